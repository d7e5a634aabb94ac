"""Loading optimizer state without losing precision, and refusing what does not fit."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

FORMAT = 1


Shapes = Callable[[Tensor, Mapping[str, Any]], set[tuple[int, ...]]]


def check_fits(
    groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any], shapes: Shapes
) -> None:
    """Raise a ValueError naming the first way in which `state_dict` does not fit `groups`.

    `shapes` says which shapes a memory of a parameter may have.
    """
    version = state_dict.get("format", FORMAT)
    if not isinstance(version, int) or not 1 <= version <= FORMAT:
        raise ValueError(
            f"this checkpoint has format {version!r}; this gomuon reads formats 1 to {FORMAT}: "
            "install a newer one"
        )
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"the checkpoint has {len(saved_groups)} parameter groups, the optimizer {len(groups)}"
        )
    for index, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"group {index} of the checkpoint has {len(saved['params'])} parameters, the "
                f"optimizer's {len(group['params'])}"
            )
    for saved_id, parameter, name, group in _pairs(groups, saved_groups):
        for key, value in state_dict["state"].get(saved_id, {}).items():
            elementwise = key in ("momentum", "square", "exp_avg", "exp_avg_sq")
            if elementwise and tuple(value.shape) not in shapes(parameter, group):
                raise ValueError(
                    f"{key} of {name!r} has shape {tuple(value.shape)} in the checkpoint, the "
                    f"parameter has {tuple(parameter.shape)}"
                )


def restored_state(
    groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]
) -> dict[Tensor, dict[str, Any]]:
    """The saved state on each parameter's device, in the dtypes it was saved in.

    torch's own loading rounds float32 state of bfloat16 parameters to bfloat16. Tensors that were
    one tensor when saved (a map shared by q, k and v) are one again.
    """
    copies: dict[tuple[int, torch.device], Tensor] = {}

    def restore(key: str, value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, Tensor):
            return value
        # torch's AdamW counts on the host.
        device = value.device if key == "step" else parameter.device
        where = (id(value), device)
        if where not in copies:
            copies[where] = value.detach().to(device, copy=True)
        return copies[where]

    return {
        parameter: {
            key: restore(key, value, parameter)
            for key, value in state_dict["state"].get(saved_id, {}).items()
        }
        for saved_id, parameter, *_ in _pairs(groups, state_dict["param_groups"])
        if saved_id in state_dict["state"]
    }


def _pairs(
    groups: Sequence[Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]]
) -> list[tuple[int, Tensor, str, Mapping[str, Any]]]:
    return [
        (saved_id, parameter, parameter_name(group, index, position), group)
        for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True))
        for position, (saved_id, parameter) in enumerate(
            zip(saved["params"], group["params"], strict=True)
        )
    ]


def parameter_name(group: Mapping[str, Any], index: int, position: int) -> str:
    """The name the user gave, or the parameter's place among the groups."""
    names = group.get("param_names")
    return names[position] if names else f"group {index}, parameter {position}"
