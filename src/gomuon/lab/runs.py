"""A run on disk: its configuration, its folder, and reading it back.

One folder per run: ``manifest.json`` before the first update, ``metrics.jsonl`` and
``timing.jsonl`` as updates happen, ``checkpoint.pt`` to continue from, and ``result.json`` at the
end, whose presence means that the run is finished.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gomuon.lab.errors import LabError
from gomuon.lab.foreign import UNFIT, is_file
from gomuon.lab.limits import require_positive, require_whole
from gomuon.lab.storage import read_json, read_json_lines

FORMAT = 1
MANIFEST, METRICS, TIMING = "manifest.json", "metrics.jsonl", "timing.jsonl"
CHECKPOINT, RESULT = "checkpoint.pt", "result.json"
LARGEST_SEED = 2**64 - 1  # of torch's generators
WHOLE = (
    *("steps", "evaluate_every", "checkpoint_every", "threads", "length", "batch"),
    *("width", "layers", "heads", "hidden", "modulus"),
)
KINDS: dict[str, type] = {"task": str, "optimizer": str, "arm": str, "options": dict}
KINDS |= {"telemetry": bool, "label": str}
RESUMED = "resumed"  # the manifest's list of what changed while a run was under way


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides the numbers of one run, and the labels it is filed under."""

    task: str
    optimizer: str
    lr: float  # peak rate of the matrices
    seed: int
    steps: int
    arm: str = ""  # the folder's prefix and the report's column
    adamw_lr: float = 3e-3  # peak rate of embeddings, norms and other vectors
    options: dict[str, Any] = field(default_factory=dict)  # further keywords of the optimizer
    width: int = 128
    layers: int = 3
    heads: int = 4
    hidden: int = 384
    length: int = 128  # characters per window; unused by modular addition
    batch: int = 16  # windows per update; unused by modular addition
    modulus: int = 0  # unused by the character models
    evaluate_every: int = 10
    checkpoint_every: int = 50
    threads: int = 1
    telemetry: bool = False  # count steps that oppose their source or gradient
    label: str = "full"  # "quick" for anything shorter than declared

    def __post_init__(self) -> None:
        # Checked by kind as well: a configuration may be read from a file.
        for name, kind in KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise LabError(f"{name} must be of type {kind.__name__}, not {value!r}")
        for name in WHOLE:
            require_whole(name, getattr(self, name), least=0 if name == "modulus" else 1)
        for name in ("lr", "adamw_lr"):
            require_positive(name, getattr(self, name))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise LabError(f"seed must be a whole number, not {self.seed!r}")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise LabError(f"seed must lie between 0 and {LARGEST_SEED}, not {self.seed}")
        if self.label not in ("quick", "full"):
            raise LabError(f"label must be 'quick' or 'full', not {self.label!r}")

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: Path) -> RunConfig:
        """Read a manifest's configuration; ``where`` is named when it does not fit."""
        known = {f.name for f in dataclasses.fields(cls)}
        foreign = sorted(set(values) - known)
        if foreign:
            raise LabError(f"{where}: unknown configuration field {foreign[0]!r}")
        try:
            return cls(**values)
        except (TypeError, LabError) as error:
            raise LabError(f"{where}: not a usable configuration ({error})") from error


@dataclass(frozen=True)
class Resumption:
    """Where a run was continued by other code, with other versions or on another machine.

    Attributes:
        step: the last update before it.
        commit: from then on, as `Run.commit`, and so the others.
    """

    step: int
    commit: str | None
    versions: dict[str, Any]
    machine: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, entry: Any, where: Path) -> Resumption:
        """Read an entry of a manifest; ``where`` is named when it does not fit."""
        try:
            commit, step = entry["commit"], int(entry["step"])
            if not isinstance(commit, str | None):
                raise TypeError("the commit is no text")
            return cls(step, commit, dict(entry["versions"]), dict(entry["machine"]))
        except UNFIT as error:
            raise LabError(
                f"{where}: {entry!r} under {RESUMED!r} is not step, commit, versions and machine"
            ) from error


@dataclass(frozen=True)
class Run:
    """A run folder as read back; ``result`` is None while the run is unfinished."""

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
    """What a manifest says of changes under way; most have nothing to say."""
    where, entries = folder / MANIFEST, manifest.get(RESUMED, [])
    if not isinstance(entries, list):
        raise LabError(f"{where}: {RESUMED!r} must be a list, not {entries!r}")
    return tuple(Resumption.from_dict(entry, where) for entry in entries)


def is_finished(folder: Path) -> bool:
    return is_file(folder / RESULT)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder, checked for its format."""
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
    """Refuse what is not an object of texts and numbers."""
    if not isinstance(found, dict):
        raise LabError(f"{path}: {name!r} must be an object, not {found!r}")
    for key, value in found.items():
        if not isinstance(value, str | int | float | None):
            raise LabError(f"{path}: {key!r} under {name!r} is {value!r}; expected text")


def load_run(folder: str | Path) -> Run:
    """Read a run folder, finished or not.

    Raises:
        LabError: the folder is no run, its format is unknown, a line of a finished run is
            truncated, or its metrics are not the ones its result was computed from.
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
            f"{path} holds {len(metrics)} updates, but {RESULT} says {result.get('steps')}"
        )
    recorded = result.get("metrics_sha256")
    if recorded is not None and recorded != file_sha256(path):
        raise LabError(f"{path} was changed after the run: its sha256 differs from {RESULT}'s")


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
