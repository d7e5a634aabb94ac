"""The hooks placed on a model: one on each captured layer, and one that notices DDP."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gomuon.capture.placed import PlacedHook
from gomuon.capture.shared_inputs import SharedInputs
from gomuon.capture.tap import Probe, Tap, in_backward
from gomuon.functional.linalg import working_dtype
from gomuon.moments import Moment, Shape
from gomuon.parameters.rows import Rows, can_capture


@dataclass(frozen=True)
class CapturedModule:
    """A module to capture: how its rows are read, and the shapes of its two moments."""

    module: nn.Module
    rows: Rows
    inputs: Shape
    gradients: Shape


class LayerHook(PlacedHook):
    """The forward hook of one linear layer or convolution; on a reuse step it returns at once.

    Args:
        shared: the gate and shared inputs of its group.
        weight: the layer's weight.
        captured: the module and how it is read.
        inputs: whether Σ x xᵀ is wanted.
        gradients: whether Σ δ δᵀ is wanted.
        phase: by which part of the refresh interval this layer refreshes later than others.
        sharded: whether the weight's gradient may lie on other ranks.
    """

    def __init__(
        self,
        shared: SharedInputs,
        weight: Tensor,
        captured: CapturedModule,
        *,
        inputs: bool,
        gradients: bool,
        phase: float = 0.0,
        sharded: bool = False,
    ) -> None:
        super().__init__()
        self.shared = shared
        self.phase = phase
        self.open = False
        self.wants_inputs = inputs
        self.wants_gradients = gradients
        self.rows = captured.rows
        self.shapes = (captured.inputs, captured.gradients)
        self.substitute: Moment | None = None
        self.weight = weight
        self._sharded = sharded
        self.make_probes(weight)

    def make_probes(self, weight: Tensor) -> None:
        """Make this layer's own probes; `inputs` is used where inputs cannot be shared."""
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
            # In a backward pass this is a recomputation, and gradients may still be to come.
            self.shared.remember_mask()
            self._forget_sums_if_zeroed()
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
            self.make_probes(weight)  # the model was moved or converted
        inputs = self._input_probes(x) if self.wants_inputs else (None, None, None)
        tapped: Tensor = Tap.apply(
            output,
            x if self.wants_inputs else None,
            self._mask(output),
            self.rows,
            *inputs,
            *(self.gradients.leaves if self.wants_gradients else (None, None, None)),
        )
        return tapped

    def _can_read(self, x: Tensor, output: Tensor, device: torch.device) -> bool:
        """Whether input and output have one row for each use of the weight; a subclass may not."""
        inputs, gradients = self.shapes
        if not (can_capture(output, device) and self.rows.fits_output(output, gradients)):
            return False
        if not self.wants_inputs:
            return True
        return can_capture(x, device) and self.rows.fits_input(x, output, inputs)

    def _mask(self, output: Tensor) -> Tensor | None:
        """The mask, if this layer has a row for each of its entries."""
        mask = self.shared.mask_now()
        if mask is None:
            return None
        positions = self.rows.positions(output)
        if positions == mask.shape:
            return mask
        return mask.flatten() if positions == (mask.numel(),) else None

    def _input_probes(self, x: Tensor) -> tuple[Callable[[], bool] | None, Tensor, Tensor]:
        """Whether this layer forms x's moment, asked in backward; probes for it and its rows."""
        if torch.compiler.is_compiling():
            # Which layers share a tensor is not known while a graph is traced.
            return None, self.inputs.total, self.inputs.count
        self.shared.merge(self)
        shared = self.shared.of(x, self)
        return partial(self.shared.forms, shared, self), shared.total, shared.count_of(self)

    @property
    def was_zeroed(self) -> bool:
        """Whether there is no gradient, as after the model's own `zero_grad`.

        A sharded gradient may lie on another rank, so its absence here says nothing.
        """
        return self.weight.grad is None and not self._sharded

    def _forget_sums_if_zeroed(self) -> None:
        """Statistics are dropped together with the gradients they came with."""
        if not self.was_zeroed:
            return
        self.shared.forget_sums_of(self)
        if self.inputs.total.grad is not None or self.gradients.total.grad is not None:
            self.forget_sums()

    def forget_sums(self) -> None:
        """Drop what backward passes delivered."""
        self.inputs.clear()
        self.gradients.clear()
        self.substitute = None


def _is_recorded() -> bool:
    """Whether the forward pass is recorded, to be run elsewhere without an optimizer."""
    # Not torch.compiler.is_exporting(): in older versions it is also true under torch.compile.
    return torch.jit.is_tracing() or getattr(torch.compiler, "_is_exporting_flag", False)


class WrapperHook(PlacedHook):
    """A forward pre-hook that notices DistributedDataParallel around the model it is on.

    Trainer, accelerate and Lightning make the optimizer from the plain model and wrap it later, and
    a wrapper leaves no mark on what it wraps. But while a wrapper runs the model, torch says which
    wrapper is running (the compiler needs to know). So the hook asks in the forward pass, which
    always comes before the first step.

    The hook stays on the model once it has found a wrapper: it costs almost nothing, and removing
    it would make a compiled model compile again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False
        self.process_group: Any = None  # the wrapper's; None is the default one

    def watch(self, model: nn.Module) -> None:
        """Look for a wrapper in `model`; if there is none, look at every forward pass."""
        self.remove()
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                self._note(module)
                return
        # The compiler runs `look` while it traces, inside the wrapper, and keeps it out of the
        # graph. Not a decorator: that would load the compiler when gomuon is imported.
        torch.compiler.assume_constant_result(WrapperHook.look)
        for module in _called(unwrapped(model)):
            self.handles.append(module.register_forward_pre_hook(self))

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.look()

    def look(self) -> bool:
        """Whether a wrapper started the forward pass that is running, or an earlier one."""
        if not self.found and (wrapper := DistributedDataParallel._get_active_ddp_module()):
            self._note(wrapper)
        return self.found

    def copy_from(self, other: "WrapperHook") -> None:
        """Know what another hook knows, for the copy of an optimizer."""
        self.found, self.process_group = other.found, other.process_group

    def _note(self, wrapper: DistributedDataParallel) -> None:
        self.found, self.process_group = True, wrapper.process_group


def _called(model: nn.Module) -> Iterator[nn.Module]:
    """The model itself; its parts if it only holds them, as a ModuleList does."""
    if type(model).forward is not nn.Module.forward or "forward" in vars(model):
        yield model
        return
    for child in model.children():
        yield from _called(child)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel or torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
