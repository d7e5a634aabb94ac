"""AdamW for everything that is not a hidden matrix, by torch's own implementation."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from gomuon.holdings import local, local_gradient
from gomuon.probes import working_dtype


def adamw_step(
    parameters: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    group: Mapping[str, Any],
    default_lr: float | Tensor,
) -> None:
    """One update in place; moments are float32 or wider whatever the parameters' dtype.

    In a group that mixes treatments `lr` is the matrices', and AdamW's moves in proportion to it.
    """
    settings = group["adamw"]
    lr, weight_decay = _number(group["lr"]), group["weight_decay"]
    default_lr = _number(default_lr)
    if group["treatment"] != "adamw":
        lr = settings["lr"] * (lr / default_lr if default_lr else 0.0)
        weight_decay = settings["weight_decay"]
    for parameter, state in zip(parameters, states, strict=True):
        if "exp_avg" not in state:
            dtype = working_dtype(parameter)
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
    rows = [local(parameter) for parameter in parameters]  # a shard, where sharded
    wide = [parameter.to(working_dtype(parameter)) for parameter in rows]
    beta1, beta2 = settings["betas"]
    on_cpu = all(parameter.device.type == "cpu" for parameter in rows)
    adamw(
        wide,
        [_gradient(p).to(working_dtype(p)) for p in parameters],
        [local(state["exp_avg"]) for state in states],
        [local(state["exp_avg_sq"]) for state in states],
        [],
        [state["step"] for state in states],
        # Fused kernels want their counters on the device, where ours are not, and foreach a number.
        fused=on_cpu or None,
        foreach=not on_cpu and not isinstance(lr, Tensor),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=float(weight_decay),
        eps=settings["eps"],
        maximize=False,
    )
    for parameter, updated in zip(rows, wide, strict=True):
        if updated is not parameter:
            parameter.copy_(updated)


def _number(lr: float | Tensor) -> float | Tensor:
    """A rate on the host as a number; one on a device stays there, for reading it would wait."""
    return lr.item() if isinstance(lr, Tensor) and lr.device.type == "cpu" else lr


def _gradient(parameter: Tensor) -> Tensor:
    gradient = local_gradient(parameter)
    assert gradient is not None
    return gradient
