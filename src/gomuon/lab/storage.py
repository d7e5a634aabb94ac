"""Files that are either whole or absent: atomic writes, JSON and JSON lines with clear errors."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gomuon.lab.errors import LabError

if sys.platform != "win32":
    import fcntl


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary neighbour, then rename it into place.

    A kill or a full disk leaves the previous file untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Drop the temporary files of processes that were killed while writing."""
    for path in folder.glob(".*.part"):
        path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_atomically(path, lambda temporary: _write_text(temporary, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or a LabError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LabError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise LabError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise LabError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_json_lines(path: Path, *, whole: bool) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, one per line.

    Args:
        path: the file; a missing one counts as empty.
        whole: whether a truncated last line is an error (a finished run) or the trace of a kill,
            which the next resume heals and which is dropped here.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"cannot read {path}: {error}") from error
    lines = text.split("\n")
    values = []
    for number, line in enumerate(lines, start=1):
        last = number == len(lines)
        if last and not line:
            break
        try:
            value = json.loads(line)
            if last or not isinstance(value, dict):
                raise ValueError
        except ValueError:
            if last and not whole:
                break
            raise LabError(
                f"{path}, line {number}: truncated or damaged; "
                "delete this run's folder and run the campaign again to repeat it"
            ) from None
        values.append(value)
    return values


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    # Root passes every permission check on an ordinary file system, so ask the kernel as well.
    if not os.access(path, os.W_OK | os.X_OK):
        raise LabError(f"cannot write {path}: the folder is read-only; give another one with --out")


def cannot_write(path: Path, error: OSError) -> LabError:
    return LabError(
        f"cannot write {path}: {error.strerror or error}; "
        "nothing is lost, repeat the same command to continue once this is mended"
    )


class Journal:
    """A JSON-lines file written one line at a time, each flushed as it comes."""

    def __init__(self, path: Path, length: int) -> None:
        """Open for appending after the first ``length`` bytes; what follows them is cut off."""
        self.path = path
        try:
            # Of a missing file nothing is left either; truncating would make it up from zeros.
            if (path.stat().st_size if path.exists() else 0) < length:
                raise LabError(
                    f"{path} is shorter than its checkpoint says; "
                    "delete this run's folder and run the campaign again to repeat it"
                )
            self._file = path.open("ab")
            self._file.truncate(length)
        except OSError as error:
            raise cannot_write(path, error) from error
        self.length = length

    def append(self, value: dict[str, Any]) -> None:
        line = json.dumps(value).encode() + b"\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self.length += len(line)

    def sync(self) -> None:
        """Put the lines on the disk, so that no checkpoint counts lines a power cut could take."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def close(self) -> None:
        # After a failed write, closing tries to flush the same bytes again and fails again.
        with contextlib.suppress(OSError):
            self._file.close()


@contextlib.contextmanager
def locked(folder: Path, patience: float = 20.0) -> Iterator[None]:
    """Hold the folder for this process alone.

    A killed process gives its lock back by itself; an orphan that is about to notice its parent's
    death is waited for.
    """
    if sys.platform == "win32":  # has no flock
        yield
        return
    try:
        file = (folder / ".lock").open("wb")
    except OSError as error:
        raise cannot_write(folder, error) from error
    with file:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise LabError(f"another process is already at work in {folder}") from None
                time.sleep(0.05)
        yield
