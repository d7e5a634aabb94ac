"""Methods from outside the package: `gomuon --import FILE_OR_MODULE COMMAND …`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from gomuon.lab.errors import LabError
from gomuon.lab.experiments.own_code import found_from, import_code, is_file_name
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
        given = str(Path(name).absolute()) if is_file_name(name) else name
        if given not in _imported:
            _import(given)
            _imported.append(given)


def _import(given: str) -> None:
    known, asked = set(METHODS), f"{OPTION} {given}"
    with found_from(given):
        module = import_code(given, asked)
        # A module that was imported before has registered its methods then.
        own = [m for m in METHODS.values() if f"{m.__module__}.".startswith(f"{module.__name__}.")]
        if not own and set(METHODS) == known:
            raise LabError(
                f"{asked} registers no method; decorate its class with "
                "@gomuon.recipes.registry.register"
            )
