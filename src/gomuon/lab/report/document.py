"""The content of a report; `html` and `markdown` render the same document.

Every string here is plain text. Only the two renderers create markup, and they escape all text, so
that a name from a run folder can never become markup.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cell:
    """A cell of a table; `best` marks the best value of its column."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under column heads; the first `left` columns are names, the others are values.

    A row with a single cell is a heading for the rows after it.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell | str, ...], ...]
    left: int = 1


@dataclass(frozen=True)
class Plot:
    """A plot in four variants (SVG text), for wide and narrow, light and dark screens."""

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
    folded: bool = False  # the HTML page shows it on request


@dataclass(frozen=True)
class Standing:
    """The rank of one arm: its name, its result, and a remark."""

    place: str
    name: str
    result: str
    unit: str
    remark: str
    color: int  # index into the palette of the plots
    winner: bool = False


@dataclass(frozen=True)
class Document:
    title: str
    headline: str  # the answer, in one sentence
    evidence: str  # how certain the answer is; may be empty
    introduction: str  # what was run, in one or two sentences
    quick: bool = False
    standings: tuple[Standing, ...] = ()
    sections: tuple[Section, ...] = field(default_factory=tuple)


def cell(value: Cell | str) -> Cell:
    return value if isinstance(value, Cell) else Cell(value)


def visible(text: str) -> str:
    """Text with control characters replaced, which could break a file or a line."""
    return "".join(c if c.isprintable() or c.isspace() else "\ufffd" for c in text)
