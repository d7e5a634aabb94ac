"""Whether a refresh takes much longer than the training around it, estimated from shapes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gomuon.parameters.layers import Layer
from gomuon.parameters.side_forms import LEFT, RIGHT, SideForm
from gomuon.recipes.work import CapturedFactors, Decomposition, Factors, Matrices, StepWork, Work

# A refresh that takes longer than this many forward and backward passes gets a warning, ...
MANY_PASSES = 5.0
# ... unless it is over in a moment: about a second on the cores of a desktop processor.
NOTICEABLE = 2e11
# An operation of a decomposition takes as long as this many operations of a product.
DECOMPOSITION = 4.0

# Maps made of gradients do not depend on the number of rows, so nothing says how many there are.
ASSUMED_ROWS = 4096

_NAMED = 3
_CHEAPER = {  # by setting
    "block_size": "block_size=256 cuts long sides into blocks",
    "max_side": "max_side= leaves long sides out",
    "refresh_every": "a larger refresh_every= makes refreshes rarer",
}
_SIDES = ("outputs", "inputs")


def costly_refresh(
    layers: Sequence[Layer], work: StepWork | None, group: Mapping[str, Any]
) -> str | None:
    """A warning if the first maps of these layers cost many forward and backward passes.

    Args:
        layers: with the statistics that their maps are made of.
        work: what the method computes; None if it does not say.
        group: the settings.
    """
    if work is None:
        return None
    if work.captured is None:
        costs = list(_gradient_map_costs(layers, work, group))
        training = 6.0 * ASSUMED_ROWS * sum(layer.parameter.numel() for layer in layers)
        passes = f"of these layers with {ASSUMED_ROWS:,} rows"
    else:
        costs = list(_map_costs(layers, work.captured, group))
        training = sum(map(_pass_cost, layers))
        passes = "of these layers"
    refresh = sum(cost for cost, _, _ in costs)
    if refresh < NOTICEABLE or not training or refresh <= MANY_PASSES * training:
        return None
    costs.sort(key=lambda each: -each[0])
    named = ", ".join(f"{layer.name!r} ({sides})" for _, layer, sides in costs[:_NAMED])
    more = f" and {len(costs) - _NAMED} more" if len(costs) > _NAMED else ""
    ways = [way for name, way in _CHEAPER.items() if name in group]
    return (
        f"a refresh takes about {refresh / training:.0f} times as long as a forward and backward "
        f"pass {passes}, by an estimate from shapes; most of it is for {named}{more}"
        + (f". {_listed(ways)}" if ways else "")
    )


def _listed(ways: Sequence[str]) -> str:
    *first, last = ways
    return f"{', '.join(first)}, and {last}" if first else last


def _gradient_map_costs(
    layers: Sequence[Layer], work: StepWork, group: Mapping[str, Any]
) -> Iterator[tuple[float, Layer, str]]:
    """The cost of each layer's first maps, if they are made of its gradient."""
    for layer in layers:
        m, n = layer.shape
        matrices = Matrices(layer.blocks, m, n, layer.dtype.itemsize > 4)
        made = work.first or work.renew
        yield _cost(made(matrices, group)), layer, f"{m} outputs, {n} inputs"


def _map_costs(
    layers: Sequence[Layer], captured: CapturedFactors, group: Mapping[str, Any]
) -> Iterator[tuple[float, Layer, str]]:
    """The cost of each map, with its layer and side. Layers that share a factor share its map."""
    seen: set[int] = set()
    for layer in layers:
        if (statistics := layer.statistics) is None:
            continue
        for where, moment in ((LEFT, statistics.gradients), (RIGHT, statistics.inputs)):
            if moment is None or id(moment) in seen or layer.forms[where].kind != "matrix":
                continue
            if captured.one_for == "factor":
                seen.add(id(moment))
            form = layer.forms[where]
            squares = _squares(layer, form, where, moment.total.numel(), captured)
            factors = Factors(squares, form.size, where, layer.dtype.itemsize > 4)
            made = captured.first_map_work or captured.map_work
            yield _cost(made(factors, group)), layer, f"{form} {_SIDES[where]}"


def _squares(
    layer: Layer, form: SideForm, where: int, elements: int, captured: CapturedFactors
) -> int:
    if captured.one_for == "block":
        return layer.blocks * form.blocks
    return elements // form.size**2


def _cost(work: Work) -> float:
    """Operations, each weighted by its time."""
    return sum(
        operation.flops * (DECOMPOSITION if isinstance(operation, Decomposition) else 1.0)
        for operation in work
    )


def _pass_cost(layer: Layer) -> float:
    """Operations of a layer's forward and backward pass: three products of W's size per row."""
    statistics = layer.statistics
    moment = None if statistics is None else statistics.gradients or statistics.inputs
    if moment is None or moment.uses.device.type != "cpu":  # to read it there would wait
        return 0.0
    return 6.0 * layer.parameter.numel() * float(moment.uses.mean())
