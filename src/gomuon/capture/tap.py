"""The tap: statistics as gradients of probe tensors.

A tap is an identity function on a layer's output. Its backward pass returns xᵀx, gᵀg and their row
counts as *gradients of probe tensors*. So autograd does the book-keeping. It adds up micro-batches
and repeated calls, counts once under activation checkpointing, and visits only the layers that the
loss depends on.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gomuon.moments import Moment, Shape, count_dtype, stacked_counts
from gomuon.parameters.divided_rows import CapturedRows, DividedRows
from gomuon.parameters.product_rows import ProductRows
from gomuon.parameters.rows import SumCut, moment

_CPU = torch.device("cpu")


def leaf(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    """A probe: a leaf tensor whose gradient autograd will fill.

    It is expanded from one element, so it has a moment's shape but needs no memory.
    """
    return torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()


class Probe:
    """Leaf tensors for a moment and for its two numbers of rows, count and uses.

    `known` receives numbers that follow from shapes. It is on the CPU, so that reading them never
    waits for an accelerator. `counted` receives numbers that only the moment's device knows: those
    of masked rows. Compiled graphs use it too, because one that works on two devices cannot be
    replayed as a CUDA graph.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        matrices: int | None = None,
    ) -> None:
        """With `matrices` there are two numbers of rows for each of so many matrices."""
        counts = (2,) if matrices is None else (2, matrices)
        self.total = leaf(dtype, device, *shape)
        self.known = leaf(torch.float64, _CPU, *counts)
        self.counted = leaf(count_dtype(device), device, *counts)

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.total, self.known, self.counted

    @property
    def moment(self) -> Moment | None:
        return moment_of(self.total.grad, self.known.grad, self.counted.grad)

    def clear(self) -> None:
        for probe in self.leaves:
            probe.grad = None


def moment_of(total: Tensor | None, known: Tensor | None, counted: Tensor | None) -> Moment | None:
    """The moment of a probe's gradients; None if no backward pass delivered any."""
    if total is None:
        return None
    numbers = [pair for pair in (known, counted) if pair is not None]
    count, uses = numbers[0] if len(numbers) == 1 else stacked_counts(numbers).sum(0)
    return Moment(total, count, uses)


class Tap(torch.autograd.Function):
    """The identity on y; its backward returns moments and counts as the gradients of the probes.

    For inputs and for gradients there are three leaves of a `Probe`: total, known and counted. A
    leaf that is None receives nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor | None,
        mask: Tensor | None,
        rows: CapturedRows | ProductRows,
        cuts: tuple[SumCut, SumCut],
        forms: Callable[[], bool] | None,
        expect: Callable[[list[Tensor]], None] | None,
        *leaves: Tensor | None,
    ) -> Tensor:
        # The layer itself also saves x, so this needs no extra memory. (Under autocast the layer
        # saves a rounded copy instead.)
        traced = torch.compiler.is_compiling()
        ctx.save_for_backward(x, mask if traced else None)
        # Not saved with x: activation checkpointing saves x again, perhaps under another mask. A
        # copy, because the user may write to the mask.
        ctx.mask = None if mask is None or traced else mask.clone()
        ctx.rows, ctx.cuts, ctx.forms, ctx.expect = rows, cuts, forms, expect
        ctx.leaves = () if expect is None else leaves
        ctx.dtypes = tuple(None if probe is None else probe.dtype for probe in leaves)
        # Not a view: in-place activations may write to it. Nothing else keeps y alive.
        return y.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.compiler.is_compiling() and _is_batched(g):
            # A batch of gradients, for example of a Jacobian. These never reach the weights.
            return g, *[None] * 12
        inputs_dtype, inputs_known, inputs_counted = ctx.dtypes[:3]
        gradients_dtype, gradients_known, gradients_counted = ctx.dtypes[3:]
        x, mask = ctx.saved_tensors
        mask = mask if ctx.mask is None else ctx.mask
        # The first layer that the backward pass reaches forms the moment of a shared input.
        forms = inputs_dtype is not None and (ctx.forms is None or ctx.forms())
        rows_x = ctx.rows.inputs(x.detach()) if forms else None
        rows_g = ctx.rows.gradients(g.detach()) if gradients_dtype else None
        numbers = ctx.rows.sampled(g), ctx.rows.uses(g)
        known = _pair(numbers, torch.float64, _CPU) if inputs_known or gradients_known else None
        counted = None
        if mask is not None:
            wanted = ctx.rows.mask_rows(mask.to(g.dtype))  # one or zero per row
            rows_x = None if rows_x is None else _times(rows_x, wanted)
            rows_g = None if rows_g is None else _times(rows_g, wanted)
            exact = count_dtype(g.device)
            used = ctx.rows.own_mask(mask) if isinstance(ctx.rows, DividedRows) else mask
            counted = torch.stack([wanted.sum(dtype=exact), used.sum(dtype=exact)])
            if isinstance(numbers[0], list):
                counted = counted.unsqueeze(1).expand(2, len(numbers[0]))
        elif inputs_counted or gradients_counted:
            counted = _pair(numbers, count_dtype(g.device), g.device)
        of_x, of_g = ctx.cuts
        A = None if rows_x is None else moment(rows_x, inputs_dtype, of_x)  # (9) Σ x xᵀ
        B = None if rows_g is None else moment(rows_g, gradients_dtype, of_g)  # (9) Σ δ δᵀ
        delivered = (
            *(A, known if inputs_known else None, counted if inputs_counted and forms else None),
            *(B, known if gradients_known else None, counted if gradients_counted else None),
        )
        if ctx.expect is not None:
            both = zip(ctx.leaves, delivered, strict=True)
            ctx.expect([leaf for leaf, value in both if leaf is not None and value is not None])
        return (g, None, None, None, None, None, None, *delivered)


def _times(rows: Tensor | list[Tensor], wanted: Tensor) -> Tensor | list[Tensor]:
    return [part * wanted for part in rows] if isinstance(rows, list) else rows * wanted


def _pair(
    numbers: tuple[int, int] | tuple[list[int], list[int]],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Two numbers as a tensor. Not by `torch.tensor`, which a graph would copy from the CPU.

    Of several matrices, two for each, [2, matrices]; these are never in a graph.
    """
    if isinstance(numbers[0], list):
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.stack([torch.full((), number, dtype=dtype, device=device) for number in numbers])


def _is_batched(g: Tensor) -> bool:
    """Whether g is a batch of gradients, from `is_grads_batched` or torch.vmap."""
    return bool(
        torch._C._are_functorch_transforms_active()
        or torch._C._functorch.is_legacy_batchedtensor(g)
    )


def backward_pass() -> int:
    """The number of the backward pass running in this thread; −1 if there is none."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Whether a forward pass is a recomputation by activation checkpointing."""
    return backward_pass() != -1


def gradient(probe: Tensor) -> Tensor:
    assert probe.grad is not None
    return probe.grad
