"""What the records of a run say about each layer: its last numbers, and what stands out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gomuon.watching.records import WatchRecord

Number = Callable[[WatchRecord], float | None]

# Worth a look, not wrong: docs/watch.md says where these come from.
LOW_EFFICIENCY = 0.5
HIGH_CONDITION = 1e5
LITTLE_RANK = 0.1
DRIFTS, ILL, STARVED = "drifts", "ill-conditioned", "starved of rank"
REMARKS = (DRIFTS, ILL, STARVED)


@dataclass
class LayerView:
    """One layer, with the records of a run, oldest first."""

    name: str
    records: list[WatchRecord] = field(default_factory=list)

    @property
    def last(self) -> WatchRecord:
        return self.records[-1]

    def latest(self, number: Number) -> float | None:
        """The newest value of a number that not every record has."""
        return next((v for r in reversed(self.records) if (v := number(r)) is not None), None)

    @property
    def efficiency(self) -> float | None:
        return self.latest(lambda r: r.efficiency)

    @property
    def drift(self) -> float | None:
        return self.latest(lambda r: r.drift)

    @property
    def conditions(self) -> tuple[float | None, float | None]:
        """κ₂ of A and of B̄."""
        a = self.latest(lambda r: r.input_condition)
        return a, self.latest(lambda r: r.output_condition)

    @property
    def rank(self) -> tuple[float, int] | None:
        """The rank of the source and the largest possible one."""
        found = self.latest(lambda r: r.source_rank)
        return None if found is None else (found, self.last.full_rank or 0)

    @property
    def remarks(self) -> list[str]:
        """What stands out."""
        found = []
        if self.efficiency is not None and self.efficiency < LOW_EFFICIENCY:
            found.append(DRIFTS)
        raised = self.latest(lambda r: r.input_raised), self.latest(lambda r: r.output_raised)
        if max(x or 0.0 for x in self.conditions) > HIGH_CONDITION or any(raised):
            found.append(ILL)
        spread = self.latest(lambda r: r.source_spread)
        lacking = self.rank is not None and self.rank[0] < self.rank[1]
        if lacking or (spread is not None and spread < LITTLE_RANK * (self.last.full_rank or 0)):
            found.append(STARVED)
        return found


@dataclass(frozen=True)
class RunView:
    """A run: its layers in the order of their first records."""

    layers: tuple[LayerView, ...]

    @classmethod
    def of(cls, records: Sequence[WatchRecord]) -> RunView:
        """From records in any order of layers, oldest first."""
        layers: dict[str, LayerView] = {}
        for record in records:
            layers.setdefault(record.layer, LayerView(record.layer)).records.append(record)
        return cls(tuple(layers.values()))

    @property
    def step(self) -> int:
        return max((layer.last.step for layer in self.layers), default=0)

    @property
    def method(self) -> str:
        return self.layers[0].last.method if self.layers else ""

    def with_remark(self, remark: str) -> list[LayerView]:
        """The layers of which something stands out."""
        return [layer for layer in self.layers if remark in layer.remarks]

    def series(self, number: Number) -> list[tuple[int, list[float]]]:
        """By step, the newest value of a number in every layer that has had it.

        Layers take turns with some numbers, so at each step most of these are a little older.
        """
        changes: dict[int, dict[str, float]] = {}
        for layer in self.layers:
            for record in layer.records:
                if (value := number(record)) is not None:
                    changes.setdefault(record.step, {})[layer.name] = value
        newest: dict[str, float] = {}
        found = []
        for step, new in sorted(changes.items()):
            newest |= new
            found.append((step, list(newest.values())))
        return found

    def medians(self, number: Number) -> list[float]:
        """The median over layers, step by step."""
        return [statistics.median(values) for _, values in self.series(number)]

    @property
    def headline(self) -> str:
        """What stands out, in one sentence."""
        total = len(self.layers)
        counts = [(remark, len(self.with_remark(remark))) for remark in REMARKS]
        said = [
            f"{count} {'drifts' if count == 1 else 'drift'}"
            if remark == DRIFTS
            else f"{count} {'is' if count == 1 else 'are'} {remark}"
            for remark, count in counts
            if count
        ]
        if not said:
            return f"Nothing stands out in {total} layer{'s' if total != 1 else ''}"
        return f"Of {total} layers {', '.join(said)}"
