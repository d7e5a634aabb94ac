"""AdamW for all parameters that are not hidden matrices, with torch's own implementation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from gomuon.functional.linalg import working_dtype
from gomuon.parameters.stacks import where_usable


def adamw_step(
    parameters: Sequence[tuple[Tensor, dict[str, Any]]],
    group: Mapping[str, Any],
    local: Callable[[Tensor], Tensor],
    usable: Tensor | None = None,
) -> None:
    """One update in place. Moments are float32 or wider for every parameter dtype.

    If the group's treatment is not "adamw", its `lr` is the rate of matrices. AdamW's own rate is
    then scaled by `lr` / `base_lr`, and is `lr` itself with `lr_scale="adamw"`. With
    `cautious_decay` a weight decays only where the update moves it the same way.

    Args:
        parameters: the parameters with gradients, and their states.
        group: the settings of their group.
        local: returns this rank's part of a tensor.
        usable: a scalar: if it is False, the gradients count as zero.
    """
    states = [state for _, state in parameters]
    settings = group["adamw"]
    lr, weight_decay = _rate_on_host(group["lr"]), group.get("weight_decay", 0.0)
    if group["treatment"] != "adamw":
        if group.get("lr_scale") != "adamw" or settings["lr"] != group["base_lr"]:
            lr = settings["lr"] * (lr / group["base_lr"])
        weight_decay = settings["weight_decay"]
    for parameter, state in parameters:
        if "exp_avg" not in state:
            dtype = working_dtype(parameter)
            # The count is on the CPU, whatever the default device is.
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
    weights = [local(parameter) for parameter, _ in parameters]
    means = [local(state["exp_avg"]) for state in states]
    squares = [local(state["exp_avg_sq"]) for state in states]
    copies = [
        (one, _contiguous(one, working_dtype(like)))
        for tensors in (weights, means, squares)
        for one, like in zip(tensors, weights, strict=True)
    ]
    contiguous = [copy for _, copy in copies]
    count, on_cpu = len(weights), all(parameter.device.type == "cpu" for parameter in weights)
    beta1, beta2 = settings["betas"]
    gradients = [
        where_usable(usable, _contiguous(local(_gradient(p)), working_dtype(p)))
        for p, _ in parameters
    ]
    is_cautious = bool(group.get("cautious_decay")) and float(weight_decay) != 0
    decays = []
    if is_cautious:  # AdamW's update has the signs of its mean
        means_after = torch._foreach_lerp(contiguous[count : 2 * count], gradients, 1 - beta1)
        decays = [
            torch.where(mean * weight >= 0, lr * weight_decay * weight, 0.0)
            for mean, weight in zip(means_after, contiguous[:count], strict=True)
        ]
    adamw(
        contiguous[:count],
        gradients,
        contiguous[count : 2 * count],
        contiguous[2 * count :],
        [],
        [state["step"] for state in states],
        # Fused kernels need the counts on the device, but ours are on the CPU; foreach needs a
        # Python number as lr.
        fused=on_cpu or None,
        foreach=not on_cpu and not isinstance(lr, Tensor),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=0.0 if is_cautious else float(weight_decay),
        eps=settings["eps"],
        maximize=False,
    )
    for weight, decay in zip(contiguous[:count], decays, strict=False):
        weight.sub_(decay)
    for original, copy in copies:
        if copy is not original:
            original.copy_(copy)


def _contiguous(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in this dtype and contiguous: the fused kernel ignores strides."""
    return tensor.to(dtype).contiguous()


def _rate_on_host(lr: float | Tensor) -> float | Tensor:
    """An lr on the CPU as a number. An lr on a device stays there: reading it would wait."""
    return lr.item() if isinstance(lr, Tensor) and lr.device.type == "cpu" else lr


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
