"""A fault in what a step is made of; then five clean steps must train.

Every method, precision and way of looking at gradients, with every fault in the embedded inputs, in
one layer's output, in all gradients or in one of them, on a step that refreshes and on one that
does not.
"""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gomuon
from gomuon import NonFiniteGradientError
from gomuon.optimizer import MatrixOptimizer
from tests.methods.table import RECIPES
from tests.models import language_loss, transformer

Fault = Callable[[Tensor], Tensor]


def one_entry(rows: Tensor, value: float) -> Tensor:
    """One entry, in the middle, is this value."""
    flat = rows.clone().flatten()
    flat[flat.numel() // 2] = value
    return flat.view_as(rows)


def huge(rows: Tensor) -> float:
    """Finite, but its square is not."""
    return 1e300 if rows.dtype == torch.float64 else 1e38


def constant(rows: Tensor) -> Tensor:
    """All entries alike, of the size they had: a larger one would be another step, no fault."""
    return rows * 0 + rows.detach().double().square().mean().sqrt().to(rows.dtype)


def only_first(rows: Tensor) -> Tensor:
    """All rows but the first are zero."""
    kept = torch.zeros_like(rows.flatten(0, -2)[:, :1])
    kept[0] = 1
    return (rows.flatten(0, -2) * kept).view_as(rows)


def first_everywhere(rows: Tensor) -> Tensor:
    """Every row is the first one."""
    return rows.flatten(0, -2)[:1].expand(rows.flatten(0, -2).shape).reshape(rows.shape)


# Of rows [..., d]; None stands for no rows at all.
FAULTS: dict[str, Fault | None] = {
    "NaN": partial(one_entry, value=torch.nan),
    "infinity": partial(one_entry, value=-torch.inf),
    "1e38": lambda rows: one_entry(rows, huge(rows)),
    "all 1e38": lambda rows: rows * 0 + huge(rows),
    "denormals": lambda rows: rows * 1e-42,
    "zeros": lambda rows: rows * 0,
    "constant rows": constant,
    "one row": only_first,
    "duplicated rows": first_everywhere,
    "no rows": None,
}
PLACES = ("inputs", "layer", "gradients", "gradient")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
MODES = ("raise", "skip", "allow")
WARM = (4, 5)  # clean steps before: then comes a refresh step, or one that reuses
CLEAN = 5
LAYER = "trunk.blocks.0.mlp.up"

METHOD_NAMES = list(dict.fromkeys(name for name, _ in RECIPES))
EVERY = list(product(range(len(RECIPES)), DTYPES, MODES, FAULTS, PLACES, WARM))
CASES = len(EVERY)


def case(seed: int, folder: Path) -> str | None:
    """Every combination in turn, neighbours far apart."""
    warnings.simplefilter("ignore")
    return faulty(*numbered(seed))


def numbered(seed: int) -> tuple[int, torch.dtype, str, str, str, int]:
    """The combination with this number."""
    return EVERY[seed * 7919 % CASES]


def faulty(
    number: int, dtype: torch.dtype, mode: str, fault: str, place: str, warm: int
) -> str | None:
    """What is wrong after the fault; None if nothing is."""
    name, options = RECIPES[number]
    what = f"{name} {options} in {dtype}, {mode}, {fault} in {place} at step {warm}"
    model = transformer(0, dtype, width=8, layers=1)
    kind: type[MatrixOptimizer] = getattr(gomuon, name)
    # A fifth of the method's own rates: that the loss falls is then no matter of luck.
    rate = 0.2 * kind.recipe.defaults["lr"]
    optimizer = kind(model, lr=rate, adamw={"lr": 1e-3}, nonfinite=mode, **options)
    for _ in range(warm):
        clean_step(model, optimizer)
    try:
        faulty_step(model, optimizer, fault, place)
    except NonFiniteGradientError:
        if mode != "raise":
            return f"{what}: raised, although it should not"
    if mode == "allow":  # nobody looks: NaN may be in the weights, but nothing is raised
        for _ in range(CLEAN):
            clean_step(model, optimizer)
        return None
    before = loss_of(model)
    for _ in range(CLEAN):
        clean_step(model, optimizer)
    after = loss_of(model)
    if not all(bool(p.isfinite().all()) for p in model.parameters()):
        return f"{what}: weights are not finite"
    return None if after < before else f"{what}: the loss went from {before:.6f} to {after:.6f}"


def clean_step(model: nn.Module, optimizer: MatrixOptimizer) -> None:
    """Always on the same batch, so that the loss can be compared."""
    optimizer.zero_grad()
    language_loss(model, 0).backward()
    optimizer.step()


def faulty_step(model: nn.Module, optimizer: MatrixOptimizer, fault: str, place: str) -> None:
    change = FAULTS[fault]
    optimizer.zero_grad()
    with ExitStack() as hooks:
        if place in ("inputs", "layer"):
            module = model.get_submodule("embedding" if place == "inputs" else LAYER)
            hooks.callback(module.register_forward_hook(_replacing(change)).remove)
        language_loss(model, 0, batch=0 if place == "inputs" and change is None else 6).backward()
    chosen = {
        "gradients": list(model.parameters()),
        "gradient": [model.get_parameter(f"{LAYER}.weight")],
    }
    for p in chosen.get(place, []):
        assert p.grad is not None
        rows = p.grad if p.ndim > 1 else p.grad.unsqueeze(0)
        p.grad = None if change is None else change(rows).view_as(p)
    optimizer.step()


def _replacing(change: Fault | None) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """A forward hook that spoils the output; without rows, one that lets no gradient through."""

    def replace(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.detach() if change is None else change(output)

    return replace


def loss_of(model: nn.Module) -> float:
    with torch.no_grad():
        return float(language_loss(model, 0).double())
