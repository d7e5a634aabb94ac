"""Capture of weights that functions multiply with: `F.linear(x, W)`, `x @ W[e]`, einsum and others.

No module stands for these products. So on refresh steps, while modules around such weights run, a
function mode of torch sees every call. It follows views of watched weights, and taps the results
of products with them, as the hook of a layer taps the layer's output. On reuse steps it is not
entered.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.capture.forward_mode import CallMode, ForwardHooks, push_mode, remove_mode
from gomuon.capture.hooks import is_exported
from gomuon.capture.products import LabelledProduct, parse_of
from gomuon.capture.shared_inputs import SharedInputs
from gomuon.capture.uses import NotLinear, use_of
from gomuon.capture.views import VIEWS, View, views_of, whole_view
from gomuon.capture.watched import WatchedWeight
from gomuon.parameters.sharding import is_sharded

_UNKNOWN = "it is of a kind that is not known"
_CHECKPOINTED = "it is in a checkpointed function that is no module"


class _Running(threading.local):
    """What runs in this thread: the modules that were entered, and the views that are known."""

    def __init__(self) -> None:
        self.modules: list[tuple[nn.Module, Any]] = []  # with torch's hooks on saved tensors
        self.known: dict[int, tuple[Tensor, View]] = {}  # by id; the tensor is kept alive


class FunctionWatch:
    """Watches the functions that multiply with the weights of one parameter group.

    Attributes:
        open: whether anything is captured in this step.
        entered: how often the function mode was entered.
        seen: whether modules ran with gradients in this step.
    """

    def __init__(self, shared: SharedInputs) -> None:
        self.open = False
        self.entered = 0
        self.seen = False
        self.weights: dict[Tensor, WatchedWeight] = {}
        self._shared = shared
        self._mode = CallMode(self.called)
        self._running = _Running()
        self._owners: dict[nn.Module, list[tuple[nn.Module, str, Tensor]]] = {}
        self._hooks = ForwardHooks(self)

    # ---- hooks on modules ------------------------------------------------------------------------

    def place(self, model: nn.Module) -> None:
        """Hook every module that has watched weights, or modules that have some."""
        self.remove_hooks()
        modules = dict(model.named_modules())
        around: dict[nn.Module, None] = {}
        for prefix, module in modules.items():
            for leaf, parameter in module.named_parameters(recurse=False):
                if parameter not in self.weights:
                    continue
                owner = module, leaf, parameter
                parts = prefix.split(".") if prefix else []
                above = [modules[".".join(parts[:n])] for n in range(len(parts), -1, -1)]
                around.update(dict.fromkeys(above))
                # A parent may use its child's weight without calling the child.
                for user in above[:2]:
                    self._owners.setdefault(user, []).append(owner)
        self._hooks.place(around)

    def remove_hooks(self) -> None:
        self._hooks.remove()
        self._owners.clear()

    def remove(self) -> None:
        """Watch nothing any more."""
        self.close()
        self.remove_hooks()
        self.weights.clear()
        self.open = False

    def gate(self, is_due: Callable[[WatchedWeight], bool]) -> bool:
        """Before the forward pass: which weights are captured in the next step, and whether any."""
        self.close()
        self.open = self.seen = False
        for watched in self.weights.values():
            watched.open = is_due(watched)
            self.open |= watched.open
        return self.open

    def enter(self, module: nn.Module) -> None:
        """Before a module's forward pass: enter the mode, unless a module around it has."""
        running = self._running
        if is_exported() or not (running.modules or torch.is_grad_enabled()):
            return
        self.seen |= torch.is_grad_enabled()
        if not running.modules:
            self.entered += 1
            push_mode(self._mode)
            for owners in self._owners.values():
                self._learn(owners)
        else:
            self._learn(self._owners.get(module, ()))
        running.modules.append((module, _hooks_on_saved_tensors()))

    def _learn(self, owners: Any) -> None:
        """Note the tensors that are weights now; `fully_shard` puts others into modules."""
        for module, leaf, parameter in owners:
            tensor = module._parameters.get(leaf)
            if tensor is None or is_sharded(tensor) or id(tensor) in self._running.known:
                continue
            stored = self.weights[parameter].cut.stored
            if tensor.numel() == stored[0] * stored[1] * stored[2]:
                self._running.known[id(tensor)] = tensor, whole_view(parameter, tensor.shape)

    def leave(self, module: nn.Module) -> None:
        """After a module's forward pass, also one that raised."""
        running = self._running
        if running.modules and running.modules[-1][0] is module:
            running.modules.pop()
            if not running.modules:
                self.close()

    @property
    def is_inside(self) -> bool:
        return bool(self._running.modules)

    def close(self) -> None:
        """Leave the mode, if a forward pass was interrupted."""
        running = self._running
        running.modules.clear()
        running.known.clear()
        remove_mode(self._mode)

    def why_uncaptured(self, parameter: Tensor) -> str:
        """Why no product with a weight was captured in this step, and what to do."""
        watched = self.weights[parameter]
        if watched.problem == "turned":
            other = not watched.cut.transposed
            return (
                f"it is used as {'inputs × outputs' if other else 'outputs × inputs'}; pass "
                f"specs={{name: LayerSpec(transposed={other})}}"
            )
        if watched.problem == _CHECKPOINTED:
            return f"its product cannot be captured: {_CHECKPOINTED}; checkpoint a module instead"
        if watched.problem is not None:
            return f"its product cannot be captured: {watched.problem}"
        if not self.seen:
            return (
                "the modules around it did not run with gradients, or only in a graph of "
                "torch.compile, where products outside of linear layers are not seen; leave it out "
                "of what is compiled to have it captured"
            )
        return (
            "no product with it was seen; an operation may multiply with it inside of itself, or a "
            "graph of torch.compile; leave it out of what is compiled to have it captured"
        )

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function of torch; its result, tapped if it is a product to capture."""
        made = func(*args, **kwargs)
        if func in VIEWS:
            view = self.view_of(args[0]) if args else None
            if view is not None:
                self.follow(view, func, args, kwargs, made)
            return made
        parse = parse_of(func)
        return made if parse is None else self.multiplied(parse, args, kwargs, made)

    # ---- products --------------------------------------------------------------------------------

    def view_of(self, tensor: Any) -> View | None:
        """The watched view that a tensor is."""
        known = self._running.known.get(id(tensor))
        return None if known is None else known[1]

    def follow(self, view: View, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Note the views that a function made of a view."""
        for result, view_made in views_of(view, func, args, kwargs, made):
            self._running.known[id(result)] = result, view_made

    def multiplied(
        self, parse: Callable[..., LabelledProduct | None], args: Any, kwargs: Any, result: Any
    ) -> Any:
        """The result of a product; tapped, if one factor is watched and is captured."""
        if not self._is_captured(result):
            return result
        product = None if "out" in kwargs else parse(args, kwargs)
        if product is None:
            for tensor in args:
                if (view := self.view_of(tensor)) is not None:
                    self.weights[view.weight].problem = _UNKNOWN
            return result
        views = self.view_of(product.left), self.view_of(product.right)
        if (views[0] is None) == (views[1] is None):
            return result
        view = views[0] or views[1]
        assert view is not None
        watched = self.weights[view.weight]
        if not (watched.open and view.weight.requires_grad):
            return result
        if self._running.modules[-1][0] in watched.layers:
            return result  # the hook of the layer captures it
        try:
            return self._tapped(product, result, view, watched, is_left=views[0] is not None)
        except NotLinear as reason:
            watched.problem = str(reason)
            return result

    def _is_captured(self, result: Any) -> bool:
        if not (isinstance(result, Tensor) and torch.is_grad_enabled() and result.requires_grad):
            return False
        return self.is_inside and not torch._C._are_functorch_transforms_active()

    def _tapped(
        self,
        product: LabelledProduct,
        result: Tensor,
        view: View,
        watched: WatchedWeight,
        *,
        is_left: bool,
    ) -> Tensor:
        hooks = _hooks_on_saved_tensors()
        if hooks is not self._running.modules[-1][1] and _are_of_checkpoint(hooks):
            # Recomputed, it would run without the mode, and save fewer tensors.
            raise NotLinear(_CHECKPOINTED)
        use = use_of(
            product,
            result,
            view,
            is_left=is_left,
            stored=watched.cut.stored,
            transposed=watched.cut.transposed,
            sampling=watched.cut.sampling,
        )
        watched.begin_pass(self._shared)
        self._shared.remember_forward_mask()
        return watched.tapped(use, result, self._shared)


def _hooks_on_saved_tensors() -> Any:
    """The innermost function that packs tensors which autograd saves; None if there is none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def _are_of_checkpoint(pack: Any) -> bool:
    return getattr(pack, "__module__", None) == "torch.utils.checkpoint"
