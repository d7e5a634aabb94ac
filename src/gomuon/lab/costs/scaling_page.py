"""The tables in docs/scaling.md, between two markers, as `gomuon plan` computes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gomuon.lab.costs import planned_model
from gomuon.lab.costs.comparison import compare_costs
from gomuon.lab.costs.cost_tables import cost_rows, heading, notes
from gomuon.lab.costs.traffic import Mesh
from gomuon.lab.errors import LabError
from gomuon.lab.experiments.optimizers import title
from gomuon.lab.files import write_text
from gomuon.lab.report.markdown import table_row

BEGIN = "<!-- tables: made by make docs -->"
END = "<!-- end of tables -->"
METHODS = "go-muon,go-muon-input,muon,shampoo,kfac,adamw"
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
    """The page with new tables."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise LabError(f"{name} has no lines {BEGIN!r} and {END!r}; the tables go between them")
    return f"{before}{BEGIN}\n\n{block()}\n\n{END}{after}"


def block() -> str:
    """All tables of the page."""
    return "\n\n".join(part for shown in SHOWN for part in _section(*shown))


def _section(name: str, mesh: Mesh, dtype: str) -> Iterator[str]:
    found = compare_costs(planned_model.published_model(name, None, dtype), mesh, METHODS)
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
