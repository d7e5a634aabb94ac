"""Benchmark results that are made up."""

from __future__ import annotations

from typing import Any

from gomuon.lab.bench.all_arms import arms_by_name

# Of our own arms; their settings say so, but nothing is built here.
INTERVALS = {"go-muon-4": 4, "go-muon-4-fast": 4, "go-muon-fast": 8, "go-muon-16": 16}


def timed(step: float, passes: float = 1.0, error: float | None = 0.1) -> dict[str, Any]:
    def mean(value: float) -> dict[str, Any]:
        return {"value": value, "error": error, "cycles": 2}

    times = {"step": mean(step), "forward_backward": mean(passes), "whole": mean(step + passes)}
    return {**times, "state_bytes": 3000, "peak_bytes": 6000, "steps": 32}


def made_result(size: str = "full", **times: dict[str, float]) -> dict[str, Any]:
    """Results with the steps' seconds of arms on workloads: paper={"go_muon_4": .4}."""
    arms = arms_by_name()
    works: dict[str, Any] = {}
    for name, seconds in times.items():
        entries: dict[str, Any] = {}
        for short, value in {"adamw": 0.1, **seconds}.items():
            arm = arms[short.replace("_", "-")]
            interval = INTERVALS.get(arm.name, arm.interval or 1)
            facts = {"title": arm.title, "package": arm.package, "interval": interval}
            entries[arm.name] = {**facts, "note": arm.note, **timed(value)}
        works[name] = {
            "title": f"the {name} model",
            "shape": {"width": 8, "batch": 2},
            "steps": 32,
            "warmup": 2,
            "parameters": 250,
            "parameter_bytes": 1000,
            "bare_peak_bytes": 4000,
            "arms": entries,
        }
    return {
        "format": 1,
        "size": size,
        "rate": 1e-3,
        "machine": {"system": "made", "processor": "made up", "cores": 2},
        "vectors": "AVX2",
        "threads": 2,
        "versions": {"gomuon": "0", "torch": "0", "python": "0"},
        "commit": None,
        "source": "0",
        "command": "gomuon bench",
        "date": "2000-01-01",
        "workloads": works,
        "memory": {},
        "operations": {},
        "tokens": {},
        "scaling": {},
    }
