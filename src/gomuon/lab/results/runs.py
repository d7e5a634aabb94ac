"""A run on disk: its folder, and reading it back.

One folder per run: ``manifest.json`` is written before the first update, ``metrics.jsonl`` and
``timing.jsonl`` during the run, ``checkpoint.pt`` to continue from, and ``result.json`` at the end:
a run is finished if it has this file.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gomuon.lab.errors import LabError
from gomuon.lab.experiments.run_config import RunConfig
from gomuon.lab.files import read_json, read_json_lines
from gomuon.lab.input_checks import BAD_VALUE_ERRORS, is_file

FORMAT = 1
MANIFEST, METRICS, TIMING = "manifest.json", "metrics.jsonl", "timing.jsonl"
CHECKPOINT, RESULT = "checkpoint.pt", "result.json"
OWN, CONTINUATION = "own", "continuation"  # of code from outside; see `running.trials`
DIFFERS_AT = "differs_at"  # an update that gave something else when it was made again
RESUMED = "resumed"  # the manifest's list of changes when a run was continued


@dataclass(frozen=True)
class Resumption:
    """A point at which a run was continued by other code, with other versions or elsewhere.

    Attributes:
        step: the last update before it.
        commit: from then on; also versions and machine.
    """

    step: int
    commit: str | None
    versions: dict[str, Any]
    machine: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, entry: Any, where: Path) -> Resumption:
        """An entry of a manifest; errors name the file ``where``."""
        try:
            commit, step = entry["commit"], int(entry["step"])
            if not isinstance(commit, str | None):
                raise TypeError("the commit is not text")
            return cls(step, commit, dict(entry["versions"]), dict(entry["machine"]))
        except BAD_VALUE_ERRORS as error:
            raise LabError(
                f"{where}: {entry!r} under {RESUMED!r} is not step, commit, versions and machine"
            ) from error


@dataclass(frozen=True)
class Run:
    """A run, read from its folder; ``result`` is None if the run is unfinished."""

    folder: Path
    config: RunConfig
    hashes: dict[str, str]
    versions: dict[str, Any]
    machine: dict[str, Any]
    commit: str | None
    metrics: list[dict[str, Any]]
    timing: list[dict[str, Any]]
    result: dict[str, Any] | None
    resumed: tuple[Resumption, ...] = ()

    @classmethod
    def from_manifest(
        cls,
        folder: Path,
        manifest: dict[str, Any],
        result: dict[str, Any] | None,
        metrics: list[dict[str, Any]],
        timing: list[dict[str, Any]],
    ) -> Run:
        return cls(
            folder=folder,
            config=RunConfig.from_dict(manifest["config"], folder / MANIFEST),
            hashes=manifest["hashes"],
            versions=manifest.get("versions", {}),
            machine=manifest.get("machine", {}),
            commit=manifest.get("commit"),
            metrics=metrics,
            timing=timing,
            result=result,
            resumed=resumptions(manifest, folder),
        )

    @property
    def finished(self) -> bool:
        return self.result is not None


def resumptions(manifest: dict[str, Any], folder: Path) -> tuple[Resumption, ...]:
    """The changes recorded in a manifest; most runs have none."""
    where, entries = folder / MANIFEST, manifest.get(RESUMED, [])
    if not isinstance(entries, list):
        raise LabError(f"{where}: {RESUMED!r} must be a list, not {entries!r}")
    return tuple(Resumption.from_dict(entry, where) for entry in entries)


def is_finished(folder: Path) -> bool:
    return is_file(folder / RESULT)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder, with its format checked."""
    path = folder / MANIFEST
    if not is_file(path):
        raise LabError(f"{folder} is not a run folder: it has no {MANIFEST}")
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        raise LabError(
            f"{path}: format {manifest.get('format')!r} is unknown, this gomuon reads {FORMAT}"
        )
    for name in ("config", "hashes"):
        if not isinstance(manifest.get(name), dict):
            raise LabError(f"{path}: {name!r} is missing or not an object")
    for name in ("hashes", "versions", "machine"):
        _require_facts(path, name, manifest.get(name, {}))
    if not isinstance(manifest.get("commit"), str | None):
        raise LabError(f"{path}: 'commit' must be text, not {manifest['commit']!r}")
    return manifest


def _require_facts(path: Path, name: str, found: Any) -> None:
    """Require an object of texts and numbers, else raise a LabError."""
    if not isinstance(found, dict):
        raise LabError(f"{path}: {name!r} must be an object, not {found!r}")
    for key, value in found.items():
        if not isinstance(value, str | int | float | None):
            raise LabError(f"{path}: {key!r} under {name!r} is {value!r}; expected text")


def load_run(folder: str | Path) -> Run:
    """Read a run folder, finished or not.

    Raises:
        LabError: the folder is not a run, its format is unknown, a line of a finished run is
            truncated, or its metrics are not those of its result.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    finished = is_finished(folder)
    metrics = read_json_lines(folder / METRICS, whole=finished)
    result = read_json(folder / RESULT) if finished else None
    if result is not None:
        _check_metrics(folder, metrics, result)
    timing = read_json_lines(folder / TIMING, whole=False)
    return Run.from_manifest(folder, manifest, result, metrics, timing)


def _check_metrics(folder: Path, metrics: list[dict[str, Any]], result: dict[str, Any]) -> None:
    path = folder / METRICS
    if isinstance(result.get("steps"), bool) or len(metrics) != result.get("steps"):
        raise LabError(
            f"{path} has {len(metrics)} updates, but {RESULT} says {result.get('steps')}"
        )
    recorded = result.get("metrics_sha256")
    if recorded is not None and recorded != file_sha256(path):
        raise LabError(f"{path} was changed after the run: its sha256 differs from {RESULT}'s")


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
