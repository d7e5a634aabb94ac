"""An optimizer's parameter groups in words: what all of them share is said once."""

from collections.abc import Mapping, Sequence
from typing import Any

Group = Mapping[str, Any]
_LISTED_APART = ("params", "param_names", "treatment")


def described_groups(groups: Sequence[Group]) -> str:
    """The settings of all groups, then of each group what it does not share with all others."""
    shared = _shared(groups) if len(groups) > 1 else []
    lines = []
    if shared:
        lines += ["Settings of all groups", *_settings(groups[0], shared)]
    for index, group in enumerate(groups):
        count = len(group["params"])
        tensors = f"{count} parameter{'' if count == 1 else 's'}"
        lines.append(f"Parameter Group {index}: {group['treatment']}, {tensors}")
        lines += _settings(group, [key for key in sorted(group) if key not in shared])
    return "\n".join(lines)


def _shared(groups: Sequence[Group]) -> list[str]:
    first, *others = groups
    return [
        key
        for key in sorted(first)
        if all(key in other and _is_same(first[key], other[key]) for other in others)
    ]


def _settings(group: Group, keys: Sequence[str]) -> list[str]:
    return [f"    {key}: {group[key]}" for key in keys if key not in _LISTED_APART]


def _is_same(one: Any, other: Any) -> bool:
    try:
        return bool(one is other or one == other)
    except (TypeError, ValueError, RuntimeError):
        return False  # values of a user that cannot be compared
