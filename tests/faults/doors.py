"""The public functions: right arguments for each, and what shape and dtype they must give."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gomuon import functional
from gomuon.functional import theory
from tests.faults.arguments import Source

Arguments = dict[str, Any]
Shape = tuple[tuple[int, ...], torch.dtype] | None  # None: a plain number
METHODS = ("fast", "exact", "svd", "canonical", "auto")


@dataclass(frozen=True)
class Door:
    """A public function: right arguments for it, and what they must give."""

    function: Callable[..., Any]
    right: Callable[[Source], Arguments]
    results: Callable[[Mapping[str, Any]], list[Shape]]


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


def _quadratic(source: Source) -> Arguments:
    given = _factors(source)
    return {"D": given["M"], "A": given["A"], "B": given["B"]}


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


def _with_estimate(source: Source) -> Arguments:
    given = _with_jacobian(source)
    dtype = given["p"].dtype
    d = given["p"].shape[-1] if given["jacobian"] is None else 4
    leads = source.pick.choice([given["p"].shape[:-1], ()])
    return {**given, "estimated": source.definite(*leads, d=d, dtype=dtype)}


def _factor_parts(source: Source) -> Arguments:
    dtype, leading, d = _dtype(source), source.leading(), max(1, source.side())
    names = ("cached", "current", "estimated", "observed", "fisher")
    leads = [source.pick.choice([leading, ()]) for _ in names]
    both = zip(names, leads, strict=True)
    return {name: source.definite(*lead, d=d, dtype=dtype) for name, lead in both}


def _lags(source: Source) -> Arguments:
    shape = (*source.leading(), source.pick.choice([1, 2, 9]), *[max(1, source.side())] * 2)
    return {**_clock(source), "autocovariances": source.normal(*shape, dtype=_dtype(source))}


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


def _error_bound(arguments: Mapping[str, Any]) -> list[Shape]:
    ((shape, dtype),) = (found for found in _mismatch_bound(arguments) if found is not None)
    return [(tuple(torch.broadcast_shapes(shape, arguments["estimated"].shape[:-2])), dtype)]


def _four(arguments: Mapping[str, Any]) -> list[Shape]:
    leading = torch.broadcast_shapes(*(S.shape[:-2] for S in arguments.values()))
    return [((*leading, 4), arguments["fisher"].dtype)]


def _without_lags(arguments: Mapping[str, Any]) -> list[Shape]:
    gamma = arguments["autocovariances"]
    return [((*gamma.shape[:-3], *gamma.shape[-2:]), gamma.dtype)]


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
    "root_fisher_norm": Door(theory.root_fisher_norm, _quadratic, _like("D", "A", "B", drop=2)),
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
    "observed_label_factor": Door(theory.observed_label_factor, _labels, _mismatch),
    "observed_factor_error_bound": Door(
        theory.observed_factor_error_bound, _with_estimate, _error_bound
    ),
    "factor_error_terms": Door(theory.factor_error_terms, _factor_parts, _four),
    "ema_covariance": Door(theory.ema_covariance, _lags, _without_lags),
    "ema_variance": Door(theory.ema_variance, _clock, _plain),
    "sparse_variance_ratio": Door(theory.sparse_variance_ratio, _clock, _plain),
    "sparse_noise_gain": Door(
        theory.sparse_noise_gain,
        lambda s: {**_clock(s), "frequency": s.pick.choice([0, 0.1, -2.5, math.pi, 1e9])},
        _plain,
    ),
    "sparse_lag": Door(theory.sparse_lag, _clock, _plain),
}
