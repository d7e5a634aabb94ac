"""The steps of a cycle: what each of them computes, sends and holds, by the units that are due.

If all layers refresh together, a cycle is one refresh step and reuse steps. If refreshes are
staggered, a part of the units is due in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gomuon.distributed.assignment import Unit, load_per_rank
from gomuon.distributed.narrow_sums import owner_adds
from gomuon.distributed.stream_layout import BUCKET
from gomuon.lab.costs.division import Division
from gomuon.lab.costs.exchange import RowShare
from gomuon.lab.costs.matrix_layers import MatrixLayer
from gomuon.lab.costs.traffic import Mesh, moment_bytes, replicated_bytes, sums_in_messages
from gomuon.lab.costs.unit_costs import moment_work, moments_of
from gomuon.recipes.work import flops

Turns = frozenset[int]


@dataclass(frozen=True)
class Spread:
    """The largest and the mean value of a quantity over the ranks."""

    largest: float
    mean: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(max(values), sum(values) / len(values))


@dataclass(frozen=True)
class StepCost:
    """The costs of one step, per rank.

    Attributes:
        refreshes: whether it renews maps.
        work: FLOPs.
        sent: bytes.
        held: most bytes of captured sums on a rank at one time.
    """

    refreshes: bool
    work: Spread
    sent: Spread
    held: int


@dataclass(frozen=True)
class StepCosts:
    """What the costs of a step are added up from; lists are by unit, unless said otherwise.

    Attributes:
        mesh: the ranks that share the work.
        replicate: whether every rank computes everything.
        divided: the units, their owners and turns.
        owned: the units as far as messages depend on them.
        always: bytes that each rank sends in every step, by rank; not used if work is replicated.
        beside: bytes that each rank sends in every step to ranks that have other matrices.
        steps: FLOPs of every step.
        grams: FLOPs added where factors are observed.
        maps: FLOPs added where maps are renewed.
        passes: forward passes whose rows enter the captured sums.
        groups: parameter groups with matrices.
        size: bytes of a captured number.
        travels: bytes of one on its way.
        activation: bytes of an element of an activation.
    """

    mesh: Mesh
    replicate: bool
    divided: Division
    owned: Sequence[Unit]
    always: Sequence[int]
    beside: int
    steps: Sequence[float]
    grams: Sequence[float]
    maps: Sequence[float]
    passes: float
    groups: int
    size: int
    travels: int
    activation: int

    def of(self, observed: Turns, renewed: Turns) -> StepCost:
        """A step that observes the units with some turns and renews the maps of others."""
        work = self.work(observed, renewed, self.maps)
        return StepCost(bool(renewed), work, self.sent(observed), self.held(observed))

    def over_ranks(self, costs: Sequence[float]) -> list[float]:
        """The sum over each rank's units."""
        if self.replicate:
            return [sum(costs)] * self.mesh.ranks
        return load_per_rank(costs, self.divided.owners, self.mesh.ranks)

    def work(self, observed: Turns, renewed: Turns, maps: Sequence[float]) -> Spread:
        both = zip(self.steps, self.grams, maps, self.divided.turns, strict=True)
        own = [
            step + gram * (turn in observed) + renewal * (turn in renewed)
            for step, gram, renewal, turn in both
        ]
        captured = self.captured(observed)
        return Spread.of([a + b for a, b in zip(self.over_ranks(own), captured, strict=True)])

    def captured(self, observed: Turns) -> list[int]:
        """FLOPs of the captured sums on each rank: those of all rows that it reads."""
        inputs = [self.divided.layers_of(unit) for unit in self.divided.captured_together(observed)]
        return self._by_part(
            [
                sum(flops(moment_work(layers, self.passes, share)) for layers in inputs)
                for share in self._shares
            ]
        )

    def exchanged(self, observed: Turns) -> list[int]:
        """Bytes of activations that each rank sends to those that divide layers with it."""
        inputs = [self.divided.layers_of(unit) for unit in self.divided.captured_together(observed)]
        sums = [one for layers in inputs for one in moments_of(layers)]
        return self._by_part(
            [
                self.activation
                * sum(share.exchanged(one.layer, self.passes, one.where) for one in sums)
                for share in self._shares
            ]
        )

    @property
    def _shares(self) -> list[RowShare]:
        return [RowShare(self.mesh.parts, part) for part in range(self.mesh.parts)]

    def _by_part(self, of_parts: Sequence[int]) -> list[int]:
        """What depends on the part alone, by rank."""
        return [of_parts[place.part] for place in self.mesh.places]

    def sent(self, observed: Turns) -> Spread:
        due = [i for i, turn in enumerate(self.divided.turns) if turn in observed]
        units, ranks = [self.owned[i] for i in due], self.mesh.ranks
        if self.replicate:
            settings = {"moment_size": self.size, "groups": self.groups}
            sent = replicated_bytes(units, self.mesh, refresh=bool(due), **settings)
            return Spread.of([self.beside + each for each in sent])
        owners = [self.divided.owners[i] for i in due]
        moments = [0] * ranks
        if due:
            moments = moment_bytes(units, owners, ranks, self.size, self.travels)
        parts = zip(self.always, moments, self.exchanged(observed), strict=True)
        return Spread.of([self.beside + sum(each) for each in parts])

    def held(self, observed: Turns) -> int:
        """Most bytes of sums on a rank at one time.

        An owner's rank sends each unit of layers that read one input when it is complete, or a
        small bucket, and keeps what it receives.
        """
        readers = self.divided.captured_together(observed)
        whole = [self.size * elements_of(self.divided.layers_of(unit)) for unit in readers]
        if self.replicate or self.mesh.ranks == 1:
            return sum(whole)
        due = [i for unit in readers for i in unit]
        sums = {i: self.size * sum(self.owned[i].moments) for i in due}
        # Bytes of a message for each byte of the sums in it.
        message = sums_in_messages(self.mesh.ranks, self.size, self.travels) / self.size
        packed = [message * sum(sums[i] for i in unit) for unit in readers]
        at_once = max((a + b for a, b in zip(whole, packed, strict=True)), default=0)
        # A bucket, as a message too.
        sending = min(max(at_once, (2 + message) * BUCKET), sum(whole) + sum(packed))
        owners = [self.divided.owners[i] for i in due]
        received = load_per_rank([sums[i] for i in due], owners, self.mesh.ranks)
        sliced = self.travels < self.size and not owner_adds(self.mesh.ranks)
        slices = sum(sums.values()) // self.mesh.ranks if sliced else 0
        return round(sending + max(received)) + slices


def elements_of(layers: Sequence[MatrixLayer]) -> int:
    """Numbers in the captured sums of layers that read one input."""
    return sum(one.factors.elements for one in moments_of(layers))


def busiest(steps: Sequence[Spread]) -> Spread | None:
    """The step with the most on one rank; None if there is none."""
    return max(steps, key=lambda step: step.largest, default=None)
