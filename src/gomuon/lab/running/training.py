"""Train one run in one folder; it can be killed at any time and continued.

The metrics file grows line by line, and a checkpoint records its length. A continued run cuts the
file to that length and repeats the later updates, which give the same bits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gomuon.lab import formatting, machine
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import own_code
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.files import (
    Journal,
    locked,
    make_folder,
    read_json_lines,
    refuse_links,
    remove_leftovers,
    write_json,
)
from gomuon.lab.input_checks import BAD_VALUE_ERRORS, parse_json
from gomuon.lab.results import pairing
from gomuon.lab.results.runs import (
    CHECKPOINT,
    CONTINUATION,
    DIFFERS_AT,
    FORMAT,
    MANIFEST,
    METRICS,
    OWN,
    RESULT,
    RESUMED,
    TIMING,
    Resumption,
    file_sha256,
    is_finished,
    read_manifest,
    resumptions,
)
from gomuon.lab.results.statistics import run_result
from gomuon.lab.running import checkpoint
from gomuon.lab.running.session import Diverged, Session
from gomuon.lab.running.trials import Continuation, try_continuing


@dataclass(frozen=True)
class UpdateReport:
    """The progress of a run after an update."""

    step: int
    seconds: float
    metrics: dict[str, Any]


def train(
    config: RunConfig,
    folder: str | Path,
    *,
    data_dir: str | Path | None = None,
    report: Callable[[UpdateReport], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda text: None,
) -> bool:
    """Train a run to its end, from where it was stopped; a finished run is not repeated.

    Args:
        config: what to run; a folder with another configuration is refused.
        folder: the run folder.
        data_dir: where the corpora are.
        report: called after every update.
        stop: called before every update; True saves a checkpoint and ends.
        say: called with a message if a run is continued by other code or on another machine.

    Returns:
        Whether the run is finished.
    """
    folder = Path(folder)
    make_folder(folder)
    with locked(folder):
        remove_leftovers(folder)
        if is_finished(folder):
            _same_config(config, folder)
            return True
        refuse_links(*(folder / name for name in (MANIFEST, METRICS, TIMING, CHECKPOINT, RESULT)))
        session = Session(config, data_dir)
        continuation = _open_manifest(session, folder, data_dir)
        for text in (session.note, continuation.problem):
            if text:
                say(text)
        step, lengths = 0, {METRICS: 0, TIMING: 0}
        if continuation.checkpoints and (folder / CHECKPOINT).exists():
            step, lengths = session.restore(folder / CHECKPOINT)
        repeated = _lines_after(folder / METRICS, lengths[METRICS])
        metrics = Journal(folder / METRICS, lengths[METRICS])
        timing = Journal(folder / TIMING, lengths[TIMING])
        try:
            _record_changes(config, folder, step, say)
            check = functools.partial(_check_repeated, folder, repeated, say)
            keep = continuation.checkpoints
            return _continue(session, folder, step, metrics, timing, report, stop, keep, check)
        finally:
            metrics.close()
            timing.close()


def _continue(
    session: Session,
    folder: Path,
    step: int,
    metrics: Journal,
    timing: Journal,
    report: Callable[[UpdateReport], None],
    stop: Callable[[], bool],
    keep: bool,
    check: Callable[[dict[str, Any]], None],
) -> bool:
    def save() -> None:
        if not keep:
            return
        for journal in (metrics, timing):
            journal.sync()
        lengths = {METRICS: metrics.length, TIMING: timing.length}
        session.save(folder / CHECKPOINT, step, lengths)

    config, diverged = session.config, None
    while step < config.steps:
        if stop():
            save()
            return False
        try:
            line, seconds = session.update(step + 1)
        except Diverged:
            # A normal outcome: the race goes on, and the report says so.
            diverged = step + 1
            break
        except Exception as error:
            if session.restored is None:
                raise
            raise checkpoint.unusable(session.restored, error) from error
        session.restored = None
        check(line)
        step += 1
        metrics.append(line)
        timing.append({"step": step, "seconds": round(seconds, 6)})
        if step % config.checkpoint_every == 0 or step == config.steps:
            save()
        report(UpdateReport(step, seconds, line))
    lines = read_json_lines(folder / METRICS, whole=True)
    try:
        result = {"steps": step, **run_result(config.task, config.steps, lines)}
    except BAD_VALUE_ERRORS as error:
        raise LabError(
            f"{folder / METRICS}: a line lacks values ({type(error).__name__}: {error}); "
            "delete this run's folder and run the command again to repeat it"
        ) from error
    if diverged is not None:
        result["diverged_at"] = diverged
    if session.counter is not None:
        result.update(session.counts())
    result["metrics_sha256"] = file_sha256(folder / METRICS)
    write_json(folder / RESULT, result)
    return True


def _open_manifest(session: Session, folder: Path, data_dir: str | Path | None) -> Continuation:
    """Write the manifest of a new run; check that of a continued one."""
    path, config = folder / MANIFEST, session.config
    own = own_code.sources(config.task, [config.optimizer])
    if path.exists():
        manifest = _same_config(config, folder)
        own_code.require_same(manifest.get(OWN), own, folder)
        differing = pairing.differing_fields(manifest["hashes"], session.hashes)
        if differing:
            raise LabError(f"{folder} cannot be continued: its {differing[0]} hash has changed")
        return Continuation.from_plain(manifest.get(CONTINUATION), path) if own else Continuation()
    found = try_continuing(config, data_dir)
    write_json(
        path,
        {
            "format": FORMAT,
            "config": config.as_dict(),
            "hashes": session.hashes,
            **_provenance(config),
            **({OWN: own, CONTINUATION: found.as_dict()} if own else {}),
        },
    )
    return found


def _lines_after(path: Path, length: int) -> dict[int, dict[str, Any]]:
    """Update -> its line, of updates that a stopped run made after its checkpoint."""
    if not path.is_file():
        return {}
    found = {}
    with path.open("rb") as file:
        file.seek(length)
        for text in file.read().splitlines():
            with contextlib.suppress(*BAD_VALUE_ERRORS):  # the last line may be cut off
                line = parse_json(text.decode())
                found[int(line["step"])] = line
    return found


def _check_repeated(
    folder: Path,
    repeated: dict[int, dict[str, Any]],
    say: Callable[[str], None],
    line: dict[str, Any],
) -> None:
    """Say, once, that an update made again gave something else than before the run was stopped."""
    before = repeated.pop(line["step"], line)
    if before != line:
        repeated.clear()
        manifest = read_manifest(folder)
        write_json(folder / MANIFEST, {**manifest, DIFFERS_AT: line["step"]})
        say(
            f"{folder.name}: update {line['step']}, made again, differs from the one before the "
            f"run was stopped; so it does not end in the same bytes ({DIFFERS_AT} in {MANIFEST})"
        )


def _provenance(config: RunConfig) -> dict[str, Any]:
    """Code, versions and machine of a run; they may change when it is continued."""
    return {
        "commit": machine.source_commit(),
        "versions": {
            **own_code.package_versions(config.task, config.optimizer),
            **machine.versions(),
        },
        "machine": {**machine.facts(), "threads": config.threads},
    }


def _record_changes(config: RunConfig, folder: Path, step: int, say: Callable[[str], None]) -> None:
    """Add changes of code, versions or machine to the manifest."""
    manifest, now = read_manifest(folder), _provenance(config)
    earlier = resumptions(manifest, folder)
    known = earlier[-1].as_dict() if earlier else manifest
    changed = [name for name in now if _comparable(known.get(name)) != _comparable(now[name])]
    if not changed:
        return
    entry = Resumption(step=step, **now).as_dict()
    write_json(folder / MANIFEST, {**manifest, RESUMED: [*(e.as_dict() for e in earlier), entry]})
    say(
        f"{folder.name}: {formatting.listing(changed)} changed after update {step}; "
        f"{MANIFEST} has the old and the new values"
    )


def _comparable(value: Any) -> Any:
    return machine.comparable(value) if isinstance(value, dict) else value


def _same_config(config: RunConfig, folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    recorded, wanted = manifest["config"], config.as_dict()
    for name in wanted:
        # A missing field counts as different, not as its default.
        if recorded.get(name) != _plain(wanted[name]):
            raise LabError(
                f"{folder} was started with {name}={recorded.get(name)!r}, not {wanted[name]!r}; "
                "choose another folder with --out"
            )
    return manifest


def _plain(value: Any) -> Any:
    """A value as JSON returns it."""
    return list(value) if isinstance(value, tuple) else value
