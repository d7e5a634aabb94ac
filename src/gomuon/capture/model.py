"""The capture of a model: places hooks, opens and closes them, reads and removes them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.capture.hooks import CapturedModule, LayerHook
from gomuon.capture.placed import remove_inert_hooks
from gomuon.capture.shared_inputs import SharedInputs, Term
from gomuon.capture.tap import moment_of
from gomuon.functional.linalg import identity_like
from gomuon.moments import Moment, MomentShapes, Statistics, stacked_counts
from gomuon.parameters.groups import is_matrix, named
from gomuon.parameters.layout import Layout
from gomuon.parameters.rows import ConvRows, is_transposed_linear, rows_for
from gomuon.parameters.sampling import Sampling
from gomuon.parameters.sharding import is_sharded
from gomuon.parameters.side_forms import LONG_SIDES, RIGHT, SideForm, captured_maps
from gomuon.parameters.specs import DEFAULT_SPEC, LayerSpec, own_shape, row_limit
from gomuon.parameters.stacks import Layer
from gomuon.parameters.tensor_shards import TensorShard
from gomuon.parameters.units import as_phase, refresh_turns

Group = Mapping[str, Any]
IsDue = Callable[[float], bool]  # whether layers with a given phase refresh in the next step


def captured_modules(
    model: nn.Module,
    sampling: Callable[[Tensor], Sampling],
    specs: Mapping[Tensor, LayerSpec] = MappingProxyType({}),
) -> dict[Tensor, list[CapturedModule]]:
    """For each weight, its modules whose inputs and output gradients can be captured.

    `specs` say which block of a weight this rank has, if not all of it.
    """
    modules: dict[Tensor, list[CapturedModule]] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or not weight.numel():
            continue
        rows = rows_for(module, sampling(weight))
        if rows is None:
            continue
        shape = own_shape(weight, specs.get(weight, DEFAULT_SPEC))
        m, n = shape[0], math.prod(shape[1:])
        m, n = (n, m) if is_transposed_linear(module) else (m, n)
        n += rows.sampling.ones
        groups = (rows.groups,) if isinstance(rows, ConvRows) and rows.groups > 1 else ()
        m //= groups[0] if groups else 1
        modules.setdefault(weight, []).append(
            CapturedModule(module, rows, (*groups, n, n), (*groups, m, m))
        )
    return modules


class GroupCapture:
    """The hooks of one parameter group."""

    def __init__(self) -> None:
        self.shared = SharedInputs()
        self.placed_for: object = None  # the settings its hooks were placed for
        self._hooks: dict[Tensor, list[LayerHook]] = {}

    def __contains__(self, parameter: Tensor) -> bool:
        """Whether anything is captured for this parameter."""
        return parameter in self._hooks

    def place(
        self,
        parameter: Tensor,
        modules: Iterable[CapturedModule],
        forms: tuple[SideForm, SideForm],
        *,
        inputs: bool,
        gradients: bool,
        phase: float = 0.0,
        sharded: bool = False,
        shard: TensorShard | None = None,
    ) -> None:
        """Hook every module whose weight is `parameter`: several modules if it is tied."""
        for captured in modules:
            hook = LayerHook(
                self.shared,
                parameter,
                captured,
                forms,
                inputs=inputs,
                gradients=gradients,
                phase=phase,
                sharded=sharded,
                shard=shard,
            )
            # Before the hooks of `parallelize_module`: these may send the output on, or its rows.
            handle = captured.module.register_forward_hook(
                hook, with_kwargs=True, prepend=shard is not None
            )
            hook.handles.append(handle)
            self._hooks.setdefault(parameter, []).append(hook)

    def collect(
        self,
        loss_scale: float = 1.0,
        ranks: int = 1,
        parameters: Sequence[Tensor] | None = None,
    ) -> dict[Tensor, Statistics]:
        """The sums of Equation (9) since the gate was set, by parameter.

        δ is divided by `loss_scale`, the factor on the loss in the backward pass, and by the number
        of ranks, because gradients are averaged over the ranks after they were captured. With
        `parameters`, only their sums, and only of inputs that no other layers read.
        """
        some = None if parameters is None else self._hooks_of(parameters)
        shared, sums = self.shared.terms(some), dict[Any, Moment]()
        chosen = self._hooks if parameters is None else parameters
        return {
            parameter: Statistics(
                _sum(
                    (
                        term
                        for hook in hooks
                        for term in ((hook.inputs.moment, 1.0), *shared.get(hook, ()))
                    ),
                    sums,
                ),
                _unscaled(_sum(((_gradients(hook, loss_scale), 1.0) for hook in hooks), {}), ranks),
            )
            for parameter, hooks in ((p, self._hooks[p]) for p in chosen)
            if any(hook.open for hook in hooks)
        }

    # ---- sums that are sent away during the backward pass ----------------------------------------

    def _hooks_of(self, parameters: Iterable[Tensor]) -> dict[LayerHook, None]:
        return dict.fromkeys(hook for parameter in parameters for hook in self._hooks[parameter])

    def leader_of(self, parameter: Tensor) -> Tensor:
        """The parameter whose layer is the first that reads the same inputs, as far as is known."""
        leaders = self.shared.leaders
        hook = self._hooks[parameter][0]
        passed = {hook}
        while (leader := leaders.get(hook, hook)) not in passed:
            passed.add(leader)
            hook = leader
        return hook.weight

    def were_called(self, parameters: Sequence[Tensor]) -> bool:
        """Whether a forward pass of this step has used one of these parameters."""
        return any(hook.called for hook in self._hooks_of(parameters))

    def have_arrived(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the sums of all used layers of these parameters are here, and none is coming."""
        hooks = self._hooks_of(parameters)
        inputs, awaits = self.shared.read_by(hooks), self.shared.deliveries.awaits
        counted = {
            hook
            for shared in inputs
            if shared.filled
            for hook, count in shared.counts.items()
            if count.grad is not None
        }
        return (
            # A probe of output gradients gets those of all uses at once, an input those of one use.
            all(
                hook.is_filled or (hook in counted and not hook.wants_gradients)
                for hook in hooks
                if hook.called
            )
            and not any(awaits((*h.inputs.leaves, *h.gradients.leaves)) for h in hooks)
            and not any(self.shared.deliveries.came_early(h.gradients.leaves) for h in hooks)
            and not any(awaits(shared.leaves) for shared in inputs)
        )

    def release(self, parameters: Sequence[Tensor]) -> None:
        """Drop the sums that `collect` gave for these parameters: they have been sent away."""
        hooks = self._hooks_of(parameters)
        self.shared.release(hooks)
        for hook in hooks:
            hook.forget_sums()
            hook.taken = True

    def forget_taken(self) -> None:
        """What was sent away has been used: sums may be dropped again."""
        self.shared.deliveries.dropped = False
        for hook in self._hooks_of(self._hooks):
            hook.taken = False

    # ----------------------------------------------------------------------------------------------

    def shapes(self) -> dict[Tensor, MomentShapes]:
        """Shapes of the moments to capture in this step, by parameter."""
        return {
            parameter: self._wanted(hooks[0])
            for parameter, hooks in self._hooks.items()
            if hooks[0].open
        }

    @staticmethod
    def _wanted(hook: LayerHook) -> MomentShapes:
        inputs, gradients = hook.shapes
        return inputs if hook.wants_inputs else None, gradients if hook.wants_gradients else None

    def identity_statistics(self, parameter: Tensor) -> Statistics:
        """Multiples of the identity, with the shapes of a layer's captured moments."""
        hooks = self._hooks.get(parameter)
        if not hooks:
            return Statistics(None, None)
        dtype, device = hooks[0].dtype, parameter.device

        def moment(shape: tuple[int, ...] | None) -> Moment | None:
            if shape is None:
                return None
            side = max(shape[-2:])
            rows = torch.tensor(float(side), dtype=torch.float64, device="cpu")
            like = torch.empty((), dtype=dtype, device=device).expand(shape)
            return Moment(side * identity_like(like).expand(shape), rows, rows)

        inputs, gradients = self._wanted(hooks[0])
        return Statistics(moment(inputs), moment(gradients))

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
        self.shared.deliveries.paused = True  # these sums replace others of the whole step
        probes = [leaf for hook in hooks for leaf in hook.gradients.leaves]
        # Gradients are computed for the probes only, so no weight's gradient changes.
        found = torch.autograd.grad(loss, probes, retain_graph=True, allow_unused=True)
        for hook, *sums in zip(hooks, found[::3], found[1::3], found[2::3], strict=True):
            hook.substitute = _sum([(hook.substitute, 1.0), (moment_of(*sums), 1.0)], {})

    def gate(self, is_due: IsDue) -> None:
        """Before the forward pass: open the hooks of layers that refresh in the next step."""
        self.shared.open = False
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.open = is_due(hook.phase)
                self.shared.open |= hook.open
                hook.called = False
        self.shared.clear()
        self.forget_sums()
        if self.shared.deliveries.listener is not None:
            self.shared.deliveries.begin()

    def forget_sums(self) -> None:
        """Drop the statistics of backward passes, as `zero_grad` drops their gradients."""
        self.shared.forget_sums()
        for hooks in self._hooks.values():
            for hook in hooks:
                self.shared.deliveries.dropped |= hook.taken
                hook.forget_sums()

    def remove(self) -> None:
        """Take the hooks off the model."""
        self.gate(lambda phase: False)
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.remove()
        self._hooks.clear()
        self.shared.leaders.clear()


class ModelCapture:
    """The capture of an optimizer's model; one `GroupCapture` per parameter group.

    Args:
        layout: how parameters are cut. The phases of staggered layers are written into it.
        sides: whether (output gradients, inputs) are captured for a group.
        observes: whether the next step observes a group's layers with a given phase.
        staggers: whether a group's layers take turns.
    """

    def __init__(
        self,
        layout: Layout,
        sides: Callable[[Group], tuple[bool, bool]],
        observes: Callable[[Group, float], bool],
        staggers: Callable[[Group], bool] = lambda group: group.get("stagger") is True,
    ) -> None:
        self.model: nn.Module | None = None
        self.groups: list[GroupCapture] = []
        self.scaler: torch.amp.GradScaler | None = None
        self.epoch = 0  # changes when hooks are placed or gated
        self._listener: Callable[[], bool] | None = None
        self._layout = layout
        self._sides = sides
        self._observes = observes
        self._staggers = staggers

    def attach(self, model: nn.Module, groups: Sequence[Group]) -> None:
        """Remove all hooks and place new ones on `model`, which has no wrapper."""
        self.remove()
        self.model = model
        remove_inert_hooks(model)
        for index, group in enumerate(groups):
            self.place(index, group)
        self.gate(groups)

    def add_group(self, index: int, group: Group) -> None:
        """Place and gate the hooks of an added group."""
        self.place(index, group)
        self.groups[index].shared.deliveries.listener = self._listener
        self.groups[index].gate(partial(self._observes, group))

    def captures(self, group: Group) -> bool:
        """Whether anything is captured for a group."""
        return any(self._sides(group))

    def sides_of(self, parameter: Tensor, group: Group) -> tuple[bool, bool]:
        """Whether (output gradients, inputs) are captured for a matrix of a group."""
        left, right = (form.kind != "identity" for form in self._layout.forms_of(parameter, group))
        gradients, inputs = self._sides(group)
        return gradients and left, inputs and right

    def geometry(self, groups: Sequence[Group]) -> dict[Tensor, str]:
        """What is captured of every matrix, in words for the routing table."""
        found: dict[Tensor, str] = {}
        joined = {spec.bias for spec in self._layout.specs.values()}
        for capture, group in zip(self.groups, groups, strict=True):
            for p in group["params"] if self._layout.captured and self.captures(group) else ():
                if is_matrix(group, p) and p not in joined and p.ndim and p.numel():
                    known = p in capture or not any(self.sides_of(p, group))
                    text = self._layout.describe(p, group, self._sides(group))
                    found[p] = text if known else "identity (not captured)"
        return found

    def place(self, index: int, group: Group) -> None:
        """Remove a group's hooks and place new ones."""
        capture, layout = self.groups[index], self._layout
        capture.remove()
        self.epoch += 1
        capture.placed_for = self._settings(group)
        for parameter in group["params"]:
            layout.phases.pop(parameter, None)
        if self.model is None or not self.captures(group):
            return

        def sampling(weight: Tensor) -> Sampling:
            spec = layout.specs.get(weight, DEFAULT_SPEC)
            rows = row_limit(spec, group, layout.forms_of(weight, group)[RIGHT])
            settings = group["token_stride"], group["token_skip"], group["reduce"]
            return Sampling(*settings, ones=spec.bias is not None, rows=rows)

        modules = captured_modules(self.model, sampling, layout.specs)
        captured = [
            p
            for p in group["params"]
            if is_matrix(group, p) and p in modules and any(self.sides_of(p, group))
        ]
        forms = [layout.forms_of(parameter, group) for parameter in captured]
        if self._staggers(group):
            layout.phases.update(self._phases(index, group))
        for parameter, both in zip(captured, forms, strict=True):
            gradients, inputs = self.sides_of(parameter, group)
            capture.place(
                parameter,
                modules[parameter],
                both,
                inputs=inputs,
                gradients=gradients,
                phase=layout.phases.get(parameter, 0.0),
                sharded=is_sharded(parameter),
                shard=layout.shards.get(parameter),
            )

    def _phases(self, index: int, group: Group) -> dict[Tensor, float]:
        """When the layers of a staggered group refresh, as fractions of the interval.

        Of all its matrices, also those that are not captured: owners are chosen by the same turns,
        before it is known what is captured.
        """
        joined = {spec.bias for spec in self._layout.specs.values()}
        layers = [
            Layer(name, parameter, {}, self._layout.spec_of(parameter, group))
            for name, parameter in named(group, index)
            if is_matrix(group, parameter) and parameter.numel() and parameter not in joined
        ]
        every = group.get("refresh_every", 1)
        turns = refresh_turns(
            [layer.name for layer in layers],
            [(layer.blocks, *layer.shape) for layer in layers],
            [captured_maps(layer.forms, self._sides(group)) for layer in layers],
            every,
            index,
        )
        phases = [as_phase(turn, every) for turn in turns]
        return dict(zip([layer.parameter for layer in layers], phases, strict=True))

    def _settings(self, group: Group) -> tuple[Any, ...]:
        """The settings that a group's hooks depend on."""
        names = ("rows", "token_stride", "token_skip", "reduce", *LONG_SIDES)
        turns = group.get("refresh_every") if self._staggers(group) else None
        return (*self._sides(group), *(group.get(name) for name in names), turns)

    def gate(self, groups: Sequence[Group]) -> list[int]:
        """Before a forward pass: open the hooks of layers that refresh in the next step.

        Returns the groups whose hooks were placed again because their settings have changed.
        """
        changed = []
        self.epoch += 1
        for index, (capture, group) in enumerate(zip(self.groups, groups, strict=True)):
            if self.model is not None and capture.placed_for != self._settings(group):
                self.place(index, group)
                changed.append(index)
            capture.gate(partial(self._observes, group))
        return changed

    @property
    def is_open(self) -> bool:
        """Whether anything is captured in this step."""
        return any(capture.shared.open for capture in self.groups)

    def collect(self, ranks: int) -> dict[int, dict[Tensor, Statistics]]:
        """This rank's statistics of this step, by group. Closed groups are left out."""
        if not self.is_open:
            return {}
        scale = self.loss_scale
        return {
            index: capture.collect(scale, ranks)
            for index, capture in enumerate(self.groups)
            if capture.shared.open
        }

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def listen(self, listener: Callable[[], bool] | None) -> None:
        """Call `listener` in the backward pass whenever sums have been delivered."""
        self._listener = listener
        for capture in self.groups:
            capture.shared.deliveries.listener = listener

    def forget_taken(self) -> None:
        """What was sent away has been used: sums may be dropped again."""
        for capture in self.groups:
            capture.forget_taken()

    @property
    def dropped(self) -> bool:
        """Whether sums were dropped after some of them had been sent away."""
        return any(capture.shared.deliveries.dropped for capture in self.groups)

    @property
    def paused(self) -> bool:
        """Whether this step's sums must stay here until the step."""
        return any(capture.shared.deliveries.paused for capture in self.groups)

    def shapes(self, index: int) -> dict[Tensor, MomentShapes]:
        """Shapes of the moments a group captures in this step, by parameter."""
        return self.groups[index].shapes()

    def forget_sums(self) -> None:
        """Drop the statistics of backward passes, as `zero_grad` drops their gradients."""
        for capture in self.groups:
            capture.forget_sums()

    def use_gradients_of(self, loss: Tensor) -> None:
        """Take output gradients from `loss` instead of the loss that is trained on."""
        for capture in self.groups:
            capture.use_gradients_of(loss)

    @contextmanager
    def masked(self, mask: Tensor) -> Iterator[None]:
        """Leave out positions where the mask is zero, for forward passes inside the context."""
        with ExitStack() as masks:
            for capture in self.groups:
                masks.enter_context(capture.shared.masked(mask))
            yield

    def remove(self) -> None:
        """Take every hook off the model."""
        remove_hooks(self.groups)
        self.epoch += 1
        self.model = None


def remove_hooks(groups: Iterable[GroupCapture]) -> None:
    """Take the hooks of all groups off the model."""
    for capture in groups:
        capture.remove()


def _gradients(hook: LayerHook, loss_scale: float) -> Moment | None:
    """A hook's Σ δ δᵀ without the loss scale. The loss of a substitute was never scaled."""
    if hook.substitute is not None:
        return hook.substitute
    return _unscaled(hook.gradients.moment, loss_scale)


def _unscaled(moment: Moment | None, scale: float) -> Moment | None:
    if moment is None or scale == 1:
        return moment
    return Moment(moment.total / scale**2, moment.count, moment.uses)


def _sum(terms: Iterable[Term], cache: dict[Any, Moment]) -> Moment | None:
    """Σ times·moment. Equal sums give the same object, so layers still share it."""
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
                stacked_counts([moment.count * times for moment, times in present]).sum(),
                stacked_counts([moment.uses * times for moment, times in present]).sum(),
            )
    return cache[key]
