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

from gomuon.moments import Moment, Shape
from gomuon.parameters.rows import Rows, SumCut, moment


def leaf(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    """A probe: a leaf tensor whose gradient autograd will fill.

    It is expanded from one element, so it has a moment's shape but needs no memory.
    """
    return torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()


class Probe:
    """Leaf tensors for a moment, its count and its uses."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.total = leaf(dtype, device, *shape)
        self.count = leaf(torch.float64, device)
        self.uses = leaf(torch.float64, device)

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.total, self.count, self.uses

    @property
    def moment(self) -> Moment | None:
        if self.total.grad is None:
            return None
        count = gradient(self.count)
        uses = self.uses.grad
        return Moment(self.total.grad, count, count if uses is None else uses)

    def clear(self) -> None:
        for probe in self.leaves:
            probe.grad = None


class Tap(torch.autograd.Function):
    """The identity on y; its backward returns moments and counts as the gradients of the probes."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor | None,
        mask: Tensor | None,
        rows: Rows,
        cuts: tuple[SumCut, SumCut],
        forms: Callable[[], bool] | None,
        inputs_total: Tensor | None,
        inputs_count: Tensor | None,
        gradients_total: Tensor | None,
        gradients_count: Tensor | None,
        gradients_uses: Tensor | None,
    ) -> Tensor:
        # The layer itself also saves x, so this needs no extra memory. (Under autocast the layer
        # saves a rounded copy instead.)
        traced = torch.compiler.is_compiling()
        ctx.save_for_backward(x, mask if traced else None)
        # Not saved with x: activation checkpointing saves x again, perhaps under another mask. A
        # copy, because the user may write to the mask.
        ctx.mask = None if mask is None or traced else mask.clone()
        ctx.rows, ctx.cuts, ctx.forms = rows, cuts, forms
        ctx.dtypes = tuple(
            None if probe is None else probe.dtype
            for probe in (inputs_total, inputs_count, gradients_total)
        )
        # Not a view: in-place activations may write to it. Nothing else keeps y alive.
        return y.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        inputs_dtype, count_dtype, gradients_dtype = ctx.dtypes
        if not torch.compiler.is_compiling() and _is_batched(g):
            # A batch of gradients, for example of a Jacobian. These never reach the weights.
            return g, *[None] * 10
        x, mask = ctx.saved_tensors
        mask = mask if ctx.mask is None else ctx.mask
        rows_g = ctx.rows.gradients(g.detach())
        # The first layer that the backward pass reaches forms the moment of a shared input.
        forms = inputs_dtype is not None and (ctx.forms is None or ctx.forms())
        rows_x = ctx.rows.inputs(x.detach()) if forms else None
        if mask is None:
            count, uses = (
                torch.full((), number, dtype=torch.float64, device=g.device)
                for number in (rows_g.shape[-2], ctx.rows.uses(g))
            )
        else:
            wanted = ctx.rows.mask_rows(mask.to(g.dtype))  # one or zero per row
            rows_g, rows_x = rows_g * wanted, None if rows_x is None else rows_x * wanted
            count, uses = wanted.sum(dtype=torch.float64), mask.sum(dtype=torch.float64)
        of_inputs, of_gradients = ctx.cuts
        A = None if rows_x is None else moment(rows_x, inputs_dtype, of_inputs)  # (9) Σ x xᵀ
        gradients: tuple[Tensor | None, ...] = (None, None, None)
        if gradients_dtype:
            B = moment(rows_g, gradients_dtype, of_gradients)  # (9) Σ δ δᵀ
            gradients = (B, count, uses)
        return g, None, None, None, None, None, A, count if count_dtype else None, *gradients


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
