"""Arguments at random: right ones, right ones bent, and things that are no arguments at all."""

import math
import random
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

NONSENSE: tuple[Any, ...] = (
    None,
    True,
    "svd",
    "x",
    b"",
    1j,
    [],
    [1, 2],
    [[1.0, 2.0], [3.0, 4.0]],
    (),
    (0.1, 0.2),
    {},
    {"a": 1},
    {"damping": -1},
    {1, 2},
    range(3),
    len,
    object,
    Tensor,
    torch.float32,
    Decimal("0.5"),
    np.zeros((2, 2)),
    np.array(["a", "b"]),
)
NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, 10**20, 10**400, -(10**400), 10**4000),
    *(0.0, 0.25, 0.5, 1.0, -0.5, 2.5, 5e-324, 1e308, math.nan, math.inf, -math.inf),
    *(np.float32(0.5), np.float64(0.5), np.int64(3), Fraction(1, 3)),
    torch.tensor(0.5),
    torch.tensor([1]),
    torch.tensor(-1.0),
    torch.tensor(math.nan),
    torch.tensor([[2.0]], dtype=torch.float64),
)


class Source:
    """Everything from one seed."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self._numbers = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self._numbers, dtype=dtype)

    def definite(self, *leading: int, d: int, dtype: torch.dtype) -> Tensor:
        """Symmetric positive definite, well-conditioned."""
        X = self.normal(*leading, d, d, dtype=dtype)
        return X @ X.mT / max(d, 1) + torch.eye(d, dtype=dtype)

    def leading(self) -> tuple[int, ...]:
        """Dimensions in front of a matrix; there may be none, and no matrix."""
        return self.pick.choice([(), (), (3,), (1,), (2, 2), (0,), (2, 0)])

    def side(self) -> int:
        """Of a matrix; seldom wide enough that threads share the work, seldom zero."""
        return self.pick.choice([1, 2, 3, 4, 5, 6, 6, 6, 72, 0])

    def probabilities(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Positive, with sum one."""
        return self.normal(*shape, dtype=dtype).softmax(-1)

    def wrong(self, right: Any) -> Any:
        """Something else in the place of a right argument."""
        kind = self.pick.random()
        if isinstance(right, Tensor) and kind < 0.7:
            return self.bent(right)
        if kind < 0.85:
            return self.pick.choice(NUMBERS)
        if kind < 0.93:
            return self.pick.choice(NONSENSE)
        shape = [self.pick.choice([0, 1, 2, 3]) for _ in range(self.pick.randrange(4))]
        return self.normal(*shape)

    def bent(self, X: Tensor) -> Tensor:
        """A tensor that is X but for one property."""
        ways: list[Callable[[], Any]] = [
            lambda: X.to(self.pick.choice([torch.float16, torch.bfloat16])),
            lambda: X.to(self.pick.choice([torch.int64, torch.uint8, torch.bool])),
            lambda: X.to(self.pick.choice([torch.complex64, torch.complex128])),
            lambda: X.to(torch.float64 if X.dtype == torch.float32 else torch.float32),
            lambda: X.to("meta"),
            X.to_sparse,
            lambda: X.detach().clone().requires_grad_(X.is_floating_point()),
            lambda: nn.Parameter(X.detach(), requires_grad=False),
            lambda: torch.stack([X, X], -1)[..., 0],  # not contiguous
            lambda: X.expand(2, *X.shape),
            lambda: X.unsqueeze(0),
            lambda: X[..., 0] if X.ndim and X.shape[-1] else X,
            lambda: X.sum(),
            lambda: X.mT if X.ndim > 1 else X,
            lambda: torch.cat([X, X], -1) if X.ndim else X,
            lambda: torch.cat([X, X], -2) if X.ndim > 1 else X,
            lambda: X[..., :0] if X.ndim else X,
            lambda: X[..., :0, :] if X.ndim > 1 else X,
            lambda: X.new_zeros(4, 0, *X.shape[-2:]),
            lambda: self._with_one(X, self.pick.choice([math.nan, math.inf, -math.inf])),
            lambda: X * self.pick.choice([0.0, -1.0, 1e-30, 1e30, 1e-42, 3e38]),
            lambda: X.numpy(),
        ]
        bent: Tensor = self.pick.choice(ways)()
        return bent

    def _with_one(self, X: Tensor, value: float) -> Tensor:
        X = X.clone()
        if X.numel() and X.is_floating_point():
            X.view(-1)[self.pick.randrange(X.numel())] = value
        return X
