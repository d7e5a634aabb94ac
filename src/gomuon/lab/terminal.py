r"""The door to the terminal: whatever a folder or a file is called, it stays text.

A name may hold escape sequences, which would move the cursor, recolour or rename the window, and
characters that no encoding has. They are shown as Python writes them, such as \x1b.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# All control characters but tab and line feed, marks that reverse or break a line, and halves of
# surrogate pairs, which stand for bytes of a name that are not UTF-8.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str) -> str:
    """The text with nothing in it that a terminal would obey; lines stay lines."""
    return UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """The same in a single line, for an error of which others may have written a part."""
    return escaped(re.sub(r"\s*\n\s*", " ", text.strip()))


class SafeConsole(Console):
    """A console that prints its own colours and no one else's."""

    def render_str(self, text: str, **options: object) -> Text:
        """A cell or a line, escaped before it is laid out."""
        return super().render_str(escaped(text), **options)  # type: ignore[arg-type]

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The pieces that are written; control segments are rich's own cursor movements."""
        for piece in super().render(renderable, options):
            safe = piece.text if piece.control else escaped(piece.text)
            yield piece if safe == piece.text else Segment(safe, piece.style)
