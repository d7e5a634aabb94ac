"""Wrong arguments raise at the door, by name; what they raised before came from deep inside."""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gomuon.errors import DecompositionError, describe_value
from gomuon.functional import (
    frobenius_graft,
    inside_only_direction,
    inverse_root,
    matched_direction,
    oas,
    shrink,
    theory,
    weighted_norm,
)

M, LEFT, RIGHT = torch.randn(3, 2), torch.eye(3), torch.eye(2)
P = torch.tensor([0.2, 0.8])
TENSOR_ARGUMENTS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (matched_direction, {"M": M, "left": LEFT, "right": RIGHT}),
    (inside_only_direction, {"M": M, "left": LEFT, "right": RIGHT}),
    (weighted_norm, {"D": M, "left": LEFT, "right": RIGHT}),
    (frobenius_graft, {"D": M}),
    (partial(inverse_root, power=0.25), {"S": LEFT}),
    (partial(oas, n=3), {"S": LEFT}),
    (partial(shrink, intensity=0.5), {"S": LEFT}),
    (theory.oracle_value, {"M": M, "left": LEFT, "right": RIGHT}),
    (theory.condition_number, {"S": LEFT}),
    (partial(theory.grafted_alignment_bound, alpha=0.5), {"A": RIGHT, "B": LEFT, "M": M}),
    (partial(theory.grafted_condition_bound, alpha=0.5), {"A": RIGHT, "B": LEFT}),
    (theory.root_fisher_norm, {"D": M, "A": RIGHT, "B": LEFT}),
    (
        theory.cached_efficiency_bound,
        {"left": LEFT, "right": RIGHT, "cached_left": LEFT, "cached_right": RIGHT},
    ),
    (theory.softmax_fisher, {"p": P}),
    (theory.observed_label_mismatch, {"q": P, "p": P}),
    (theory.observed_label_mismatch_bound, {"q": P, "p": P, "jacobian": RIGHT}),
    (theory.observed_label_factor, {"q": P, "p": P}),
    (
        theory.observed_factor_error_bound,
        {"estimated": RIGHT, "q": P, "p": P, "jacobian": RIGHT},
    ),
    (
        theory.factor_error_terms,
        {"cached": LEFT, "current": LEFT, "estimated": LEFT, "observed": LEFT, "fisher": LEFT},
    ),
    (partial(theory.ema_covariance, beta=0.5), {"autocovariances": LEFT.expand(2, 3, 3)}),
]
WRONG: list[tuple[Callable[[Tensor], Any], type[Exception]]] = [
    (lambda X: X.tolist(), TypeError),
    (lambda X: X.numpy(), TypeError),
    (lambda X: "X", TypeError),
    (lambda X: X.to_sparse(), TypeError),
    (lambda X: X.to(torch.complex64), ValueError),
    (lambda X: X.sum(), ValueError),
]


@pytest.mark.parametrize(("function", "arguments"), TENSOR_ARGUMENTS)
@pytest.mark.parametrize(("bend", "error"), WRONG)
def test_a_wrong_tensor_is_named(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    bend: Callable[[Tensor], Any],
    error: type[Exception],
) -> None:
    function(**arguments)
    for name, right in arguments.items():
        with pytest.raises(error, match=rf"\b{name}\b"):
            function(**{**arguments, name: bend(right)})


NUMBER_ARGUMENTS: list[tuple[Callable[..., Any], str, list[Any]]] = [
    (partial(inverse_root, LEFT), "power", [-1, math.nan, math.inf, 10**400]),
    (partial(oas, LEFT), "n", [0, 0.5, math.nan, 10**400]),
    (partial(shrink, LEFT), "intensity", [math.nan, math.inf, 10**400]),
    (partial(theory.grafted_condition_bound, LEFT, LEFT), "alpha", [math.inf, 10**400]),
    (lambda d: theory.oas_condition_bound(d, 0.5), "d", [0, -3, 10**400]),
    (partial(theory.oas_condition_bound, 3), "intensity", [0, 0.0, -1, math.nan]),
    (theory.ema_variance, "beta", [-1, 1, 2, math.nan]),
    (partial(theory.ema_variance, 0.5), "every", [0, -1, 10**400]),
    (partial(theory.ema_covariance, LEFT[None]), "beta", [-1, 1, 2, math.nan]),
    (partial(theory.ema_covariance, LEFT[None], 0.5), "every", [0, -1, 10**400]),
    (lambda beta: theory.sparse_variance_ratio(beta, 2), "beta", [1, 1.5]),
    (partial(theory.sparse_noise_gain, 0.9, 2), "frequency", [math.nan, math.inf, 10**400]),
    (partial(theory.sparse_lag, 0.9), "every", [0, 10**400]),
]


@pytest.mark.parametrize(("function", "name", "values"), NUMBER_ARGUMENTS)
def test_a_wrong_number_is_named(
    function: Callable[..., Any], name: str, values: list[Any]
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=rf"\b{name}\b.*, got "):
            function(value)
    for value in (None, "a", True, 1j, [1], {}, np.ones(2), torch.tensor(True)):
        if not (name == "n" and isinstance(value, Tensor)):
            with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b.*, got "):
                function(value)


@pytest.mark.parametrize("direction", [matched_direction, inside_only_direction, weighted_norm])
@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("left", RIGHT, "left must be 3×3"),
        ("right", LEFT, "right must be 2×2"),
        ("left", torch.ones(3, 2), "left must be square"),
        ("left", LEFT.double(), "left must have [MD]'s dtype and device"),
        ("left", LEFT.to("meta"), "left must have [MD]'s dtype and device"),
        ("left", LEFT.expand(5, 3, 3), r"left's leading dimensions .* \(4,\), got \(5,\)"),
    ],
)
def test_sides_must_fit(
    direction: Callable[..., Tensor], name: str, wrong: Tensor, message: str
) -> None:
    sides = {"left": LEFT, "right": RIGHT, name: wrong}
    with pytest.raises(ValueError, match=message):
        direction(M.expand(4, 3, 2), **sides)


@pytest.mark.parametrize("direction", [matched_direction, inside_only_direction])
def test_one_source_takes_the_leading_dimensions_of_its_sides(
    direction: Callable[..., Tensor],
) -> None:
    left = torch.stack([torch.diag(torch.tensor([1.0, 2.0, c])) for c in (1.0, 3.0)])
    for source in (M, M.unsqueeze(0)):
        together = direction(source, left, RIGHT)
        for one, side in zip(together, left, strict=True):
            torch.testing.assert_close(one, direction(M, side, RIGHT))


def test_cached_maps_take_the_leading_dimensions_of_the_current_ones() -> None:
    # Of as many maps as they have rows: torch would read the cached one as so many vectors.
    left = torch.stack([torch.diag(torch.tensor([1.0, c])) for c in (2.0, 5.0)])
    bounds = theory.cached_efficiency_bound(left, RIGHT, RIGHT, RIGHT)
    torch.testing.assert_close(bounds, torch.tensor([1 / 2, 1 / 5]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_cannot_be_decomposed(value: float) -> None:
    bad = torch.full((2, 2), value)
    for call in (
        partial(theory.condition_number, bad),
        partial(theory.oracle_value, bad, RIGHT, RIGHT),
        partial(weighted_norm, bad, None, None),
        partial(weighted_norm, RIGHT, bad, None),
        partial(theory.observed_label_mismatch_bound, P, P, bad),
    ):
        with pytest.raises(DecompositionError, match="NaN or infinity"):
            call()


def test_singular_maps_cannot_be_solved_with() -> None:
    with pytest.raises(DecompositionError, match="singular"):
        weighted_norm(RIGHT, torch.zeros(2, 2), None)
    with pytest.raises(DecompositionError, match="singular"):
        theory.cached_efficiency_bound(torch.zeros(2, 2), RIGHT, RIGHT, RIGHT)


def test_what_has_no_entries_has_no_norm_and_no_condition() -> None:
    for call, name in (
        (lambda X: theory.condition_number(X), "S"),
        (lambda X: weighted_norm(X, None, None), "D"),
        (lambda X: oas(X, 3), "S"),
    ):
        with pytest.raises(ValueError, match=f"{name} must have at least one row"):
            call(torch.zeros(4, 0, 0))


def test_sides_of_zero_and_batches_of_none_are_taken() -> None:
    for shape in ((0, 3), (3, 0), (0, 3, 2), (2, 0, 3, 2)):
        X = torch.zeros(shape)
        left, right = torch.eye(shape[-2]), torch.eye(shape[-1])
        for direction in (matched_direction, inside_only_direction):
            assert direction(X, left, right).shape == shape
        assert frobenius_graft(X).shape == shape


def test_numbers_of_other_kinds_are_numbers() -> None:
    expected = inverse_root(2 * LEFT, 0.5)
    for half in (Fraction(1, 2), np.float32(0.5), torch.tensor([[0.5]], dtype=torch.float64)):
        found = inverse_root(2 * LEFT, half)  # type: ignore[arg-type]
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)


def test_messages_stay_short() -> None:
    for value in (10**5000, "x" * 1000, np.ones((90, 90)), torch.ones(90, 90), list(range(999))):
        assert len(describe_value(value)) < 120
    assert re.search("0.25", describe_value(torch.tensor(0.25)))
