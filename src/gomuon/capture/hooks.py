"""The hooks placed on a model: one on each captured layer, and one that detects DDP."""

import math
import weakref
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
from gomuon.parameters.divided_rows import CapturedRows
from gomuon.parameters.rows import SumCut, can_capture
from gomuon.parameters.side_forms import LEFT, RIGHT, SideForm
from gomuon.parameters.tensor_shards import Rewrap, TensorShard, local_input, local_output


@dataclass(frozen=True)
class CapturedModule:
    """A module to capture: how to read its rows, and the shapes of its moments if not cut."""

    module: nn.Module
    rows: CapturedRows
    inputs: Shape
    gradients: Shape

    def cuts(self, forms: tuple[SideForm, SideForm]) -> tuple[SumCut, SumCut]:
        """How inputs and gradients are cut, given the forms of the left and right factors."""
        left, right = forms
        return _cut(self.inputs, right, RIGHT), _cut(self.gradients, left, LEFT)


def _cut(whole: Shape, form: SideForm, where: int) -> SumCut:
    return SumCut(math.prod(whole[:-1]) // form.side, form, where)


class LayerHook(PlacedHook):
    """The forward hook of one linear layer or convolution. On a reuse step it returns at once.

    Args:
        shared: the gate and the shared inputs of the layer's group.
        weight: the layer's weight.
        captured: the module, and how to read its rows.
        forms: the forms of its left and right factors.
        inputs: whether to capture Σ x xᵀ.
        gradients: whether to capture Σ δ δᵀ.
        phase: this layer refreshes later by this fraction of the refresh interval.
        sharded: whether the weight's gradient may be on other ranks.
        shard: the weight's place in tensor parallelism.
    """

    def __init__(
        self,
        shared: SharedInputs,
        weight: Tensor,
        captured: CapturedModule,
        forms: tuple[SideForm, SideForm],
        *,
        inputs: bool,
        gradients: bool,
        phase: float = 0.0,
        sharded: bool = False,
        shard: TensorShard | None = None,
    ) -> None:
        super().__init__()
        self.shared = shared
        self.phase = phase
        self.open = False
        self.called = False  # in a forward pass of this step
        self.tapped = False  # in one that can deliver sums
        self.stack = 1  # matrices that have a number of rows of their own
        self.taken = False  # some of its sums of this step have been sent away
        self.wants_inputs = inputs
        self.wants_gradients = gradients
        self.rows = captured.rows
        self.cuts = captured.cuts(forms)
        self.shapes = tuple(cut.shape for cut in self.cuts)
        self.count_shape = (2,)
        self._whole = (captured.inputs, captured.gradients)
        self.substitute: Moment | None = None
        self.weight = weight
        self._sharded = sharded
        self._shard = shard
        self.make_probes(weight)

    def make_probes(self, weight: Tensor) -> None:
        """Make this layer's own probes. `inputs` is only used if inputs cannot be shared."""
        self.dtype_and_device = (weight.dtype, weight.device)
        self.dtype = working_dtype(weight)
        self.inputs, self.gradients = (
            Probe(shape, self.dtype, weight.device) for shape in self.shapes
        )

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Tensor | None:
        if not self.open or is_exported():
            return None
        if not torch.compiler.is_compiling():
            self.called = True
        learns = module.training or torch.is_grad_enabled()
        if learns and not torch.compiler.is_compiling() and not in_backward():
            # Not in a backward pass: there this is a recomputation, and gradients may be pending.
            self.shared.remember_mask()
            self._forget_sums_if_zeroed()
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not (isinstance(x, Tensor) and isinstance(output, Tensor)):
            return None  # a subclass that takes or returns something else
        if not (torch.is_grad_enabled() and output.requires_grad):
            return None  # no gradients will arrive, whatever the mode of the model
        if torch._C._are_functorch_transforms_active():
            return None  # torch.func's gradients are not those of the training loss
        weight = getattr(module, "weight", None)
        if not (isinstance(weight, Tensor) and weight.requires_grad):
            return None
        rewrap: Rewrap | None = None
        if self._shard is not None:
            found = local_output(output, self._shard.dim)
            if found is None:
                return None  # its rows are divided
            output, rewrap = found
            x = local_input(x, self._shard.dim)
        if not self._can_read(x, output, weight.device):
            return None
        if self.dtype_and_device != (weight.dtype, weight.device):
            self.make_probes(weight)  # the model was moved or converted
        if not torch.compiler.is_compiling():
            self.tapped = True
        mask = self._mask(output)
        forms, *inputs = self._input_leaves(x, mask) if self.wants_inputs else [None] * 4
        tapped: Tensor = Tap.apply(
            output,
            x if self.wants_inputs else None,
            mask,
            self.rows,
            self.cuts,
            forms,
            self.shared.expect,
            *inputs,
            *(self._gradient_leaves(mask) if self.wants_gradients else [None] * 3),
        )
        return tapped if rewrap is None else rewrap(tapped)

    def _can_read(self, x: Tensor, output: Tensor, device: torch.device) -> bool:
        """Whether x and output have one row per use of the weight. In a subclass they may not."""
        inputs, gradients = self._whole
        if not (can_capture(output, device) and self.rows.fits_output(output, gradients)):
            return False
        if not self.wants_inputs:
            return True
        return can_capture(x, device) and self.rows.fits_input(x, output, inputs)

    def _mask(self, output: Tensor) -> Tensor | None:
        """The mask, if this layer has one row per entry of the mask."""
        mask = self.shared.mask_now()
        if mask is None:
            return None
        positions = self.rows.positions(output)
        if positions == mask.shape:
            return mask
        return mask.flatten() if positions == (mask.numel(),) else None

    def _input_leaves(
        self, x: Tensor, mask: Tensor | None
    ) -> tuple[Callable[[], bool] | None, Tensor, Tensor | None, Tensor | None]:
        """A function for the backward pass, and leaves for x's moment and row counts.

        The function says whether this layer forms the moment.
        """
        if torch.compiler.is_compiling():
            # While a graph is traced, it is not known which layers share a tensor.
            return None, self.inputs.total, None, self.inputs.counted
        self.shared.merge(self)
        shared = self.shared.of(x, self, None if mask is None else self.shared.mask_now())
        forms = partial(self.shared.forms, shared, self)
        return forms, shared.total, shared.count_of(self), shared.counted

    def _gradient_leaves(self, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Leaves for the moment of the output gradients and for row counts."""
        total, known, counted = self.gradients.leaves
        if mask is not None or torch.compiler.is_compiling():
            return total, None, counted
        return total, known, None

    @property
    def was_zeroed(self) -> bool:
        """Whether the weight has no gradient, for example after the model's own `zero_grad`.

        A sharded gradient may be on another rank only, so then the answer is always False.
        """
        return self.weight.grad is None and not self._sharded

    def _forget_sums_if_zeroed(self) -> None:
        """Drop the statistics if the gradients that came with them were dropped."""
        if not self.was_zeroed:
            return
        self.shared.deliveries.dropped |= self.taken
        self.shared.forget_sums_of(self)
        if self.inputs.total.grad is not None or self.gradients.total.grad is not None:
            self.forget_sums()

    @property
    def is_filled(self) -> bool:
        """Whether backward passes have delivered to this layer's own probes."""
        if self.wants_gradients:
            return self.gradients.total.grad is not None
        return self.inputs.total.grad is not None

    def forget_sums(self) -> None:
        """Drop the sums that backward passes delivered."""
        self.inputs.clear()
        self.gradients.clear()
        self.substitute = None


def is_exported() -> bool:
    """Whether the forward pass is traced to be run elsewhere, without an optimizer."""
    # Not torch.compiler.is_exporting(): in older versions it is also true under torch.compile.
    return torch.jit.is_tracing() or getattr(torch.compiler, "_is_exporting_flag", False)


class WrapperHook(PlacedHook):
    """A forward pre-hook that detects DistributedDataParallel around its model.

    Trainer, accelerate and Lightning make the optimizer from the plain model and wrap the model
    later. A model does not know its wrapper. But while a wrapper runs the model, torch says which
    wrapper is running (the compiler needs this). So the hook asks torch in the forward pass, which
    always comes before the first step.

    The hook stays on the model after it has found a wrapper. It costs almost nothing, and removing
    it would make a compiled model compile again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False
        self.process_group: Any = None  # the wrapper's; None is the default group
        self._wrapper: weakref.ref[DistributedDataParallel] | None = None

    def watch(self, model: nn.Module) -> None:
        """Look for a wrapper in `model`. If there is none, look again at every forward pass."""
        self.remove()
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                self._set_wrapper(module)
                return
        # The compiler calls `find_wrapper` while it traces, inside the wrapper, and leaves it out
        # of the graph. Not a decorator: that would load the compiler when gomuon is imported.
        torch.compiler.assume_constant_result(WrapperHook.find_wrapper)
        for module in _modules_called(unwrapped(model)):
            self.handles.append(module.register_forward_pre_hook(self))

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.find_wrapper()

    def find_wrapper(self) -> bool:
        """Whether a wrapper started this forward pass or an earlier one."""
        if not self.found and (wrapper := DistributedDataParallel._get_active_ddp_module()):
            self._set_wrapper(wrapper)
        return self.found

    def copy_from(self, other: "WrapperHook") -> None:
        """Take over what another hook has found, when an optimizer is copied."""
        self.found, self.process_group = other.found, other.process_group

    def _set_wrapper(self, wrapper: DistributedDataParallel) -> None:
        self.found, self.process_group = True, wrapper.process_group
        self._wrapper = weakref.ref(wrapper)

    def ignored(self) -> frozenset[Tensor]:
        """Parameters that the wrapper neither makes equal nor averages."""
        wrapper = None if self._wrapper is None else self._wrapper()
        if wrapper is None:
            return frozenset()
        names, named = wrapper.parameters_to_ignore, wrapper.module.named_parameters()
        delayed = set(wrapper._delay_all_reduce_params)  # these are averaged, only later
        return frozenset(p for name, p in named if name in names and p not in delayed)

    def averages(self) -> bool:
        """Whether the wrapper averages gradients in a backward pass that runs now.

        Inside of its `no_sync()` it does not: more micro-batches follow.
        """
        wrapper = None if self._wrapper is None else self._wrapper()
        return wrapper is None or bool(wrapper.require_backward_grad_sync)


def _modules_called(model: nn.Module) -> Iterator[nn.Module]:
    """The model itself, or its children if it has no forward of its own (such as ModuleList)."""
    if type(model).forward is not nn.Module.forward or "forward" in vars(model):
        yield model
        return
    for child in model.children():
        yield from _modules_called(child)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel or torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
