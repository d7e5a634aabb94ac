"""The capture of a model: places hooks, opens and closes them, reads and removes them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from gomuon.capture.functions import FunctionWatch
from gomuon.capture.hooks import CapturedModule, LayerHook
from gomuon.capture.misses import cause_of
from gomuon.capture.placed import remove_inert_hooks
from gomuon.capture.shared_inputs import SharedInputs, Term
from gomuon.capture.tap import moment_of
from gomuon.capture.watched import WatchedCut, WatchedWeight
from gomuon.functional.linalg import identity_like
from gomuon.moments import Moment, MomentShapes, Statistics, stacked_counts
from gomuon.parameters.divided_rows import CapturedRows, divided
from gomuon.parameters.groups import is_matrix, named
from gomuon.parameters.layout import Layout
from gomuon.parameters.rows import ConvRows, is_transposed_linear, rows_for
from gomuon.parameters.sampling import Sampling
from gomuon.parameters.sharding import is_sharded
from gomuon.parameters.side_forms import LONG_SIDES, RIGHT, SideForm, captured_maps
from gomuon.parameters.specs import (
    DEFAULT_SPEC,
    LayerSpec,
    matrix_sides,
    own_shape,
    row_limit,
    stored_sides,
)
from gomuon.parameters.stacks import Layer
from gomuon.parameters.tensor_shards import TensorShard
from gomuon.parameters.units import as_phase, refresh_turns

Group = Mapping[str, Any]
IsDue = Callable[[float], bool]  # whether layers with a given phase refresh in the next step


def captured_modules(
    model: nn.Module,
    sampling: Callable[[Tensor], Sampling],
    specs: Mapping[Tensor, LayerSpec] = MappingProxyType({}),
    gathered: Mapping[Tensor, TensorShard] = MappingProxyType({}),
) -> dict[Tensor, list[CapturedModule]]:
    """For each weight, its modules whose inputs and output gradients can be captured.

    `specs` say which block of a weight this rank has, if not all of it. `gathered` are the places
    of weights in tensor parallelism if the rows of all their blocks are gathered.
    """
    modules: dict[Tensor, list[CapturedModule]] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or not weight.numel():
            continue
        if isinstance(module, NonDynamicallyQuantizableLinear):
            continue  # the output projection of nn.MultiheadAttention, which does not call it
        rows = rows_for(module, sampling(weight))
        if rows is None:
            continue
        shape = own_shape(weight, specs.get(weight, DEFAULT_SPEC))
        m, n = shape[0], math.prod(shape[1:])
        m, n = (n, m) if is_transposed_linear(module) else (m, n)
        n += rows.sampling.ones
        groups = (rows.groups,) if isinstance(rows, ConvRows) and rows.groups > 1 else ()
        m //= groups[0] if groups else 1
        read: CapturedRows = divided(rows, gathered[weight]) if weight in gathered else rows
        modules.setdefault(weight, []).append(
            CapturedModule(module, read, (*groups, n, n), (*groups, m, m))
        )
    return modules


class GroupCapture:
    """The hooks of one parameter group."""

    def __init__(self) -> None:
        self.shared = SharedInputs()
        self.placed_for: object = None  # the settings its hooks were placed for
        self.sent_as: torch.dtype | None = None  # how ranks send its sums; None: as computed
        self.functions = FunctionWatch(self.shared)
        self._hooks: dict[Tensor, list[LayerHook]] = {}

    def __contains__(self, parameter: Tensor) -> bool:
        """Whether anything is captured for this parameter."""
        return parameter in self._hooks or parameter in self._watched

    @property
    def _watched(self) -> dict[Tensor, WatchedWeight]:
        """The weights that functions multiply with."""
        return self.functions.weights

    def watch(self, weight: WatchedWeight) -> None:
        """Capture products of functions with a weight, once `functions` are placed."""
        weight.dropped = self._note_dropped
        self._watched[weight.weight] = weight

    def _note_dropped(self) -> None:
        self.shared.deliveries.dropped = True

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
        watched = self._watched_of(self._watched if parameters is None else parameters)
        products = {
            one.weight: Statistics(one.inputs.moment, _unscaled(_gradients(one, loss_scale), ranks))
            for one in watched
            if one.open
        }
        return products | {
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
            for parameter, hooks in ((p, self._hooks[p]) for p in chosen if p in self._hooks)
            if any(hook.open for hook in hooks)
        }

    def why_missed(self, parameter: Tensor) -> str:
        """Why nothing was captured for this parameter in this step."""
        return cause_of(parameter, self._hooks.get(parameter, ()))

    # ---- sums that are sent away during the backward pass ----------------------------------------

    def _hooks_of(self, parameters: Iterable[Tensor]) -> dict[LayerHook, None]:
        return dict.fromkeys(
            hook for parameter in parameters for hook in self._hooks.get(parameter, ())
        )

    def _watched_of(self, parameters: Iterable[Tensor]) -> list[WatchedWeight]:
        return [self._watched[parameter] for parameter in parameters if parameter in self._watched]

    def leader_of(self, parameter: Tensor) -> Tensor:
        """The parameter whose layer is the first that reads the same inputs, as far as is known."""
        if parameter in self._watched:
            return parameter
        leaders = self.shared.leaders
        hook = self._hooks[parameter][0]
        passed = {hook}
        while (leader := leaders.get(hook, hook)) not in passed:
            passed.add(leader)
            hook = leader
        return hook.weight

    def were_called(self, parameters: Sequence[Tensor]) -> bool:
        """Whether a forward pass of this step has used one of these parameters."""
        watched = any(one.called for one in self._watched_of(parameters))
        return watched or any(hook.called for hook in self._hooks_of(parameters))

    def have_arrived(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the sums of all used layers of these parameters are here, and none is coming."""
        hooks, watched = self._hooks_of(parameters), self._watched_of(parameters)
        inputs, awaits = self.shared.read_by(hooks), self.shared.deliveries.awaits
        came_early = self.shared.deliveries.came_early
        for one in watched:
            leaves = *one.inputs.leaves, *one.gradients.leaves
            if one.called and (not one.is_filled or awaits(leaves) or came_early(leaves)):
                return False
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
            and not any(came_early(h.gradients.leaves) for h in hooks)
            and not any(awaits(shared.leaves) for shared in inputs)
        )

    def release(self, parameters: Sequence[Tensor]) -> None:
        """Drop the sums that `collect` gave for these parameters: they have been sent away."""
        hooks = self._hooks_of(parameters)
        self.shared.release(hooks)
        holders: list[LayerHook | WatchedWeight] = [*hooks, *self._watched_of(parameters)]
        for one in holders:
            one.forget_sums()
            one.taken = True

    def forget_taken(self) -> None:
        """What was sent away has been used: sums may be dropped again."""
        self.shared.deliveries.dropped = False
        for hook in self._hooks_of(self._hooks):
            hook.taken = False
        for one in self._watched.values():
            one.taken = False

    # ----------------------------------------------------------------------------------------------

    def shapes(self) -> dict[Tensor, MomentShapes]:
        """Shapes of the moments to capture in this step, by parameter."""
        first = {p: hooks[0] for p, hooks in self._hooks.items()} | self._watched
        return {parameter: self._wanted(one) for parameter, one in first.items() if one.open}

    def _wanted(self, hook: LayerHook | WatchedWeight) -> MomentShapes:
        inputs, gradients = hook.shapes
        return MomentShapes(
            inputs if hook.wants_inputs else None,
            gradients if hook.wants_gradients else None,
            self.sent_as,
            hook.stack,
        )

    def identity_statistics(self, parameter: Tensor) -> Statistics:
        """Multiples of the identity, with the shapes of a layer's captured moments."""
        hook = self._watched.get(parameter) or next(iter(self._hooks.get(parameter, ())), None)
        if hook is None:
            return Statistics(None, None)
        dtype, device, wanted = hook.dtype, parameter.device, self._wanted(hook)

        def moment(shape: tuple[int, ...] | None) -> Moment | None:
            if shape is None:
                return None
            side = max(shape[-2:])
            rows = torch.full(wanted.counts[1:], float(side), dtype=torch.float64, device="cpu")
            like = torch.empty((), dtype=dtype, device=device).expand(shape)
            return Moment(side * identity_like(like).expand(shape), rows, rows)

        return Statistics(moment(wanted.inputs), moment(wanted.gradients))

    def use_gradients_of(self, loss: Tensor) -> None:
        """Take output gradients from `loss` instead of the loss that is trained on."""
        hooks = [
            hook
            for hooks in self._hooks.values()
            for hook in hooks
            if hook.wants_gradients and hook.open
        ]
        watched = [one for one in self._watched.values() if one.wants_gradients and one.open]
        if not (hooks or watched):
            return
        self.shared.deliveries.paused = True  # these sums replace others of the whole step
        probes = [leaf for hook in hooks for leaf in hook.gradients.leaves]
        probes += [leaf for one in watched for leaf in one.gradients.leaves]
        # Gradients are computed for the probes only, so no weight's gradient changes.
        found = torch.autograd.grad(loss, probes, retain_graph=True, allow_unused=True)
        sums = iter(zip(found[::3], found[1::3], found[2::3], strict=True))
        for hook in hooks:
            made = moment_of(*next(sums))
            hook.substitute = _sum([(hook.substitute, 1.0), (made, 1.0)], {})
        for one in watched:
            moments = {place: moment_of(*next(sums)) for place in one.gradients.probes}
            whole = one.gradients.whole(moments)
            one.substitute = _sum([(one.substitute, 1.0), (whole, 1.0)], {})

    def gate(self, is_due: IsDue) -> None:
        """Before the forward pass: open the hooks of layers that refresh in the next step."""
        self.shared.open = False
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.open = is_due(hook.phase)
                self.shared.open |= hook.open
                hook.called = hook.tapped = False
        if self._watched:
            self.shared.open |= self.functions.gate(is_due)
        self.shared.clear()
        self.forget_sums()
        for one in self._watched.values():
            one.begin_step()
        if self.shared.deliveries.listener is not None:
            self.shared.deliveries.begin()

    def forget_sums(self) -> None:
        """Drop the statistics of backward passes, as `zero_grad` drops their gradients."""
        self.shared.forget_sums()
        for hooks in self._hooks.values():
            for hook in hooks:
                self.shared.deliveries.dropped |= hook.taken
                hook.forget_sums()
        for one in self._watched.values():
            self.shared.deliveries.dropped |= one.taken
            one.forget_sums()

    def remove(self) -> None:
        """Take the hooks off the model."""
        self.gate(lambda phase: False)
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.remove()
        self._hooks.clear()
        self.functions.remove()
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
        self.groups[index].sent_as = _sent_as(group)
        self.groups[index].gate(partial(self._observes, group))

    def captures(self, group: Group) -> bool:
        """Whether anything is captured for a group."""
        return any(self._sides(group))

    def sides_of(self, parameter: Tensor, group: Group) -> tuple[bool, bool]:
        """Whether (output gradients, inputs) are captured for a matrix of a group."""
        left, right = (form.kind != "identity" for form in self._layout.forms_of(parameter, group))
        gradients, inputs = self._sides(group)
        return gradients and left, inputs and right

    def why_missed(self, parameter: Tensor) -> str:
        """Why nothing was captured for this parameter in this step."""
        holders = (capture for capture in self.groups if parameter in capture)
        return next(holders, self.groups[0]).why_missed(parameter)

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

        modules = captured_modules(self.model, sampling, layout.specs, layout.gathered)
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
        for parameter in group["params"]:
            if is_matrix(group, parameter) and parameter not in modules and parameter.numel():
                self._watch(capture, parameter, group, sampling)
        capture.functions.place(self.model)

    def _watch(
        self,
        capture: GroupCapture,
        parameter: Tensor,
        group: Group,
        sampling: Callable[[Tensor], Sampling],
    ) -> None:
        """Watch a weight that no module multiplies with."""
        gradients, inputs = self.sides_of(parameter, group)
        spec = self._layout.spec_of(parameter, group)
        divided = spec.shard is not None and is_sharded(parameter)
        joined = {spec.bias for spec in self._layout.specs.values()}
        if divided or parameter in joined or parameter.ndim < 2 or not (gradients or inputs):
            return
        stored = stored_sides(own_shape(parameter, spec), spec)
        cut = WatchedCut(
            stored,
            spec.transposed,
            spec.tiling(*matrix_sides(parameter, spec), stored[0]),
            self._layout.forms_of(parameter, group),
            sampling(parameter),
        )
        phase = self._layout.phases.get(parameter, 0.0)
        capture.watch(
            WatchedWeight(parameter, cut, inputs, gradients, phase, is_sharded(parameter))
        )

    def why_uncaptured(self, parameter: Tensor) -> str | None:
        """Why no product with a watched weight was captured; None for layers with hooks."""
        for capture in self.groups:
            if parameter in capture.functions.weights:
                return capture.functions.why_uncaptured(parameter)
        return None

    def _phases(self, index: int, group: Group) -> dict[Tensor, float]:
        """When the layers of a staggered group refresh, as fractions of the interval.

        Of all its matrices, also those that are not captured: owners are chosen by the same turns,
        before it is known what is captured.
        """
        joined = {spec.bias for spec in self._layout.specs.values()}
        own = self._layout.own
        layers = [
            Layer(name, parameter, {}, self._layout.spec_of(parameter, group))
            for name, parameter in named(group, index)
            if is_matrix(group, parameter) and parameter.numel() and parameter not in joined
        ]
        # Those that only this rank has by themselves, so that ranks agree on the others.
        parts = [[x for x in layers if (x.parameter in own) == here] for here in (False, True)]
        return {p: phase for part in parts for p, phase in self._turns(index, group, part)}

    def _turns(
        self, index: int, group: Group, layers: Sequence[Layer]
    ) -> Iterator[tuple[Tensor, float]]:
        every = group.get("refresh_every", 1)
        turns = refresh_turns(
            [layer.name for layer in layers],
            [(layer.blocks, *layer.shape) for layer in layers],
            [captured_maps(layer.forms, self._sides(group)) for layer in layers],
            every,
            index,
        )
        for layer, turn in zip(layers, turns, strict=True):
            yield layer.parameter, as_phase(turn, every)

    def _settings(self, group: Group) -> tuple[Any, ...]:
        """The settings that a group's hooks depend on."""
        names = ("rows", "token_stride", "token_skip", "reduce", *LONG_SIDES)
        turns = None
        if self._staggers(group):
            turns = group.get("refresh_every"), self._layout.own.intersection(group["params"])
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
            capture.sent_as = _sent_as(group)
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


def _sent_as(group: Group) -> torch.dtype | None:
    return torch.bfloat16 if group.get("sums_dtype") == "bfloat16" else None


def remove_hooks(groups: Iterable[GroupCapture]) -> None:
    """Take the hooks of all groups off the model."""
    for capture in groups:
        capture.remove()


def _gradients(hook: LayerHook | WatchedWeight, loss_scale: float) -> Moment | None:
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
