"""Rates of a parameter group: the matrices' `lr`, and AdamW's beside it."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

Group = Mapping[str, Any]


def add_adamw_settings(group: MutableMapping[str, Any], defaults: Group) -> None:
    """Complete a new group's `adamw`, and the rate and decay of a group that AdamW updates.

    With `lr_scale="adamw"` AdamW's rate and decay are those of the matrices, unless `adamw` has its
    own. In an "auto" group AdamW updates only vectors, which then do not decay.
    """
    own = group.get("adamw", {})
    group["adamw"] = adamw = {**defaults["adamw"], **own}
    shared, treatment = has_one_rate(group, defaults), group["treatment"]
    if shared:
        if "lr" not in own and "lr" in group:
            adamw["lr"] = float(group["lr"])
        if treatment == "auto" and "weight_decay" not in own:
            adamw["weight_decay"] = 0.0
    if treatment == "adamw":
        # Equal rates stay one: a scheduler may write into a tensor that both groups have.
        if not (shared and adamw["lr"] == float(defaults["lr"])):
            group.setdefault("lr", adamw["lr"])
        group.setdefault("weight_decay", adamw["weight_decay"])


def add_base_rate(group: MutableMapping[str, Any], default: float) -> None:
    """Complete `base_lr`, the rate at which AdamW's is that of `adamw`.

    A number, because schedulers write into a tensor. If lr is 0, as before a warm-up, it is the
    method's default, or AdamW's with `lr_scale="adamw"`.
    """
    lr, adamw = float(group["lr"]), group["adamw"]
    if not has_one_rate(group, group):
        group.setdefault("base_lr", lr or default)
        return
    is_shared = adamw["lr"] == lr
    group.setdefault("base_lr", lr or adamw["lr"] or default)
    if is_shared:
        adamw["lr"] = group["base_lr"]


def has_one_rate(group: Group, defaults: Group) -> bool:
    """Whether one rate is meant for all parameters: matrices are scaled as AdamW is."""
    return bool(group.get("lr_scale", defaults.get("lr_scale")) == "adamw")


def one_rate_written_into_all(groups: Sequence[Group]) -> str | None:
    """A warning if a loop has replaced different rates by one, as nanoGPT's does; None if not.

    To ask in the first steps: later a schedule may have brought all rates to one small one.
    """
    rates = {group["lr"] for group in groups if isinstance(group["lr"], int | float)}
    bases = {group["base_lr"] for group in groups}
    if len(groups) < 2 or len(rates) != 1 or len(bases) == 1:
        return None
    if not any(rates) or not all(isinstance(group["lr"], int | float) for group in groups):
        return None
    kinds = {"matrix": "matrices", "adamw": "AdamW's part", "auto": "bare parameters"}
    made = {f"{group['base_lr']:g} for {kinds[group['treatment']]}": None for group in groups}
    ways = "scale each group's own rate by one factor, as torch's schedulers do"
    if "lr_scale" in groups[0]:
        ways = f'pass lr_scale="adamw", with which one rate of AdamW\'s is right for all; or {ways}'
    return (
        f"all parameter groups now have the rate {rates.pop():g}, but they were made with "
        f"{', '.join(made)}. If your loop writes one rate into all groups, {ways}"
    )


FIRST_STEPS = 10
