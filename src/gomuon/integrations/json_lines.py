"""Records as JSON lines, one object for each layer and step. Needs no further package."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from gomuon.watching.records import WatchRecord


class JsonLinesWriter:
    """Appends records to a file, for `gomuon watch FILE` and for scripts.

    Every record is complete in the file before the next step. On several ranks give each rank a
    file of its own, or watch with `gather=True` and write on one rank.

    Args:
        path: the file; folders are made. A file that exists is continued.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut = _length_of_whole_lines(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        if cut is not None:  # the rest of a line that a killed process began
            self._file.truncate(cut)

    def __call__(self, records: list[WatchRecord]) -> None:
        """Write the records."""
        lines = (json.dumps(record.as_dict(), allow_nan=False) for record in records)
        self._file.write("".join(f"{line}\n" for line in lines))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _length_of_whole_lines(path: Path) -> int | None:
    """The bytes of a file up to its last line end; None if it ends with one or is not there."""
    if not path.exists():
        return None
    content = path.read_bytes()
    return content.rfind(b"\n") + 1 if content and not content.endswith(b"\n") else None


def read_records(path: str | os.PathLike[str]) -> list[WatchRecord]:
    """The records of a file, oldest first. A last line that is still being written is left out.

    Raises:
        ValueError: a line is no record; the message names it.
    """
    return list(_records(Path(path)))


def _records(path: Path) -> Iterator[WatchRecord]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            entries = json.loads(line.decode())
            if not isinstance(entries, dict):
                raise ValueError("it is no JSON object")
            yield WatchRecord.from_dict(entries)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"line {number} of {path} is no record of JsonLinesWriter: {error}"
            ) from error
