"""Files that are either whole or absent: atomic writes, JSON and JSON lines with clear errors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gomuon.lab.errors import LabError


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
