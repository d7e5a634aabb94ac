"""An optimizer's parameter groups in words: what most of them share is said once."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Group = Mapping[str, Any]
_LISTED_APART = ("params", "param_names", "treatment")


def described_groups(groups: Sequence[Group]) -> str:
    """The settings that most groups have, then of each group what is different in it."""
    usual = dict(_usual(groups)) if len(groups) > 1 else {}
    lines = []
    if usual:
        lines += ["Settings, where a group has no other", *_settings(usual)]
    for index, group in enumerate(groups):
        count = len(group["params"])
        tensors = f"{count} parameter{'' if count == 1 else 's'}"
        lines.append(f"Parameter Group {index}: {group['treatment']}, {tensors}")
        other = {k: v for k, v in group.items() if k not in usual or not _is_same(v, usual[k])}
        lines += _settings(other)
    return "\n".join(lines)


def _usual(groups: Sequence[Group]) -> Iterator[tuple[str, Any]]:
    """The settings of all groups with the value that most of them have, if two have one.

    The rate only if all have it, because it is what one looks for in a group.
    """
    for key in groups[0]:
        values = [group[key] for group in groups if key in group]
        counts = [sum(_is_same(value, other) for other in values) for value in values]
        fewest = len(groups) if key == "lr" else 2
        if len(values) == len(groups) and max(counts) >= fewest:
            yield key, values[counts.index(max(counts))]


def _settings(settings: Group) -> list[str]:
    return [f"    {key}: {settings[key]}" for key in sorted(settings) if key not in _LISTED_APART]


def _is_same(one: Any, other: Any) -> bool:
    try:
        return bool(one is other or one == other)
    except (TypeError, ValueError, RuntimeError):
        return False  # values of a user that cannot be compared
