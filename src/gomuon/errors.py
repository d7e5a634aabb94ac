"""Errors and warnings of our own, so that callers can tell them from torch's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol


class DecompositionError(RuntimeError):
    """A matrix decomposition failed in the working precision and again in float64."""


class NonFiniteGradientError(RuntimeError):
    """A gradient held NaN or infinity; nothing was changed by the step that found it."""


class GeometryWarning(UserWarning):
    """A layer runs on a geometry the user may not expect: the identity, or an older one."""


class RankError(RuntimeError):
    """Another rank failed, died, or was set up differently."""


class Named(Protocol):
    """What an error can be pinned on."""

    name: str
    shape: tuple[int, int]


@contextmanager
def naming(layers: Sequence[Named]) -> Iterator[None]:
    """Tell in the notes of an exception which layers were being worked on, if nobody has."""
    try:
        yield
    except Exception as failure:
        if getattr(failure, "__notes__", ()) or not layers:
            raise
        shown = ", ".join(repr(layer.name) for layer in layers[:3])
        more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
        shapes = {f"{m}×{n}" for m, n in (layer.shape for layer in layers)}
        size = f" ({shapes.pop()})" if len(shapes) == 1 else ""
        failure.add_note(f"in the step of {shown}{more}{size}")
        raise


def told(failure: BaseException) -> str:
    """An exception in one line, with its notes."""
    return "; ".join([f"{type(failure).__name__}: {failure}", *getattr(failure, "__notes__", ())])
