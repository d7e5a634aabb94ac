"""Files that are either whole or absent: atomic writes, JSON and JSON lines with clear errors.

A folder from elsewhere may hold symbolic links where the lab writes. Nothing is ever written,
truncated or locked through one: the link is named and refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gomuon.lab.errors import LabError
from gomuon.lab.input_checks import LARGEST_JSON, parse_json

if sys.platform != "win32":
    import fcntl


# Absent where there is no such flag; links are looked for beforehand as well.
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


def refuse_links(*paths: Path) -> None:
    """Raise a LabError if one of these names is a symbolic link, which may lead anywhere."""
    for path in paths:
        if path.is_symlink():
            raise LabError(
                f"{path} is a symbolic link, and the lab writes through none inside its folders; "
                "remove the link, which leaves alone what it leads to, or give another folder "
                "with --out"
            )


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a plain file that is made if it is missing, and is nobody else's."""
    refuse_links(path)
    # A pipe or a device would keep us waiting, or swallow what is written.
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise LabError(
            f"cannot write {path}: it is not a plain file; give another folder with --out"
        )
    return os.open(path, flags | os.O_CREAT | NO_LINK, 0o666)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary neighbour, then rename it into place.

    A kill or a full disk leaves the previous file untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        refuse_links(path)
        # Made anew: an earlier one may be a link that somebody put there.
        temporary.unlink(missing_ok=True)
        os.close(open_own(temporary, os.O_WRONLY | os.O_EXCL))
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):  # such as a name that is too long to be there at all
            temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Drop the temporary files of processes that were killed while writing."""
    for path in folder.glob(".*.part"):
        if path.is_symlink() or path.is_file():  # of a link only the link goes
            path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_atomically(path, lambda temporary: _write_text(temporary, text))


def _write_text(path: Path, text: str) -> None:
    # A name that is not UTF-8 becomes an escape of JSON's own, and is read back as it was.
    path.write_bytes(text.encode("utf-8", "backslashreplace"))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or a LabError that names the file."""
    try:
        if (size := readable_size(path)) > LARGEST_JSON:
            raise LabError(f"{path} has {size:,} bytes, which no file of the lab has; remove it")
        value = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LabError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise LabError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise LabError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def readable_size(path: Path) -> int:
    """The bytes of a file; a pipe or a device, which may never end, is refused."""
    found = path.stat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise LabError(f"cannot read {path}: it is not a plain file")
    return found.st_size


def read_json_lines(path: Path, *, whole: bool) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, one per line.

    Args:
        path: the file; a missing one counts as empty.
        whole: whether a truncated last line is an error (a finished run) or the trace of a kill,
            which the next resume heals and which is dropped here.
    """
    try:
        readable_size(path)
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LabError(f"cannot read {path}: {error}") from error
    return _objects(path, content, whole)


def read_first_lines(path: Path, length: int) -> list[dict[str, Any]]:
    """The objects in the first ``length`` bytes of a JSON-lines file, which end with a line."""
    try:
        _require_length(path, length)
        if not length:
            return []
        with path.open("rb") as file:
            content = file.read(length)
    except OSError as error:
        raise LabError(f"cannot read {path}: {error}") from error
    return _objects(path, content, whole=True)


def _require_length(path: Path, length: int) -> None:
    # Of a missing file nothing is left either; truncating would make it up from zeros.
    if (path.stat().st_size if path.exists() else 0) < length:
        raise LabError(
            f"{path} is shorter than its checkpoint says; "
            "delete this run's folder and run the campaign again to repeat it"
        )


def _objects(path: Path, content: bytes, whole: bool) -> list[dict[str, Any]]:
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise LabError(f"cannot read {path}: {error}") from error
    values = []
    for number, line in enumerate(lines, start=1):
        last = number == len(lines)
        if last and not line:
            break
        try:
            value = parse_json(line)
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
            refuse_links(path)
            _require_length(path, length)
            self._file = os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND), "ab")
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
        file = os.fdopen(open_own(folder / ".lock", os.O_WRONLY), "wb")
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
