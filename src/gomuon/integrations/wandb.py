"""Records for Weights & Biases. Needs the package `wandb`."""

from typing import Any

from gomuon.integrations.scalars import scalars
from gomuon.watching.records import WatchRecord


class WandbWriter:
    """Logs every number of every record as prefix/layer/number.

    They are drawn over prefix/step, the optimizer's steps. So they do not touch the run's own step,
    and you may log with steps of your own.

    Args:
        run: what `wandb.init()` returned.
        prefix: the first part of the names.
    """

    def __init__(self, run: Any, prefix: str = "gomuon") -> None:
        if not prefix:
            raise ValueError("prefix must not be empty: it keeps these steps apart from your own")
        self._run, self._prefix = run, prefix
        run.define_metric(f"{prefix}/step")
        run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")

    def __call__(self, records: list[WatchRecord]) -> None:
        """Log the records."""
        for step, numbers in scalars(records, self._prefix).items():
            self._run.log({f"{self._prefix}/step": step, **numbers})
