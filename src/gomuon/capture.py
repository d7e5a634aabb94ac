"""Gated capture of each layer's input x and output gradient δ, as second moments.

The forward hook passes the layer's output through an identity whose backward hands out xᵀx, gᵀg and
their row counts as *gradients of probe tensors*. Autograd then does the book-keeping: it adds up
micro-batches and repeated calls, counts once under activation checkpointing, and visits only what
the loss reaches. Nothing here knows of factors, shrinkage or optimizers.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Moment:
    """Σ v vᵀ over rows v, [d, d], and the number of rows, a float64 scalar tensor."""

    total: Tensor
    count: Tensor


@dataclass(frozen=True)
class Statistics:
    """What one step's backward passes said of a layer; a side not asked for or not seen is None.

    Layers that read the same tensors carry the *same* `inputs` object.
    """

    inputs: Moment | None
    gradients: Moment | None


class Probe:
    """Two leaves whose gradients autograd fills with a moment and its count."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        # Expanded from one element: the leaf has the moment's shape without its memory.
        self.total = torch.zeros((), dtype=dtype, device=device).expand(size, size).requires_grad_()
        self.count = torch.zeros((), dtype=torch.float64, device=device).requires_grad_()

    @property
    def filled(self) -> bool:
        return self.total.grad is not None

    def read(self) -> Moment:
        assert self.total.grad is not None
        assert self.count.grad is not None
        return Moment(self.total.grad, self.count.grad)

    def clear(self) -> None:
        self.total.grad = None
        self.count.grad = None


@dataclass(eq=False)
class Reading:
    """One input tensor of one forward pass, and the layers that read it."""

    probe: Probe
    readers: list["LayerHook"] = field(default_factory=list)


class Window:
    """The gate shared by a group's hooks, and what came in while it stood open."""

    def __init__(self) -> None:
        self.open = False
        self._readings: list[Reading] = []
        self._inputs: dict[int, tuple[weakref.ref[Tensor], int, Reading]] = {}

    def reading_of(self, x: Tensor, hook: "LayerHook") -> tuple[Reading, bool]:
        """The reading x belongs to, and whether `hook` is the first to read it."""
        known = self._inputs.get(id(x))
        # The same object, still alive and not written to since: q, k and v of one attention.
        if known is not None and known[0]() is x and known[1] == x._version:
            known[2].readers.append(hook)
            return known[2], False
        reading = Reading(Probe(x.shape[-1], hook.dtype, x.device), [hook])
        self._inputs[id(x)] = (weakref.ref(x), x._version, reading)
        self._readings.append(reading)
        return reading, True

    def inputs_of(self, hooks: Sequence["LayerHook"], cache: dict[Any, Moment]) -> Moment | None:
        """The moment of all inputs these hooks read; one object for equal sets of readings."""
        terms = [(hook.inputs, 1) for hook in hooks]
        for reading in self._readings:
            # A module applied twice to one tensor has that tensor in its sum twice.
            times = sum(reading.readers.count(hook) for hook in hooks)
            terms += [(reading.probe, times)] if times else []
        return _add(terms, cache)

    def fold(self, reading: Reading) -> None:
        """Merge a finished reading into an older one of the same readers, to bound memory."""
        for other in self._readings:
            if other is reading:
                return
            if other.probe.filled and other.readers == reading.readers:
                newer, older = reading.probe.read(), other.probe.read()
                older.total.add_(newer.total)
                older.count.add_(newer.count)
                self._readings.remove(reading)
                return

    def forget_sums(self) -> None:
        """Drop what backward passes delivered; forward passes still awaiting theirs stay."""
        self._readings = [r for r in self._readings if not r.probe.filled]

    def clear(self) -> None:
        self._readings.clear()
        self._inputs.clear()


class LayerHook:
    """The forward hook of one linear layer; on a reuse step it returns at once."""

    def __init__(
        self, window: Window, weight: nn.Parameter, *, inputs: bool, gradients: bool
    ) -> None:
        self.window = window
        self.wants_inputs = inputs
        self.wants_gradients = gradients
        self.dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self._sizes = (weight.shape[1], weight.shape[0])
        self._led: Reading | None = None
        self.place(weight.device)

    def place(self, device: torch.device) -> None:
        """Make this layer's own probes; `inputs` serves where readings cannot be shared."""
        self.inputs, self.gradients = (Probe(size, self.dtype, device) for size in self._sizes)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        if not self.window.open:
            return None
        if not (module.training and torch.is_grad_enabled() and output.requires_grad):
            return None  # an evaluation pass, or a frozen branch
        if not module.weight.requires_grad:
            return None
        if self.gradients.count.device != output.device:
            self.place(output.device)  # the model was moved
        x: Tensor = args[0] if args else kwargs["input"]
        inputs = self._input_probe(x) if self.wants_inputs else None
        gradients = self.gradients if self.wants_gradients else None
        tapped: Tensor = Tap.apply(
            output,
            None if inputs is None else x,
            None if inputs is None else inputs.total,
            None if inputs is None else inputs.count,
            None if gradients is None else gradients.total,
            None if gradients is None else gradients.count,
        )
        return tapped

    def _input_probe(self, x: Tensor) -> Probe | None:
        """The probe for x, or None when another layer takes its moment for us."""
        if torch.compiler.is_compiling():
            return self.inputs  # who shares a tensor is not known while a graph is traced
        led, self._led = self._led, None
        if led is not None and led.probe.filled:
            self.window.fold(led)
        reading, first = self.window.reading_of(x, self)
        if not first:
            return None
        self._led = reading
        return reading.probe

    def forget_sums(self) -> None:
        self.inputs.clear()
        self.gradients.clear()

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
    """The identity on y; its backward returns moments as the gradients of the probes."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor | None,
        inputs_total: Tensor | None,
        inputs_count: Tensor | None,
        gradients_total: Tensor | None,
        gradients_count: Tensor | None,
    ) -> Tensor:
        if x is not None:
            ctx.save_for_backward(x)  # the tensor the layer itself keeps: no extra memory
        ctx.dtypes = (
            None if inputs_total is None else inputs_total.dtype,
            None if gradients_total is None else gradients_total.dtype,
        )
        # Not a view: in-place activations may write to it. y itself is kept by nobody.
        return y.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        inputs_dtype, gradients_dtype = ctx.dtypes
        nothing = (None, None)
        inputs = _second_moment(ctx.saved_tensors[0], inputs_dtype) if inputs_dtype else nothing
        gradients = _second_moment(g, gradients_dtype) if gradients_dtype else nothing
        return g, None, *inputs, *gradients


def _second_moment(v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # A user may call backward inside autocast, which would round the product to bfloat16.
    with torch.autocast(v.device.type, enabled=False):
        rows = v.detach().reshape(-1, v.shape[-1]).to(dtype)
        count = torch.full((), rows.shape[0], dtype=torch.float64, device=v.device)
        return rows.mT @ rows, count


def _add(terms: Iterable[tuple[Probe, int]], cache: dict[Any, Moment]) -> Moment | None:
    """Σ times·moment over the filled probes; the same object for the same sum."""
    filled = [(probe, times) for probe, times in terms if probe.filled]
    if not filled:
        return None
    key = tuple((id(probe), times) for probe, times in filled)
    if key not in cache:
        if len(filled) == 1 and filled[0][1] == 1:
            cache[key] = filled[0][0].read()
        else:
            moments = [(probe.read(), times) for probe, times in filled]
            cache[key] = Moment(
                torch.stack([moment.total * times for moment, times in moments]).sum(0),
                torch.stack([moment.count * times for moment, times in moments]).sum(),
            )
    return cache[key]


class Capture:
    """The hooks of one parameter group: placed, gated, read and removed together."""

    def __init__(self) -> None:
        self.window = Window()
        self._hooks: dict[nn.Parameter, list[LayerHook]] = {}
        self._handles: list[RemovableHandle] = []

    def watch(
        self,
        parameter: nn.Parameter,
        modules: Iterable[nn.Module],
        *,
        inputs: bool,
        gradients: bool,
    ) -> None:
        """Hook every module whose weight is `parameter` (several when it is tied)."""
        for module in modules:
            hook = LayerHook(self.window, parameter, inputs=inputs, gradients=gradients)
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
            self._hooks.setdefault(parameter, []).append(hook)

    def watches(self, parameter: Tensor) -> bool:
        return parameter in self._hooks

    def collect(self) -> dict[Tensor, Statistics]:
        """Everything captured since the last `forget`, by parameter."""
        inputs_cache: dict[Any, Moment] = {}
        return {
            parameter: Statistics(
                self.window.inputs_of(hooks, inputs_cache),
                _add(((hook.gradients, 1) for hook in hooks), {}),
            )
            for parameter, hooks in self._hooks.items()
        }

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
