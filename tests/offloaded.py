"""What is copied between an accelerator and the host when factors, or maps, are offloaded.

`python -m tests.offloaded` takes steps on fake tensors of another device, as `tests.accelerator`
does, and prints every copy of a matrix between it and the host as JSON.
"""

import json
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gomuon.lab.costs.recorder import OperationRecorder
from gomuon.lab.machine import on_threads
from gomuon.recipes.registry import METHODS
from tests.accelerator import fake_accelerator, faked

# Four factors, which no two layers share, and as many maps.
SETTINGS: dict[str, dict[str, Any]] = {
    "GoMuon": {"refresh_every": 2, "input_decay": 0.9},
    "Shampoo": {"refresh_every": 2, "statistics_every": 2},
}
CASES = [(name, offload) for name in SETTINGS for offload in (False, True, "maps")]
STEPS = 6


class Copies(TorchDispatchMode):
    """Records copies of matrices between devices, as "to host" and "to device"."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            into = packet is torch.ops.aten.copy_
            source, target = (args[1], args[0]) if into else (args[0], result)
            moves = source.device.type != target.device.type
            if moves and source.ndim > 1:
                free = args[2:] == (True,) if into else bool((kwargs or {}).get("non_blocking"))
                where = "host" if target.device.type == "cpu" else "device"
                self.made.append(f"to {where}" + ("" if free else ", waits"))
        return result


def copies_of(name: str, offload: Any, device: str) -> dict[str, Any]:
    """The copies and waits of every step, and where the state is afterwards."""
    first, second = (nn.Linear(12, m, False, device=device) for m in (12, 8))
    model = nn.Sequential(first, nn.Tanh(), second)
    optimizer = METHODS[name](model, **SETTINGS[name], offload=offload, routes={"*": "matrix"})
    steps = []
    for _ in range(STEPS):
        x = torch.randn(9, 12).to(device)
        optimizer.zero_grad()
        with on_threads(1), OperationRecorder() as record:
            model(x).square().mean().backward()
            with Copies() as copies:
                optimizer.step()
        waits = sum(one.waits for one in record.operations if not one.on_host)
        steps.append({"copies": sorted(copies.made), "waits": waits})
    places = {
        key: value.device.type
        for entries in optimizer.state.values()
        for key, value in entries.items()
        if isinstance(value, torch.Tensor)
    }
    return {"steps": steps, "places": places}


def main() -> None:
    warnings.simplefilter("ignore")
    device = fake_accelerator()
    found = {}
    for name, offload in CASES if device else []:
        with faked():
            found[f"{name} {offload}"] = copies_of(name, offload, device)
    print(json.dumps({"device": device, "found": found}))


if __name__ == "__main__":
    main()
