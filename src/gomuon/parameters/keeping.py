"""How a matrix's state is kept between steps: in how many bits, and on which device.

Steps compute in float32 or wider, on the parameter's device. What they leave behind may be kept in
less:

| | `state_dtype="bfloat16"` | `state_dtype="int8"` |
|---|---|---|
| momentum | bfloat16 | 8 bits, with a float32 scale for every 128 elements |
| factors, maps, bases | bfloat16 | bfloat16 |
| averages of squares | as computed | as computed |

Eight bits are too few for factors and maps, which must stay positive definite, and bfloat16 is too
little for slow averages of squares (`tests/parameters/test_keeping.py`). Shampoo and Mousse keep
their factors as computed, and SINGD its roots, to which it adds small steps (`Side.wide`). Factors
may also be kept on the host, and maps too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gomuon.functional.narrow import from_codes, to_bfloat16, to_codes
from gomuon.parameters.state import ADAMW_ENTRIES, MOMENTUM, SCALES, SQUARE

StateDtype = Literal["bfloat16", "int8"]
Offload = bool | Literal["maps"]

HOST = torch.device("cpu")
_ELEMENTWISE = {MOMENTUM, SCALES, SQUARE, *ADAMW_ENTRIES}


@dataclass(frozen=True)
class Keeping:
    """How the entries of a matrix's state are kept.

    Attributes:
        dtype: the setting `state_dtype`; None keeps everything as it is computed.
        offload: the setting `offload`.
        wide: names of entries that are kept as computed whatever `dtype` is, see `Side.wide`.
    """

    dtype: StateDtype | None = None
    offload: Offload = False
    wide: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, group: Mapping[str, Any], device: torch.device, wide: frozenset[str]
    ) -> "Keeping | None":
        """What a group's settings say for parameters on `device`.

        None if all of their state is kept as it is computed, on their device.
        """
        dtype, offload = group.get("state_dtype"), group.get("offload", False)
        offload = offload if device.type != "cpu" else False
        return cls(dtype, offload, wide) if dtype is not None or offload else None

    def dtype_of(self, name: str, working: torch.dtype) -> torch.dtype:
        """The dtype an entry is kept in, if the step computes in `working`."""
        if self._is_wide(name):
            return working
        return torch.int8 if name == MOMENTUM and self.dtype == "int8" else torch.bfloat16

    def _is_wide(self, name: str) -> bool:
        return self.dtype is None or name in self.wide or name in _ELEMENTWISE - {MOMENTUM}

    def keeps_as_computed(self, name: str) -> bool:
        """Whether an entry is kept as steps compute it, on the parameter's device."""
        return self._is_wide(name) and not self.is_offloaded(name)

    def is_offloaded(self, name: str) -> bool:
        """Whether an entry is kept on the host: factors, and maps if they are asked for."""
        if name in _ELEMENTWISE:
            return False
        return bool(self.offload) and (self.offload == "maps" or name.endswith("_factor"))

    def place_of(self, name: str, device: torch.device) -> torch.device:
        """The device an entry is kept on, if the parameter is on `device`."""
        return HOST if self.is_offloaded(name) else device

    def stored(self, name: str, value: Tensor, turn: int) -> Tensor:
        """An entry other than the momentum as it is kept.

        Args:
            name: the entry's name.
            value: the entry as computed.
            turn: the number of the update, for the rounding of averages.
        """
        if self.dtype_of(name, value.dtype) == torch.bfloat16:
            # Maps are made anew; factors are averages and must not stop, see `to_bfloat16`.
            averaged = name.endswith("_factor") and value.dtype != torch.bfloat16
            value = to_bfloat16(value, turn) if averaged else value.to(torch.bfloat16)
        return _on_host(value) if self.is_offloaded(name) else value

    def computed(self, stored: Tensor, device: torch.device, working: torch.dtype) -> Tensor:
        """An entry other than the momentum as steps compute with it."""
        return stored.to(device, non_blocking=True).to(working)


def fit_state(
    state: dict[str, Any],
    keeping: Keeping | None,
    blocks: int,
    device: torch.device,
    working: torch.dtype,
) -> None:
    """Move and convert a matrix's state, if the model, `state_dtype` or `offload` has changed."""
    keeping = keeping or Keeping()
    for name, value in list(state.items()):
        if not isinstance(value, Tensor) or name in (SCALES, "step"):  # AdamW counts on the CPU
            continue
        dtype, place = keeping.dtype_of(name, working), keeping.place_of(name, device)
        if value.dtype == torch.int8:
            scales = state[SCALES].to(place)
            if dtype == torch.int8:
                state.update({name: value.to(place), SCALES: scales})
                continue
            del state[SCALES]
            codes = value.to(place).reshape(blocks, -1)
            value = from_codes(codes, scales, working).view_as(value)
        if dtype == torch.int8:
            codes, state[SCALES] = to_codes(value.to(place).reshape(blocks, -1))
            state[name] = codes.view_as(value)
        else:
            state[name] = value.to(place, dtype)


def wait_for_copies(parameters: Iterable[Tensor]) -> None:
    """Wait until everything that is being copied to the host has arrived there."""
    for device in {parameter.device for parameter in parameters}:
        if device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device)
            if module.is_available() and hasattr(module, "synchronize"):
                module.synchronize(device)


def _on_host(value: Tensor) -> Tensor:
    """A copy on the host, in pinned memory if there is some. Does not wait: see above."""
    if value.device.type == "cpu":
        return value
    pinned = value.device.type == "cuda" and torch.cuda.is_available()
    host = torch.empty(value.shape, dtype=value.dtype, device=HOST, pin_memory=pinned)
    return host.copy_(value, non_blocking=True)
