"""Records for TensorBoard. Needs the package `tensorboard`."""

import os
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from gomuon.integrations.scalars import scalars
from gomuon.watching.records import WatchRecord


class TensorBoardWriter:
    """Writes every number of every record as a scalar named prefix/layer/number.

    Args:
        to: a folder, or the `SummaryWriter` that you use already.
        prefix: the first part of the names; "" leaves it out.
    """

    def __init__(self, to: str | os.PathLike[str] | Any, prefix: str = "gomuon") -> None:
        self._writer = SummaryWriter(os.fspath(to)) if isinstance(to, str | os.PathLike) else to
        self._prefix = prefix

    def __call__(self, records: list[WatchRecord]) -> None:
        """Write the records."""
        for step, numbers in scalars(records, self._prefix).items():
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the `SummaryWriter`."""
        self._writer.close()
