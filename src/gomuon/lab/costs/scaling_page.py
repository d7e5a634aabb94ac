"""What docs/scaling.md shows between markers: the tables and answers of `gomuon plan`."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from gomuon.lab.costs import planned_model
from gomuon.lab.costs.comparison import CostComparison, compare_costs, given_settings
from gomuon.lab.costs.cost_tables import cost_rows, heading, human, notes
from gomuon.lab.costs.estimate import RankLayout
from gomuon.lab.costs.fit_tables import percent, print_fitting, shown_settings
from gomuon.lab.costs.fitting import Bounds, fit_methods
from gomuon.lab.costs.sizes import parse_bytes
from gomuon.lab.costs.traffic import Mesh
from gomuon.lab.errors import LabError
from gomuon.lab.experiments import optimizers
from gomuon.lab.experiments.optimizers import title
from gomuon.lab.files import write_text
from gomuon.lab.report.markdown import table_row

BEGIN = "<!-- tables: made by make pages -->"
END = "<!-- end of tables -->"
METHODS = "go-muon,go-muon-input,muon,shampoo,kfac,adamw"
FITS_BEGIN = "<!-- fits: made by make pages -->"
FITS_END = "<!-- end of fits -->"
# Model, mesh, methods, memory and reserve, in bfloat16.
FITS_SHOWN = (
    ("llama-70b", Mesh(replicas=8, shards=64), "go-muon,muon,shampoo,kfac", "80GB", "20GB"),
    ("llama-7b", Mesh(shards=8), "go-muon,muon,soap", "24GB", "6GB"),
)
LARGE_BEGIN = "<!-- large models: made by make pages -->"
LARGE_END = "<!-- end of large models -->"
# Model, mesh, and the most bytes of captured sums that a rank may hold at one time, in bfloat16.
LARGE_SHOWN = (
    ("llama-7b", Mesh(shards=64), 10**9),
    ("llama-70b", Mesh(replicas=8, shards=64), 2 * 10**9),
)
LARGEST_SHARE = 0.08  # of the model's work, amortised
# The defaults that make it so; their values come from the method itself.
NAMED = ("refresh_every", "stagger", "block_size", "rows", "alpha", "state_dtype", "offload")
WIDTH = 100  # columns of a terminal's output on the page
# Model, mesh and dtype.
SHOWN = (
    ("gpt2-124m", Mesh(replicas=8), "float32"),
    ("llama-7b", Mesh(shards=64), "bfloat16"),
    ("llama-70b", Mesh(replicas=8, shards=64), "bfloat16"),
)


def write(path: Path) -> None:
    """Replace the text between the markers of a page."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise LabError(f"--markdown {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LabError(f"--markdown {path} is not UTF-8 text: {error}") from error
    # A link here was given by the user: write to the file it points to.
    write_text(path.resolve(), renewed(text, str(path)))


def renewed(text: str, name: str = "the page") -> str:
    """The page with new tables and answers."""
    text = _replaced(text, (BEGIN, END), block, name)
    text = _replaced(text, (LARGE_BEGIN, LARGE_END), large_models, name)
    return _replaced(text, (FITS_BEGIN, FITS_END), fits, name)


def _replaced(text: str, markers: tuple[str, str], made: Callable[[], str], name: str) -> str:
    """The text with something new between two lines."""
    first, last = markers
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise LabError(f"{name} has no lines {first!r} and {last!r}; the tables go between them")
    return f"{before}{first}\n\n{made()}\n\n{last}{after}"


def fits() -> str:
    """What `gomuon plan --fit` prints, as code."""
    return "\n\n".join(_answer(*shown) for shown in FITS_SHOWN)


def _answer(name: str, mesh: Mesh, methods: str, memory: str, reserve: str) -> str:
    planned = planned_model.published_model(name, None, "bfloat16")
    bounds = Bounds(parse_bytes("--fit", memory), parse_bytes("--reserve", reserve))
    fitting = fit_methods(planned, RankLayout(mesh), methods, bounds, given_settings())
    written = io.StringIO()
    print_fitting(fitting, Console(file=written, width=WIDTH))
    command = (
        f"$ gomuon plan {name} --ranks {mesh.ranks} --shards {mesh.shards} --dtype bfloat16 "
        f"--optimizers {methods} --fit {memory} --reserve {reserve}"
    )
    lines = [line.rstrip() for line in [command, *written.getvalue().splitlines()]]
    return "\n".join(["```", *(line for line in lines if line), "```"])


def large_models() -> str:
    """What Go-MUON's defaults need on large models, beside what it may be."""
    heads = ["", "captured sums, at one time", "sent, busiest step", "work, amortised", "busiest"]
    rows = [heads, ["---", *["---:"] * (len(heads) - 1)], *map(large_model, LARGE_SHOWN)]
    entry = optimizers.find("go-muon")
    assert entry is not None
    settings = shown_settings({name: entry.recipe.defaults[name] for name in NAMED})
    return "\n".join([f"`GoMuon(model, {settings})`, the defaults:", "", *map(table_row, rows)])


def large_model(shown: tuple[str, Mesh, int]) -> list[str]:
    """One row of this table."""
    name, mesh, sums = shown
    found = compare_large(name, mesh)
    (cost,) = found.methods
    assert cost.refresh is not None
    assert cost.sent_refresh is not None
    work, busiest = (
        percent(steps.largest / found.model_flops) for steps in (cost.amortised, cost.refresh)
    )
    return [
        f"{name}, {mesh.ranks} ranks, {found.dtype}",
        f"{human(cost.held, 'B')} (≤ {human(sums, 'B')})",
        f"{human(cost.sent_refresh.largest, 'B')} (≤ {human(found.wrapper, 'B')}, FSDP2's own)",
        f"{work} (≤ {percent(LARGEST_SHARE)})",
        busiest,
    ]


def compare_large(name: str, mesh: Mesh) -> CostComparison:
    planned = planned_model.published_model(name, None, "bfloat16")
    return compare_costs(planned, RankLayout(mesh), "go-muon")


def block() -> str:
    """All tables of the page."""
    return "\n\n".join(part for shown in SHOWN for part in _section(*shown))


def _section(name: str, mesh: Mesh, dtype: str) -> Iterator[str]:
    found = compare_costs(
        planned_model.published_model(name, None, dtype), RankLayout(mesh), METHODS
    )
    yield f"### {heading(found)}"
    yield (
        f"    gomuon plan {name} --ranks {mesh.ranks} --shards {mesh.shards} --dtype {dtype} "
        f"--optimizers {METHODS}"
    )
    matrices = sum(x.parameters for x in found.treated if x.treatment == "matrix")
    yield (
        f"Of the parameters {100 * matrices / found.parameters:.1f} % are matrices, the rest is "
        f"AdamW's. {' '.join(notes(found)[1:])}"
    )
    heads = ["", *(title(method.method) for method in found.methods)]
    rows = [heads, ["---", *["---:"] * len(found.methods)], *cost_rows(found)]
    yield "\n".join(table_row(row) for row in rows)
