"""State kept stacked: views of one tensor, and right whatever happens to the parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gomuon import KFAC, SOAP, GoMuon, Mousse, Muon, Shampoo
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters import stacks
from gomuon.parameters.layers import Layer
from gomuon.parameters.stacks import stacked
from tests.accelerator import host_as_accelerator
from tests.models import language_loss, mlp, train, transformer

METHODS = [GoMuon, Muon, KFAC, Shampoo, SOAP, Mousse]


def matrices(model: nn.Module) -> list[Tensor]:
    return [p for name, p in model.named_parameters() if "attention." in name and p.ndim == 2]


def test_layers_of_one_shape_keep_their_state_in_one_tensor() -> None:
    model = transformer()
    optimizer = GoMuon(model)
    train(model, optimizer, range(6))
    for name in ("momentum", "left_map", "right_map"):
        kept = {optimizer.state[p][name].untyped_storage().data_ptr() for p in matrices(model)}
        assert len(kept) == 1, name


def test_a_stack_lasts_while_the_same_layers_take_part() -> None:
    model = transformer()
    optimizer = GoMuon(model)
    train(model, optimizer, range(3))
    roll = optimizer._step.participants[0]
    train(model, optimizer, range(3, 9))
    assert optimizer._step.participants[0] is roll
    matrices(model)[0].requires_grad_(False)
    train(model, optimizer, range(9, 10))
    assert optimizer._step.participants[0] is not roll


def interrupted_by(event: Callable[[nn.Module, MatrixOptimizer], Any], method: Any) -> list[Tensor]:
    model = transformer(layers=2)
    optimizer = method(model)
    train(model, optimizer, range(6))
    event(model, optimizer)
    train(model, optimizer, range(6, 13))
    return [p.detach().clone() for p in model.parameters()]


def reload(model: nn.Module, optimizer: MatrixOptimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def part_the_stacks(model: nn.Module, optimizer: MatrixOptimizer) -> None:
    """Somebody replaces every tensor of the state by a copy."""
    for entries in optimizer.state.values():
        for key, value in entries.items():
            entries[key] = value.clone() if isinstance(value, Tensor) else value


def replace_one(model: nn.Module, optimizer: MatrixOptimizer) -> None:
    entries = optimizer.state[matrices(model)[2]]
    for key, value in entries.items():
        entries[key] = value.clone() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("event", [reload, part_the_stacks, replace_one])
def test_stacks_are_made_again_of_what_the_state_says(
    event: Callable[[nn.Module, MatrixOptimizer], Any], method: Any
) -> None:
    expected = interrupted_by(lambda model, optimizer: None, method)
    for one, other in zip(interrupted_by(event, method), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_a_cleared_state_starts_anew(method: Any) -> None:
    def clear(model: nn.Module, optimizer: MatrixOptimizer) -> None:
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["step"] = 0
        optimizer._gate()

    model = transformer(layers=2)
    train(model, method(model), range(6))
    train(model, method(model), range(6, 13))  # a new optimizer
    for one, other in zip(interrupted_by(clear, method), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_writing_into_a_state_tensor_reaches_the_stack() -> None:
    model = mlp(6, 6, 6, 6)
    optimizer = Muon(model, lr=0.0)
    x = torch.randn(4, 6, dtype=torch.float64)
    model(x).square().sum().backward()
    optimizer.step()
    first = next(p for p in model.parameters() if p.ndim == 2)
    optimizer.state[first]["momentum"].fill_(7.0)
    assert first.grad is not None
    first.grad.zero_()
    optimizer.step()
    torch.testing.assert_close(
        optimizer.state[first]["momentum"], torch.full((6, 6), 7 * 0.8, dtype=torch.float64)
    )


class Reads(TorchDispatchMode):
    """Counts values read back to the host, each of which would wait for an accelerator."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("nonfinite", ["allow", "raise", "skip"])
def test_a_reuse_step_reads_nothing_back(nonfinite: str) -> None:
    """On the branch of an accelerator; gradients that are not finite are reported later."""
    model = transformer(dtype=torch.float32)
    optimizer = GoMuon(model, polar="fast", nonfinite=nonfinite)
    with host_as_accelerator():
        train(model, optimizer, range(5))
        language_loss(model, 5).backward()
        with Reads() as mode:
            optimizer.step()
    assert mode.count == 0


def test_a_finite_direction_is_not_copied_on_the_host() -> None:
    W = nn.Parameter(torch.zeros(3, 4))
    (stack,) = stacked([Layer("W", W, {})])
    D = torch.ones(1, 3, 4)
    assert stack.usable(D, 0.0) is D
    assert stack.unusable is None
    D[0, 1, 2] = torch.nan
    assert not stack.usable(D, 0.0).any()
    assert [layer.name for layer in stack.unusable_layers()] == ["W"]


def test_a_stack_of_several_layers_is_not_larger_than_it_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sizes(*shapes: tuple[int, int]) -> list[int]:
        made = [Layer("", nn.Parameter(torch.zeros(shape)), {}) for shape in shapes]
        return [len(stack.layers) for stack in stacked(made)]

    monkeypatch.setattr(stacks, "_AT_ONCE", 24)
    assert sizes(*[(3, 4)] * 5) == [2, 2, 1]
    assert sizes((5, 6), (5, 6), (3, 4)) == [1, 1, 1], "a larger layer is alone"
    monkeypatch.setattr(stacks, "_AT_ONCE", 2**22)
    assert sizes(*[(3, 4)] * 5) == [5]


# ---- stagger ------------------------------------------------------------------------------------


def refreshed(model: nn.Module, optimizer: MatrixOptimizer, step: int) -> set[str]:
    """Names of the layers whose geometry this step renewed."""
    before = {p: optimizer.state[p].get("left_seen") for p in model.parameters()}
    train(model, optimizer, range(step, step + 1))
    return {
        name
        for name, p in model.named_parameters()
        if optimizer.state[p].get("left_seen") not in (None, before[p])
    }


def test_staggered_layers_take_turns() -> None:
    model = transformer(layers=4)
    optimizer = GoMuon(model, stagger=True, refresh_every=4)
    turns = [refreshed(model, optimizer, step) for step in range(12)]
    assert turns[:4] == turns[4:8] == turns[8:12]
    everyone = {route.name for route in optimizer.routing_table().treated("matrix")}
    assert set.union(*turns[:4]) == everyone
    assert sum(map(len, turns[:4])) == len(everyone)
    # Equal layers and four of them: each turn is one of the four.
    assert max(map(len, turns[:4])) <= 1.5 * len(everyone) / 4


def test_staggered_neighbours_keep_sharing_their_inputs() -> None:
    model = transformer(layers=4)
    optimizer = GoMuon(model, stagger=True, refresh_every=4)
    lags = optimizer._layout.phases
    for block in model.trunk.blocks:
        attention = block.attention
        assert len({int(4 * lags[getattr(attention, name).weight]) for name in "qkv"}) == 1


def test_staggered_factors_equal_those_of_one_layer_alone() -> None:
    """Whose turn it is changes when statistics are taken, not what is made of them."""
    model, alone = transformer(layers=2), transformer(layers=2)
    staggered = GoMuon(model, stagger=True, refresh_every=2, lr=0.0, adamw={"lr": 0.0})
    plain = GoMuon(alone, refresh_every=1, lr=0.0, adamw={"lr": 0.0})
    train(model, staggered, range(1))
    train(alone, plain, range(1))
    early = [
        name for name, p in model.named_parameters() if staggered._layout.phases.get(p, 1.0) < 0.5
    ]
    assert early
    for name in early:
        one = staggered.state[model.get_parameter(name)]["left_factor"]
        other = plain.state[alone.get_parameter(name)]["left_factor"]
        torch.testing.assert_close(one, other)


def test_a_staggered_run_goes_on_from_its_checkpoint() -> None:
    whole, half = transformer(layers=2), transformer(layers=2)
    train(whole, GoMuon(whole, stagger=True), range(11))
    first = GoMuon(half, stagger=True)
    train(half, first, range(5))
    second = GoMuon(half, stagger=True)
    second.load_state_dict(first.state_dict())
    train(half, second, range(5, 11))
    for one, other in zip(half.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
