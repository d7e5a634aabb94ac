"""docs/methods.md: all methods, from the same recipes as `gomuon methods`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from gomuon.lab.experiments.optimizers import VARIANTS, OptimizerEntry, command_name
from gomuon.lab.report.markdown import escape, table_row
from gomuon.lab.report.terminal_methods import (
    AXES,
    axes,
    blocks,
    docstring,
    official_in_words,
    recipes,
)
from gomuon.recipes.recipe import Recipe

CODE_WIDTH = 96
INTRODUCTION = """\
# Methods

Made by `make pages` from the recipes in `src/gomuon/methods/`, one file for each method; change
them there.

All methods share one step and differ in three choices: where the geometry comes from, how it is
used, and when it is refreshed. G is the gradient of a weight W [m, n], M its momentum, M̂ the source
of the update (M itself, or Nesterov's look-ahead), D the direction, and polar(X) the factor UVᵀ of
X = USVᵀ. Factors are averages of what is observed; maps are what the step multiplies with, such as
their inverse roots or eigenvectors. `gomuon race`, `gomuon tune` and `gomuon plan` use the names in
the second column.

Where there is public code, "equal with" names our settings with which both make the same updates,
and after a semicolon its own; both then take the exact polar factor and compute in float64. Tests
hold us to plain references written from the same formulas. "departs" is where we differ on purpose,
whatever the settings."""

OWN_METHOD = """\
## Your own method

A method is one file, which may be anywhere. It chooses a function for each station of the step and
registers a class with that recipe:"""
EXAMPLE = '''\
"""ToyMuon: the polar factor approached by a few Newton–Schulz steps."""

from torch import Tensor

from gomuon import MatrixOptimizer
from gomuon.geometry.base import Geometry
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import MOMENTUM, Group, length, lerp_momentum, muon_scale, rate
from gomuon.recipes.work import Matrices, Product, StepWork, Work
from gomuon.settings import INTERVAL, Setting


def newton_schulz(X: Tensor, stack: Stack, group: Group) -> Tensor:
    """Y ← 1.5·Y − .5·YYᵀY, from Y = X/‖X‖_F; X is a stack of matrices, [b, m, n]."""
    Y = X / length(X).clamp_min(1e-30)
    for _ in range(group["iterations"]):
        Y = 1.5 * Y - 0.5 * (Y @ Y.mT) @ Y
    return Y


def step_work(x: Matrices, group: Group) -> Work:
    """The products of one step, for `gomuon plan`."""
    count = x.count * group["iterations"]
    return [Product(count, x.m, x.n, x.m), Product(count, x.m, x.m, x.n)]


@register
class ToyMuon(MatrixOptimizer):
    """Muon by Newton–Schulz steps alone."""

    recipe = Recipe(
        "ToyMuon",
        geometry=Geometry(),
        source=lerp_momentum,
        direction=newton_schulz,
        scale=muon_scale,
        settings={**rate(0.02), **MOMENTUM, "iterations": Setting(5, INTERVAL)},
        formula="D = the fifth Newton–Schulz iterate of M̂/‖M̂‖_F",
        origin="an example",
        work=StepWork(step_work),
    )
'''
USE = """\
`work` may be left out; then `gomuon plan` refuses the method. On the command line, name the file or
its module before the command:

    gomuon --import toy_muon.py methods toy-muon
    gomuon --import toy_muon.py race --optimizers go-muon,toy-muon
    gomuon --import toy_muon.py plan gpt2-124m --optimizers muon,toy-muon"""


def markdown() -> str:
    """The whole document."""
    parts = [INTRODUCTION, _table()]
    parts += [_section(recipe) for recipe in recipes()]
    parts.append("## Variants")
    parts.append("Further names of the lab; each is one of the methods above with other settings.")
    parts.append("\n".join(f"- {_code(name)}: {_variant(v)}" for name, v in VARIANTS.items()))
    parts += [OWN_METHOD, _verbatim(EXAMPLE.rstrip()), USE]
    return "\n\n".join(parts) + "\n"


def _table() -> str:
    heads = ["method", "name", *AXES[:-1], "default lr", AXES[-1]]
    lines = [table_row(heads), table_row(["---"] * len(heads))]
    for recipe in recipes():
        *middle, origin = (escape(value) for value in axes(recipe))
        link = f"[{escape(recipe.name)}](#{recipe.name.lower()})"
        rate = f"{recipe.defaults['lr']:g}"
        lines.append(table_row([link, _code(command_name(recipe.name)), *middle, rate, origin]))
    return "\n".join(lines)


def _section(recipe: Recipe) -> str:
    geometry, formula, clock, origin = axes(recipe)
    call = f"{recipe.name}(model, {_settings(recipe)})"
    code = textwrap.fill(call, CODE_WIDTH, subsequent_indent=" " * (len(recipe.name) + 1))
    facts = [
        f"- {AXES[0]}: {escape(geometry)}",
        f"- {AXES[2]}: {escape(clock)}",
        f"- {AXES[3]}: {escape(origin)}",
        *(f"- {name}: {escape(value)}" for name, value in official_in_words(recipe)),
    ]
    parts = [f"## {escape(recipe.name)}", *_description(recipe)]
    parts += [_verbatim(formula), "\n".join(facts), f"```python\n{code}\n```"]
    return "\n\n".join(parts)


def _settings(recipe: Recipe) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in recipe.defaults.items())


def _description(recipe: Recipe) -> Iterator[str]:
    """The text and formulas of the class's docstring, up to its arguments."""
    code: list[str] = []
    for block in [*blocks(docstring(recipe)), "Args:"]:
        if not isinstance(block, str):
            code += block
            continue
        formulas = textwrap.dedent("\n".join(code)).strip("\n")
        if formulas:
            yield _verbatim(formulas)
        code = []
        if block == "Args:":
            return
        yield _prose(re.sub("::$", ":", block))


def _prose(text: str) -> str:
    """An escaped paragraph; names in backticks stay code."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if part.startswith("`") else escape_inside(part) for part in parts)


def escape_inside(text: str) -> str:
    """Escape a part of a line; keep the spaces at its start and end."""
    lead, tail = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    return f"{lead}{escape(text)}{tail}" if text.strip() else text


def _verbatim(text: str) -> str:
    """An indented block, which needs no escaping."""
    return textwrap.indent(text, "    ")


def _code(text: str) -> str:
    return f"`{text}`"


def _variant(entry: OptimizerEntry) -> str:
    parts = [_code(f"{name}={value!r}") for name, value in entry.options.items()]
    parts += [f"{_code(p)} split into heads by {side}" for p, side in entry.per_head.items()]
    return f"{escape(entry.recipe.name)} with {', '.join(parts)}"
