"""What the doctor finds, and how it is printed."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

WIDTH = 80
_NAMED = 3  # layers that are named when many have the same finding


@dataclass(frozen=True)
class Finding:
    """Something that looks wrong in one layer.

    Attributes:
        layer: the parameter's name.
        kind: what sort of thing it is, the same for all layers that have it.
        what: what was seen, with its numbers.
        why: why it matters.
        do: what to do about it.
    """

    layer: str
    kind: str
    what: str
    why: str
    do: str


class Diagnosis(tuple[Finding, ...]):
    """All findings. Prints as text of at most 80 columns.

    `note` says what could not be judged; "" if everything could.
    """

    note: str = ""

    @classmethod
    def of(cls, findings: Iterable[Finding], note: str = "") -> "Diagnosis":
        """The findings with a note."""
        made = cls(findings)
        made.note = note
        return made

    def __str__(self) -> str:
        kinds: dict[str, list[Finding]] = {}
        for finding in self:
            kinds.setdefault(finding.kind, []).append(finding)
        parts = [_described(kind, alike) for kind, alike in kinds.items()]
        if not parts:
            parts = ["Nothing looks wrong."]
        if self.note:
            parts.append(textwrap.fill(self.note, WIDTH))
        return "\n\n".join(parts)


def _described(kind: str, alike: list[Finding]) -> str:
    """One paragraph for all layers with a kind of finding."""
    number = "" if len(alike) == 1 else f" ({len(alike)} layers)"
    lines = [f"{kind[0].upper()}{kind[1:]}{number}"]
    for finding in alike[:_NAMED]:
        lines += _wrapped(f"{finding.layer}: {finding.what}", "  - ", "    ")
    if len(alike) > _NAMED:
        names = ", ".join(finding.layer for finding in alike[_NAMED:])
        lines += _wrapped(f"and {names}", "  - ", "    ")
    for label, text in (("why", alike[0].why), ("do", alike[0].do)):
        lines += _wrapped(text, f"  {label:<5}", "       ")
    return "\n".join(lines)


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=others)
