"""Reading and writing files: atomic writes, JSON and JSON lines, locks, with clear errors.

A folder from someone else may have symbolic links where the lab writes. The lab never writes,
truncates or locks a file through a link: it refuses and names the link.
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


# 0 on systems without such a flag; `refuse_links` checks for links as well.
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


def refuse_links(*paths: Path) -> None:
    """Raise a LabError if one of these paths is a symbolic link."""
    for path in paths:
        if path.is_symlink():
            raise LabError(
                f"{path} is a symbolic link, and gomuon does not write through links; remove it "
                "(its target stays), or choose another folder with --out"
            )


def open_own(path: Path, flags: int) -> int:
    """Open a regular file, creating it if it is missing; refuse links, pipes and devices."""
    refuse_links(path)
    # A pipe or a device could block, or lose what is written.
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise LabError(
            f"cannot write {path}: it is not a regular file; choose another folder with --out"
        )
    return os.open(path, flags | os.O_CREAT | NO_LINK, 0o666)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file in the same folder, then rename it to ``path``.

    If the process is killed or the disk is full, the previous file stays as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        refuse_links(path)
        # Created anew: an existing one may be a link that somebody put there.
        temporary.unlink(missing_ok=True)
        os.close(open_own(temporary, os.O_WRONLY | os.O_EXCL))
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):  # such as a name that is too long
            temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of processes that were killed while writing."""
    for path in folder.glob(".*.part"):
        if path.is_symlink() or path.is_file():  # of a link only the link is removed
            path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    # A name that is not UTF-8 becomes a JSON escape, so that it can be read back.
    content = text.encode("utf-8", "backslashreplace")
    write_atomically(path, lambda temporary: temporary.write_bytes(content))


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a LabError names the file if that fails."""
    try:
        if (size := readable_size(path)) > LARGEST_JSON:
            raise LabError(f"{path} has {size:,} bytes, more than any file of gomuon; remove it")
        value = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LabError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise LabError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise LabError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def readable_size(path: Path) -> int:
    """The size of a file in bytes; pipes and devices, which may never end, are refused."""
    found = path.stat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise LabError(f"cannot read {path}: it is not a regular file")
    return found.st_size


def read_json_lines(path: Path, *, whole: bool) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, one per line.

    Args:
        path: the file; a missing one counts as empty.
        whole: True for a finished run: a truncated last line is an error. False for a run that may
            have been killed while writing: a truncated last line is ignored.
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
    """The objects in the first ``length`` bytes of a JSON-lines file."""
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
    # A missing file has length 0. Without this check, truncating would fill it with zeros.
    if (path.stat().st_size if path.exists() else 0) < length:
        raise LabError(
            f"{path} is shorter than its checkpoint says; "
            "delete this run's folder and run the command again to repeat it"
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
                "delete this run's folder and run the command again to repeat it"
            ) from None
        values.append(value)
    return values


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    # mkdir succeeds for an existing folder even if nothing can be written into it.
    if not os.access(path, os.W_OK | os.X_OK):
        raise LabError(
            f"cannot write {path}: the folder is read-only; choose another one with --out"
        )


def cannot_write(path: Path, error: OSError) -> LabError:
    return LabError(
        f"cannot write {path}: {error.strerror or error}; "
        "nothing is lost: fix this and repeat the same command to continue"
    )


class Journal:
    """Appends lines to a JSON-lines file and flushes each of them."""

    def __init__(self, path: Path, length: int) -> None:
        """Open for appending after the first ``length`` bytes; the rest is cut off."""
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
        """Write the lines to the disk before a checkpoint that counts them is saved."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def close(self) -> None:
        # After a failed write, closing flushes the same bytes again and fails again.
        with contextlib.suppress(OSError):
            self._file.close()


@contextlib.contextmanager
def locked(folder: Path, patience: float = 20.0) -> Iterator[None]:
    """Lock the folder, so that no other process works in it.

    The system releases the lock of a killed process. Its workers stop by themselves within a few
    seconds, so the lock is waited for.
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
                    raise LabError(
                        f"another process is working in {folder}; wait for it or stop it"
                    ) from None
                time.sleep(0.05)
        yield
