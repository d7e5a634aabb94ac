"""The capture of a model: which layers get hooks or are watched, and when these are open."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.capture.borrowed import borrowed_layers
from gomuon.capture.group import GroupCapture, IsDue, remove_hooks
from gomuon.capture.hooks import LayerHook
from gomuon.capture.modules import captured_modules
from gomuon.capture.placed import remove_inert_hooks
from gomuon.capture.watched import WatchedCut, WatchedWeight
from gomuon.intervals import Adaptive, Turn, number_of_turns
from gomuon.moments import MomentShapes, Statistics
from gomuon.parameters.groups import is_matrix, named
from gomuon.parameters.layers import Layer
from gomuon.parameters.layout import Layout, State
from gomuon.parameters.sampling import Sampling
from gomuon.parameters.sharding import is_sharded
from gomuon.parameters.side_forms import LONG_SIDES, RIGHT, captured_maps
from gomuon.parameters.specs import (
    DEFAULT_SPEC,
    matrix_sides,
    own_shape,
    row_limit,
    stored_sides,
)
from gomuon.parameters.state import INTERVAL
from gomuon.parameters.units import as_phase, refresh_turns, siblings

Group = Mapping[str, Any]
NO_STATE: State = MappingProxyType({})


class ModelCapture:
    """The capture of an optimizer's model; one `GroupCapture` per parameter group.

    Args:
        layout: how parameters are cut. The phases of staggered layers are written into it, and the
            units of layers whose clock adapts.
        sides: whether (output gradients, inputs) are captured for a group.
        observes: whether the next step observes a group's layers with a given turn.
        staggers: whether a group's layers take turns.
    """

    def __init__(
        self,
        layout: Layout,
        sides: Callable[[Group], tuple[bool, bool]],
        observes: Callable[[Group, Turn], bool],
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

    def attach(self, model: nn.Module, groups: Sequence[Group], state: State = NO_STATE) -> None:
        """Remove all hooks and place new ones on `model`, which has no wrapper."""
        self.remove()
        self.model = model
        remove_inert_hooks(model)
        for index, group in enumerate(groups):
            self.place(index, group)
        self.gate(groups, state)

    def add_group(self, index: int, group: Group) -> None:
        """Place and gate the hooks of an added group."""
        self.place(index, group)
        self.groups[index].shared.deliveries.listener = self._listener
        self.groups[index].sent_as = _sent_as(group)
        self.groups[index].gate(self._is_due(group, NO_STATE))

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
            layout.units.pop(parameter, None)
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
        for part in self._refreshed_together(index, group):
            if self._staggers(group):
                layout.phases.update(self._phases(index, group, part))
            if isinstance(group.get("refresh_every"), Adaptive):
                layout.units.update(_units(part))
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
        borrowed = borrowed_layers(self.model)
        for parameter in group["params"]:
            layers = frozenset(one.module for one in modules.get(parameter, ()))
            outside = not layers or (layers & borrowed and parameter not in layout.shards)
            if outside and is_matrix(group, parameter) and parameter.numel():
                self._watch(capture, parameter, group, sampling, layers)
        capture.functions.place(self.model)

    def _watch(
        self,
        capture: GroupCapture,
        parameter: Tensor,
        group: Group,
        sampling: Callable[[Tensor], Sampling],
        layers: frozenset[nn.Module],
    ) -> None:
        """Watch a weight that functions multiply with; `layers` do as well, with their hooks."""
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
        sharded = is_sharded(parameter)
        watched = WatchedWeight(parameter, cut, inputs, gradients, phase, sharded, layers=layers)
        capture.watch(watched)

    def _refreshed_together(self, index: int, group: Group) -> list[list[Layer]]:
        """The matrices of a group: those that ranks share, and those that only this rank has.

        All of them, also those that are not captured: owners are chosen by the same turns, before
        it is known what is captured.
        """
        joined = {spec.bias for spec in self._layout.specs.values()}
        own = self._layout.own
        layers = [
            Layer(name, parameter, {}, self._layout.spec_of(parameter, group))
            for name, parameter in named(group, index)
            if is_matrix(group, parameter) and parameter.numel() and parameter not in joined
        ]
        # Those that only this rank has by themselves, so that ranks agree on the others.
        return [[x for x in layers if (x.parameter in own) == here] for here in (False, True)]

    def _phases(
        self, index: int, group: Group, layers: Sequence[Layer]
    ) -> Iterator[tuple[Tensor, float]]:
        """When staggered layers refresh, as fractions of the interval."""
        every = number_of_turns(group.get("refresh_every", 1), len(set(_units(layers).values())))
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
        adapts = isinstance(group.get("refresh_every"), Adaptive)
        return (*self._sides(group), *(group.get(name) for name in names), turns, adapts)

    def _is_due(self, group: Group, state: State) -> IsDue:
        def is_due(one: LayerHook | WatchedWeight) -> bool:
            interval = state[one.weight].get(INTERVAL) if one.weight in state else None
            return self._observes(group, Turn(one.phase, interval))

        return is_due

    def gate(self, groups: Sequence[Group], state: State = NO_STATE) -> list[int]:
        """Before a forward pass: open the hooks of layers that refresh in the next step.

        `state` is the optimizer's. Returns the groups whose hooks were placed again because
        their settings have changed.
        """
        changed = []
        self.epoch += 1
        for index, (capture, group) in enumerate(zip(self.groups, groups, strict=True)):
            if self.model is not None and capture.placed_for != self._settings(group):
                self.place(index, group)
                changed.append(index)
            capture.sent_as = _sent_as(group)
            capture.gate(self._is_due(group, state))
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


def _units(layers: Sequence[Layer]) -> dict[Tensor, str]:
    """The unit of each layer, by the name of the unit's first layer."""
    units = siblings([layer.name for layer in layers], [layer.shape[1] for layer in layers])
    return {layers[i].parameter: layers[unit[0]].name for unit in units for i in unit}


def _sent_as(group: Group) -> torch.dtype | None:
    return torch.bfloat16 if group.get("sums_dtype") == "bfloat16" else None
