"""Fits the state of captured sides to another cut, after a setting or a checkpoint changed it."""

from typing import Any

from torch import Tensor

from gomuon.functional.block_diagonal import diagonal_blocks, diagonal_of, whole_matrix
from gomuon.moments import Shape
from gomuon.parameters.side_forms import RIGHT, SideForm


class Recut:
    """Converts factors and maps. Layers that share a tensor share what it is converted to.

    What lies outside the new blocks is dropped. What lies outside the old blocks is zero. So
    factors stay positive semidefinite and maps positive definite. Eigenvectors and eigenvalues
    (K-FAC's) are dropped; the next refresh makes them again.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, SideForm], tuple[Tensor, Tensor]] = {}  # old and new

    def __call__(self, entries: dict[str, Any], forms: tuple[SideForm, SideForm]) -> None:
        """Fit a layer's state to the forms of its left and right side."""
        for where, (side, form) in enumerate(zip(("left", "right"), forms, strict=True)):
            for kind in ("factor", "map", "velocity", "basis", "values"):
                kept = entries.get(name := f"{side}_{kind}")
                if kept is None or tuple(kept.shape[1:]) == _shape(form, where, kind):
                    continue
                del entries[name]
                if form.kind != "identity" and kind not in ("basis", "values"):
                    entries[name] = self._converted(kept, form, where)

    def _converted(self, S: Tensor, form: SideForm, where: int) -> Tensor:
        key = id(S), form
        if key not in self._made:
            self._made[key] = S, converted(S, form, where)
        return self._made[key][1]


def converted(S: Tensor, form: SideForm, where: int) -> Tensor:
    """A factor or map [strips, …] of one side, in another form."""
    if form.kind == "diagonal":
        return diagonal_of(S, form.side).unsqueeze(-2 if where == RIGHT else -1).clone()
    whole = whole_matrix(S, form.side)
    return diagonal_blocks(whole, form.blocks) if form.blocks > 1 else whole.clone()


def _shape(form: SideForm, where: int, kind: str) -> Shape | None:
    """The shape of an entry of this kind without its first dimension; None if there is none."""
    if form.kind == "identity" or (form.kind == "diagonal" and kind == "basis"):
        return None
    shape = form.shape(where)
    if kind != "values":
        return shape
    return (form.side,) if form.kind == "diagonal" else shape[:-1]
