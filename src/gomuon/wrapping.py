"""Whether a model is trained inside DistributedDataParallel, also when it is wrapped later."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gomuon.holdings import is_sharded
from gomuon.hooks import PlacedHook
from gomuon.routing import unwrapped


class Wrapping(PlacedHook):
    """A forward pre-hook that notices DistributedDataParallel around the model it is on.

    Trainer, accelerate and Lightning make the optimizer from the plain model and wrap it
    afterwards, and a wrapper leaves no trace on what it wraps. But while it runs the model, torch
    says which wrapper is at work: the compiler needs to know it too. So we ask in the forward pass,
    which always comes before the first step.

    The hook stays on the model once it has found a wrapper: it costs next to nothing, and taking
    it away would make a compiled model compile again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False
        self.group: dist.ProcessGroup | None = None  # None is the default one

    def watch(self, model: nn.Module) -> None:
        """Look at a model, given wrapped or not, and at its forward passes if it is not."""
        self.remove()
        if any(map(is_sharded, model.parameters())):
            return  # by fully_shard, which says it all
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                self._note(module)
                return
        # The compiler runs it while it traces, within the wrapper, and leaves it out of the graph.
        # Said here, not at its definition: that would load the compiler with the package.
        torch.compiler.assume_constant_result(Wrapping.look)
        for module in _called(unwrapped(model)):
            self.handles.append(module.register_forward_pre_hook(self))

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.look()

    def look(self) -> bool:
        """Whether the forward pass that is running was started by a wrapper, now or before."""
        if not self.found and (wrapper := DistributedDataParallel._get_active_ddp_module()):
            self._note(wrapper)
        return self.found

    def follow(self, other: "Wrapping") -> None:
        """Know what another knows, as its optimizer's copy."""
        self.found, self.group = other.found, other.group

    def _note(self, wrapper: DistributedDataParallel) -> None:
        self.found, self.group = True, wrapper.process_group


def _called(model: nn.Module) -> Iterator[nn.Module]:
    """The model; or its parts if it only holds them, as a ModuleList does."""
    if type(model).forward is not nn.Module.forward or "forward" in vars(model):
        yield model
        return
    for child in model.children():
        yield from _called(child)
