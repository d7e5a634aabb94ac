"""The step: the paper's "Complete update", Equations (27)–(35), for every method and every team."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from gomuon.adamw import adamw_step
from gomuon.capture.misses import MISSED
from gomuon.capture.model import ModelCapture
from gomuon.distributed.team import Captured, ChooseOwners, Team
from gomuon.functional import linalg
from gomuon.functional.linalg import all_finite
from gomuon.functional.polar_factor import only_multiplies
from gomuon.moments import Statistics
from gomuon.parameters.gradient_faults import dense_gradients, unusable_gradients
from gomuon.parameters.late_check import LateCheck
from gomuon.parameters.layers import Layer, note_layers_on_error
from gomuon.parameters.layout import Layout, State
from gomuon.parameters.stacks import Participants, Stack, stacked
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.refresh_cost import costly_refresh
from gomuon.recipes.stations import NextIntervals, Pending, cautious
from gomuon.reports import Reports
from gomuon.threads.spreading import concurrently, cores_for_workers

Group = Mapping[str, Any]

# A layer's state holds one of these once it has a geometry.
_GEOMETRY = {"left_map", "right_map", "left_factor", "right_factor"}


class Observer(Protocol):
    """What looks on while steps are taken. It changes nothing."""

    def before_refresh(
        self, observed: Sequence[Layer], renewed: Sequence[Layer], group: Group
    ) -> None:
        """Called before layers of a group are observed and renewed. Either may be none."""
        ...

    def updated(self, stack: Stack, source: Tensor, D: Tensor, U: Tensor, group: Group) -> None:
        """Called once a stack has moved, with its source, direction and update, [b, m, n]."""
        ...


def has_geometry(layer: Layer) -> bool:
    """Whether a layer has maps or factors."""
    return bool(_GEOMETRY & layer.state.keys())


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.disable`, but only at the first call, because it loads the compiler."""
    disabled = functools.cache(lambda: torch.compiler.disable(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return disabled()(*args, **kwargs)

    return call


class Step:
    """Takes steps as a recipe says.

    Args:
        recipe: the method's recipe.
        layout: how parameters are cut into matrices.
        reports: for warnings about layers that failed.
        check_finite: whether to leave out directions that are not finite.
    """

    def __init__(
        self, recipe: Recipe, layout: Layout, reports: Reports, *, check_finite: bool
    ) -> None:
        self.recipe = recipe
        self.layout = layout
        self.reports = reports
        self.check_finite = check_finite
        self.observers: list[Observer] = []
        self.participants: dict[int, Participants] = {}  # of the last step, by group
        self._late = LateCheck()
        self._usable: Tensor | None = None  # whether this step's gradients are; None: they are

    # ---- before the step -------------------------------------------------------------------------

    def find_participants(
        self, groups: Sequence[Group], state: State, team: Team, choose: ChooseOwners
    ) -> list[Participants]:
        """What the step updates, by group; the same objects while the parameters are the same."""
        for index, group in enumerate(groups):
            present = [p for p in group["params"] if p.grad is not None and p.numel()]
            kept = group.get("state_dtype"), group.get("offload")
            key = [(id(p), p.dtype, p.device, id(state[p]), *kept) for p in present]
            known = self.participants.get(index)
            if known is None or known.key != key:
                matrices, others = self.layout.divided(index, group, state)
                layers, owned = team.layers(matrices, choose)
                self.participants[index] = Participants(key, stacked(layers), others, owned)
        return [self.participants[index] for index in range(len(groups))]

    def find_fault(self, groups: Sequence[Group], team: Team) -> str | None:
        """What is wrong with this rank's gradients. Also reports results the last step left out.

        On an accelerator nothing is read, because that would wait for it. Gradients that cannot be
        used then count as zero in this step, and `late_faults` names them later.
        """
        self._usable = None
        if not self.check_finite:
            return None
        parameters = [p for group in groups for p in group["params"]]
        gradients = [team.local(p.grad) for p in parameters if p.grad is not None]
        masks = [stack.unusable for stack in self._stacks() if stack.unusable is not None]
        if not team.waits_for_others and _none_on_host(gradients):
            self._usable = self._late.ask(_step_number(groups), dense_gradients(groups), masks)
            return None
        dense = all(gradient.layout == torch.strided for gradient in gradients)
        # One call for both, because each call would wait for an accelerator.
        if dense and all_finite([g for g in gradients if g.numel()], masks):
            for stack in self._stacks():
                stack.unusable = None
            return None
        by_name = dense_gradients(groups)
        self.report_unusable()
        return unusable_gradients(by_name)

    def late_faults(self) -> list[str]:
        """What was wrong with gradients of earlier steps on an accelerator, as far as is known."""
        if not self._late.pending:
            return []
        answers = self._late.answers()
        if any(answer.overflowed for answer in answers):
            self.report_unusable()
        return [
            f"the gradient of {answer.bad[0]!r} was not finite in step {answer.step}"
            + (f", and those of {len(answer.bad) - 1} more" if len(answer.bad) > 1 else "")
            for answer in answers
            if answer.bad
        ]

    def report_unusable(self) -> None:
        """Count, by layer, memories and directions that overflowed and were left out."""
        for stack in self._stacks():
            self.reports.count_failures(stack.unusable_layers())

    def _stacks(self) -> list[Stack]:
        return [stack for present in self.participants.values() for stack in present.stacks]

    @contextmanager
    def dropped_on_failure(self, team: Team) -> Iterator[None]:
        """If the step raises, drop its gradients, statistics and messages.

        Otherwise gradients and statistics in the stacks would be used in the next step.
        """
        try:
            yield
        except BaseException:
            self.participants.clear()
            self._late.forget()
            team.forget()
            raise

    # ---- the step --------------------------------------------------------------------------------

    def cores(self, groups: Sequence[Group]) -> AbstractContextManager[None]:
        """Frees cores for the threads that decompose, if every step decomposes.

        Products alone are faster on torch's own threads.
        """
        parameters = [(p, group.get("polar", "exact")) for group in groups for p in group["params"]]
        if all(only_multiplies(polar, p.dtype) for p, polar in parameters):
            return nullcontext()
        return cores_for_workers(sum(p.numel() for p, _ in parameters))

    def take(
        self,
        groups: Sequence[dict[str, Any]],
        participants: Sequence[Participants],
        team: Team,
        captured: Captured,
        capture: ModelCapture,
    ) -> None:
        """One step of all groups.

        Args:
            groups: the optimizer's parameter groups.
            participants: the layers and parameters to update, by group.
            team: the ranks that work together.
            captured: this rank's statistics, by group.
            capture: the capture of the model.
        """
        both = list(zip(groups, participants, strict=True))
        for stack in (stack for present in participants for stack in present.stacks):
            stack.begin_step(self._usable)
        for index, (group, present) in enumerate(both):
            if not (present.stacks or present.matrices):
                continue
            weights = bool(group.get("geometry_decay")) or self.recipe.geometry.reads_weights
            arrived = team.gather(present.matrices, weights=weights)
            statistics: Mapping[Tensor, Statistics] = {}
            if index in captured:
                wanted = capture.shapes(index)
                statistics = team.sum_statistics(present.matrices, captured[index], wanted)
            arrived()
            intervals = NextIntervals(self.recipe.clock, group, present, self.layout)
            with team.fail_together(present, intervals.votes):
                unseen = self.refresh(present, statistics, group)
                intervals.count(present.layers)
                if unseen and capture.model is not None and capture.captures(group):
                    self._report_uncaptured(unseen, group, capture)
                self.update(present, group, team)
            intervals.settle()
            team.send(present.matrices)
            for stack in present.stacks:
                stack.end_step()
        # AdamW runs while steps are sent. It runs after all groups, because a rank may fail there.
        for group, present in both:
            if present.others:
                adamw_step(present.others, group, team.local, self._usable)
        team.finish()
        for group, present in both:
            group["step"] += bool(present.key)  # last: an interrupted step is not counted

    def refresh(
        self, present: Participants, statistics: Mapping[Tensor, Statistics], group: Group
    ) -> list[Layer]:
        """If t mod K = 0: renew factors and maps. A layer that fails keeps its old maps.

        Returns the layers whose turn it was to be observed, but of which nothing was captured.
        """
        geometry, clock = self.recipe.geometry, self.recipe.clock
        observed = [layer for layer in present.layers if clock.observes(group, layer.turn)]
        renewed = [layer for layer in present.layers if clock.renews(group, layer.turn)]
        for layer in observed:
            layer.statistics = statistics.get(layer.parameter)
        new = [layer for layer in renewed if not has_geometry(layer)]
        if new:
            self.reports.warn_if(costly_refresh(new, self.recipe.work, group), key="costly refresh")
        for observer in self.observers:
            observer.before_refresh(observed, renewed, group)
        cores = cores_for_workers(sum(layer.parameter.numel() for layer in renewed))
        with cores, cores:  # twice, see `cores_for_workers`
            failed = geometry.refresh(observed, renewed, present.stacks, group)  # (27), (28), (29)
        unseen = [layer for layer in observed if _is_empty(layer.statistics)]
        for layer in observed:
            layer.missed = layer.missed + 1 if _is_empty(layer.statistics) else 0
            layer.statistics = None
        if failed:
            self.reports.count_failures(failed)
        return unseen

    def _report_uncaptured(
        self, layers: Sequence[Layer], group: Group, capture: ModelCapture
    ) -> None:
        """Warn of layers that have no geometry although it was their turn, or only an old one."""
        missing: dict[tuple[str, bool], list[str]] = {}
        for layer in layers:
            has_maps = has_geometry(layer)
            # An expert without rows is no reason to warn, but its gradient may be there, as zeros.
            due = not has_maps or (layer.missed == MISSED and bool(layer.gradients.any()))
            if due and any(capture.sides_of(layer.parameter, group)):
                why = capture.why_missed(layer.parameter)
                missing.setdefault((why, has_maps), []).append(layer.name)
        if not float(group["lr"]):
            return
        for (why, has_maps), names in missing.items():
            self.reports.nothing_captured(names, why, MISSED if has_maps else 0)

    def update(self, present: Participants, group: Group, team: Team) -> None:
        """Move the weights, layers of one shape at a time, stacked [b, m, n]."""
        recipe, lr = self.recipe, group["lr"]
        directions = self.directions(present.stacks, group)  # (30)–(34)
        for stack, source, D in recipe.trust(directions, group, team.total):
            scale = recipe.rms_scale if group.get("lr_scale") == "adamw" else recipe.scale
            U = scale(D, stack, group)  # √max(1, m/n)·D_t
            factor, drift = recipe.decay(stack, group)
            if group.get("cautious_decay"):
                factor, drift = cautious(factor, drift, U, stack)
            stack.move(factor, lr * U if drift is None else drift + lr * U)  # (35) W_{t+1}
            stack.count_update()
            for observer in self.observers:
                observer.updated(stack, source, D, U, group)
            stack.close()
        if recipe.geometry.acts_after:
            due = [layer for layer in present.layers if recipe.clock.renews(group, layer.turn)]
            recipe.geometry.after(due, present.stacks, group)

    def directions(self, stacks: Sequence[Stack], group: Group) -> Iterator[Pending]:
        """Source and direction of every stack that moves. Several are computed in parallel."""
        moving = []
        for stack in stacks:
            if stack.updates < self.recipe.observes_first:
                stack.count_update()
            else:
                moving.append(stack)
        return concurrently([partial(self._direction, stack, group) for stack in moving])

    def _direction(self, stack: Stack, group: Group) -> Pending:
        with note_layers_on_error(stack.layers):
            source = self.recipe.source(stack, group)  # (30) M_t, (31) M̂_t
            D = self.recipe.direction(source, stack, group)  # (32) C_t, (33) D_{0,t}, (34) D_t
            return stack, source, stack.usable(D, 0.0) if self.check_finite else D


def _is_empty(statistics: Statistics | None) -> bool:
    return statistics is None or statistics.inputs is statistics.gradients is None


def _none_on_host(gradients: Sequence[Tensor]) -> bool:
    """Whether there are gradients, all of them on devices that the host should not wait for."""
    return bool(gradients) and not any(linalg.decomposes_well(g.device) for g in gradients)


def _step_number(groups: Sequence[Group]) -> int:
    return 1 + max(group["step"] for group in groups)
