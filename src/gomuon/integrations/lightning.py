"""For Lightning: a callback that watches. Needs `lightning` or `pytorch_lightning`."""

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from typing import Any

from gomuon.integrations.scalars import scalars
from gomuon.optimizer import MatrixOptimizer
from gomuon.watching.records import WatchRecord
from gomuon.watching.watch import Watch, Writer


def _callback() -> Any:
    """The class of the package that the program uses: both may be installed, and they differ."""
    names = ("lightning.pytorch", "pytorch_lightning")
    used = [name for name in names if name.partition(".")[0] in sys.modules]
    there = [name for name in names if importlib.util.find_spec(name.partition(".")[0])]
    return importlib.import_module((*used, *there, names[0])[0]).Callback


Callback: Any = _callback()


class WatchFit(Callback):  # type: ignore[misc]
    """Watches the optimizers of this package from the start of `fit` to its end.

    Args:
        every, spectra, gather: as for `MatrixOptimizer.watch`.
        to: a writer, or several. None: the Trainer's loggers.
        doctor: whether to print at the end what looks wrong.
    """

    def __init__(
        self,
        every: int = 10,
        *,
        to: Writer | Iterable[Writer] | None = None,
        spectra: int = 6,
        gather: bool = False,
        doctor: bool = False,
    ) -> None:
        self._settings: dict[str, Any] = {"every": every, "spectra": spectra, "gather": gather}
        self._to, self._doctor = to, doctor
        self._watches: list[tuple[MatrixOptimizer, Watch]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""

        def log(records: list[WatchRecord]) -> None:
            for step, numbers in scalars(records).items():
                for logger in trainer.loggers:
                    logger.log_metrics(numbers, step=step)

        to = log if self._to is None else self._to
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, MatrixOptimizer):
                self._watches.append((optimizer, optimizer.watch(to=to, **self._settings)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Print the doctor's findings if asked, and stop watching."""
        if self._doctor:
            for optimizer, _ in self._watches:
                print(optimizer.doctor())
        self._remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop watching."""
        self._remove()

    def _remove(self) -> None:
        for _, watch in self._watches:
            watch.remove()
        self._watches.clear()
