"""A public function, or an optimizer's constructor, with arguments at random.

A call holds when it returns what its documentation says, of the shape and dtype that its arguments
give, or when it raises a ValueError, a TypeError or a DecompositionError that names the argument.
Right arguments must be taken, and give finite numbers.
"""

import inspect
import numbers
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gomuon import DecompositionError, LayerSpec
from gomuon.recipes.registry import METHODS
from tests.faults.arguments import Source
from tests.faults.doors import DOORS, Arguments, Door

CASES = 5000


def case(seed: int, folder: Path) -> str | None:
    """One call."""
    source = Source(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if source.pick.random() < 0.25:
            return _construct(source)
        return _call(source)


# ---- functions -----------------------------------------------------------------------------------


def _call(source: Source) -> str | None:
    name = source.pick.choice(sorted(DOORS))
    door = DOORS[name]
    arguments = door.right(source)
    count = min(source.pick.choice([0, 1, 1, 2]), len(arguments))
    wrong = source.pick.sample(sorted(arguments), count)
    for one in wrong:
        arguments[one] = source.wrong(arguments[one])
    if isinstance(arguments.get("bisections"), int) and arguments["bisections"] > 100:
        arguments["bisections"] = 100  # a right one, but long
    said = f"{name}({', '.join(f'{key}={_told(value)}' for key, value in arguments.items())})"
    try:
        found = door.function(**arguments)
    except (ValueError, TypeError, DecompositionError) as error:
        if not wrong:
            return f"{said} raised {error!r}"
        if isinstance(error, DecompositionError):
            return None if "cannot decompose" in str(error) else f"{said} raised {error!r}"
        return _unless_named(said, error, {*arguments, name, "method"})
    except Exception as error:
        return f"{said} raised {type(error).__name__}: {error}"
    return _judged(said, found, door, arguments, right=not wrong)


def _judged(
    said: str, found: Any, door: Door, arguments: Mapping[str, Any], *, right: bool
) -> str | None:
    try:
        expected = door.results(arguments)
    except Exception as error:
        return f"{said} returned {_told(found)}, but its arguments fit nothing: {error!r}"
    results = list(found) if isinstance(found, tuple) else [found]
    if len(results) != len(expected):
        return f"{said} returned {len(results)} values, expected {len(expected)}"
    for result, shape in zip(results, expected, strict=True):
        if shape is None:
            if isinstance(result, bool) or not isinstance(result, (numbers.Real, Tensor)):
                return f"{said} returned {_told(result)}, expected a number"
        elif not isinstance(result, Tensor) or (tuple(result.shape), result.dtype) != shape:
            return f"{said} returned {_told(result)}, expected {shape}"
        if right and not torch.as_tensor(result).isfinite().all():
            return f"{said} returned what is not finite"
    return None


def _unless_named(said: str, error: Exception, names: set[str]) -> str | None:
    if names & set(re.findall(r"\w+", str(error))):
        return None
    return f"{said} raised {type(error).__name__} that names no argument: {error}"


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"<{value.dtype} {tuple(value.shape)} {value.device} {value.layout}>"
    if isinstance(value, int) and abs(value) > 10**30:
        return f"<{value.bit_length()} bits>"
    return repr(value)[:60]


# ---- constructors --------------------------------------------------------------------------------

OPTIMIZERS = [*METHODS.values()]


class _Attention(nn.Module):
    """What every optimizer takes, MuonQK too."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.q_proj = nn.Linear(4, 4)
        self.k_proj = nn.Linear(4, 4, bias=False)


def _construct(source: Source) -> str | None:
    kind = source.pick.choice(OPTIMIZERS)
    model = _Attention()
    names = [name for name in inspect.signature(kind).parameters if name != "params"]
    changed = source.pick.sample(names, source.pick.choice([0, 1, 1, 2]))
    settings: Arguments = {name: _setting(source, name, model) for name in changed}
    params: Any = _parameters(source, model) if source.pick.random() < 0.2 else model
    settings_said = settings if params is model else {"params": params, **settings}
    said = f"{kind.__name__}({', '.join(f'{k}={_told(v)}' for k, v in settings_said.items())})"
    try:
        kind(params, **settings)
    except (ValueError, TypeError) as error:
        if not settings_said:
            return f"{said} raised {error!r}"
        words = (
            {"parameter", "parameters", "params", "model", "weight", "lr"}
            if params is not model
            else set()
        )
        return _unless_named(said, error, {*settings, *words})
    except Exception as error:
        return f"{said} raised {type(error).__name__}: {error}"
    return None


def _setting(source: Source, name: str, model: nn.Module) -> Any:
    if name == "specs" and source.pick.random() < 0.7:
        value = source.wrong(1)
        return source.pick.choice(
            [
                {"*": LayerSpec()},
                {"q_proj.weight": value},
                {value: LayerSpec()} if _key(value) else {},
            ]
        )
    if name == "adamw" and source.pick.random() < 0.7:
        return {source.pick.choice(["lr", "betas", "eps", "weight_decay", "x"]): source.wrong(1)}
    if name in ("alpha", "betas") and source.pick.random() < 0.5:
        return (source.wrong(1), source.wrong(1))
    value = source.wrong(1)
    return (
        None if name == "routes" and callable(value) else value
    )  # a function's errors are its own


def _key(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _parameters(source: Source, model: nn.Module) -> Any:
    X = source.bent(source.normal(3, 4))
    return source.pick.choice(
        [
            list(model.parameters()),
            model.named_parameters(),
            iter(model.parameters()),
            [],
            nn.Sequential(),
            X,
            [X],
            [{"params": [X]}],
            [{"params": list(model.parameters()), "lr": source.wrong(1)}],
            [{}],
            source.wrong(1),
            [source.wrong(1)],
            set(model.parameters()),
            nn.Embedding(3, 4, sparse=True),
            nn.Linear(2, 2, dtype=torch.complex64),
            nn.LazyLinear(2),
        ]
    )
