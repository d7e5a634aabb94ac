"""The gated forward hooks: what each layer saw in a step, as second moments.

Nothing here knows of factors, shrinkage or optimizers; how a moment comes about: see `probes`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.holdings import is_sharded
from gomuon.hooks import PlacedHook
from gomuon.probes import Moment, Probe, Shape, Tap, add, in_backward, unscaled, working_dtype
from gomuon.readers import Reader, is_readable
from gomuon.windows import Window


@dataclass(frozen=True)
class Statistics:
    """What one step's backward passes said of a layer; a side not asked for or not seen is None.

    Layers that read the same tensors carry the *same* `inputs` object.
    """

    inputs: Moment | None
    gradients: Moment | None


@dataclass(frozen=True)
class Watched:
    """A module to hook: how it is read, and the shapes of its two moments."""

    module: nn.Module
    reader: Reader
    inputs: Shape
    gradients: Shape


class LayerHook(PlacedHook):
    """The forward hook of one linear layer; on a reuse step it returns at once."""

    def __init__(
        self,
        window: Window,
        weight: Tensor,
        watched: Watched,
        *,
        inputs: bool,
        gradients: bool,
        lag: float = 0.0,
    ) -> None:
        super().__init__()
        self.window = window
        self.lag = lag
        self.open = False
        self.wants_inputs = inputs
        self.wants_gradients = gradients
        self.reader = watched.reader
        self.shapes = (watched.inputs, watched.gradients)
        self.substitute: Moment | None = None
        self.weight = weight
        self.place(weight)

    def place(self, weight: Tensor) -> None:
        """Make this layer's own probes; `inputs` serves where readings cannot be shared."""
        self.kind = (weight.dtype, weight.device)
        self.dtype = working_dtype(weight)
        self.inputs, self.gradients = (
            Probe(shape, self.dtype, weight.device) for shape in self.shapes
        )

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Tensor | None:
        if not self.open or _is_recorded():
            return None
        if module.training and not torch.compiler.is_compiling() and not in_backward():
            # Within a backward pass it is a recomputation, and gradients may still be on their way.
            self.window.remember_mask()
            self._share_the_gradients_fate()
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not (isinstance(x, Tensor) and isinstance(output, Tensor)):
            return None  # a subclass that takes or returns something else
        if not (module.training and torch.is_grad_enabled() and output.requires_grad):
            return None  # an evaluation pass, or a frozen branch
        if torch._C._are_functorch_transforms_active():
            return None  # torch.func's gradients are not the loss's
        weight = getattr(module, "weight", None)
        if not (isinstance(weight, Tensor) and weight.requires_grad):
            return None
        if not self._can_read(x, output, weight.device):
            return None
        if self.kind != (weight.dtype, weight.device):
            self.place(weight)  # the model was moved or converted
        inputs = self._input_probes(x) if self.wants_inputs else (None, None, None)
        tapped: Tensor = Tap.apply(
            output,
            x if self.wants_inputs else None,
            self._mask(output),
            self.reader,
            *inputs,
            *(self.gradients.leaves if self.wants_gradients else (None, None, None)),
        )
        return tapped

    def _can_read(self, x: Tensor, output: Tensor, device: torch.device) -> bool:
        """Whether they have rows, one for each use of the weight; a subclass may do otherwise."""
        inputs, gradients = self.shapes
        if not (is_readable(output, device) and self.reader.fits_output(output, gradients)):
            return False
        if not self.wants_inputs:
            return True
        return is_readable(x, device) and self.reader.fits_input(x, output, inputs)

    def _mask(self, output: Tensor) -> Tensor | None:
        """The window's mask if this layer has a row for each of its entries."""
        mask = self.window.mask_now()
        if mask is None:
            return None
        positions = self.reader.positions(output)
        if positions == mask.shape:
            return mask
        return mask.flatten() if positions == (mask.numel(),) else None

    def _input_probes(self, x: Tensor) -> tuple[Callable[[], bool] | None, Tensor, Tensor]:
        """Whether we form x's moment, asked when backward comes, and probes for it and our rows."""
        if torch.compiler.is_compiling():
            # Who shares a tensor is not known while a graph is traced.
            return None, self.inputs.total, self.inputs.count
        self.window.fold(self)
        reading = self.window.reading_of(x, self)
        return partial(self.window.forms, reading, self), reading.total, reading.count_of(self)

    @property
    def was_zeroed(self) -> bool:
        """Whether there is no gradient, as after the model's own `zero_grad`.

        A sharded one may lie elsewhere, so nothing is concluded from its absence.
        """
        return self.weight.grad is None and not is_sharded(self.weight)

    def _share_the_gradients_fate(self) -> None:
        """Drop what backward passes delivered if their gradients are gone."""
        if not self.was_zeroed:
            return
        self.window.forget_sums_of(self)
        if self.inputs.total.grad is not None or self.gradients.total.grad is not None:
            self.forget_sums()

    def gradient_moment(self, loss_scale: float) -> Moment | None:
        """Of δ, freed of the scale of the loss; a substitute's loss was never scaled."""
        if self.substitute is not None:
            return self.substitute
        return unscaled(self.gradients.moment, loss_scale)

    def forget_sums(self) -> None:
        self.inputs.clear()
        self.gradients.clear()
        self.substitute = None


def _is_recorded() -> bool:
    """Whether a forward pass is recorded, to be run elsewhere without an optimizer."""
    # Not torch.compiler.is_exporting(): in older versions torch.compile takes it for true.
    return torch.jit.is_tracing() or getattr(torch.compiler, "_is_exporting_flag", False)


class Capture:
    """The hooks of one parameter group: placed, gated, read and removed together."""

    def __init__(self) -> None:
        self.window = Window()
        self.settings: object = None  # what its hooks were placed for
        self._hooks: dict[Tensor, list[LayerHook]] = {}

    def watch(
        self,
        parameter: Tensor,
        modules: Iterable[Watched],
        *,
        inputs: bool,
        gradients: bool,
        lag: float = 0.0,
    ) -> None:
        """Hook every module whose weight is `parameter` (several when it is tied)."""
        sides = {"inputs": inputs, "gradients": gradients}
        for watched in modules:
            hook = LayerHook(self.window, parameter, watched, **sides, lag=lag)
            hook.handles.append(watched.module.register_forward_hook(hook, with_kwargs=True))
            self._hooks.setdefault(parameter, []).append(hook)

    def watches(self, parameter: Tensor) -> bool:
        return parameter in self._hooks

    def collect(self, loss_scale: float = 1.0, ranks: int = 1) -> dict[Tensor, Statistics]:
        """Everything captured since the gate was set, by parameter.

        `loss_scale` is what the loss was multiplied by before the backward pass; δ is freed of it,
        and of the number of ranks over which gradients are averaged after they were captured.
        """
        shares, sums = self.window.shares(), dict[Any, Moment]()
        return {
            parameter: Statistics(
                add(
                    (
                        term
                        for hook in hooks
                        for term in ((hook.inputs.moment, 1.0), *shares.get(hook, ()))
                    ),
                    sums,
                ),
                unscaled(
                    add(((hook.gradient_moment(loss_scale), 1.0) for hook in hooks), {}), ranks
                ),
            )
            for parameter, hooks in self._hooks.items()
            if any(hook.open for hook in hooks)
        }

    def shapes(self) -> dict[Tensor, tuple[Shape | None, Shape | None]]:
        """The shapes of the moments asked for in this step, inputs and gradients, by parameter."""
        return {
            parameter: (
                hooks[0].shapes[0] if hooks[0].wants_inputs else None,
                hooks[0].shapes[1] if hooks[0].wants_gradients else None,
            )
            for parameter, hooks in self._hooks.items()
            if hooks[0].open
        }

    def use_gradients_of(self, loss: Tensor) -> None:
        """Take output gradients from `loss` instead of the loss that is trained on."""
        hooks = [
            hook
            for hooks in self._hooks.values()
            for hook in hooks
            if hook.wants_gradients and hook.open
        ]
        if not hooks:
            return
        probes = [leaf for hook in hooks for leaf in hook.gradients.leaves]
        # Only the probes are asked for, so no weight's gradient is formed or touched.
        found = torch.autograd.grad(loss, probes, retain_graph=True, allow_unused=True)
        for hook, *sums in zip(hooks, found[::3], found[1::3], found[2::3], strict=True):
            if all(part is not None for part in sums):
                hook.substitute = add([(hook.substitute, 1.0), (Moment(*sums), 1.0)], {})

    def gate(self, is_due: Callable[[float], bool]) -> None:
        """Set before the forward pass: whose geometry the coming step refreshes, by its lag."""
        self.window.open = False
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.open = is_due(hook.lag)
                self.window.open |= hook.open
        self.window.clear()
        self.forget_sums()

    def forget_sums(self) -> None:
        """Statistics share the gradients' fate: `zero_grad` discards both."""
        self.window.forget_sums()
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.forget_sums()

    def remove(self) -> None:
        self.gate(lambda lag: False)
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.remove()
        self._hooks.clear()
