"""Saving, loading, copying: what survives, and in which precision."""

import copy
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from gomuon.axes import Pending
from gomuon.capture import Capture, Moment, Statistics
from gomuon.checkpoints import FORMAT, Checkpoint, fitted, is_blank, mapping, restored_state
from gomuon.consolidation import COUNT
from gomuon.entries import Cut
from gomuon.errors import RankError, told
from gomuon.holdings import local_gradient
from gomuon.layers import LayerSpec
from gomuon.recipes import Recipe
from gomuon.routing import RoutingTable
from gomuon.stacks import Roll, Stack


class PersistentOptimizer(torch.optim.Optimizer):
    """torch's optimizer, whose state keeps its precision and whose copies keep their hooks.

    torch.distributed.checkpoint makes a new optimizer take a step with zero gradients and lr 0, and
    then believes that its state has the keys and shapes of one that has trained. Such a step leaves
    a *blank* state behind: everything training would make, all of it zero, no step counted. It is
    never trained on nor loaded.
    """

    recipe: ClassVar[Recipe]
    _model: nn.Module | None
    _table: RoutingTable
    _captures: list[Capture]
    _rolls: dict[int, Roll]
    _spec_patterns: dict[str, LayerSpec]
    _scaler: torch.amp.GradScaler | None
    _process_group: Any
    _incoming: Checkpoint | None
    _had_state: bool
    _awaits_model: bool = False  # unpickled: how its parameters are cut is known once attached

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self._watch_steps()

    @abstractmethod
    def _begin(self, specs: Mapping[str, LayerSpec] | None = None) -> None:
        """Make what is not saved."""

    @abstractmethod
    def _gate(self) -> None:
        """Open or close the hooks for the coming step."""

    @abstractmethod
    def _cut_of(self, parameter: Tensor, group: Mapping[str, Any]) -> Cut:
        """How this parameter is cut, as far as that is known."""

    @abstractmethod
    def _roll(self, index: int, group: Mapping[str, Any]) -> Roll:
        """Who takes part in a group's step."""

    @abstractmethod
    def _directions(self, stacks: Sequence[Stack], group: Mapping[str, Any]) -> Iterator[Pending]:
        """What a step would do, stack by stack."""

    @abstractmethod
    def _anywhere(self, here: bool) -> bool:
        """Whether something is so on any rank."""

    @abstractmethod
    def _forget_comparison(self) -> None:
        """Let the next step compare the ranks' settings again."""

    @abstractmethod
    def _settle(self) -> None:
        """Make a state that was loaded fit this rank."""

    @abstractmethod
    def attach(self, model: nn.Module) -> None:
        """Place the hooks."""

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the format's number and the method's name."""
        state_dict = super().state_dict()
        if state_dict["state"]:
            # Biases that join their weights have no state of their own, nor have layers no loss has
            # reached; torch.distributed.checkpoint takes their absence for a damaged checkpoint.
            for group in state_dict["param_groups"]:
                for saved_id in group["params"]:
                    state_dict["state"].setdefault(saved_id, {})
        return {**state_dict, "format": FORMAT, "method": self.recipe.name}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's, but by name where there are names, and in the precision it was saved in.

        Raises:
            ValueError: the checkpoint does not fit; the optimizer is left as it was.
        """

        def fit(_: torch.optim.Optimizer, incoming: Any) -> Checkpoint:
            self._incoming = fitted(self.param_groups, incoming, self.recipe, self._cut_of)
            return self._incoming

        before = self.state, self.param_groups
        handle = self.register_load_state_dict_pre_hook(fit)
        try:
            super().load_state_dict(mapping(state_dict))
            self._settle()
            self._gate()
        except BaseException as failure:
            self._put_back(*before)
            told_well = isinstance(failure, (ValueError, RankError, Warning))
            if told_well or not isinstance(failure, Exception):  # such as an interruption
                raise
            raise ValueError(
                f"this checkpoint cannot be loaded, and the optimizer is as it was: {told(failure)}"
            ) from failure
        finally:
            handle.remove()
            self._incoming = None
        self._rolls.clear()

    def _put_back(self, state: Any, groups: list[dict[str, Any]]) -> None:
        """Undo a loading that has failed; before anything was replaced this does nothing."""
        if self.param_groups is not groups:
            self.state, self.param_groups = state, groups
            self._gate()

    def __getstate__(self) -> dict[str, Any]:
        """As torch's, with how layers are cut, which the geometry is of."""
        of_model = self._model is not None or self._awaits_model
        return {**super().__getstate__(), "specs": self._spec_patterns, "of_model": of_model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        specs, of_model = state.pop("specs", None), state.pop("of_model", True)
        incoming = self.__dict__.get("_incoming")
        super().__setstate__(state)
        if incoming is not None:  # called by torch's load_state_dict, which has rounded the state
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state.pop(parameter, None)
            self.state.update(restored_state(self.param_groups, incoming, self.recipe))
        if "_captures" not in self.__dict__:  # unpickled or copied
            self._begin(specs)
            self._awaits_model = of_model
            self._captures.extend(Capture() for _ in self.param_groups)
            self._watch_steps()
            self.defaults.setdefault("work", "shared")  # it was, before one could say
            for holder in (self.defaults, *self.param_groups):  # older than a setting, perhaps
                for name, value in self.recipe.defaults.items():
                    holder.setdefault(name, self.defaults.get(name, value))
            for group in self.param_groups:
                group.setdefault(
                    "base_lr", float(self.defaults["lr"]) or self.recipe.defaults["lr"]
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        new._process_group = self._process_group  # cannot be copied, nor need it be
        new._table = copy.deepcopy(self._table, memo)
        new._scaler = memo.get(id(self._scaler), self._scaler)
        if self._model is not None:
            new.attach(copy.deepcopy(self._model, memo))
        return new

    # ---- the blank state -----------------------------------------------------------------------

    def _watch_steps(self) -> None:
        self._had_state = False
        self.register_step_pre_hook(_drop_blank)
        self.register_step_post_hook(_make_blank)

    def _only_created_state(self) -> bool:
        """Whether the step just taken was the first and could not have moved anything."""
        if self._had_state or any(float(group["lr"]) for group in self.param_groups):
            return False
        gradients = [local_gradient(p) for group in self.param_groups for p in group["params"]]
        return not self._anywhere(any(bool(g.any()) for g in gradients if g is not None))

    def _blank_state(self) -> None:
        """Let every layer see white statistics, so that all of its state comes about; zero it."""
        for index, group in enumerate(self.param_groups):
            group["step"] = 0
            stacks = self._roll(index, group).stacks
            for layer in (layer for stack in stacks for layer in stack.layers):
                layer.statistics = _white(self._captures[index], layer.parameter)
                layer.lag = 0.0  # all at once, staggered or not
            self.recipe.geometry.before(stacks, group)
            for stack, _, D in self._directions(stacks, group):
                self.recipe.scale(D, stack, group)
            self.recipe.geometry.after(stacks, group)
            for matrix in self._roll(index, group).matrices:
                self.state[matrix.parameter].setdefault(COUNT, 0)
        self._rolls.clear()
        self._forget_comparison()
        for entries in self.state.values():
            for key, value in entries.items():
                entries[key] = torch.zeros_like(value) if isinstance(value, Tensor) else 0
        self._gate()


def _drop_blank(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    assert isinstance(optimizer, PersistentOptimizer)
    if not optimizer._had_state:
        for parameter, entries in list(optimizer.state.items()):
            if is_blank(entries):
                del optimizer.state[parameter]
    optimizer._had_state = bool(optimizer.state)


def _make_blank(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    assert isinstance(optimizer, PersistentOptimizer)
    if optimizer._only_created_state():
        with torch.no_grad():
            optimizer._blank_state()


def _white(capture: Capture, parameter: Tensor) -> Statistics:
    """Moments of the shapes that would be captured, of rows whose directions are all alike."""
    hooks = capture._hooks.get(parameter)
    if not hooks:
        return Statistics(None, None)
    hook = hooks[0]

    def moment(shape: tuple[int, ...]) -> Moment:
        rows = torch.tensor(float(shape[-1]), dtype=torch.float64, device=parameter.device)
        eye = torch.eye(shape[-1], dtype=hook.dtype, device=parameter.device)
        return Moment(rows * eye.expand(shape), rows, rows)

    inputs, gradients = hook.shapes
    return Statistics(
        moment(inputs) if hook.wants_inputs else None,
        moment(gradients) if hook.wants_gradients else None,
    )
