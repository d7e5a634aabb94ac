"""A weight that no module multiplies with: its probes, one for each use of its matrices."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from gomuon.capture.shared_inputs import SharedInputs
from gomuon.capture.tap import Probe, Tap, in_backward
from gomuon.capture.uses import NotLinear, WeightUse
from gomuon.functional.linalg import working_dtype
from gomuon.moments import Moment, Shape
from gomuon.parameters.rows import SumCut, can_capture
from gomuon.parameters.sampling import Sampling
from gomuon.parameters.side_forms import LEFT, RIGHT, SideForm
from gomuon.parameters.tiling import Tiling


@dataclass(frozen=True)
class WatchedCut:
    """How the sums of a watched weight are cut.

    Attributes:
        stored: the sizes of the weight as it is stored, [stack, first, rest].
        transposed: whether it is stored inputs × outputs.
        tiling: how it is cut into matrices.
        forms: the forms of its left and right factors.
        sampling: which rows enter the moments.
    """

    stored: tuple[int, int, int]
    transposed: bool
    tiling: Tiling
    forms: tuple[SideForm, SideForm]
    sampling: Sampling

    @property
    def cuts(self) -> tuple[SumCut, SumCut]:
        """Of the rows of one matrix of the stack: inputs, then gradients."""
        left, right = self.forms
        return SumCut(self.tiling.columns, right, RIGHT), SumCut(self.tiling.rows, left, LEFT)


class StackProbe:
    """Leaves for the moments of all matrices of a stack, made when matrices are used.

    Experts that are used one by one have a leaf each, so that a sum is as large as one expert's.
    """

    def __init__(self, cut: SumCut, stack: int, weight: Tensor) -> None:
        self.cut, self.stack = cut, stack
        self.dtype, self.device = working_dtype(weight), weight.device
        self.probes: dict[tuple[int, int], Probe] = {}  # by the first matrix and their number

    def of(self, first: int, number: int) -> Probe:
        """The probe of the sums of some matrices, [number, …]."""
        if (first, number) not in self.probes:
            shape = number, *self.cut.shape
            self.probes[first, number] = Probe(shape, self.dtype, self.device, number)
        return self.probes[first, number]

    @property
    def shape(self) -> Shape:
        """The shape of the whole moment."""
        if self.stack == 1:
            return self.cut.shape
        whole = self.cut.strips == 1
        one = self.cut.shape if self._is_bare else self.cut.shape[1:]
        return (self.stack * (1 if whole else self.cut.strips), *one)

    @property
    def _is_bare(self) -> bool:
        """Whether the moment of one matrix has no dimension for its strips."""
        return len(self.cut.shape) == 2

    @property
    def leaves(self) -> list[Tensor]:
        return [leaf for probe in self.probes.values() for leaf in probe.leaves]

    @property
    def moment(self) -> Moment | None:
        """The moment of all matrices; None if no backward pass delivered any."""
        return self.whole({place: probe.moment for place, probe in self.probes.items()})

    def whole(self, moments: dict[tuple[int, int], Moment | None]) -> Moment | None:
        """The moment of all matrices, given those of the probes."""
        present = {place: moment for place, moment in moments.items() if moment is not None}
        if not present:
            return None
        first = next(iter(present.values()))
        if len(present) == 1 and len(first.total) == self.stack:
            total, count, uses = first.total, first.count, first.uses
        else:
            total = first.total.new_zeros(self.stack, *self.cut.shape)
            counts = {(m.count.dtype, m.count.device) for m in present.values()}
            like = next((c for c in counts if c[1].type != "cpu"), next(iter(counts)))
            count, uses = (torch.zeros(self.stack, dtype=like[0], device=like[1]) for _ in range(2))
            for (begin, number), moment in present.items():
                here = slice(begin, begin + number)
                total[here] += moment.total
                count[here] += moment.count.to(like[1], like[0])
                uses[here] += moment.uses.to(like[1], like[0])
        if self.stack == 1:
            return Moment(total[0], count[0], uses[0])
        return Moment(total.reshape(self.shape), count, uses)

    def clear(self) -> None:
        for probe in self.probes.values():
            probe.clear()


class ProductReader:
    """A weight in products that make rows of their inputs alike. It may share inputs with others.

    See `shared_inputs.Reader` for the attributes.
    """

    count_shape = (2, 1)  # of a stack of one matrix

    def __init__(self, watched: "WatchedWeight", rows: object) -> None:
        self.watched, self.rows = watched, rows
        self.weight, self.dtype, self.cuts = watched.weight, watched.dtype, watched.cut.cuts
        self.shapes = tuple((1, *cut.shape) for cut in self.cuts)

    @property
    def was_zeroed(self) -> bool:
        return self.watched.was_zeroed


@dataclass(eq=False)
class WatchedWeight:
    """A weight whose products are captured.

    Attributes:
        weight: the optimizer's parameter.
        cut: how its sums are cut.
        wants_inputs: whether to capture Σ x xᵀ.
        wants_gradients: whether to capture Σ δ δᵀ.
        phase: it refreshes later by this fraction of the refresh interval.
        sharded: whether its gradient may be on other ranks.
        open: whether products are captured in this step.
        called: whether a product was captured in a forward pass of this step.
        taken: whether some of its sums of this step have been sent away.
        problem: why a product of this step was not captured.
        readers: of inputs that other weights may read as well.
        layers: the layers whose weight it is, which have hooks of their own.
    """

    weight: Tensor
    cut: WatchedCut
    wants_inputs: bool
    wants_gradients: bool
    phase: float = 0.0
    sharded: bool = False
    open: bool = False
    called: bool = False
    taken: bool = False
    problem: str | None = None
    substitute: Moment | None = None
    layers: frozenset[nn.Module] = frozenset()
    dropped: Callable[[], None] | None = None
    inputs: StackProbe = field(init=False)
    gradients: StackProbe = field(init=False)
    readers: dict[object, ProductReader] = field(default_factory=dict)  # by how they make rows

    def __post_init__(self) -> None:
        self.make_probes(self.weight)

    def make_probes(self, weight: Tensor) -> None:
        self.dtype_and_device = (weight.dtype, weight.device)
        self.dtype = working_dtype(weight)
        stack = self.cut.tiling.stack
        self.readers.clear()
        self.inputs, self.gradients = (StackProbe(cut, stack, weight) for cut in self.cut.cuts)

    @property
    def stack(self) -> int:
        return self.cut.tiling.stack

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """The shapes of the moments of inputs and of gradients."""
        return self.inputs.shape, self.gradients.shape

    def tapped(self, use: WeightUse, result: Tensor, shared: SharedInputs) -> Tensor:
        """The result of a product, whose backward pass delivers the moments."""
        device = self.weight.device
        if not (can_capture(result, device) and can_capture(use.x, device)):
            raise NotLinear("its factors are not plain tensors")
        if self.dtype_and_device != (self.weight.dtype, device):
            self.make_probes(self.weight)  # the model was moved or converted
        self.called = True
        mask = shared.mask_now()
        if mask is not None:
            positions = use.rows.positions(result)
            fits = positions == mask.shape
            mask = mask if fits else mask.flatten() if positions == (mask.numel(),) else None
        forms, *inputs = self._input_leaves(use, mask, shared)
        tapped: Tensor = Tap.apply(
            result,
            use.x if self.wants_inputs else None,
            mask,
            use.rows,
            self.cut.cuts,
            forms,
            shared.expect,
            *inputs,
            *(_leaves(self.gradients, use, mask) if self.wants_gradients else [None] * 3),
        )
        return tapped

    def _input_leaves(
        self, use: WeightUse, mask: Tensor | None, shared: SharedInputs
    ) -> tuple[Callable[[], bool] | None, Tensor | None, Tensor | None, Tensor | None]:
        """A function that says whether this product forms x's moment, and leaves for it."""
        if not self.wants_inputs:
            return None, None, None, None
        if mask is not None or self.stack > 1 or use.rows.segments is not None:
            return None, *_leaves(self.inputs, use, mask)
        rows = use.rows.of_inputs
        if rows not in self.readers:
            self.readers[rows] = ProductReader(self, rows)
        reader = self.readers[rows]
        shared.merge(reader)
        read = shared.of(use.x, reader, None)
        return partial(shared.forms, read, reader), read.total, read.count_of(reader), None

    def begin_pass(self, shared: SharedInputs) -> None:
        """Before a product: drop the sums if the gradients that came with them were dropped."""
        if in_backward() or not self.was_zeroed:
            return
        for reader in self.readers.values():
            shared.forget_sums_of(reader)
        if any(probe.total.grad is not None for probe in self._probes):
            if self.taken and self.dropped is not None:
                self.dropped()
            self.forget_sums()

    @property
    def _probes(self) -> Iterator[Probe]:
        yield from self.inputs.probes.values()
        yield from self.gradients.probes.values()

    @property
    def was_zeroed(self) -> bool:
        return self.weight.grad is None and not self.sharded

    @property
    def is_filled(self) -> bool:
        """Whether backward passes have delivered to all probes."""
        probes = list(self._probes)
        return bool(probes) and all(probe.total.grad is not None for probe in probes)

    def forget_sums(self) -> None:
        """Drop the sums that backward passes delivered."""
        self.inputs.clear()
        self.gradients.clear()
        self.substitute = None

    def begin_step(self) -> None:
        """Before a new step: the probes of the last one are not needed any more."""
        self.called, self.problem = False, None
        self.inputs.probes.clear()
        self.gradients.probes.clear()


def _leaves(
    probe: StackProbe, use: WeightUse, mask: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Leaves for the moment and the numbers of rows of the matrices that a product uses."""
    total, known, counted = probe.of(use.first, use.rows.matrices).leaves
    return (total, known, None) if mask is None else (total, None, counted)
