"""The capture of one parameter group: its hooks, their gate, and the sums they hold."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gomuon.capture.functions import FunctionWatch
from gomuon.capture.hooks import CapturedModule, LayerHook
from gomuon.capture.misses import cause_of
from gomuon.capture.shared_inputs import Reader, SharedInputs, Term
from gomuon.capture.tap import moment_of
from gomuon.capture.watched import WatchedWeight
from gomuon.functional.linalg import identity_like
from gomuon.moments import Moment, MomentShapes, Statistics, stacked_counts
from gomuon.parameters.side_forms import SideForm
from gomuon.parameters.tensor_shards import TensorShard

# Whether what a hook or a watched weight captures is observed in the next step.
IsDue = Callable[[LayerHook | WatchedWeight], bool]


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
        some = None if parameters is None else self._readers_of(parameters)
        shared, sums = self.shared.terms(some), dict[Any, Moment]()
        chosen = self._hooks if parameters is None else parameters
        watched = self._watched_of(self._watched if parameters is None else parameters)
        products = {
            one.weight: Statistics(
                _sum(_input_terms(one, one.readers.values(), shared), sums),
                _unscaled(_gradients(one, loss_scale), ranks),
            )
            for one in watched
            if one.open
        }
        layers = {
            parameter: Statistics(
                _sum((term for h in hooks for term in _input_terms(h, (h,), shared)), sums),
                _unscaled(_sum(((_gradients(hook, loss_scale), 1.0) for hook in hooks), {}), ranks),
            )
            for parameter, hooks in ((p, self._hooks[p]) for p in chosen if p in self._hooks)
            if any(hook.open for hook in hooks)
        }
        for weight in products.keys() & layers.keys():  # used by functions and by its layers
            layers[weight] = _together(layers[weight], products[weight])
        return products | layers

    def why_missed(self, parameter: Tensor) -> str:
        """Why nothing was captured for this parameter in this step."""
        hooks = self._hooks.get(parameter, ())
        watched = self._watched.get(parameter)
        if watched is None or (hooks and watched.problem is None):
            return cause_of(parameter, hooks)  # its layers have more to say
        return f"functions multiply with it, and {self.functions.why_uncaptured(parameter)}"

    # ---- sums that are sent away during the backward pass ----------------------------------------

    def _hooks_of(self, parameters: Iterable[Tensor]) -> dict[LayerHook, None]:
        return dict.fromkeys(
            hook for parameter in parameters for hook in self._hooks.get(parameter, ())
        )

    def _readers_of(self, parameters: Sequence[Tensor]) -> dict[Reader, None]:
        """Everything that reads inputs with these parameters."""
        products = (one.readers.values() for one in self._watched_of(parameters))
        return dict.fromkeys((*self._hooks_of(parameters), *(r for own in products for r in own)))

    def _watched_of(self, parameters: Iterable[Tensor]) -> list[WatchedWeight]:
        return [self._watched[parameter] for parameter in parameters if parameter in self._watched]

    def leader_of(self, parameter: Tensor) -> Tensor:
        """The parameter whose layer is the first that reads the same inputs, as far as is known."""
        leaders = self.shared.leaders
        reader = next(iter(self._readers_of([parameter])), None)
        if reader is None:
            return parameter
        passed = {reader}
        while (leader := leaders.get(reader, reader)) not in passed:
            passed.add(leader)
            reader = leader
        return reader.weight

    def were_called(self, parameters: Sequence[Tensor]) -> bool:
        """Whether a forward pass of this step has used one of these parameters."""
        watched = any(one.called for one in self._watched_of(parameters))
        return watched or any(hook.called for hook in self._hooks_of(parameters))

    def have_arrived(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the sums of all used layers of these parameters are here, and none is coming."""
        hooks, watched = self._hooks_of(parameters), self._watched_of(parameters)
        inputs = self.shared.read_by(self._readers_of(parameters))
        awaits, came_early = self.shared.deliveries.awaits, self.shared.deliveries.came_early
        counted = {
            reader
            for shared in inputs
            if shared.filled
            for reader, count in shared.counts.items()
            if count.grad is not None
        }
        for one in watched:
            leaves = *one.inputs.leaves, *one.gradients.leaves
            by_inputs = not one.wants_gradients and counted.intersection(one.readers.values())
            filled = one.is_filled or by_inputs
            if one.called and (not filled or awaits(leaves) or came_early(leaves)):
                return False
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
        self.shared.release(self._readers_of(parameters))
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
        first = self._watched | {p: hooks[0] for p, hooks in self._hooks.items()}
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
        own = self._hooks.get(parameter, ())
        hook = next(iter(own), None) or self._watched.get(parameter)
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
                hook.open = is_due(hook)
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
        self.gate(lambda one: False)
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.remove()
        self._hooks.clear()
        self.functions.remove()
        self.shared.leaders.clear()


def remove_hooks(groups: Iterable[GroupCapture]) -> None:
    """Take the hooks of all groups off the model."""
    for capture in groups:
        capture.remove()


def _input_terms(
    one: LayerHook | WatchedWeight, readers: Iterable[Reader], shared: Mapping[Reader, list[Term]]
) -> Iterator[Term]:
    """Of Σ x xᵀ: the sums of its own probes, and those of inputs that it shares."""
    yield one.inputs.moment, 1.0
    for reader in readers:
        yield from shared.get(reader, ())


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


def _together(one: Statistics, other: Statistics) -> Statistics:
    """The sums of both."""
    return Statistics(
        _sum([(one.inputs, 1.0), (other.inputs, 1.0)], {}),
        _sum([(one.gradients, 1.0), (other.gradients, 1.0)], {}),
    )
