"""A public function, or an optimizer's constructor, with arguments at random.

A call holds when it returns what its documentation says, of the shape and dtype that its arguments
give, or when it raises a ValueError, a TypeError or a DecompositionError that names the argument.
Right arguments must be taken, and give finite numbers.
"""

import inspect
import numbers
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gomuon
from gomuon import DecompositionError, LayerSpec, functional
from gomuon.functional import theory
from tests.faults.arguments import Source

CASES = 5000

Arguments = dict[str, Any]
Shape = tuple[tuple[int, ...], torch.dtype] | None  # None: a plain number
METHODS = ("svd", "canonical", "gram", "polar-express", "auto")


@dataclass(frozen=True)
class Door:
    """A public function: right arguments for it, and what they must give."""

    function: Callable[..., Any]
    right: Callable[[Source], Arguments]
    results: Callable[[Mapping[str, Any]], list[Shape]]


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


# ---- what right arguments are --------------------------------------------------------------------


def _dtype(source: Source) -> torch.dtype:
    return source.pick.choice([torch.float32, torch.float64])


def _sided(
    source: Source, name: str = "M", *, optional: bool = True, empty: bool = True
) -> Arguments:
    leading, dtype = source.leading(), _dtype(source)
    m, n = (source.side() if empty else max(1, source.side()) for _ in range(2))
    arguments: Arguments = {name: source.normal(*leading, m, n, dtype=dtype)}
    for side, d in (("left", m), ("right", n)):
        leads = source.pick.choice([leading, ()])
        arguments[side] = source.definite(*leads, d=d, dtype=dtype)
        if optional and source.pick.random() < 0.2:
            arguments[side] = None
    return arguments


def _with_method(source: Source) -> Arguments:
    return {**_sided(source), "polar_method": source.pick.choice(METHODS)}


def _halfspace(source: Source) -> Arguments:
    return {
        **_with_method(source),
        "tau": source.pick.choice([0.0, 0.5, 0.9, 0.999, 1 - 1e-7, 1 - 1e-15]),
        "bisections": source.pick.choice([0, 5, 30]),
    }


def _square(source: Source, d: int | None = None) -> Tensor:
    d = source.side() if d is None else d
    return source.definite(*source.leading(), d=d, dtype=_dtype(source))


def _factors(source: Source) -> Arguments:
    dtype, leading = _dtype(source), source.leading()
    m, n = (max(1, source.side()) for _ in range(2))
    return {
        "A": source.definite(*leading, d=n, dtype=dtype),
        "B": source.definite(*leading, d=m, dtype=dtype),
        "M": source.normal(*leading, m, n, dtype=dtype),
        "alpha": source.pick.choice([0.0, 0.25, 0.5]),
    }


def _drift(source: Source) -> Arguments:
    dtype, leading = _dtype(source), source.leading()
    m, n = (max(1, source.side()) for _ in range(2))
    sides = {"left": m, "right": n, "cached_left": m, "cached_right": n}
    return {name: source.definite(*leading, d=d, dtype=dtype) for name, d in sides.items()}


def _labels(source: Source) -> Arguments:
    shape, dtype = (*source.leading(), max(1, source.side())), _dtype(source)
    return {name: source.probabilities(*shape, dtype=dtype) for name in ("q", "p")}


def _with_jacobian(source: Source) -> Arguments:
    labels = _labels(source)
    *leading, c = labels["p"].shape
    J = source.normal(*leading, c, 4, dtype=labels["p"].dtype)
    return {**labels, "jacobian": source.pick.choice([J, None])}


def _clock(source: Source) -> Arguments:
    return {
        "beta": source.pick.choice([0.0, 0.5, 0.97, 1 - 1e-9]),
        "every": source.pick.choice([1, 2, 4, 100]),
    }


# ---- what they give ------------------------------------------------------------------------------


def _like(name: str, *sides: str, drop: int = 0) -> Callable[[Mapping[str, Any]], list[Shape]]:
    """As the named argument, with leading dimensions of the sides too, and less the last ones."""

    def results(arguments: Mapping[str, Any]) -> list[Shape]:
        X: Tensor = arguments[name]
        given = [arguments[side] for side in sides]
        others = [side.shape[:-2] for side in given if side is not None]
        leading = torch.broadcast_shapes(X.shape[:-2], *others)
        return [((*leading, *X.shape[-2:])[: len(leading) + 2 - drop], X.dtype)]

    return results


def _mismatch(arguments: Mapping[str, Any]) -> list[Shape]:
    q, p = arguments["q"], arguments["p"]
    shape = torch.broadcast_shapes(q.shape, p.shape)
    return [((*shape, shape[-1]), torch.promote_types(q.dtype, p.dtype))]


def _mismatch_bound(arguments: Mapping[str, Any]) -> list[Shape]:
    q, p, J = arguments["q"], arguments["p"], arguments["jacobian"]
    bound = torch.empty_like((q - p)[..., 0])
    if J is not None:
        bound = bound * torch.empty(J.shape[:-2], dtype=J.dtype)
    return [(tuple(bound.shape), bound.dtype)]


def _shrunk(weight: str) -> Callable[[Mapping[str, Any]], list[Shape]]:
    def results(arguments: Mapping[str, Any]) -> list[Shape]:
        S, given = arguments["S"], arguments[weight]
        own = given.shape if isinstance(given, Tensor) else ()
        over = torch.broadcast_shapes(own, S.shape[:-2])
        shrunk: Shape = ((*over, *S.shape[-2:]), S.dtype)
        return [shrunk, (tuple(over), S.dtype)] if weight == "n" else [shrunk]

    return results


def _bound(arguments: Mapping[str, Any]) -> list[Shape]:
    given = arguments["intensity"]
    return [(tuple(given.shape), given.dtype) if isinstance(given, Tensor) else None]


def _plain(arguments: Mapping[str, Any]) -> list[Shape]:
    return [None]


_SIDES = ("left", "right")
DOORS: dict[str, Door] = {
    "polar": Door(
        functional.polar,
        lambda s: {
            "X": s.normal(*s.leading(), s.side(), s.side(), dtype=_dtype(s)),
            "method": s.pick.choice(METHODS),
        },
        _like("X"),
    ),
    "matched_direction": Door(functional.matched_direction, _with_method, _like("M", *_SIDES)),
    "inside_only_direction": Door(
        functional.inside_only_direction, _with_method, _like("M", *_SIDES)
    ),
    "halfspace_direction": Door(functional.halfspace_direction, _halfspace, _like("M", *_SIDES)),
    "frobenius_graft": Door(
        functional.frobenius_graft,
        lambda s: {"D": s.normal(*s.leading(), s.side(), s.side(), dtype=_dtype(s))},
        _like("D"),
    ),
    "weighted_norm": Door(
        functional.weighted_norm,
        lambda s: _sided(s, "D", empty=False),
        _like("D", *_SIDES, drop=2),
    ),
    "inverse_root": Door(
        functional.inverse_root,
        lambda s: {"S": _square(s), "power": s.pick.choice([0, 0.25, 0.5, 1])},
        _like("S"),
    ),
    "oas": Door(
        functional.oas,
        lambda s: {
            "S": _square(s, s.pick.choice([1, 2, 6])),
            "n": s.pick.choice([1, 2.5, 100, torch.tensor(5), torch.tensor(7.0)]),
        },
        _shrunk("n"),
    ),
    "shrink": Door(
        functional.shrink,
        lambda s: {"S": _square(s), "intensity": s.pick.choice([0, 0.5, 1, torch.tensor(0.1)])},
        _shrunk("intensity"),
    ),
    "oracle_value": Door(
        theory.oracle_value,
        lambda s: _sided(s, optional=False),
        _like("M", *_SIDES, drop=2),
    ),
    "condition_number": Door(
        theory.condition_number,
        lambda s: {"S": _square(s, s.pick.choice([1, 2, 6]))},
        _like("S", drop=2),
    ),
    "grafted_alignment_bound": Door(
        theory.grafted_alignment_bound, _factors, _like("M", "A", "B", drop=2)
    ),
    "grafted_condition_bound": Door(
        theory.grafted_condition_bound,
        lambda s: {key: value for key, value in _factors(s).items() if key != "M"},
        _like("A", "B", drop=2),
    ),
    "oas_condition_bound": Door(
        theory.oas_condition_bound,
        lambda s: {
            "d": s.pick.choice([1, 2, 100]),
            "intensity": s.pick.choice([0.1, 1, 1e-9, torch.tensor([0.5, 1.0])]),
        },
        _bound,
    ),
    "cached_efficiency_bound": Door(
        theory.cached_efficiency_bound,
        _drift,
        _like("left", "right", "cached_left", "cached_right", drop=2),
    ),
    "softmax_fisher": Door(
        theory.softmax_fisher,
        lambda s: {"p": _labels(s)["p"]},
        lambda given: [((*given["p"].shape, given["p"].shape[-1]), given["p"].dtype)],
    ),
    "observed_label_mismatch": Door(theory.observed_label_mismatch, _labels, _mismatch),
    "observed_label_mismatch_bound": Door(
        theory.observed_label_mismatch_bound, _with_jacobian, _mismatch_bound
    ),
    "ema_variance": Door(theory.ema_variance, _clock, _plain),
    "sparse_variance_ratio": Door(theory.sparse_variance_ratio, _clock, _plain),
    "sparse_lag": Door(theory.sparse_lag, _clock, _plain),
}


# ---- constructors --------------------------------------------------------------------------------

OPTIMIZERS = [
    one
    for name in gomuon.__all__
    if inspect.isclass(one := getattr(gomuon, name)) and issubclass(one, torch.optim.Optimizer)
]


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
