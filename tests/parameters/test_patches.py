"""Patches of some outputs equal those of all outputs, and cost only what they hold."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gomuon.parameters.rows import rows_for
from gomuon.parameters.sampling import Sampling, spread_rows
from tests.parameters.test_rows import CONVOLUTIONS

MORE: list[tuple[Any, tuple[int, ...]]] = [
    (nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=3), (3, 4, 20)),
    (nn.Conv2d(4, 6, 1, stride=2), (3, 4, 9, 8)),
    (nn.Conv2d(4, 8, (5, 1), padding=(2, 0), groups=2), (3, 4, 9, 8)),
    (nn.Conv3d(4, 8, 3, padding=(2, 1, 0), dilation=(2, 1, 1), groups=4), (2, 4, 5, 6, 5)),
    (nn.Conv2d(4, 6, 3, padding=1), (4, 9, 8)),
]


def reader(module: nn.Module, **sampling: Any) -> Any:
    found = rows_for(module, Sampling(**sampling))
    assert found is not None
    return found


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 12])
@pytest.mark.parametrize(("module", "shape"), [*CONVOLUTIONS, *MORE], ids=str)
def test_sampled_patches_are_rows_of_the_unfolded_batch(
    module: Any, shape: tuple[int, ...], rows: int, ones: bool
) -> None:
    x = torch.randn(shape)
    y = module(x).detach()
    every, some = reader(module, ones=ones), reader(module, ones=ones, rows=rows)
    total = every.gradients(y).shape[-2]
    chosen = spread_rows(total, rows, x.device) if rows < total else torch.arange(total)
    assert torch.equal(some.inputs(x), every.inputs(x)[..., chosen, :])
    assert torch.equal(some.gradients(y), every.gradients(y)[..., chosen, :])
    mask = torch.rand(every.positions(y))
    assert torch.equal(some.mask_rows(mask), every.mask_rows(mask)[chosen])


@pytest.mark.parametrize(("module", "shape"), [*CONVOLUTIONS, *MORE], ids=str)
def test_a_bound_comes_after_stride_and_skip(module: Any, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    y = module(x).detach()
    every, some = (reader(module, stride=2, skip=1, rows=rows) for rows in (None, 4))
    total = every.gradients(y).shape[-2]
    chosen = spread_rows(total, 4, x.device) if total > 4 else torch.arange(total)
    assert torch.equal(some.inputs(x), every.inputs(x)[..., chosen, :])
    assert torch.equal(some.gradients(y), every.gradients(y)[..., chosen, :])
    mask = torch.rand(every.positions(y))
    assert torch.equal(some.mask_rows(mask), every.mask_rows(mask)[chosen])


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_a_nan_at_the_border_does_not_reach_the_padding(memory: torch.memory_format) -> None:
    module = nn.Conv2d(2, 3, 3, padding=1)
    x = torch.randn(2, 2, 4, 4).contiguous(memory_format=memory)
    x[0, :, 0, 0] = torch.nan
    unbound, bound = reader(module).inputs(x), reader(module, rows=20).inputs(x)
    expected = unbound[spread_rows(len(unbound), 20, x.device)]
    torch.testing.assert_close(bound, expected, rtol=0, atol=0, equal_nan=True)


class Copied(TorchDispatchMode):
    """Counts the elements that operations write; views write none."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self.elements += tensor.numel()
                    self.largest = max(self.largest, tensor.numel())
        return result


def copied(batch: int, rows: int | None, *, side: str = "inputs") -> Copied:
    """What a layer of a ResNet's first stage writes: 64 → 64 channels, 3 × 3, images of 32 × 32."""
    with torch.device("meta"):
        module = nn.Conv2d(64, 64, 3, padding=1)
        x = torch.empty(batch, 64, 32, 32)
    with Copied() as counter:
        getattr(reader(module, rows=rows), side)(x)
    return counter


def test_the_costs_follow_the_bound_and_not_the_batch() -> None:
    patch = 64 * 9
    for side, width in (("inputs", patch), ("gradients", 64)):
        once, twice = copied(32, 256, side=side), copied(32, 512, side=side)
        assert copied(8, 256, side=side).elements == once.elements
        assert twice.elements == pytest.approx(2 * once.elements, rel=0.01)
        assert once.largest == 256 * width
        assert once.elements < 5 * 256 * width
    assert copied(32, None).largest == 32 * 32 * 32 * patch
