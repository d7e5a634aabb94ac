"""Run folders are read back, and damaged ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gomuon.lab.errors import LabError
from gomuon.lab.results.runs import MANIFEST, METRICS, load_run
from gomuon.lab.running.training import train
from tests.lab.helpers.tiny_runs import addition, metrics_of


@pytest.mark.parametrize(
    ("resumed", "words"),
    [
        (3, "'resumed' must be a list, not 3"),
        ([{"step": 3}], "under 'resumed' is not step, commit, versions and machine"),
        (["x"], "under 'resumed' is not step, commit, versions and machine"),
    ],
)
def test_resumptions_that_cannot_be_read_are_named(
    resumed: Any, words: str, tmp_path: Path
) -> None:
    train(addition(), tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, "resumed": resumed}))
    with pytest.raises(LabError, match=words):
        load_run(tmp_path)


def test_a_folder_that_is_no_run_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="not a run folder"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ('{"format": 2}', "format 2 is unknown"),
        ('{"format": 1}', "'config' is missing"),
        ('{"format": 1, "config": {"colour": 1}, "hashes": {}}', "'colour'"),
        ('{"format": 1, "config": {"task": "ptb"}, "hashes": {}}', "invalid configuration"),
    ],
)
def test_a_bad_manifest_is_named(manifest: str, words: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(manifest)
    with pytest.raises(LabError, match=words) as caught:
        load_run(tmp_path)
    assert MANIFEST in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_line_of_a_finished_run_is_an_error(tmp_path: Path) -> None:
    train(addition(), tmp_path)
    content = metrics_of(tmp_path)
    (tmp_path / METRICS).write_bytes(content[:-9])
    with pytest.raises(LabError, match=r"metrics\.jsonl, line 12: truncated"):
        load_run(tmp_path)
    lines = content.splitlines(keepends=True)
    lines[4] = lines[4][:7] + b"\n"
    (tmp_path / METRICS).write_bytes(b"".join(lines))
    with pytest.raises(LabError, match=r"metrics\.jsonl, line 5: truncated"):
        load_run(tmp_path)


def test_changed_metrics_of_a_finished_run_are_refused(tmp_path: Path) -> None:
    train(addition(), tmp_path)
    content = metrics_of(tmp_path)
    (tmp_path / METRICS).write_bytes(content.replace(b'"loss": 1', b'"loss": 0', 1))
    with pytest.raises(LabError, match="changed after the run"):
        load_run(tmp_path)
    (tmp_path / METRICS).write_bytes(b"".join(content.splitlines(keepends=True)[:-1]))
    with pytest.raises(LabError, match="has 11 updates"):
        load_run(tmp_path)
