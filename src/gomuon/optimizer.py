"""The optimizer: torch's interface around the step.

It does little itself. It calls its collaborators: the layout of its parameters
(`parameters/layout.py`), the capture of the model (`capture/model.py`), the team of ranks
(`distributed/team.py`), the step (`step.py`) and the store of checkpoints (`checkpoints/store.py`).
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, ClassVar, Self, TypedDict

import torch
from torch import Tensor, nn

from gomuon.capture.fisher import sampled_label_loss
from gomuon.capture.group import GroupCapture, remove_hooks
from gomuon.capture.hooks import unwrapped
from gomuon.capture.model import ModelCapture
from gomuon.checkpoints.allocation import allocate, drop_blank
from gomuon.checkpoints.rebuilt_maps import rebuild_maps, without_rebuilt_maps
from gomuon.checkpoints.store import Checkpoint, Store, shallow_copy
from gomuon.distributed.block_state import side_by_side
from gomuon.distributed.divided_state import GatheredState, drop_others_state, is_only_count
from gomuon.distributed.ranks import check_group
from gomuon.distributed.team import Captured, Team
from gomuon.distributed.team_finder import TeamFinder, is_distributed
from gomuon.errors import NonFiniteGradientError, RankError, describe_exception, describe_value
from gomuon.functional.linalg import full_precision
from gomuon.intervals import shortest
from gomuon.parameters.described_groups import described_groups
from gomuon.parameters.groups import is_matrix, named, names_of_model, with_groups
from gomuon.parameters.keeping import wait_for_copies
from gomuon.parameters.layers import Layer
from gomuon.parameters.layout import Layout
from gomuon.parameters.rates import (
    FIRST_STEPS,
    add_adamw_settings,
    add_base_rate,
    one_rate_written_into_all,
)
from gomuon.parameters.routing import Routes, RoutingTable, check_trainable
from gomuon.parameters.sharding import local_gradient
from gomuon.parameters.shares import few_matrices
from gomuon.parameters.specs import DEFAULT_SPEC, LayerSpec, layer_specs, with_shard
from gomuon.parameters.stacks import Participants
from gomuon.parameters.state import Cut, wide_entries
from gomuon.parameters.tensor_shards import tensor_shards
from gomuon.recipes.model_groups import groups_and_model, groups_of_model
from gomuon.recipes.overrides import Overrides
from gomuon.recipes.recipe import Recipe
from gomuon.reports import Reports
from gomuon.settings import AdamWSettings, check_settings
from gomuon.step import Observer, Step, has_geometry, outside_graphs
from gomuon.watching.doctor import Patient, diagnosis
from gomuon.watching.findings import Diagnosis
from gomuon.watching.layer_updates import HandedUpdates, LayerUpdate
from gomuon.watching.watch import Watch, Writer

Parameters = nn.Module | Iterable[Any]
Group = Mapping[str, Any]


class Common(TypedDict, total=False):
    """Keywords that every method takes."""

    adamw: AdamWSettings | None
    routes: Routes
    specs: Mapping[str, LayerSpec] | None
    example_input: Any
    overrides: Overrides
    model: nn.Module | None
    loss_reduction: str
    nonfinite: str
    work: str
    tensor_parallel: str
    process_group: Any


class MatrixOptimizer(torch.optim.Optimizer):
    """The base class of all methods: gradient → source → direction → scale → weights.

    The class's recipe updates matrices; AdamW updates all other parameters. See `GoMuon` for the
    arguments.
    """

    recipe: ClassVar[Recipe]

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor | None = None,
        *,
        adamw: AdamWSettings | None = None,
        routes: Routes = None,
        specs: Mapping[str, LayerSpec] | None = None,
        example_input: Any = None,
        overrides: Overrides = None,
        model: nn.Module | None = None,
        loss_reduction: str = "mean",
        nonfinite: str = "raise",
        work: str = "auto",
        tensor_parallel: str = "blocks",
        process_group: Any = None,
        preset: str | None = None,
        **settings: Any,
    ) -> None:
        if not hasattr(type(self), "recipe"):
            raise TypeError(
                f"{type(self).__name__} has no recipe: use a method such as gomuon.GoMuon, or a "
                "subclass with a `recipe`"
            )
        recipe, common = self.recipe, {"loss_reduction": loss_reduction, "nonfinite": nonfinite}
        common |= {"work": work, "tensor_parallel": tensor_parallel}
        defaults = recipe.values(settings, lr, adamw, preset, **common)
        if specs is not None and not isinstance(specs, Mapping):
            raise TypeError(f"specs must be a dict or None, got {describe_value(specs)}")
        check_group(process_group)
        self._make_collaborators(Layout(dict(specs or {})), defaults, process_group)
        of_model: dict[str, Any] = {"routes": routes, "overrides": overrides}
        of_model["example_input"] = example_input
        given, model = groups_and_model(recipe, params, model, {"specs": specs, **of_model})
        if model is not None:
            inner = unwrapped(model)
            layout = self._layout
            layout.shards = tensor_shards(inner)
            table, groups = groups_of_model(recipe, inner, given, defaults, layout, **of_model)
            layout.table = table
            super().__init__(groups, defaults)
            self._watch_steps()
            self.attach(model)
            self._reports.warn_if(few_matrices(table))
            return
        assert given is not None
        super().__init__(given, defaults)
        self._watch_steps()
        if self._captures:
            self._reports.without_model(type(self).__name__)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show the recipe's defaults in the signature of a class without its own __init__."""
        super().__init_subclass__(**kwargs)
        if "__init__" not in cls.__dict__ and hasattr(cls, "recipe"):
            cls.__signature__ = cls.recipe.signature()  # type: ignore[attr-defined]

    def _make_collaborators(
        self, layout: Layout, defaults: Group, process_group: Any = None
    ) -> None:
        """Make everything that is not saved: the collaborators, and data kept between steps."""
        recipe = self.recipe
        self._layout = layout
        layout.captured = recipe.geometry.uses_moments
        layout.gathers = defaults["tensor_parallel"] == "exact"
        layout.wide = wide_entries(recipe.geometry.entries)
        self._reports = Reports()
        self._teams = TeamFinder(process_group, layout, recipe.geometry, defaults)
        sides, observes = recipe.geometry.captured_sides, recipe.clock.observes
        self._capture = ModelCapture(layout, sides, observes, self._teams.staggers)
        check_finite = defaults["nonfinite"] != "allow"
        self._step = Step(recipe, layout, self._reports, check_finite=check_finite)
        self._store = Store(recipe)
        self._incoming: Checkpoint | None = None  # a checkpoint that is being loaded
        self._state_not_divided = False  # the next step divides it among the ranks
        self._gathered: GatheredState | None = None  # until the next step
        self._awaits_model = False  # unpickled: how parameters are cut is known after attach()
        # The list is shared, so hooks of groups added later are also removed with the optimizer.
        weakref.finalize(self, remove_hooks, self._capture.groups)
        weakref.finalize(self, self._teams.wrapper.remove)

    # ---- the step --------------------------------------------------------------------------------

    # The step depends on the captured data and calls LAPACK, so compiling it would gain nothing.
    @outside_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._report_late_faults()
        if self.param_groups[0]["step"] < FIRST_STEPS:
            self._reports.warn_if(one_rate_written_into_all(self.param_groups), key="one rate")
        team, parameters = self._team(), self._all_parameters()
        cores = self._step.cores(self.param_groups)
        if self._teams.may_be_wrapped:
            self._continue_without_wrapper(team)
        # Twice: if an interrupt stops the end of the first, the second gives the cores back.
        with full_precision(parameters), cores, cores, self._step.dropped_on_failure(team):
            fault, captured = team.agree(
                partial(self._local_check, team), self.recipe.name, self.param_groups
            )
            if fault is None:
                if self._state_not_divided:  # only now: ranks that differ must lose nothing
                    self._divide_state(team)
                present = self._find_participants(team)
                self._step.take(self.param_groups, present, team, captured, self._capture)
            else:
                self._raise_or_skip(fault)
        self._stream_sums(team)
        self._gate()
        return loss

    def _all_parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _find_participants(self, team: Team) -> list[Participants]:
        groups = self.param_groups
        return self._step.find_participants(groups, self.state, team, self._choose_owners)

    # ---- gradients that cannot be used -----------------------------------------------------------

    def _local_check(self, team: Team) -> tuple[str | None, Captured]:
        """What is wrong with this rank's gradients, and its statistics of this step."""
        captured = self._capture.collect(team.averaged)
        return self._step.find_fault(self.param_groups, team), captured

    def _report_late_faults(self) -> None:
        """Raise or count what was wrong with earlier steps, depending on `nonfinite`."""
        faults = self._step.late_faults()
        if faults and self.defaults["nonfinite"] == "raise":
            raise NonFiniteGradientError(
                f"{faults[0]}; all gradients of that step were taken as zero, and it is reported "
                'late so that no step waits. Pass nonfinite="skip" to go on after such steps'
            )
        for fault in faults:
            self._count_skipped(f"{fault}; all gradients of that step were taken as zero")

    def _count_skipped(self, reason: str) -> None:
        for group in self.param_groups:
            group["skipped"] = group.get("skipped", 0) + 1
        self._reports.warn_once(f"{reason} (the groups count these as 'skipped')")

    def _raise_or_skip(self, fault: str) -> None:
        """Raise or skip the step, depending on `nonfinite`. Nothing has changed yet."""
        if self.defaults["nonfinite"] == "raise":
            raise NonFiniteGradientError(
                f'{fault}; nothing was changed. Pass nonfinite="skip" to skip such steps'
            )
        self._count_skipped(f"{fault}; the step was skipped")

    # ---- watching --------------------------------------------------------------------------------

    def watch(
        self,
        every: int = 10,
        *,
        to: Writer | Iterable[Writer] | None = None,
        spectra: int = 6,
        gather: bool = False,
    ) -> Watch:
        """Record what the geometry does in every layer (docs/watch.md). No step changes by a bit.

        Args:
            every: one `WatchRecord` for each layer every so many steps. Nothing is read from the
                device in between.
            to: a function, or several, called with the list of records each time: a writer of
                `gomuon.integrations`, or your own. None: the watch keeps them until you take them.
            spectra: numbers that need spectra (oracle value, condition numbers, drift, …) cost as
                much as a step. A layer's are in every so-manyth of its records, layers taking
                turns. 1: in every record.
            gather: every rank gets the records of all ranks. All ranks must then watch alike.
                Otherwise a rank records the layers that it computes.

        Returns:
            The watch. `remove()` ends it, and so does the end of a `with` block.
        """
        team = self._team if gather else None
        return Watch(self, self._step, every, to, spectra, rank=self._rank, team=team)

    def doctor(self) -> Diagnosis:
        """What looks wrong, in sentences: print it. Best after `watch()` and some hundred steps.

        It looks at the layers that this rank computes. See docs/watch.md for its checks.
        """
        watches = [one for one in self._step.observers if isinstance(one, Watch)]
        histories = watches[-1].history if watches else {}
        patients = [
            Patient(layer, self.param_groups[index], histories.get(layer.name, ()))
            for index, present in self._step.participants.items()
            for layer in present.layers
        ]
        of_group = {id(patient.layer): patient.group for patient in patients}
        return diagnosis(
            patients,
            lambda layer: self._why_never_captured(layer, of_group[id(layer)]),
            watched=bool(watches),
        )

    def _why_never_captured(self, layer: Layer, group: Group) -> str | None:
        """Why a layer that should be captured has no geometry; None if it has, or is not due."""
        sides = self._capture.sides_of(layer.parameter, group)
        due = group["step"] >= (shortest(group.get("refresh_every")) or 1)
        if has_geometry(layer) or not due or not any(sides):
            return None
        if self._capture.model is None:
            return "the optimizer was given parameters, not a model: pass model=, or the model"
        return self._capture.why_missed(layer.parameter).rstrip(".")

    @staticmethod
    def _rank() -> int:
        return torch.distributed.get_rank() if is_distributed() else 0

    def add_observer(self, observer: Callable[[LayerUpdate], Any]) -> Callable[[], None]:
        """Call `observer` with a `LayerUpdate` for every updated layer; returns a way to stop."""
        return self._observe(HandedUpdates(observer))

    def _observe(self, observer: Observer) -> Callable[[], None]:
        self._step.observers.append(observer)
        return lambda: self._step.observers.remove(observer)

    # ---- the model -------------------------------------------------------------------------------

    def attach(self, model: nn.Module) -> None:
        """Place the capturing hooks on `model`, whose parameters this optimizer has.

        The constructor does this if it is given a model. Call it again after unpickling.
        """
        self.remove_hooks()
        inner = unwrapped(model)
        self._layout.shards = tensor_shards(inner)
        # A method that captures nothing is also correct without finding the wrapper, only with more
        # work. Without ranks its model gets no hook, so that torch.jit.script can compile it.
        if self._captures or is_distributed():
            self._teams.watch(model)
        self._layout.specs = self._layer_specs(inner)
        # After the wrapper was looked for: whether layers take turns may depend on it.
        self._capture.attach(inner, self.param_groups, self.state)
        self._step.participants.clear()
        if self._captures and self._teams.is_known(self.param_groups):
            with suppress(ValueError):  # the step raises it
                self._stream_sums(self._team())

    def remove_hooks(self) -> None:
        """Remove every hook from the model. The geometry then does not change any more."""
        self._capture.remove()
        self._teams.wrapper.remove()

    @property
    def _captures(self) -> bool:
        return any(map(self._capture.captures, self.param_groups))

    def _layer_specs(self, model: nn.Module) -> dict[Tensor, LayerSpec]:
        """How parameters are cut into matrices: by module, by `specs`, then by the method."""
        held = {p for group in self.param_groups for p in group["params"] if is_matrix(group, p)}
        biases = held if self.recipe.joins_bias else set()
        layout = self._layout
        specs = layer_specs(model, biases, layout.patterns, captured=layout.captured)
        specs |= self.recipe.model_use.specs(model, self.defaults)
        divided = {} if layout.gathers else layout.shards_without(layout.own_among(specs))
        for name, parameter in model.named_parameters():
            if (shard := divided.get(parameter)) is not None:
                spec = specs.get(parameter, DEFAULT_SPEC)
                specs[parameter] = with_shard(name, spec, parameter, shard)
        return specs

    def _gate(self) -> None:
        """Open the hooks if the next step refreshes. Called before its forward pass."""
        for index in self._capture.gate(self.param_groups, self.state):
            self._step.participants.pop(index, None)  # phases may have changed

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and the statistics that came with them."""
        super().zero_grad(set_to_none)
        self._capture.forget_sums()

    def sample_labels(self, logits: Tensor, generator: torch.Generator | None = None) -> None:
        """Use true-Fisher backward factors: labels drawn from the model, not the observed labels.

        Call it between the forward pass and `loss.backward()`, and `zero_grad()` before both: it
        drops what was captured. On refresh steps it costs one backward pass to the activations,
        without weight gradients. On other steps it returns at once. If refreshes are staggered,
        every step is a refresh step: pass stagger=False to pay for it only once in K steps.
        """
        if self._capture.is_open:
            loss = sampled_label_loss(logits, self.defaults["loss_reduction"], generator)
            self._capture.use_gradients_of(loss)

    def statistics_mask(self, mask: Tensor) -> AbstractContextManager[None]:
        """Leave positions with a zero in `mask` [batch, positions] out of the statistics.

        It applies to forward passes inside the context, and to layers with one row per entry of the
        mask. Reentrant checkpointing repeats forward passes in the backward pass; these use the
        last mask.
        """
        if any(group.get("reduce") for group in self.param_groups):
            raise ValueError(
                "statistics_mask is not possible with reduce=True, which averages over positions; "
                "set reduce=False"
            )
        return self._capture.masked(mask)

    def use_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        """Set the GradScaler, so that captured gradients are divided by its scale.

        Without it, statistics are correct only while the scale is constant. If the scale changes,
        B̄ weights old and new statistics by their scales.
        """
        self._capture.scaler = scaler

    # ---- parameter groups ------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters. Linear layers of the attached model are captured.

        A group takes the constructor's keywords and `treatment`: "matrix", "adamw" (then `lr` and
        `weight_decay` are AdamW's), or "auto", the default: parameters with two or more dimensions
        are matrices. In an "auto" group AdamW's rate is scaled by `lr` / `base_lr`. The default of
        `base_lr` is the first `lr` of the group.
        """
        group = dict(param_group)  # the caller's dict is not changed
        group.setdefault("treatment", "auto")
        check_settings(group, self.recipe.settings)
        add_adamw_settings(group, self.defaults)
        group.setdefault("step", 0)
        if "params" not in group:
            raise ValueError(f"a group must have 'params', got a group with {list(param_group)}")
        model, index = self._capture.model, len(self.param_groups)
        group["params"] = names_of_model(group["params"], self.param_groups, model)
        super().add_param_group(group)
        added = self.param_groups[-1]
        try:
            for name, parameter in named(added, index):
                check_trainable(name, parameter, divided=parameter in self._layout.shards)
        except ValueError:
            del self.param_groups[-1]
            raise
        add_base_rate(added, self.recipe.settings["lr"].default)
        if isinstance(added["lr"], Tensor):
            # A view, so that writing to the given tensor still has an effect.
            added["lr"] = added["lr"].reshape(())
        self._capture.groups.append(GroupCapture())
        if model is not None:
            # Only the specs of new parameters: a bias of an older parameter may be new here.
            specs = self._layer_specs(model)
            self._layout.specs |= {p: specs[p] for p in added["params"] if p in specs}
        self._capture.add_group(index, added)
        self._teams.compare_again()
        self._gathered = None

    def routing_table(self) -> RoutingTable:
        """Every parameter with its treatment, the reason, and what its factors look like."""
        table = with_groups(self._layout.table, self.param_groups, self._layout.own)
        return table.with_geometry(self._capture.geometry(self.param_groups))

    def __repr__(self) -> str:
        groups = described_groups(self.param_groups)
        return f"{type(self).__name__} (\n{groups}\n)\n{self.routing_table()}"

    # ---- several ranks ---------------------------------------------------------------------------

    def _team(self) -> Team:
        """The ranks that work together. If they have changed, the next step divides the state."""
        team, changed = self._teams.team(self.param_groups)
        if changed:
            self._step.participants.clear()
            self._state_not_divided = True
        return team

    def _stream_sums(self, team: Team) -> None:
        """Send captured sums during backward passes. All ranks call this at the same time."""
        if self._capture.model is not None and self._captures:
            # Weak: the team must not keep its optimizer alive.
            choose = weakref.WeakMethod(self._choose_owners)
            team.stream_sums(self._capture, partial(_call, choose), self._teams.wrapper.averages)

    def _continue_without_wrapper(self, team: Team) -> None:
        """No wrapper was found: divide the state, and warn if there are other ranks."""
        if self._state_not_divided:
            self._divide_state(team)
        # Without statistics, equal gradients give equal steps, so no warning is needed.
        has_model = self._capture.model is not None
        matters = has_model and self._captures and self._teams.other_ranks
        if matters and any(float(group["lr"]) for group in self.param_groups):
            self._reports.alone_among_ranks()

    def _choose_owners(self, ranks: int) -> Mapping[Tensor, int]:
        return self._teams.owners(self.param_groups, ranks)

    def _divide_state(self, team: Team) -> None:
        """Drop the state of matrices that other ranks own, after loading."""
        self._state_not_divided = False
        owners = team.owners(self._choose_owners)
        if missing := drop_others_state(self.state, self.param_groups, owners, team.rank):
            self._reports.partial_checkpoint(missing)

    def owners(self) -> dict[str, int]:
        """The rank that keeps each matrix's state and computes its steps; empty without owners.

        A bias that joins its weight has the same owner as the weight.
        """
        owners = self._team().owners(self._choose_owners)
        return {
            name: owners[parameter]
            for index, group in enumerate(self.param_groups)
            for name, parameter in named(group, index)
            if parameter in owners
        }

    def consolidated_state_dict(self) -> dict[str, Any]:
        """The whole state, as one process would save it, on every rank. All ranks must call it.

        `state_dict()` has only this rank's part: its own matrices and its own rows. Both can be
        loaded on any number of ranks. With torch.distributed.checkpoint no rank needs memory for
        the whole state.
        """
        own = self._own_state_dict()
        return {**own, "state": self._whole_state(own["state"], to=None)}

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on rank `to`, for saving. All ranks must call it.

        Until the next step `state_dict()` of that rank is then the whole state. Lightning calls
        this before it saves; the name is that of torch's ZeroRedundancyOptimizer.
        """
        team = self._team()
        if not isinstance(to, int) or not 0 <= to < team.size:
            raise ValueError(
                f"to must be a rank from 0 to {team.size - 1}, got {describe_value(to)}"
            )
        self._gathered = None
        if team.size > 1:
            whole = self._whole_state(self._own_state_dict()["state"], to)
            self._gathered = GatheredState(whole if team.rank == to else None)

    def _whole_state(self, state: dict[int, Any], to: int | None) -> dict[int, Any]:
        team = self._team()
        owners = team.owners(self._choose_owners)
        parameters = enumerate(self._all_parameters())
        owned = [number for number, p in parameters if owners.get(p) == team.rank]
        return team.consolidated(state, owned, to)

    # ---- saving, loading, copying ----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Torch's state_dict with the format number and the method's name.

        If ranks share the work, it has only this rank's part, with one warning. After
        `consolidate_state_dict()` it is whole on one rank.
        """
        own = self._own_state_dict()
        if self._gathered is not None:
            whole = self._gathered.entries
            return own if whole is None else {**own, "state": dict(whole)}
        if any(map(is_only_count, own["state"].values())):
            self._reports.part_of_state()
        return own

    def _own_state_dict(self) -> Checkpoint:
        self._step.report_unusable()
        self._wait_for_offloaded()
        saved = self._store.saved(super().state_dict())
        if any(group.get("rebuild_maps") for group in self.param_groups):
            whole, groups = saved["state"], self.param_groups
            saved["state"] = without_rebuilt_maps(whole, groups, self._layout, self.recipe)
        if self._layout.blocks:
            every = self._all_parameters()
            saved["state"] = side_by_side(saved["state"], every, self._layout.blocks)
        return saved

    def _wait_for_offloaded(self) -> None:
        if any(group.get("offload") for group in self.param_groups):
            wait_for_copies(self._all_parameters())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Like torch's, but matched by name if there are names, and in the saved precision.

        Raises:
            ValueError: the checkpoint does not fit; the optimizer is not changed.
        """

        def fit(_: torch.optim.Optimizer, incoming: Any) -> Checkpoint:
            self._incoming = self._store.fitted(self.param_groups, incoming, self._cut_of)
            return self._incoming

        before = self.state, self.param_groups
        handle = self.register_load_state_dict_pre_hook(fit)
        try:
            super().load_state_dict(shallow_copy(state_dict))
            team = self._team()
            self._state_not_divided = self._teams.may_be_wrapped  # then the next step divides it
            if not self._state_not_divided:
                self._divide_state(team)
            rebuild_maps(self.state, self.param_groups, self._layout, self.recipe)
            self._gate()
            older = self.recipe.older
            if older is not None and older.changed and older.include(state_dict["param_groups"]):
                self._reports.changed_since(self.recipe.name, older.changed)
        except BaseException as failure:
            if self.param_groups is not before[1]:  # restore what was replaced
                self.state, self.param_groups = before
                self._gate()
            if isinstance(failure, (ValueError, RankError, Warning)) or not isinstance(
                failure, Exception
            ):
                raise  # the message is complete, or it is an interrupt
            raise ValueError(
                "this checkpoint cannot be loaded; the optimizer was not changed: "
                f"{describe_exception(failure)}"
            ) from failure
        finally:
            handle.remove()
            self._incoming = None
        self._step.participants.clear()
        self._gathered = None

    def _cut_of(self, parameter: Tensor, group: Group) -> Cut:
        known = self._capture.model is not None or not self._awaits_model
        return self._layout.cut_of(parameter, group, known=known)

    def __getstate__(self) -> dict[str, Any]:
        """Like torch's, with the specs, because the geometry depends on them."""
        self._wait_for_offloaded()
        of_model = self._capture.model is not None or self._awaits_model
        return {**super().__getstate__(), "specs": self._layout.patterns, "of_model": of_model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        specs, of_model = state.pop("specs", None), state.pop("of_model", True)
        incoming = self.__dict__.get("_incoming")
        super().__setstate__(state)
        if incoming is not None:  # called by torch's load_state_dict, which rounds state
            for parameter in self._all_parameters():
                self.state.pop(parameter, None)
            self.state.update(self._store.restored(self.param_groups, incoming))
        if "_capture" not in self.__dict__:  # unpickled or copied
            self.defaults.setdefault("work", "shared")  # the default of older versions
            self.defaults.setdefault("tensor_parallel", "blocks")
            self._make_collaborators(Layout(dict(specs or {})), self.defaults)
            self._awaits_model = of_model
            self._capture.groups.extend(GroupCapture() for _ in self.param_groups)
            self._watch_steps()
            for holder in (self.defaults, *self.param_groups):  # may be older than a setting
                for name, value in self.recipe.defaults.items():
                    holder.setdefault(name, self.defaults.get(name, value))
            base_lr = float(self.defaults["lr"]) or self.recipe.settings["lr"].default
            for group in self.param_groups:
                group.setdefault("base_lr", base_lr)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        new._teams.process_group = self._teams.process_group  # not copied: it cannot be
        new._layout.table = copy.deepcopy(self._layout.table, memo)
        new._layout.ignored = frozenset(memo.get(id(p), p) for p in self._layout.ignored)
        new._capture.scaler = memo.get(id(self._capture.scaler), self._capture.scaler)
        if self._capture.model is not None:
            new.attach(copy.deepcopy(self._capture.model, memo))
        new._teams.wrapper.copy_from(self._teams.wrapper)
        new._gate()  # whether layers take turns may depend on the wrapper
        return new

    # ---- allocated state, see `checkpoints/allocation.py` ----------------------------------------

    def _watch_steps(self) -> None:
        self._had_state = False
        self.register_step_pre_hook(_before_step)
        self.register_step_post_hook(_after_step)

    def _only_created_state(self) -> bool:
        """Whether the last step was the first one and could not move anything."""
        if self._had_state or any(float(group["lr"]) for group in self.param_groups):
            return False
        gradients = [local_gradient(parameter) for parameter in self._all_parameters()]
        return not self._team().any(any(bool(g.any()) for g in gradients if g is not None))

    def _allocate_state(self) -> None:
        present = self._find_participants(self._team())
        statistics = [capture.identity_statistics for capture in self._capture.groups]
        allocate(self._step, self.param_groups, present, lambda i, p: statistics[i](p), self.state)
        self._step.participants.clear()
        self._teams.compare_again()
        self._gate()


def _call(method: "weakref.WeakMethod[Callable[..., Any]]", *args: Any) -> Any:
    found = method()
    assert found is not None
    return found(*args)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    assert isinstance(optimizer, MatrixOptimizer)
    optimizer._gathered = None
    if not optimizer._had_state:
        drop_blank(optimizer.state)
    optimizer._had_state = bool(optimizer.state)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    assert isinstance(optimizer, MatrixOptimizer)
    if optimizer._only_created_state():
        with torch.no_grad():
            optimizer._allocate_state()
