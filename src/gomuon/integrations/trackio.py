"""Records for trackio. Needs the package `trackio`."""

from typing import Any

from gomuon.integrations.scalars import scalars
from gomuon.watching.records import WatchRecord


class TrackioWriter:
    """Logs every number of every record as prefix/layer/number, with the optimizer's step.

    Args:
        run: what `trackio.init()` returned.
        prefix: the first part of the names; "" leaves it out.
    """

    def __init__(self, run: Any, prefix: str = "gomuon") -> None:
        self._run, self._prefix = run, prefix

    def __call__(self, records: list[WatchRecord]) -> None:
        """Log the records."""
        for step, numbers in scalars(records, self._prefix).items():
            self._run.log(numbers, step=step)
