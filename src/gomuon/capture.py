"""Gated capture of each layer's input x and output gradient δ, as second moments.

The forward hook passes the layer's output through an identity whose backward hands out xᵀx, gᵀg and
their row counts as *gradients of probe tensors*. Autograd then does the book-keeping: it adds up
micro-batches and repeated calls, counts once under activation checkpointing, and visits only what
the loss reaches. Nothing here knows of factors, shrinkage or optimizers.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gomuon.readers import Reader, moment


@dataclass(frozen=True)
class Moment:
    """Σ v vᵀ over rows v, [d, d] or [groups, d, d], and two float64 scalars.

    `count` rows were added up; the weight was used on `uses` rows, more where rows are sampled.
    """

    total: Tensor
    count: Tensor
    uses: Tensor


Term = tuple[Moment | None, float]


@dataclass(frozen=True)
class Statistics:
    """What one step's backward passes said of a layer; a side not asked for or not seen is None.

    Layers that read the same tensors carry the *same* `inputs` object.
    """

    inputs: Moment | None
    gradients: Moment | None


Shape = tuple[int, ...]


def _leaf(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    """A probe: a leaf whose gradient autograd will fill.

    Expanded from one element, it has a moment's shape without its memory.
    """
    return torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()


class Probe:
    """Leaves for a moment, for its count and for its uses."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.total = _leaf(dtype, device, *shape)
        self.count = _leaf(torch.float64, device)
        self.uses = _leaf(torch.float64, device)

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.total, self.count, self.uses

    @property
    def moment(self) -> Moment | None:
        if self.total.grad is None:
            return None
        count = _gradient(self.count)
        return Moment(self.total.grad, count, count if self.uses.grad is None else self.uses.grad)

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


class Reading:
    """One input tensor of one forward pass, and the layers that read it.

    The leader's tap forms the moment. Every reader's tap counts its own rows, so that a reader the
    loss did not reach, or a pass that was only a recomputation, counts for nothing.
    """

    def __init__(self, leader: "LayerHook", x: Tensor) -> None:
        self.leader = leader
        self.total = _leaf(leader.dtype, x.device, *leader.shapes[0])
        self.counts: dict[LayerHook, Tensor] = {}

    def count_of(self, reader: "LayerHook") -> Tensor:
        """The reader's counting probe."""
        return self.counts.setdefault(reader, _leaf(torch.float64, self.total.device))

    @property
    def filled(self) -> bool:
        return self.total.grad is not None

    @property
    def times(self) -> dict["LayerHook", float]:
        """How often each reader's backward passed over the rows, relative to the leader's."""
        counts = {hook: c.grad for hook, c in self.counts.items() if c.grad is not None}
        rows = float(counts[self.leader]) if self.leader in counts else 0.0
        return {hook: float(count) / rows for hook, count in counts.items()} if rows else {}

    def absorb(self, other: "Reading") -> None:
        for mine, theirs in (
            (self.total, other.total),
            *((self.counts[hook], other.counts[hook]) for hook in other.times),
        ):
            assert mine.grad is not None
            assert theirs.grad is not None
            mine.grad.add_(theirs.grad)


@dataclass(frozen=True)
class Watched:
    """A module to hook: how it is read, and the shapes of its two moments."""

    module: nn.Module
    reader: Reader
    inputs: Shape
    gradients: Shape


class Window:
    """The gate shared by a group's hooks, and what came in while it stood open."""

    def __init__(self) -> None:
        self.open = False
        self._readings: list[Reading] = []
        self._inputs: dict[int, tuple[weakref.ref[Tensor], int, Reading]] = {}

    def reading_of(self, x: Tensor, hook: "LayerHook") -> Reading:
        """The reading of x that `hook` takes part in; it leads it if nobody else does."""
        known = self._inputs.get(id(x))
        # The same object, still alive and not written to since: q, k and v of one attention. Who
        # has led a reading of x leads again, so that checkpointing's second pass saves the same.
        if (
            known is not None
            and known[0]() is x
            and known[1] == x._version
            and known[2].leader is not hook
            and known[2].leader.reader == hook.reader
        ):
            return known[2]
        reading = Reading(hook, x)
        self._inputs[id(x)] = (weakref.ref(x), x._version, reading)
        self._readings.append(reading)
        return reading

    def shares(self) -> dict["LayerHook", list[Term]]:
        """Of every finished reading its moment, and how often each hook's sum contains it."""
        shares: dict[LayerHook, list[Term]] = {}
        for reading in self._readings:
            if reading.filled and (times := reading.times):
                count = _gradient(reading.counts[reading.leader])
                whole = Moment(_gradient(reading.total), count, count)
                for hook, often in times.items():
                    shares.setdefault(hook, []).append((whole, often))
        return shares

    def fold(self, reading: Reading) -> None:
        """Merge a finished reading into an older one of the same readers, to bound memory."""
        if reading not in self._readings:
            return
        for other in self._readings:
            if other is reading or other.leader is not reading.leader or not other.filled:
                continue
            if other.times == reading.times:
                other.absorb(reading)
                self._readings.remove(reading)
                return

    def forget_sums(self) -> None:
        """Drop what backward passes delivered; forward passes still awaiting theirs stay."""
        self._readings = [reading for reading in self._readings if not reading.filled]

    def clear(self) -> None:
        self._readings.clear()
        self._inputs.clear()


class LayerHook:
    """The forward hook of one linear layer; on a reuse step it returns at once."""

    def __init__(
        self, window: Window, weight: Tensor, watched: Watched, *, inputs: bool, gradients: bool
    ) -> None:
        self.window = window
        self.wants_inputs = inputs
        self.wants_gradients = gradients
        self.reader = watched.reader
        self.shapes = (watched.inputs, watched.gradients)
        self.substitute: Moment | None = None
        self._led: Reading | None = None
        self.place(weight)

    def place(self, weight: Tensor) -> None:
        """Make this layer's own probes; `inputs` serves where readings cannot be shared."""
        self.kind = (weight.dtype, weight.device)
        self.dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.inputs, self.gradients = (
            Probe(shape, self.dtype, weight.device) for shape in self.shapes
        )

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        if not self.window.open:
            return None
        if not (module.training and torch.is_grad_enabled() and output.requires_grad):
            return None  # an evaluation pass, or a frozen branch
        weight: Tensor = module.weight  # type: ignore[assignment]
        if not weight.requires_grad:
            return None
        if self.kind != (weight.dtype, weight.device):
            self.place(weight)  # the model was moved or converted
        x: Tensor = args[0] if args else kwargs["input"]
        total, count = self._input_probes(x) if self.wants_inputs else (None, None)
        tapped: Tensor = Tap.apply(
            output,
            x if total is not None else None,
            self.reader,
            total,
            count,
            *(self.gradients.leaves if self.wants_gradients else (None, None, None)),
        )
        return tapped

    def _input_probes(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """Probes for x's moment (None when another layer takes it for us) and for our rows."""
        if torch.compiler.is_compiling():
            # Who shares a tensor is not known while a graph is traced.
            return self.inputs.total, self.inputs.count
        if self._led is not None and self._led.filled:
            self.window.fold(self._led)
            self._led = None
        reading = self.window.reading_of(x, self)
        if reading.leader is not self:
            return None, reading.count_of(self)
        self._led = reading
        return reading.total, reading.count_of(self)

    @property
    def gradient_moment(self) -> Moment | None:
        return self.gradients.moment if self.substitute is None else self.substitute

    def forget_sums(self) -> None:
        self.inputs.clear()
        self.gradients.clear()
        self.substitute = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "InertHook":
        # A copied model has no optimizer yet; a copied optimizer places hooks of its own.
        return InertHook()

    def __reduce__(self) -> tuple[type["InertHook"], tuple[()]]:
        return InertHook, ()


class InertHook:
    """What a hook becomes in a copied or pickled model."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        return None


class Tap(torch.autograd.Function):
    """The identity on y; its backward returns moments and counts as the gradients of the probes."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor | None,
        reader: Reader,
        inputs_total: Tensor | None,
        inputs_count: Tensor | None,
        gradients_total: Tensor | None,
        gradients_count: Tensor | None,
        gradients_uses: Tensor | None,
    ) -> Tensor:
        if x is not None:
            ctx.save_for_backward(x)  # the tensor the layer itself keeps: no extra memory
        ctx.reader = reader
        ctx.dtypes = tuple(
            None if probe is None else probe.dtype
            for probe in (inputs_total, inputs_count, gradients_total)
        )
        # Not a view: in-place activations may write to it. y itself is kept by nobody.
        return y.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        inputs_dtype, count_dtype, gradients_dtype = ctx.dtypes
        A = None
        if inputs_dtype:
            A = moment(ctx.reader.inputs(ctx.saved_tensors[0].detach()), inputs_dtype)
        rows = ctx.reader.gradients(g.detach())
        count, uses = (
            torch.full((), number, dtype=torch.float64, device=g.device)
            for number in (rows.shape[-2], ctx.reader.uses(g))
        )
        gradients: tuple[Tensor | None, ...] = (None, None, None)
        if gradients_dtype:
            gradients = (moment(rows, gradients_dtype), count, uses)
        return g, None, None, A, count if count_dtype else None, *gradients


def _gradient(probe: Tensor) -> Tensor:
    assert probe.grad is not None
    return probe.grad


def _add(terms: Iterable[Term], cache: dict[Any, Moment]) -> Moment | None:
    """Σ times·moment; the same object for the same sum."""
    present = [(moment, times) for moment, times in terms if moment is not None]
    if not present:
        return None
    key = tuple((id(moment.total), times) for moment, times in present)
    if key not in cache:
        if len(present) == 1 and present[0][1] == 1:
            cache[key] = present[0][0]
        else:
            cache[key] = Moment(
                torch.stack([moment.total * times for moment, times in present]).sum(0),
                torch.stack([moment.count * times for moment, times in present]).sum(),
                torch.stack([moment.uses * times for moment, times in present]).sum(),
            )
    return cache[key]


class Capture:
    """The hooks of one parameter group: placed, gated, read and removed together."""

    def __init__(self) -> None:
        self.window = Window()
        self._hooks: dict[Tensor, list[LayerHook]] = {}
        self._handles: list[RemovableHandle] = []

    def watch(
        self, parameter: Tensor, modules: Iterable[Watched], *, inputs: bool, gradients: bool
    ) -> None:
        """Hook every module whose weight is `parameter` (several when it is tied)."""
        for watched in modules:
            hook = LayerHook(self.window, parameter, watched, inputs=inputs, gradients=gradients)
            handle = watched.module.register_forward_hook(hook, with_kwargs=True)
            self._handles.append(handle)
            self._hooks.setdefault(parameter, []).append(hook)

    def watches(self, parameter: Tensor) -> bool:
        return parameter in self._hooks

    def collect(self) -> dict[Tensor, Statistics]:
        """Everything captured since the last `forget`, by parameter."""
        shares, sums = self.window.shares(), dict[Any, Moment]()
        return {
            parameter: Statistics(
                _add(
                    (
                        term
                        for hook in hooks
                        for term in ((hook.inputs.moment, 1.0), *shares.get(hook, ()))
                    ),
                    sums,
                ),
                _add(((hook.gradient_moment, 1.0) for hook in hooks), {}),
            )
            for parameter, hooks in self._hooks.items()
        }

    def use_gradients_of(self, loss: Tensor) -> None:
        """Take output gradients from `loss` instead of the loss that is trained on."""
        hooks = [hook for hooks in self._hooks.values() for hook in hooks if hook.wants_gradients]
        if not (self.window.open and hooks):
            return
        probes = [leaf for hook in hooks for leaf in hook.gradients.leaves]
        # Only the probes are asked for, so no weight's gradient is formed or touched.
        found = torch.autograd.grad(loss, probes, retain_graph=True, allow_unused=True)
        for hook, *sums in zip(hooks, found[::3], found[1::3], found[2::3], strict=True):
            if all(part is not None for part in sums):
                hook.substitute = _add([(hook.substitute, 1.0), (Moment(*sums), 1.0)], {})

    def gate(self, is_open: bool) -> None:
        """Set before the forward pass: whether the coming step refreshes the geometry."""
        self.window.open = is_open
        self.window.clear()
        self.forget_sums()

    def forget_sums(self) -> None:
        """Statistics share the gradients' fate: `zero_grad` discards both."""
        self.window.forget_sums()
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.forget_sums()

    def remove(self) -> None:
        self.gate(False)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.clear()
