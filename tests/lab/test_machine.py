"""What a manifest says of the code that ran."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

from gomuon.lab import machine
from gomuon.lab.machine import commit_of, short_commit


def test_the_system_is_named_without_its_release() -> None:
    facts = machine.facts()
    assert facts["system"] == platform.system()
    assert platform.release() not in str(facts)
    older = {**facts, "system": f"{platform.system()} {platform.release()}"}
    assert machine.comparable(older) == facts == machine.comparable(facts)
    assert machine.comparable({"cores": 2}) == {"cores": 2}


def git(folder: Path, *words: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *names, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_commit_is_named_only_as_itself_while_nothing_is_edited(tmp_path: Path) -> None:
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    assert commit_of(package) is None
    (package / "code.py").write_text("x = 1\n")
    git(tmp_path, "init", "--quiet")
    assert commit_of(package) is None  # a repository without a commit
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit_of(package) == head
    (tmp_path / "notes.md").write_text("not part of what runs\n")
    assert commit_of(package) == head
    (package / "code.py").write_text("x = 2\n")
    edited = commit_of(package)
    assert edited == f"{head}-edited"
    assert (short_commit(head), short_commit(edited)) == (head[:12], f"{head[:12]}-edited")
    git(tmp_path, "checkout", "--", ".")
    (package / "more.py").write_text("")
    assert commit_of(package) == edited
