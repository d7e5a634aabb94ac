"""`gomuon methods` in the terminal: all methods in a table, or one method in full."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

import gomuon
from gomuon.lab.errors import unknown_name
from gomuon.lab.experiments.optimizers import VARIANTS, OptimizerEntry, command_name, entries
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.registry import METHODS

# As in the paper's table of related work, with rate and origin added.
AXES = ("statistical geometry", "matrix update", "curvature amortisation", "from")
WIDE = 116  # columns; a narrower terminal gets a list instead of a table


def axes(recipe: Recipe) -> tuple[str, ...]:
    """The recipe's values of ``AXES``; each definition of a formula is on its own line."""
    formula = recipe.formula.replace(";  ", ";\n")
    return recipe.geometry.description, formula, clock_in_words(recipe), recipe.origin


def recipes() -> list[Recipe]:
    """The recipes of all methods, in the registry's order."""
    return [method.recipe for method in METHODS.values()]


def clock_in_words(recipe: Recipe) -> str:
    """When factors and maps are renewed, by the method's clock and default intervals."""
    if not recipe.has_geometry:
        return "–"
    clock, defaults = recipe.clock, recipe.defaults
    at = ", at the last of them" if clock.ahead(defaults) else ""
    maps = _interval_in_words(1 if clock.maps is None else defaults[clock.maps]) + at
    own = 1 if clock.statistics is None else defaults[clock.statistics]
    factors = maps if own is None else _interval_in_words(own) + at
    if not any(name.endswith("_factor") for name in recipe.geometry.entries):
        return f"maps {maps}"
    return f"factors and maps {maps}" if factors == maps else f"factors {factors}, maps {maps}"


def _interval_in_words(every: int) -> str:
    return "every step" if every == 1 else f"every {every} steps"


def official_in_words(recipe: Recipe) -> list[tuple[str, str]]:
    """Name and value of what a recipe says of public code: where it is, how both are equal."""
    facts = []
    for code in recipe.official:
        commit = f"commit {code.commit}" if code.commit else "commit unknown"
        facts.append(("official code", f"{code.where}, {commit}"))
        if code.ours is not None:
            ours = _settings_in_words(code.ours) or "our defaults"
            facts.append(("equal with", f"{ours}; {code.theirs}" if code.theirs else ours))
    return facts + [("departs", sentence) for sentence in recipe.departures]


def _settings_in_words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def print_table(console: Console) -> None:
    """Print all recipes in the order of the registry, then the lab's variants."""
    rows = recipes()
    console.print(_wide(rows) if console.width >= WIDE else _narrow(rows))
    for name, entry in VARIANTS.items():
        text = f"{name} is {entry.recipe.name} with {difference(entry)}."
        console.print(Text(text))
    console.print(Text("gomuon methods NAME shows one method in full.", style="dim"))


def _wide(recipes: Iterable[Recipe]) -> RenderableType:
    table = Table(box=box.HORIZONTALS, show_lines=True, expand=True, header_style="bold")
    table.add_column("method", style="bold", no_wrap=True)
    table.add_column("lr", justify="right", no_wrap=True)
    for head, ratio in zip(AXES, (4, 7, 4, 5), strict=True):
        table.add_column(head, ratio=ratio)
    for recipe in recipes:
        name = Text.assemble(recipe.name, "\n", (command_name(recipe.name), "dim not bold"))
        rate = Text(f"{recipe.defaults['lr']:g}")
        table.add_row(name, rate, *(Text(value) for value in axes(recipe)))
    return table


def _narrow(recipes: Iterable[Recipe]) -> RenderableType:
    parts: list[RenderableType] = []
    for recipe in recipes:
        facts = _facts(zip(AXES, axes(recipe), strict=True))
        parts += [_head(recipe, command_name(recipe.name)), facts, Text()]
    return Group(*parts)


def _head(recipe: Recipe, name: str) -> Text:
    rate = f"lr {recipe.defaults['lr']:g}"
    return Text.assemble((recipe.name, "bold"), (f"  {name}", "dim"), f"  {rate}")


def _facts(facts: Iterable[tuple[str, str]]) -> Table:
    """One fact per line, name and value."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(f"  {name}", Text(value))
    return table


def find(name: str) -> tuple[str, OptimizerEntry]:
    """Find a method by its command-line name or its class.

    Raises:
        LabError: the name is unknown; the message suggests the nearest one.
    """
    known = entries()
    given = name if name in known else command_name(name)
    if given not in known:
        raise unknown_name("method", name, known)
    return given, known[given]


def print_method(name: str, console: Console) -> None:
    """Print one method with its axes, all defaults and the docstring of its class."""
    name, entry = find(name)
    recipe = entry.recipe
    console.print(_head(recipe, name))
    if entry.base:
        console.print(Text(f"  a variant: {recipe.name} with {difference(entry)}"))
    console.print(_facts(zip(AXES, axes(recipe), strict=True)))
    console.print(_facts(official_in_words(recipe)))
    console.print(Text("\ndefaults", style="bold"))
    defaults = Table.grid(padding=(0, 2))
    for setting, value in {**recipe.defaults, **entry.options}.items():
        defaults.add_row(f"  {setting}", Text(repr(value)))
    console.print(defaults)
    method = METHODS[recipe.name]
    public = getattr(gomuon, recipe.name, None) is method
    where = "gomuon" if public else method.__module__
    console.print(Text(f"\n{where}.{method.__qualname__}", style="bold"))
    for line in reflow(docstring(recipe), max(40, console.width - 2)):
        console.print(Text(f"  {line}" if line else ""), soft_wrap=True)


def difference(entry: OptimizerEntry) -> str:
    """How a variant differs from its recipe, in words."""
    parts = [_settings_in_words(entry.options)] if entry.options else []
    for pattern, side in entry.per_head.items():
        parts.append(f"{pattern} split into heads by {side}")
    return ", ".join(parts)


def docstring(recipe: Recipe) -> str:
    return inspect.getdoc(METHODS[recipe.name]) or ""


def reflow(text: str, width: int) -> Iterator[str]:
    """A docstring wrapped to another width; formulas after "::" keep their lines."""
    for block in blocks(text):
        if isinstance(block, str):
            hang = " " * (len(block) - len(block.lstrip())) + "    " * (block[0] == " ")
            yield from textwrap.wrap(
                block,
                width,
                subsequent_indent=hang,
                break_long_words=False,
                break_on_hyphens=False,
            )
        else:
            yield from block


def blocks(text: str) -> Iterator[str | list[str]]:
    """Paragraphs and entries of a docstring, each as one line; verbatim parts as lists."""
    pending, verbatim = "", False
    for line in [*text.splitlines(), ""]:
        indent = len(line) - len(line.lstrip())
        verbatim = verbatim and (not line or indent > 0)
        if verbatim:
            yield [line]
            continue
        # A deeper line continues an entry; an unindented line continues a paragraph.
        start = len(pending) - len(pending.lstrip())
        joins = pending and line and (indent > start > 0 or indent == start == 0)
        if joins and not pending.endswith(":"):
            pending = f"{pending} {line.strip()}"
            continue
        if pending:
            yield pending
        if not line:
            yield [""]
        verbatim = pending.endswith("::")
        pending = line
