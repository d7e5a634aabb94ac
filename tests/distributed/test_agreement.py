"""What ranks compare: settings as plain values, gradients by two numbers each."""

import math

import numpy as np
import pytest
import torch

from gomuon.distributed.agreement import (
    first_difference,
    first_differing_tensor,
    missing_gradient,
    norms_and_sums,
    rounding_allowed,
    settings_of,
)
from gomuon.distributed.ranks import checksum


class Odd:
    """Shown with its address."""


def number(**settings: object) -> float:
    return checksum(settings_of([{"params": [], "param_names": [], **settings}], wait=False))


def test_settings_are_told_apart_by_a_number() -> None:
    same = {"lr": 0.1, "betas": (0.9, 0.95), "adamw": {"lr": 1e-3, "eps": 1e-8}, "step": 3}
    assert number(**same) == number(**same)
    for name, other in (
        ("lr", math.nextafter(0.1, 1)),
        ("betas", (0.9, 0.99)),
        ("adamw", {"lr": 1e-4, "eps": 1e-8}),
        ("step", 4),
        ("more", None),
    ):
        assert number(**{**same, name: other}) != number(**same), name


def test_what_means_the_same_has_the_same_number() -> None:
    assert number(betas=(0.9, 0.95)) == number(betas=[0.9, 0.95])
    assert number(mine=Odd()) == number(mine=Odd())
    assert number(lr=torch.tensor(0.5)) == number(lr=0.5)
    assert number(lr=np.float64(0.5), refresh_every=np.int64(4)) == number(lr=0.5, refresh_every=4)
    assert number(refresh_every=np.int64(4)) != number(refresh_every=np.int64(5))
    assert number(lr=math.nan) == number(lr=math.nan)


def test_a_rate_on_an_accelerator_is_not_waited_for() -> None:
    lr = torch.tensor(0.1, device="meta")  # reading it raises
    assert number(lr=lr, step=1) != number(lr=lr, step=2)
    with pytest.raises((NotImplementedError, RuntimeError)):
        settings_of([{"params": [], "lr": lr}], wait=True)


def test_every_rank_of_three_finds_the_difference() -> None:
    everyone = [{"lr of group 0": lr} for lr in (0.1, 0.1, 0.2)]
    said = [first_difference(mine, everyone, rank) for rank, mine in enumerate(everyone)]
    assert all(words and "lr of group 0" in words for words in said)
    assert all(words and "0.1" in words and "0.2" in words for words in said)
    assert first_difference(everyone[0], everyone[:2], 0) is None
    assert first_difference({"lr": math.nan}, [{"lr": math.nan}], 0) is None


def test_a_missing_gradient_is_named() -> None:
    said = missing_gradient(["a", "b"], [[True, True], [True, False], [True, True]])
    assert said == "'b' has one on rank 0 and none on rank 1"


def told(*gradients: torch.Tensor) -> str | None:
    table = [norms_and_sums([g], torch.device("cpu")) for g in gradients]
    return first_differing_tensor(["'w'"], [rounding_allowed(gradients[0].dtype)], table)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_difference_and_another_batch_is(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gradient = torch.randn(40, 30, dtype=torch.float64)
    noise = torch.randn_like(gradient)
    rounded = gradient * (1 + torch.finfo(dtype).eps * noise)
    assert told(gradient.to(dtype), gradient.to(dtype)) is None
    assert told(gradient.to(dtype), rounded.to(dtype)) is None
    said = told(gradient.to(dtype), gradient.to(dtype), (gradient + 0.3 * noise).to(dtype))
    assert said is not None
    assert "'w'" in said
    assert "rank 2" in said


def test_lengths_alone_do_not_tell_and_zeros_are_alike() -> None:
    gradient = torch.tensor([3.0, 4.0])
    assert "sum" in str(told(gradient, -gradient))
    assert told(torch.zeros(3), torch.zeros(3)) is None
    assert "norm" in str(told(torch.zeros(3), torch.tensor([1e-20, 0.0, 0.0])))
    assert told(torch.zeros(3), torch.tensor([math.nan, 0.0, 0.0])) is None  # another check's
    assert norms_and_sums([], torch.device("cpu")) == []


def test_sums_of_half_precision_do_not_overflow() -> None:
    large = torch.full((300, 300), 60_000.0, dtype=torch.float16)
    assert all(map(math.isfinite, norms_and_sums([large], torch.device("cpu"))))
    assert told(large, large / 2) is not None
