"""How a parameter is divided into matrices, in numbers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiling:
    """A stack of matrices, each of them cut into rows × columns blocks of high × wide.

    The blocks are the matrices that methods work with. Those of one matrix of the stack are
    neighbours, row by row.
    """

    stack: int
    rows: int
    columns: int
    high: int
    wide: int

    @property
    def blocks(self) -> int:
        return self.stack * self.rows * self.columns

    @property
    def strips(self) -> tuple[int, int]:
        """The number of strips along the outputs and along the inputs.

        Blocks of one strip have the same rows or the same columns of one matrix of the stack, so
        they share what is captured of that side.
        """
        return self.stack * self.rows, self.stack * self.columns

    @property
    def sides(self) -> tuple[int, int]:
        """The sides of a block."""
        return self.high, self.wide


NO_MATRIX = Tiling(0, 0, 0, 0, 0)
