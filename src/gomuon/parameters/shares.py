"""What a routing table amounts to: how much of a model is treated how, in one line."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from gomuon.parameters.routing import Route

_KINDS = {
    "embedding": "embedding",
    "head": "head",
    "vector": "biases and vectors",
    "other": "other weights",
}
_NAMED = 3  # how many parameters a warning names


def shares(table: "Sequence[Route]") -> str:
    """One line: the shares of all numbers that are matrices, AdamW's and frozen.

    Matrices are captured or have identity maps, if the method captures at all. AdamW's parameters
    are embeddings, heads and others.
    """
    whole = _numbers(table)
    if not whole:
        return ""
    trained = [route for route in table if not route.is_frozen]
    matrices = [route for route in trained if route.treatment == "matrix"]
    adamw = [route for route in trained if route.treatment == "adamw"]

    def part(label: str, routes: "Iterable[Route]") -> str:
        return f"{label} {_percent(_numbers(routes), whole)}"

    text = part("matrix", matrices)
    if any(route.geometry for route in table):
        bare = [route for route in matrices if route.geometry.startswith("identity")]
        captured = [route for route in matrices if route not in bare]
        maps = (("captured", captured), ("identity maps", bare))
        text += f" ({', '.join(part(label, routes) for label, routes in maps if routes)})"
    if adamw:
        kinds = {kind: [route for route in adamw if route.kind == kind] for kind in _KINDS}
        largest = sorted(kinds.items(), key=lambda item: -_numbers(item[1]))
        text += f", {part('AdamW', adamw)}: "
        text += ", ".join(part(_KINDS[kind], routes) for kind, routes in largest if routes)
    if len(trained) < len(table):
        text += f"; {part('frozen', [route for route in table if route.is_frozen])}"
    return f"{whole:,} parameters: {text}"


def few_matrices(table: "Sequence[Route]") -> str | None:
    """A warning if less than half of the weights are matrices; None if there is nothing to say.

    Weights are what is trained and has more than one dimension. Embeddings and output heads do not
    count: they are AdamW's by intention.
    """
    weights = [
        route
        for route in table
        if not route.is_frozen and route.kind not in ("embedding", "head", "vector")
    ]
    others = [route for route in weights if route.treatment != "matrix"]
    whole, rest = _numbers(weights), _numbers(others)
    if not rest or 2 * rest <= whole:
        return None
    biggest = sorted(others, key=lambda route: -route.parameter.numel())
    named = ", ".join(f"{r.name!r} ({r.reason})" for r in biggest[:_NAMED])
    more = f" and {len(biggest) - _NAMED} more" if len(biggest) > _NAMED else ""
    return (
        f"only {_percent(whole - rest, whole)} of the weights (without embeddings and output "
        f"heads) are matrices; AdamW updates the rest, first of all {named}{more}. "
        'routing_table() shows all of them, and routes={pattern: "matrix"} changes them'
    )


def decays(table: "Sequence[Route]", decay_of: Mapping[Tensor, float]) -> str:
    """One line: which parameters decay, and which do not. Empty if none does."""
    labels: dict[float, list[str]] = {}
    for route in table:
        if not route.is_frozen and route.parameter in decay_of:
            label = "matrices" if route.treatment == "matrix" else _KINDS[route.kind]
            known = labels.setdefault(decay_of[route.parameter], [])
            if label not in known:
                known.append(label)
    if not any(labels):
        return ""
    parts = [f"{decay:g} for {', '.join(labels[decay])}" for decay in sorted(labels, reverse=True)]
    return f"weight decay: {'; '.join(parts)}"


def _numbers(routes: "Iterable[Route]") -> int:
    return sum(route.parameter.numel() for route in routes)


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole
    return "below 1 %" if 0 < share < 0.5 else f"{share:.0f} %"
