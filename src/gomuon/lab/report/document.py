"""What a report says, apart from how it looks: `page` and `markdown` render the same document.

Every string here is plain text. Only the two renderers turn it into markup, and they escape all
of it, so a name that a run folder brings along cannot become markup by any path.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cell:
    """A table's cell; `best` is for the figure that wins its column."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under column heads; the first `left` columns are names, the rest are figures.

    A row of a single cell is the head of the rows that follow it.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell | str, ...], ...]
    left: int = 1


@dataclass(frozen=True)
class Plot:
    """A drawing in four variants (SVG text), so that it suits the screen it is seen on."""

    caption: str
    alt: str
    wide: str
    wide_dark: str
    narrow: str
    narrow_dark: str


@dataclass(frozen=True)
class Note:
    """A paragraph; `tone` is "" for plain text, else "warn" or "quiet"."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Facts:
    """Name and value pairs."""

    pairs: tuple[tuple[str, str], ...]


Block = Table | Plot | Note | Facts


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]
    folded: bool = False  # long reference matter that the page shows on request


@dataclass(frozen=True)
class Standing:
    """One arm's place: who, the figure that decides, and what it means beside the others."""

    place: str
    name: str
    figure: str
    unit: str
    remark: str
    color: int  # index into the palette of the drawings
    winner: bool = False


@dataclass(frozen=True)
class Document:
    title: str
    headline: str  # the answer, in one sentence
    evidence: str  # how far the answer is to be trusted; may be empty
    lede: str  # what was run, in one or two sentences
    quick: bool = False
    standings: tuple[Standing, ...] = ()
    sections: tuple[Section, ...] = field(default_factory=tuple)


def cell(value: Cell | str) -> Cell:
    return value if isinstance(value, Cell) else Cell(value)


def visible(text: str) -> str:
    """Text without characters that neither show nor separate: they could break a file or a line."""
    return "".join(c if c.isprintable() or c.isspace() else "\ufffd" for c in text)
