"""All methods by name, for the table of methods, the command line, the planner and the tests."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from gomuon.optimizer import MatrixOptimizer

MethodClass = TypeVar("MethodClass", bound="type[MatrixOptimizer]")

METHODS: dict[str, "type[MatrixOptimizer]"] = {}


def register(method: MethodClass) -> MethodClass:
    """Class decorator: add a method to `METHODS` under its recipe's name.

    Raises:
        ValueError: another class already has this name.
    """
    name = method.recipe.name
    known = METHODS.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (
        method.__module__,
        method.__qualname__,
    ):
        raise ValueError(
            f"two methods are named {name!r}: {known.__module__}.{known.__qualname__} and "
            f"{method.__module__}.{method.__qualname__}; give the recipe another name"
        )
    METHODS[name] = method
    return method


def setting_names() -> set[str]:
    """The names of all methods' settings."""
    return {name for method in METHODS.values() for name in method.recipe.settings}


def renamed(name: str, groups: Sequence[Mapping[str, Any]]) -> str | None:
    """The present name of the method that a checkpoint with these groups calls `name`.

    None if it is `name` still.
    """
    for method in METHODS.values():
        older = method.recipe.older
        if older is not None and older.name == name and older.include(groups):
            return method.recipe.name
    return None
