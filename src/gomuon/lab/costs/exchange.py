"""Rows that ranks exchange and share where they divide a layer but its owner needs it whole.

Of T ranks each forms the sums of a T-th of the rows. Of a side that is cut it receives the other
columns of these rows, and sends its own columns of the others' rows. See
`gomuon/parameters/divided_rows.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from gomuon.lab.costs.matrix_layers import MatrixLayer
from gomuon.parameters.side_forms import LEFT


@dataclass(frozen=True)
class RowShare:
    """The rows that one of several ranks reads.

    Attributes:
        parts: the number of ranks.
        index: this rank's number among them.
    """

    parts: int = 1
    index: int = 0

    def rows(self, layer: MatrixLayer, passes: float, where: int) -> int:
        """The rows of a side of a layer that this rank reads in so many forward passes."""
        rows = layer.sampled_rows(passes, where)
        if self.parts == 1 or layer.by_function:  # products of functions are read whole
            return rows
        # Each call is divided by itself, and the first ranks read what is left over.
        calls = layer.calls_of(where)
        each, longer = divmod(rows, calls)
        return longer * self._of(each + 1) + (calls - longer) * self._of(each)

    def _of(self, rows: int) -> int:
        return (rows - self.index + self.parts - 1) // self.parts

    def exchanged(self, layer: MatrixLayer, passes: float, where: int) -> int:
        """Numbers that this rank sends to the others, so that each has whole rows of a side."""
        if self.parts == 1 or layer.cut != where:
            return 0
        weight = layer.tensors[0]
        columns = weight.rows if where == LEFT else weight.width
        return columns * (layer.sampled_rows(passes, where) - self.rows(layer, passes, where))


ALL_ROWS = RowShare()
