"""Run a benchmark part by part and write its file; a stopped one continues after the last part."""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib.metadata
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import gomuon
from gomuon.lab import files, machine
from gomuon.lab.bench import growth, workloads
from gomuon.lab.bench.all_arms import arms_by_name
from gomuon.lab.bench.arms import RATE
from gomuon.lab.bench.bench_parts import SECTIONS, BenchmarkSettings, BenchObserver, parts
from gomuon.lab.bench.workloads import Size
from gomuon.lab.errors import LabError
from gomuon.lab.input_checks import errors_naming, is_file

FILE = "bench.json"
FORMAT = 1
# Files of the lab outside this folder whose code is measured, or measures.
OF_THE_LAB = ("machine.py", "experiments/foreign.py", "experiments/models.py")
PACKAGES = ("heavyball", "pytorch_optimizer", "transformers", "scipy")


def run_benchmark(
    settings: BenchmarkSettings,
    folder: Path,
    command: str,
    observer: BenchObserver,
    *,
    fresh: bool = False,
) -> dict[str, Any]:
    """Measure what the folder's file does not have yet; everything again if `fresh`."""
    settings.check()
    files.make_folder(folder)
    asked = {"arms": settings.arms, "cycles": settings.cycles, "compiled": settings.compiled}
    with files.locked(folder):
        result = environment(settings.size) | {"command": command, "date": today()}
        result |= {section: {} for section in SECTIONS}
        files.refuse_links(folder / FILE)
        if fresh:
            # Now, not at the first write: a stopped run is continued without --fresh.
            (folder / FILE).unlink(missing_ok=True)
        result |= kept_parts(folder / FILE, result)
        for part in parts(settings):
            section = result[part.section]
            if section.get(part.name, {}).get("asked") == asked:
                observer.skip(part.title)
                continue
            observer.begin(part.title, part.turns)
            section[part.name] = {**part.measure(observer), "asked": asked}
            files.write_json(folder / FILE, result)
            gc.collect()
    with errors_naming(folder / FILE):
        return in_benchmark_order(result)


def kept_parts(path: Path, now: dict[str, Any]) -> dict[str, Any]:
    """The parts that the file has already.

    Raises:
        LabError: they were measured on another machine, with other settings or by other code. They
            cannot be mixed with new numbers, and only the user decides to delete them.
    """
    if not path.exists():
        return {}
    old = files.read_json(path)
    with errors_naming(path):
        found = differences(old, now)
    if found:
        raise LabError(
            f"{path} was measured under other conditions ({'; '.join(found)}); use --fresh to "
            "delete it and measure everything again, or choose another folder with --out"
        )
    sections = {section: old.get(section, {}) for section in SECTIONS}
    for name, section in sections.items():
        if not isinstance(section, dict) or not all(isinstance(p, dict) for p in section.values()):
            raise LabError(
                f"{path}: {name!r} must be an object of objects; use --fresh to delete the file "
                "and measure everything again, or choose another folder with --out"
            )
    return sections


def differences(old: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In words, how the environments of two files differ; the commit does not count."""
    found = []
    for key in environment(now["size"]).keys() - {"commit"}:
        there, here = old.get(key), now[key]
        if not (isinstance(there, Mapping) and isinstance(here, Mapping)):
            there, here = {key: there}, {key: here}
        elif key == "machine":
            there, here = machine.comparable(there), machine.comparable(here)
        for name in {**there, **here}:
            if there.get(name) != here.get(name):
                found.append(f"{name} {there.get(name)} there, {here.get(name)} here")
    return sorted(found)


def environment(size: Size) -> dict[str, Any]:
    """Everything that must be the same for all numbers of one file."""
    return {
        "format": FORMAT,
        "size": size,
        "rate": RATE,
        "machine": machine.facts(),
        "vectors": vectors(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "commit": machine.source_commit(),
        "source": source_digest(),
    }


def vectors() -> str:
    """The vector instructions torch uses; bfloat16 is slow on a processor without such units."""
    # The oldest torch we support does not have it.
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    units = known.get("avx512_bf16") or known.get("amx_bf16")
    return torch.backends.cpu.get_cpu_capability() + (" with bfloat16" if units else "")


@functools.cache
def source_digest() -> str:
    """A hash of the measured code and of the code that measures it.

    A commit would not do: edited files keep it, and changes elsewhere give another one.
    """
    package = Path(gomuon.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        inside = name.removeprefix("lab/")
        library = inside == name
        if library or inside.startswith(("bench/", "costs/")) or inside in OF_THE_LAB:
            digest.update(name.encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    found = machine.versions()
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def read_results(folder: Path) -> dict[str, Any]:
    """The results in a folder.

    Raises:
        LabError: there are none, or they have another format.
    """
    path = folder / FILE
    if not is_file(path):
        raise LabError(f"{path} does not exist; create it with gomuon bench --out {folder}")
    result = files.read_json(path)
    if result.get("format") != FORMAT:
        raise LabError(f"{path} has format {result.get('format')!r}; expected {FORMAT}; run again")
    return in_benchmark_order(result)


def in_benchmark_order(result: dict[str, Any]) -> dict[str, Any]:
    """The results in the order in which they were measured; the file is sorted by name."""
    works = in_order(result["workloads"], workloads.NAMES)
    for work in works.values():
        work["arms"] = in_order(work["arms"], list(arms_by_name()))
        work["shape"] = in_order(work.get("shape", {}), workloads.KEYS)
    scaling = in_order(result["scaling"], growth.AXES)
    for axis in scaling.values():
        axis["arms"] = in_order(axis["arms"], growth.ARMS)
    # Older files do not have the other two.
    tokens, operations = result.get("tokens", {}), result.get("operations", {})
    for found in (*tokens.values(), *operations.values()):
        found["arms"] = in_order(found["arms"], list(arms_by_name()))
    others = {"tokens": tokens, "operations": operations}
    return {**result, "workloads": works, "scaling": scaling, **others}


def in_order(things: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Sorted in the order of `names`; other entries come last."""
    places = {name: place for place, name in enumerate(names)}
    return dict(sorted(things.items(), key=lambda item: places.get(item[0], len(places))))
