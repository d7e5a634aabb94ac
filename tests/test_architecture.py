"""The imports of the package are those that docs/architecture.md allows."""

import ast
import re
from pathlib import Path

import pytest
import torch

import gomuon
from gomuon.optimizer import MatrixOptimizer

ROOT = Path(gomuon.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"


def room_of(module: str) -> str:
    """The room of a module: "functional", "step.py", "lab" or "lab/report"."""
    parts = module.split(".")[1:]
    if not parts:
        return "__init__.py"
    if not (ROOT / parts[0]).is_dir():
        return f"{parts[0]}.py"
    deeper = parts[0] == "lab" and len(parts) > 1 and (ROOT / "lab" / parts[1]).is_dir()
    return f"lab/{parts[1]}" if deeper else parts[0]


def imported(path: Path) -> set[str]:
    """Modules of gomuon, and torch.distributed, that a file imports, not only for type checkers."""
    found = set()
    for node in ast.walk(_AtRunTime().visit(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if is_module(name) else node.module for name in names}
    return {name for name in found if name.split(".")[0] in ("gomuon", "torch")}


class _AtRunTime(ast.NodeTransformer):
    """Drops `if TYPE_CHECKING:` blocks."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        test = node.test
        if isinstance(test, ast.Name) and test.id == "TYPE_CHECKING":
            return None
        return self.generic_visit(node)


def is_module(name: str) -> bool:
    parts = name.split(".")
    if parts[0] != "gomuon":
        return name == "torch.distributed"
    path = ROOT.joinpath(*parts[1:])
    return path.is_dir() or path.with_suffix(".py").exists()


FILES = sorted(ROOT.rglob("*.py"))
MODULES = {
    path: ".".join(("gomuon", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    )
    for path in FILES
}


def allowed() -> dict[str, set[str]]:
    """Room -> rooms it may import, from the tables of the page."""
    rows = re.findall(r"^\| `([\w/.]+)`[^|]*\|[^|]+\| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    table = {}
    for name, words in rows:
        rooms = {word.strip() for word in words.split(",")} - {"–"}
        table[name.rstrip("/")] = rooms
    return table


def base(room: str) -> str:
    """A room as the page lists it among imports: "step" for step.py, "report" for lab/report."""
    return room.removesuffix(".py").removeprefix("lab/")


ALLOWED = allowed()
LIBRARY = [room for room in ALLOWED if not room.startswith("lab")]


def test_the_page_lists_every_room() -> None:
    rooms = {room_of(module) for module in MODULES.values()}
    assert rooms - {"__init__.py", "__main__.py"} == set(ALLOWED)


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_a_module_imports_what_its_room_may(path: Path) -> None:
    room = room_of(MODULES[path])
    if room in ("__init__.py", "__main__.py"):
        return
    others = {room_of(module) for module in imported(path) if module.split(".")[0] == "gomuon"} - {
        room
    }
    if room.startswith("lab"):
        # The lab may import the whole library; among its own rooms the second table counts.
        others = {other for other in others if other.startswith("lab")}
        if room == "lab":  # the command line is on top of all rooms
            return
    assert {base(other) for other in others} <= ALLOWED[room]


def test_no_room_of_the_library_imports_another_in_a_circle() -> None:
    """The table itself is an order: each room only imports rooms above it."""
    above: set[str] = set()
    for room in LIBRARY:
        assert ALLOWED[room] <= above, room
        above.add(base(room))


def test_hooks_do_not_know_of_ranks_nor_geometry_of_hooks() -> None:
    for path in (*(ROOT / "capture").glob("*.py"), *(ROOT / "parameters").glob("*.py")):
        assert "torch.distributed" not in top_level_imports(path), path
    for path in (ROOT / "geometry").glob("*.py"):
        assert not any(name.startswith("gomuon.capture") for name in imported(path)), path


def top_level_imports(path: Path) -> set[str]:
    """What a file imports when it is imported itself."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_nothing_stands_between_torchs_optimizer_and_ours() -> None:
    assert MatrixOptimizer.__bases__ == (torch.optim.Optimizer,)
    for method in gomuon.__all__:
        kind = getattr(gomuon, method)
        if isinstance(kind, type) and issubclass(kind, MatrixOptimizer):
            assert kind is MatrixOptimizer or kind.__bases__ == (MatrixOptimizer,), method


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    assert set(dir(gomuon)) == {*gomuon.__all__, "__version__"}
    assert callable(gomuon.functional.polar)
    assert not (ROOT / "functional" / "polar.py").exists(), "polar is a function, not a module"


def test_one_name_means_one_thing() -> None:
    """No two classes of the package, and no two of its modules, have the same name."""
    classes = [
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted(set(classes)) == sorted(classes)
    # Every room of the lab may have a command, and every package its errors.
    common = {"__init__", "__main__", "command", "errors"}
    modules = [path.stem for path in FILES if path.stem not in common]
    assert sorted(set(modules)) == sorted(modules)
