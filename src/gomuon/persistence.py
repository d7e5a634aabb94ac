"""Saving, loading, copying: what survives, and in which precision."""

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from gomuon.capture import Capture
from gomuon.checkpoints import FORMAT, check_fits, restored_state
from gomuon.layers import LayerSpec
from gomuon.routing import RoutingTable


class PersistentOptimizer(torch.optim.Optimizer):
    """torch's optimizer, whose state keeps its precision and whose copies keep their hooks."""

    _model: nn.Module | None
    _table: RoutingTable
    _captures: list[Capture]
    _spec_patterns: dict[str, LayerSpec]
    _incoming: Mapping[str, Any] | None

    @abstractmethod
    def _begin(self, specs: Mapping[str, LayerSpec] | None = None) -> None:
        """Make what is not saved."""

    @abstractmethod
    def _gate(self) -> None:
        """Open or close the hooks for the coming step."""

    @abstractmethod
    def _memory_shapes(self, parameter: Tensor, group: Mapping[str, Any]) -> set[tuple[int, ...]]:
        """The shapes a memory of this parameter may have."""

    @abstractmethod
    def attach(self, model: nn.Module) -> None:
        """Place the hooks."""

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the format's number."""
        return {**super().state_dict(), "format": FORMAT}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's, but state keeps the precision it was saved in.

        Raises:
            ValueError: the checkpoint does not fit; the optimizer is left as it was.
        """

        def keep(_: torch.optim.Optimizer, incoming: Mapping[str, Any]) -> None:
            check_fits(self.param_groups, incoming, self._memory_shapes)
            self._incoming = incoming

        handle = self.register_load_state_dict_pre_hook(keep)
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            handle.remove()
            self._incoming = None
        self._gate()

    def __setstate__(self, state: dict[str, Any]) -> None:
        incoming = self.__dict__.get("_incoming")
        super().__setstate__(state)
        if incoming is not None:  # called by torch's load_state_dict, which has rounded the state
            self.state.update(restored_state(self.param_groups, incoming))
        if "_captures" not in self.__dict__:  # unpickled or copied
            self._begin()
            self._captures.extend(Capture() for _ in self.param_groups)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        new._table = copy.deepcopy(self._table, memo)
        new._spec_patterns = copy.deepcopy(self._spec_patterns, memo)
        if self._model is not None:
            new.attach(copy.deepcopy(self._model, memo))
        return new
