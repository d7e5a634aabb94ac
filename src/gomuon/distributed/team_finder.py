"""Finds an optimizer's team: from its settings, its wrapper, and how parameters are divided."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from gomuon.capture.hooks import WrapperHook, unwrapped
from gomuon.distributed.team import ALONE, Alone, Group, Team
from gomuon.geometry.base import Geometry
from gomuon.parameters.layout import Layout
from gomuon.parameters.sharding import is_fully_sharded, is_sharded, local
from gomuon.parameters.tensor_shards import TensorShard


class TeamFinder:
    """Finds an optimizer's team: at first use, and again if the model is wrapped in DDP later.

    Args:
        process_group: the user's process group; None is the wrapper's group or the default group.
        layout: how parameters are cut into matrices.
        geometry: the method's geometry.
        settings: the constructor's settings.
    """

    def __init__(
        self, process_group: Any, layout: Layout, geometry: Geometry, settings: Group
    ) -> None:
        self.process_group = process_group
        self.wrapper = WrapperHook()
        self.may_be_wrapped = False  # alone for now; a wrapper may still be found
        self._layout = layout
        self._geometry = geometry
        self._settings = settings
        self._found: Team | None = None
        self._last: Team | None = None

    def watch(self, model: nn.Module) -> None:
        """Look for DistributedDataParallel around a model, now and at its forward passes."""
        self.wrapper.remove()
        if not any(
            map(is_sharded, model.parameters())
        ):  # with fully_shard the team is known already
            self.wrapper.watch(model)
        if is_distributed():
            self._note_ignored(unwrapped(model))

    def _note_ignored(self, model: nn.Module | None = None) -> None:
        """Note which parameters the wrapper ignores: they are this rank's own."""
        ignored = self.wrapper.ignored()
        if model is not None and is_fully_sharded(model):
            ignored |= {p for p in model.parameters() if not is_sharded(p)}
        self._layout.ignored |= {p for p in ignored if not is_sharded(p)}

    def team(self, groups: Sequence[Group]) -> tuple[Team, bool]:
        """The team for these parameter groups, and whether it has changed since the last call.

        Raises:
            ValueError: `work` or the process group does not fit how the parameters are sharded.
        """
        if self._found is None or (self.may_be_wrapped and self.wrapper.found):
            self._found = None
            if is_distributed():
                self._note_ignored()
                self._found = self._new_team(groups)
        team = ALONE if self._found is None else self._found
        changed = self._last is not None and team is not self._last
        self._last = team
        return team, changed

    def is_known(self, groups: Sequence[Group]) -> bool:
        """Whether the ranks that work together are known before the first step."""
        sharded = any(is_sharded(p) for group in groups for p in group["params"])
        return is_distributed() and (sharded or self.wrapper.found)

    def staggers(self, group: Group) -> bool:
        """Whether the layers of a group take turns; "auto" is while several ranks share the work.

        It asks only what is known without messages, because hooks are placed before ranks meet.
        """
        if group.get("stagger") != "auto":
            return bool(group.get("stagger"))
        work = self._settings["work"]
        if work not in ("auto", "shared") or not is_distributed():
            return False
        owned = work == "shared" or self.wrapper.found or any(map(self._is_shared, group["params"]))
        return owned and self.other_ranks

    def _is_shared(self, parameter: Tensor) -> bool:
        """Whether several ranks are known to have the same matrix, or rows of it."""
        place = self._layout.blocks.get(parameter)
        if place is None or not is_sharded(parameter):
            return is_sharded(parameter) or (place is not None and self.process_group is not None)
        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
        return self.process_group is not None or mesh.ndim > (place.along is not None)

    def compare_again(self) -> None:
        """Compare all ranks again in the next step, as in the first step."""
        if self._last is not None:
            self._last.compare_again()

    def owners(self, groups: Sequence[Group], ranks: int) -> Mapping[Tensor, int]:
        """The owner of each matrix, given the number of ranks."""
        from gomuon.distributed.owners import choose_owners

        return choose_owners(groups, self._settings, self._geometry, self._layout, ranks)

    @property
    def other_ranks(self) -> bool:
        """Whether there are other ranks in the process group."""
        from torch import distributed

        return distributed.get_world_size(self.group_of_ranks) > 1

    @property
    def group_of_ranks(self) -> Any:
        """The process group: the user's, else the wrapper's; None is the default group."""
        return self.wrapper.process_group if self.process_group is None else self.process_group

    def _new_team(self, groups: Sequence[Group]) -> Team:
        work = self._settings["work"]
        parameters = [p for group in groups for p in group["params"]]
        sharded = next((p for p in parameters if is_sharded(p)), None)
        self.may_be_wrapped = False
        divided = [self._layout.shards[p] for p in parameters if p in self._layout.shards]
        if divided and self._layout.gathers:
            return self._team_of_wholes(local(parameters[0]).device)
        if divided:
            return self._team_of_blocks(parameters, divided[0])
        if work == "auto":
            if sharded is None and not self.wrapper.found:
                self.may_be_wrapped = True
                return Alone()
            work = "shared"
        if work == "alone" and sharded is None:
            return ALONE
        # Imported here, because most programs have one process.
        from gomuon.distributed.owners import Owners
        from gomuon.distributed.ranks import Ranks
        from gomuon.distributed.replicated import Replicated

        ranks, own = Ranks(self.group_of_ranks, local(parameters[0]).device), self._layout.own
        if sharded is None:
            if ranks.size == 1:
                return ALONE
            return Owners(ranks, own=own) if work == "shared" else Replicated(ranks, own)
        if work != "shared":
            raise ValueError(
                f"work={work!r} needs whole parameters on each rank, but these are sharded; use "
                'work="shared"'
            )
        mesh: Any = sharded.device_mesh
        if mesh.size() != ranks.size:
            raise ValueError(
                f"parameters are sharded over {mesh.size()} ranks, but the process group has "
                f"{ranks.size}; pass process_group= with the group of exactly those ranks"
            )
        return Owners(ranks, own=own)

    def _team_of_blocks(self, parameters: Sequence[Tensor], place: TensorShard) -> Team:
        """The team under tensor parallelism; `place` is that of any parameter."""
        from gomuon.distributed.owners import Owners
        from gomuon.distributed.ranks import Ranks
        from gomuon.distributed.replicated import Replicated
        from gomuon.distributed.tensor_blocks import Blocks

        device, work = local(parameters[0]).device, self._settings["work"]
        own = self._layout.own
        rows = next((group for p in parameters if (group := self._group_of_rows(p))), None)
        same: Team = ALONE
        if rows is not None:
            if work not in ("auto", "shared"):
                raise ValueError(
                    f"work={work!r} needs whole blocks on each rank, but fully_shard has divided "
                    'their rows; use work="shared"'
                )
            same = Owners(Ranks(rows, device), self._layout.shards, own)
        elif self.process_group is not None and work in ("auto", "shared"):
            same = Owners(Ranks(self.process_group, device), self._layout.shards, own)
        elif self.process_group is not None and work == "replicated":
            same = Replicated(Ranks(self.process_group, device), own)
        elif work in ("shared", "replicated"):
            raise ValueError(
                f"work={work!r} under tensor parallelism needs process_group= with the ranks that "
                "have the same blocks and average their gradients"
            )
        return Blocks(same, Ranks(place.mesh.get_group(), device), own)

    def _team_of_wholes(self, device: Any) -> Team:
        """The team under tensor parallelism that gathers whole matrices."""
        from gomuon.distributed.ranks import Ranks
        from gomuon.distributed.tensor_wholes import Wholes, grid_of, mesh_of

        if (work := self._settings["work"]) not in ("auto", "shared"):
            raise ValueError(
                f'work={work!r} with tensor_parallel="exact" is not possible: no rank has whole '
                'matrices, so they need owners; use work="shared", or tensor_parallel="blocks"'
            )
        shards = self._layout.shards
        mesh = mesh_of(shards)
        given = self.process_group
        ranks = Ranks(mesh.get_group() if given is None and mesh.ndim == 1 else given, device)
        return Wholes(ranks, shards, grid_of(mesh, ranks), self._layout.own)

    def _group_of_rows(self, parameter: Tensor) -> Any:
        """The process group over which `fully_shard` divides a parameter's rows, if any."""
        if not is_sharded(parameter):
            return None
        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
        along = [d for d in range(mesh.ndim) if d != self._layout.shards[parameter].along]
        if len(along) > 1:
            raise ValueError(
                f"parameters are divided over {mesh.ndim} dimensions of ranks; expected at most "
                'one for fully_shard and one for tensor parallelism, or tensor_parallel="exact"'
            )
        return mesh.get_group(along[0]) if along else None


def is_distributed() -> bool:
    """Whether there is a process group."""
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()
