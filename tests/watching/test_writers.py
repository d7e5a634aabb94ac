"""Writers: JSON lines, and every tracker with its real package, offline."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gomuon import GoMuon
from gomuon.integrations.json_lines import JsonLinesWriter, read_records
from gomuon.integrations.scalars import scalars
from gomuon.watching.records import WatchRecord
from gomuon.watching.watch import Writer
from tests.models import train, transformer

WHY = "in the test extra: pip install '.[test]'"


def written(*writers: Writer) -> list[WatchRecord]:
    """The records of a short run, which the writers got too."""
    model = transformer(layers=1)
    optimizer = GoMuon(model)
    records: list[WatchRecord] = []
    with optimizer.watch(every=3, to=[records.extend, *writers]):
        train(model, optimizer, range(6))
    return records


def test_json_lines_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one.jsonl"
    with JsonLinesWriter(path) as writer:
        records = written(writer)
    assert len(records) == 14
    assert read_records(path) == records
    assert all(json.loads(line)["method"] == "GoMuon" for line in path.read_text().splitlines())


def test_a_file_is_continued_and_half_a_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with JsonLinesWriter(path) as writer:
        records = written(writer)
    with path.open("a") as file:
        file.write('{"step": 9, "layer": "trunk')  # killed while it wrote
    assert read_records(path) == records
    with JsonLinesWriter(path) as writer:
        writer(records[:2])
    assert read_records(path) == [*records, *records[:2]]


@pytest.mark.parametrize("line", ["[1, 2]", "{}", "no JSON", '{"step": 1}'])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(ValueError, match=r"line 1 of .*run\.jsonl is no record of JsonLinesWriter"):
        read_records(path)


def expected(prefix: str) -> dict[tuple[int, str], float]:
    """(step, tag) -> number."""
    return {
        (step, tag): value
        for step, numbers in scalars(written(), prefix).items()
        for tag, value in numbers.items()
    }


def test_scalars_have_a_tag_for_each_number() -> None:
    found = scalars(written())
    tag = "gomuon/trunk.blocks.0.mlp.up.weight/update_ratio"
    assert set(found) == {3, 6}
    assert found[3][tag] > found[6][tag] > 0
    assert not any(tag.startswith("gomuon") for tag in scalars(written(), "")[3])


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason=WHY, exc_type=ModuleNotFoundError)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from gomuon.integrations.tensorboard import TensorBoardWriter

    own = SummaryWriter(str(tmp_path / "own"))
    writer = TensorBoardWriter(tmp_path / "folder")
    records = written(writer, TensorBoardWriter(own, prefix="geometry"))
    writer.close()
    own.close()
    for folder, prefix in (("folder", "gomuon"), ("own", "geometry")):
        events = EventAccumulator(str(tmp_path / folder))
        events.Reload()
        tags = events.Tags()["scalars"]
        found = {(e.step, tag): e.value for tag in tags for e in events.Scalars(tag)}
        wanted = expected(prefix)
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted, rel=1e-5)
    assert records


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """The records of an offline run: LevelDB's log format, after seven bytes of its own."""
    block, whole, at = 2**15, b"", 7
    while at + 7 <= len(content):
        if block - at % block < 7:  # too little room for a header: the block is filled up
            at += block - at % block
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def whole_offline_run(folder: Path) -> list[Any]:
    """The records of the run in this folder, once the last one is there.

    Its service may write the end of the file after `finish()` has returned.
    """
    from wandb.proto import wandb_internal_pb2

    make: Any = vars(wandb_internal_pb2)["Record"]  # made at import, so unknown to type checkers
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        records = []
        for data in leveldb_records(next(folder.rglob("*.wandb")).read_bytes()):
            records.append(make())
            records[-1].ParseFromString(data)
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        time.sleep(0.05)
    raise AssertionError("the run was not written to its end")


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb: Any = pytest.importorskip("wandb", reason=WHY, exc_type=ModuleNotFoundError)
    from gomuon.integrations.wandb import WandbWriter

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="watch", dir=str(tmp_path), mode="offline")
    run.log({"loss": 1.0}, step=100)  # the user's own steps are far ahead
    written(WandbWriter(run))
    run.finish()
    found: dict[tuple[int, str], float] = {}
    for record in whole_offline_run(tmp_path):
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            step = items.pop("gomuon/step", None)
            found |= {(step, k): v for k, v in items.items() if k.startswith("gomuon/")}
    assert found == pytest.approx(expected("gomuon"))
    with pytest.raises(ValueError, match="prefix must not be empty"):
        WandbWriter(run, prefix="")


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trackio: Any = pytest.importorskip("trackio", reason=WHY, exc_type=ModuleNotFoundError)
    from gomuon.integrations.trackio import TrackioWriter

    run = trackio.init(project="watch", name="one", embed=False)
    written(TrackioWriter(run))
    trackio.finish()
    from trackio.sqlite_storage import SQLiteStorage

    found: dict[tuple[int, str], float] = {}
    for row in SQLiteStorage.get_logs("watch", "one"):
        step = row["step"]
        found |= {(step, k): v for k, v in row.items() if k.startswith("gomuon/")}
    assert found == pytest.approx(expected("gomuon"))
