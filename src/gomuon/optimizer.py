"""The optimizer: state, clock and gate around the paper's "Complete update"."""

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn

from gomuon.adamw import adamw_step
from gomuon.axes import Pending
from gomuon.batching import alike
from gomuon.capture import Capture, Statistics
from gomuon.consolidation import keep_count
from gomuon.entries import Cut
from gomuon.errors import GeometryWarning, NonFiniteGradientError, naming
from gomuon.exchange import Matrix, OwnedLayer
from gomuon.faults import all_finite, dense_gradients, unusable_gradients
from gomuon.functional.checks import shown
from gomuon.functional.spreading import concurrently, cores_for_workers
from gomuon.groups import (
    cut,
    groups_of,
    is_matrix,
    joined_biases,
    named,
    with_groups,
)
from gomuon.layers import PLAIN, Layer, LayerSpec, follow
from gomuon.ranks import check_group
from gomuon.recipes import Recipe
from gomuon.routing import (
    Routes,
    RoutingTable,
    check_trainable,
    plain_name,
    route,
    unwrapped,
)
from gomuon.settings import ADAMW_DEFAULTS, AdamWSettings, check_settings
from gomuon.sharing import SharingOptimizer, local_gradients
from gomuon.stacks import Roll, Stack

Parameters = nn.Module | Iterable[Any]
Observer = Callable[[Stack, Tensor, Tensor], None]


class Common(TypedDict, total=False):
    """Keywords every method takes."""

    adamw: AdamWSettings | None
    routes: Routes
    specs: Mapping[str, LayerSpec] | None
    loss_reduction: str
    nonfinite: str
    work: str
    process_group: Any


def _outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.disable`, put off to the first call: it loads the compiler."""
    disabled = functools.cache(lambda: torch.compiler.disable(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return disabled()(*args, **kwargs)

    return call


class MatrixOptimizer(SharingOptimizer):
    """One walk, gradient → source → direction → scale → weights, for every recipe.

    Matrices go through the recipe; everything else goes to AdamW. See `GoMuon` for the arguments.
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
        loss_reduction: str = "mean",
        nonfinite: str = "raise",
        work: str = "auto",
        process_group: Any = None,
        **settings: Any,
    ) -> None:
        self.recipe.check_known(settings)
        defaults = {
            **self.recipe.defaults,
            **settings,
            "lr": self.recipe.defaults["lr"] if lr is None else lr,
            "adamw": adamw if adamw is not None else {},
            "loss_reduction": loss_reduction,
            "nonfinite": nonfinite,
            "work": work,
        }
        check_settings(defaults, self.recipe.checks)
        defaults["adamw"] = {**ADAMW_DEFAULTS, **defaults["adamw"]}
        if specs is not None and not isinstance(specs, Mapping):
            raise TypeError(f"specs must be a dict or None, got {shown(specs)}")
        self._begin(specs)
        check_group(process_group)
        self._process_group = process_group
        if isinstance(params, nn.Module):
            model = unwrapped(params)
            self._table = self._adapted(model, route(model, routes))
            super().__init__(self._groups_of(self._table, defaults), defaults)
            self.attach(params)
        else:
            if routes is not None or specs is not None:
                raise ValueError("routes and specs need the model: pass it, not its parameters")
            if not isinstance(params, Iterable):
                raise TypeError(
                    f"params must be a model, parameters or groups of them, got {shown(params)}"
                )
            self._check_bare()
            super().__init__(params, defaults)
            self._warn_uncaptured_construction()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show a recipe's own defaults in the signature of a class that adds no __init__."""
        super().__init_subclass__(**kwargs)
        if "__init__" not in cls.__dict__ and hasattr(cls, "recipe"):
            cls.__signature__ = cls.recipe.signature()  # type: ignore[attr-defined]

    def _begin(self, specs: Mapping[str, LayerSpec] | None = None) -> None:
        """What is not saved: hooks, observers, the model they belong to."""
        self._model: nn.Module | None = None
        self._table = RoutingTable()
        self._specs: dict[Tensor, LayerSpec] = {}
        self._spec_patterns = dict(specs or {})
        self._forget_ranks()
        self._process_group: Any = None
        self._lags: dict[Tensor, float] = {}
        self._rolls: dict[int, Roll] = {}  # by group
        self._captures: list[Capture] = []  # one per group
        self._observers: list[Observer] = []
        self._scaler: torch.amp.GradScaler | None = None
        self._warned: set[str] = set()
        self._incoming: dict[str, Any] | None = None
        # The list is shared, so hooks of groups added later go too when the optimizer goes.
        weakref.finalize(self, _remove_all, self._captures)

    # ---- the step ---------------------------------------------------------------------------

    # The step branches on what was captured and calls LAPACK, which a graph gains nothing from.
    @_outside_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        cores = self._cores()
        # Twice: an interrupt may cut short the end of one, and then the other gives cores back.
        with self._full_precision(), cores, cores, self._forgotten_on_failure():
            if self._gradients_are_finite():
                rolls = [self._roll(index, group) for index, group in enumerate(self.param_groups)]
                for index, roll in enumerate(rolls):
                    self._step_matrices(index, self.param_groups[index], roll)
                for group, roll in zip(self.param_groups, rolls, strict=True):
                    self._step_others(group, roll)
                self._arrive()
                for group, roll in zip(self.param_groups, rolls, strict=True):
                    group["step"] += bool(roll.key)  # last: what was interrupted is not counted
        self._gate()
        return loss

    @contextmanager
    def _forgotten_on_failure(self) -> Iterator[None]:
        """Keep nothing but the state of a step that ends in an exception.

        Gradients and statistics left in the stacks would move the weights in the next step.
        """
        try:
            yield
        except BaseException:
            self._rolls.clear()
            self._forget_messages()
            raise

    @contextmanager
    def _full_precision(self) -> Iterator[None]:
        """Without autocast, if the step is taken inside of it."""
        kinds = {p.device.type for group in self.param_groups for p in group["params"]}
        with ExitStack() as exact:
            for kind in kinds:
                if torch.is_autocast_enabled(kind):
                    exact.enter_context(torch.autocast(kind, enabled=False))
            yield

    def _cores(self) -> AbstractContextManager[None]:
        """Small models compute elementwise on one core, and matrices side by side on all."""
        size = sum(p.numel() for group in self.param_groups for p in group["params"])
        return cores_for_workers() if size <= _SMALL else nullcontext()

    def _step_matrices(self, index: int, group: dict[str, Any], roll: Roll) -> None:
        if not (roll.stacks or roll.matrices):
            return
        arrived = self._receive(roll.matrices, group)
        seen = self._seen(index, roll.matrices)
        arrived()
        with self._together(roll):
            self._refresh(roll.stacks, seen, group)
            self._update(roll.stacks, group)
            self.recipe.geometry.after(roll.stacks, group)
        self._send(roll.matrices)
        for stack in roll.stacks:
            stack.end()

    def _step_others(self, group: dict[str, Any], roll: Roll) -> None:
        """AdamW, while the matrices' steps travel; last, for another rank's work may fail."""
        if roll.others:
            adamw_step(roll.others, [self.state[parameter] for parameter in roll.others], group)

    def _update(self, stacks: Sequence[Stack], group: Mapping[str, Any]) -> None:
        """The paper's "Complete update", for layers of one shape at a time, stacked [b, m, n]."""
        recipe, lr = self.recipe, group["lr"]
        for stack, source, D in recipe.trust(self._directions(stacks, group), group, self._total):
            U = recipe.scale(D, stack, group)
            factor, drift = recipe.decay(stack, group)
            stack.move(factor, lr * U if drift is None else drift + lr * U)
            stack.count()
            for observe in self._observers:
                observe(stack, source, U)

    def _directions(self, stacks: Sequence[Stack], group: Mapping[str, Any]) -> Iterator[Pending]:
        moving = []
        for stack in stacks:
            if stack.updates < self.recipe.observes_first:
                stack.count()
            else:
                moving.append(stack)
        return concurrently([partial(self._direction, stack, group) for stack in moving])

    def _direction(self, stack: Stack, group: Mapping[str, Any]) -> Pending:
        with naming(stack.layers):
            source = self.recipe.source(stack, group)  # M_t, M̂_t
            D = self.recipe.direction(source, stack, group)  # D_{0,t}
            return stack, source, D if self._allows_nonfinite else stack.usable(D, 0.0)

    def _refresh(
        self, stacks: Sequence[Stack], seen: Mapping[Tensor, Statistics], group: Mapping[str, Any]
    ) -> None:
        """A_t, B_t ← statistics; B̄_t; P_A, P_B. What was not seen or is unusable stays."""
        geometry = self.recipe.geometry
        layers = [layer for stack in stacks for layer in stack.layers]
        due = [layer for layer in layers if geometry.capture_due(group, layer.lag)]
        for layer in due:
            layer.statistics = seen.get(layer.parameter)
        self._report(geometry.before(stacks, group))
        for layer in due:
            layer.statistics = None
        if due and self._model is not None and float(group["lr"]):
            self._warn_blind(due, group)

    def _warn_blind(self, layers: Sequence[Layer], group: Mapping[str, Any]) -> None:
        if any(self.recipe.geometry.captured_sides(group)):
            blind = [layer for layer in layers if not _GEOMETRY & layer.state.keys()]
            if blind:
                names = ", ".join(repr(layer.name) for layer in blind)
                self._warn_once(
                    f"nothing was captured of {names}: since the last step no forward pass in "
                    "training mode went through its module. It runs on identity maps, as Muon does "
                    "(a model compiled and run before its optimizer was made ignores hooks until "
                    "torch.compiler.reset() is called)"
                )

    def add_observer(self, observer: Observer) -> Callable[[], None]:
        """Call `observer(stack, source, U)` for every stack updated; returns what ends it."""
        self._observers.append(observer)
        return lambda: self._observers.remove(observer)

    # ---- groups --------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; those of linear layers of the attached model are captured as well.

        Besides the constructor's keywords a group may say `treatment`: "matrix", "adamw" (then `lr`
        and `weight_decay` are AdamW's) or "auto", the default: a matrix has two dimensions or more.
        In an "auto" group AdamW's rate follows `lr` in proportion, and is its own where `lr` is
        `base_lr`, by default what the group came with.
        """
        group = dict(param_group)  # the caller's stays as it is
        group.setdefault("treatment", "auto")
        check_settings(group, self.recipe.checks)
        group["adamw"] = {**self.defaults["adamw"], **group.get("adamw", {})}
        if group["treatment"] == "adamw":
            group.setdefault("lr", group["adamw"]["lr"])
            group.setdefault("weight_decay", group["adamw"]["weight_decay"])
        group.setdefault("step", 0)
        if "params" not in group:
            raise ValueError(f"a group must have 'params', got one with {list(param_group)}")
        group["params"] = self._with_names(group["params"])
        super().add_param_group(group)
        index = len(self.param_groups) - 1
        try:
            for name, parameter in named(self.param_groups[-1], index):
                check_trainable(name, parameter)
        except ValueError:
            del self.param_groups[-1]
            raise
        added = self.param_groups[-1]
        # A number: schedulers write into a tensor. Where nothing moves at first, the method's own.
        added.setdefault("base_lr", float(added["lr"]) or self.recipe.defaults["lr"])
        if isinstance(added["lr"], Tensor):
            # A view, so that whoever writes into the given tensor is heard.
            added["lr"] = added["lr"].reshape(())
        self._captures.append(Capture())
        if self._model is not None:
            specs = self._layer_specs(self._model)  # others' stay: a bias of theirs may be new here
            self._specs |= {p: specs[p] for p in self.param_groups[-1]["params"] if p in specs}
        self._hook_group(index)
        self._captures[index].gate(partial(self.recipe.geometry.capture_due, group))

    def _with_names(self, params: Any) -> Any:
        """Parameters under the names the attached model has for them, if the others have names."""
        named_already = bool(self.param_groups) and "param_names" in self.param_groups[0]
        if self._model is None or not named_already or isinstance(params, set):
            return params  # sets are torch's to refuse
        given = [params] if isinstance(params, Tensor) else list(params)
        if not all(isinstance(one, Tensor) for one in given):
            return given
        names: dict[Tensor, str] = {
            p: plain_name(name) for name, p in self._model.named_parameters()
        }
        count = sum(len(group["params"]) for group in self.param_groups)
        return [(names.get(p, f"parameter {count + i}"), p) for i, p in enumerate(given)]

    def routing_table(self) -> RoutingTable:
        """Every parameter, its treatment, and the reason."""
        return with_groups(self._table, self.param_groups)

    def __repr__(self) -> str:
        return f"{super().__repr__()}\n{self.routing_table()}"

    def _roll(self, index: int, group: Mapping[str, Any]) -> Roll:
        """Who takes part in a step, stacked; the same objects while the same take part."""
        present = [p for p in group["params"] if p.grad is not None and p.numel()]
        key = [(id(p), p.dtype, p.device, id(self.state[p])) for p in present]
        roll = self._rolls.get(index)
        if roll is None or roll.key != key:
            roll = self._rolls[index] = self._new_roll(index, group, key, set(present))
        return roll

    def _new_roll(
        self, index: int, group: Mapping[str, Any], key: list[Any], present: set[Tensor]
    ) -> Roll:
        layers: list[Layer] = []
        matrices: list[Matrix] = []
        others: list[Tensor] = []
        joined = {spec.bias for weight, spec in self._specs.items() if weight.grad is not None}
        for name, parameter in named(group, index):
            if parameter not in present or parameter in joined:
                continue
            state = self.state[parameter]
            if is_matrix(group, parameter):
                spec, lag = self._spec_of(parameter, group), self._lags.get(parameter, 0.0)
                if self._exchange is None:
                    layers.append(Layer(name, parameter, state, spec, lag))
                    continue
                matrices.append(self._matrix(name, parameter, spec))
                if matrices[-1].owner == self._exchange.ranks.rank:
                    layer = OwnedLayer(name, parameter, state, spec, lag)
                    matrices[-1].layer = layer
                    layers.append(layer)
                else:
                    keep_count(state)
            else:
                follow(parameter, state)
                others.append(parameter)
        stacks = [Stack(batch) for batch in alike(layers, _kind)]
        return Roll(key, stacks, others, matrices)

    def _check_bare(self) -> None:
        """Raise a ValueError where a method cannot do without the model."""

    def _adapted(self, model: nn.Module, table: RoutingTable) -> RoutingTable:
        """The routing as this method needs it."""
        return joined_biases(model, table) if self.recipe.joins_bias else table

    def _groups_of(self, table: RoutingTable, defaults: dict[str, Any]) -> list[dict[str, Any]]:
        """Parameter groups of a routed model."""
        return groups_of(table)

    # ---- faults ----------------------------------------------------------------------------------

    def _gradients_are_finite(self) -> bool:
        """True, or raise or skip as `nonfinite` says, before anything has changed."""
        fault = self._agreed_fault()
        if fault is None:
            return True
        if self.defaults["nonfinite"] == "raise":
            raise NonFiniteGradientError(
                f'{fault}; nothing was changed. Pass nonfinite="skip" to leave such steps out'
            )
        for group in self.param_groups:
            group["skipped"] = group.get("skipped", 0) + 1
        self._warn_once(f"{fault}; the step was left out (counted in the groups as 'skipped')")
        return False

    def _fault(self) -> str | None:
        """What is wrong with this rank's gradients; tells of what the last step left out, too."""
        if self._allows_nonfinite:
            return None
        gradients = dense_gradients(local_gradients(self.param_groups))
        masks = [stack.unusable for stack in self._stacks() if stack.unusable is not None]
        # One look for both: each would wait for an accelerator.
        if all_finite(gradients, masks):
            for stack in self._stacks():
                stack.unusable = None
            return None
        self._report_unusable()
        return unusable_gradients(gradients)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the format's number and the method's name."""
        self._report_unusable()
        return super().state_dict()

    def _report_unusable(self) -> None:
        """Count memories and directions that overflowed and were left out, by layer."""
        self._report(layer for stack in self._stacks() for layer in stack.unusable_layers())

    def _stacks(self) -> list[Stack]:
        """Those of the last step."""
        return [stack for roll in self._rolls.values() for stack in roll.stacks]

    @property
    def _allows_nonfinite(self) -> bool:
        """Whether nothing is checked for NaN, so that an accelerator is never waited for."""
        return bool(self.defaults["nonfinite"] == "allow")

    def _report(self, layers: Iterable[Layer]) -> None:
        """Count failures in the layers' states, and tell of each layer once."""
        for layer in layers:
            layer.state["failures"] = layer.state.get("failures", 0) + 1
            self._warn_once(
                f"what was computed for {layer.name!r} was not finite, or could not be decomposed; "
                "it was left out and the layer keeps what it had (counted in its state as "
                "'failures')"
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, GeometryWarning, stacklevel=4)

    def _warn_uncaptured_construction(self) -> None:
        geometry = self.recipe.geometry
        if any(any(geometry.captured_sides(group)) for group in self.param_groups):
            self._warn_once(
                f"{type(self).__name__} was given parameters, not a model, so nothing is captured "
                "and its maps are the identity, that is Muon; pass the model itself"
            )

    # ---- for saving and copying, see `persistence` ---------------------------------------------

    def _cut_of(self, parameter: Tensor, group: Mapping[str, Any]) -> Cut:
        """How this parameter is cut, as far as that is known."""
        if not parameter.ndim or not parameter.numel():
            return Cut(frozenset(), (0, 0, 0, 0))  # no matrix
        layer = Layer("", parameter, {}, self._spec_of(parameter, group))
        stacked = (layer.blocks, *layer.shape)
        own = {tuple(parameter.shape)} if layer.is_reshape else set()
        known = self._model is not None or not self._awaits_model
        tiling = (layer.rows, layer.columns, *layer.shape)
        return Cut(frozenset({stacked, *own}), tiling if known else None)

    def _spec_of(self, parameter: Tensor, group: Mapping[str, Any]) -> LayerSpec:
        return cut(self._specs.get(parameter, PLAIN), group)


_SMALL = 2**22  # parameters

# What a layer's state holds once it has a geometry.
_GEOMETRY = {"left_map", "right_map", "left_factor", "right_factor"}


def _kind(layer: Layer) -> tuple[object, ...]:
    """Layers equal in this go through the step together."""
    return layer.shape, layer.dtype, layer.parameter.device, layer.updates


def _remove_all(captures: list[Capture]) -> None:
    for capture in captures:
        capture.remove()
