r"""Safe output to the terminal, whatever the names of folders and files are.

A name may have escape sequences, which would move the cursor or change colours, and characters that
cannot be encoded. They are shown as Python writes them, such as \x1b.
"""

from __future__ import annotations

import re
import select
import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# Control characters except tab and line feed, marks that reverse or break a line, and surrogates,
# which stand for bytes of a name that are not UTF-8.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

CLOSED_PIPE = 141  # the exit code of a shell whose command was ended by SIGPIPE


def reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    if not hasattr(select, "poll"):  # Windows
        return True
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def escaped(text: str) -> str:
    """Text without anything that a terminal would interpret; line breaks stay."""
    return UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """The same in a single line, for error messages with text from files."""
    return escaped(re.sub(r"\s*\n\s*", " ", text.strip()))


class SafeConsole(Console):
    """A console that escapes everything except rich's own colours and cursor movements."""

    def render_str(self, text: str, **options: object) -> Text:
        """A cell or a line, escaped before its width is computed."""
        return super().render_str(escaped(text), **options)  # type: ignore[arg-type]

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The pieces to write; control segments are rich's own cursor movements."""
        for piece in super().render(renderable, options):
            safe = piece.text if piece.control else escaped(piece.text)
            yield piece if safe == piece.text else Segment(safe, piece.style)
