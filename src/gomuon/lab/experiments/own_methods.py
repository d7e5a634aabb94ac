"""Methods from outside the package: `gomuon --import FILE_OR_MODULE COMMAND …`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from gomuon.lab.errors import LabError
from gomuon.recipes.registry import METHODS

OPTION = "--import"
_imported: list[str] = []  # what was asked for in this process, for the processes it starts


def take_imports(arguments: Sequence[str]) -> list[str]:
    """Import what the options before the command ask for; returns the command.

    Raises:
        LabError: a module cannot be imported, or registers no method.
    """
    words, wanted = list(arguments), []
    while words and words[0].partition("=")[0] == OPTION:
        _, given, value = words.pop(0).partition("=")
        if not given:
            if not words:
                raise LabError(f"{OPTION} needs a file or a module, such as {OPTION} my_method.py")
            value = words.pop(0)
        wanted.append(value)
    import_methods(wanted)
    return words


def imported() -> tuple[str, ...]:
    """Files, with their whole path, and modules that were imported so far."""
    return tuple(_imported)


def import_methods(names: Iterable[str]) -> None:
    """Import files and modules that register methods; each once.

    Raises:
        LabError: a module cannot be imported, or registers no method.
    """
    for name in names:
        given = str(Path(name).absolute()) if _is_file_name(name) else name
        if given not in _imported:
            _import(given)
            _imported.append(given)


def _is_file_name(name: str) -> bool:
    return name.endswith(".py") or os.sep in name


def _import(given: str) -> None:
    path = Path(given) if _is_file_name(given) else None
    if path is not None and not path.is_file():
        raise LabError(f"{OPTION} {given}: there is no such file")
    # The folder stays there: the module may import its neighbours later.
    folder = str(Path.cwd() if path is None else path.parent)
    sys.path.insert(0, folder)
    try:
        _import_module(given, path)
    except LabError:
        sys.path.remove(folder)
        raise


def _import_module(given: str, path: Path | None) -> None:
    known = set(METHODS)
    try:
        module = importlib.import_module(given if path is None else path.stem)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise LabError(
            f"{OPTION} {given} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    file = getattr(module, "__file__", None)  # a module of the interpreter itself has none
    if path is not None and (file is None or Path(file).resolve() != path.resolve()):
        raise LabError(
            f"{OPTION} {given}: another module is named {path.stem!r}; give the file another name"
        )
    # A module that was imported before has registered its methods then.
    own = [m for m in METHODS.values() if f"{m.__module__}.".startswith(f"{module.__name__}.")]
    if not own and set(METHODS) == known:
        raise LabError(
            f"{OPTION} {given} registers no method; decorate its class with "
            "@gomuon.recipes.registry.register"
        )
