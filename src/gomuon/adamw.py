"""AdamW for everything that is not a hidden matrix, by torch's own implementation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from gomuon.functional.linalg import working_dtype


def adamw_step(
    parameters: Sequence[tuple[Tensor, dict[str, Any]]],
    group: Mapping[str, Any],
    local: Callable[[Tensor], Tensor],
) -> None:
    """One update in place; moments are float32 or wider whatever the parameters' dtype.

    In a group that mixes treatments `lr` is the matrices', and AdamW's moves in proportion to it:
    it is its own where `lr` is `base_lr`.

    Args:
        parameters: with gradients, and their states.
        group: its settings.
        local: what this rank holds of a tensor, a shard where it is sharded.
    """
    states = [state for _, state in parameters]
    settings = group["adamw"]
    lr, weight_decay = _number(group["lr"]), group["weight_decay"]
    if group["treatment"] != "adamw":
        lr = settings["lr"] * (lr / group["base_lr"])
        weight_decay = settings["weight_decay"]
    for parameter, state in parameters:
        if "exp_avg" not in state:
            dtype = working_dtype(parameter)
            # Counted on the host, whatever the default device is.
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
    kept = [local(parameter) for parameter, _ in parameters]
    means = [local(state["exp_avg"]) for state in states]
    squares = [local(state["exp_avg_sq"]) for state in states]
    written = [
        (one, _plain(one, working_dtype(like)))
        for tensors in (kept, means, squares)
        for one, like in zip(tensors, kept, strict=True)
    ]
    plain = [copy for _, copy in written]
    count, on_cpu = len(kept), all(parameter.device.type == "cpu" for parameter in kept)
    beta1, beta2 = settings["betas"]
    adamw(
        plain[:count],
        [_plain(local(_gradient(p)), working_dtype(p)) for p, _ in parameters],
        plain[count : 2 * count],
        plain[2 * count :],
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
    for original, copy in written:
        if copy is not original:
            original.copy_(copy)


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In this precision, element after element: the fused kernel reads memory and no strides."""
    return tensor.to(dtype).contiguous()


def _number(lr: float | Tensor) -> float | Tensor:
    """A rate on the host as a number; one on a device stays there, for reading it would wait."""
    return lr.item() if isinstance(lr, Tensor) and lr.device.type == "cpu" else lr


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
