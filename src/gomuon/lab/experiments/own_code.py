"""Classes from outside the package, as `module:Class` or `path/to/file.py:Class`.

Their names are used as they were typed, in plans, configurations and reports. So reading results
imports nothing; only what trains imports the classes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import inspect
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from gomuon.lab.errors import LabError, unknown_name
from gomuon.lab.input_checks import is_file

FORM = "write module:Class or path/to/file.py:Class"


def is_own(name: str) -> bool:
    """Whether a name means a class from outside; no name of ours has a colon."""
    return ":" in name


def is_file_name(name: str) -> bool:
    return name.endswith(".py") or os.sep in name


def split(name: str) -> tuple[str, str]:
    """The module or file, and the class."""
    place, _, cls = name.rpartition(":")
    if not place or not cls.isidentifier():
        raise LabError(f"{name!r} is not understood; {FORM}")
    return place, cls


def slug(name: str) -> str:
    """The name of an arm or a folder: torch.optim-Muon, own_task-Rings."""
    if not is_own(name):
        return name
    place, cls = split(name)
    return f"{Path(place).stem if is_file_name(place) else place}-{cls}"


def title(name: str) -> str:
    """In tables and plots: "Muon (torch.optim)", "Lion (own_optimizer.py)"."""
    place, cls = split(name)
    return f"{cls} ({Path(place).name if is_file_name(place) else place})"


@contextlib.contextmanager
def found_from(place: str) -> Iterator[None]:
    """Let Python look for a module here, or beside its file; not after a LabError.

    Otherwise the folder stays there: a module may import its neighbours later.
    """
    folder = str(Path(place).absolute().parent if is_file_name(place) else Path.cwd())
    if folder in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    except LabError:
        sys.path.remove(folder)
        raise


def import_code(place: str, asked: str) -> ModuleType:
    """Import a module or a file; `asked` begins the errors.

    Raises:
        LabError: there is no such file, it cannot be imported, or its name is taken.
    """
    path = Path(place).absolute() if is_file_name(place) else None
    if path is not None and not is_file(path):
        raise LabError(f"{asked}: there is no such file")
    try:
        module = importlib.import_module(place if path is None else path.stem)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise LabError(f"{asked} cannot be imported: {type(error).__name__}: {error}") from error
    file = getattr(module, "__file__", None)  # a module of the interpreter itself has none
    if path is not None and (file is None or Path(file).resolve() != path.resolve()):
        raise LabError(
            f"{asked}: another module is named {path.stem!r}; give the file another name"
        )
    return module


def load(name: str, kind: str) -> type:
    """The class of a name; `kind` says in errors what it is, "task" or "optimizer".

    Raises:
        LabError: it cannot be imported, or is no class.
    """
    place, wanted = split(name)
    asked = f"{kind} {name}"
    with found_from(place):
        module = import_code(place, asked)
        found = getattr(module, wanted, None)
        if found is None:
            classes = [word for word, value in vars(module).items() if isinstance(value, type)]
            if not classes:
                raise LabError(f"{asked}: {place} has no class {wanted!r}, nor any other")
            raise LabError(f"{asked}: {unknown_name(f'class of {place}', wanted, classes)}")
        if not isinstance(found, type):
            raise LabError(f"{asked} is a {type(found).__name__}; expected a class")
    return found


@dataclass(frozen=True)
class CodeSource:
    """What a class was when it was used.

    Attributes:
        path: its module and name.
        sha256: of the file that defines it, or files with its bases; None if it has none.
        package: the package that it is part of, None for a plain file.
        version: of the package.
    """

    path: str
    sha256: str | None
    package: str | None
    version: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def source_of(name: str, kind: str) -> CodeSource:
    """The source of a class from outside."""
    found = load(name, kind)
    package = None if is_file_name(split(name)[0]) else found.__module__.partition(".")[0]
    return CodeSource(
        f"{found.__module__}.{found.__qualname__}",
        _file_hash(found),
        package,
        None if package is None else _version(package),
    )


def sources(task: str, optimizers: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Name -> source, of all that come from outside; what a plan and a manifest record."""
    wanted = {task: "task", **dict.fromkeys(optimizers, "optimizer")}
    return {name: source_of(name, kind).as_dict() for name, kind in wanted.items() if is_own(name)}


def package_versions(task: str, optimizer: str) -> dict[str, str]:
    """The versions of the packages that a run's task and optimizer come from."""
    used = sources(task, [optimizer]).values()
    return {one["package"]: one["version"] for one in used if one["version"] is not None}


def require_same(recorded: Any, now: dict[str, dict[str, Any]], folder: Path) -> None:
    """Refuse to continue with another source than the recorded one.

    Another version of a package with the same file is no reason: versions are recorded with the
    runs, and a change of them is said.

    Raises:
        LabError: a class or its file has changed.
    """
    before = recorded if isinstance(recorded, dict) else {}
    for name, source in now.items():
        was = before.get(name)
        was = was if isinstance(was, dict) else {}
        if was.get("path") != source["path"]:
            raise LabError(
                f"{folder} was started with {was.get('path', 'nothing')} as {name}, which is now "
                f"{source['path']}; choose another folder with --out"
            )
        if was.get("sha256") != source["sha256"]:
            version = f" (version {was['version']} then)" if was.get("version") else ""
            then, here = (str(one.get("sha256"))[:12] for one in (was, source))
            raise LabError(
                f"the source of {name} has changed since {folder} was started{version}: its "
                f"sha256 was {then} and is {here}; restore it to continue, or choose another "
                "folder with --out"
            )


def _file_hash(found: type) -> str | None:
    """sha256 of the files, one after the other, in which the class and its bases are written.

    Bases that torch and Python provide do not count; their versions are recorded.
    """
    own = found.__module__.partition(".")[0]
    given = {"torch", "builtins", "typing", "abc"} - {own}
    files = [
        file
        for kind in found.__mro__[:-1]
        if kind.__module__.partition(".")[0] not in given and kind is not torch.optim.Optimizer
        for file in _files(kind)
    ]
    digest = hashlib.sha256()
    try:
        for file in dict.fromkeys(files):
            digest.update(Path(file).read_bytes())
    except OSError:
        return None
    return digest.hexdigest() if files else None


def _files(kind: type) -> list[str]:
    """Where its methods are written; a package may present it as part of another module."""
    functions = [inspect.unwrap(value) for value in vars(kind).values() if callable(value)]
    codes = [function.__code__ for function in functions if inspect.isfunction(function)]
    return [code.co_filename for code in codes if Path(code.co_filename).is_file()]


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    version = getattr(sys.modules.get(package), "__version__", None)
    return None if version is None else str(version)


@contextlib.contextmanager
def blaming(name: str, action: str) -> Iterator[None]:
    """Turn what a user's code raises into one line that says where.

    Raises:
        LabError: the code inside raised something else.
    """
    try:
        yield
    except LabError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = (str(error).strip().splitlines() or [""])[0]
        raise LabError(
            f"{name}: {action} raised {type(error).__name__}{': ' if said else ''}{said} "
            f"({Path(last.filename).name}, line {last.lineno})"
        ) from error
