"""The full Gauss–Newton step of small classifiers: a slow oracle to hold other methods against."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gomuon.errors import NonFiniteGradientError
from gomuon.lab.errors import LabError

LARGEST = 200_000  # parameters; a step takes `iterations` times several passes of the model


class GaussNewton(torch.optim.Optimizer):
    """W ← W − lr·(JᵀHJ + damping·I)⁻¹g over all parameters at once, for a mean cross-entropy.

    J is the Jacobian of the logits, H the Hessian of the loss in them. For a cross-entropy H
    depends on the logits alone, so no targets are needed: the inputs are those of the model's last
    forward pass, and g is the gradient that is there. Products with JᵀHJ are curvlinops', the
    equations are solved by conjugate gradients. Nothing is averaged, and there is no momentum.

    Args:
        model: maps a tensor of inputs to logits, classes last.
        lr: 1 takes the whole step.
        damping: λ, positive.
        iterations: of conjugate gradients at most.
        tolerance: the residual, relative to the gradient, at which they end.

    Raises:
        LabError: the model has too many parameters, or curvlinops is not installed.
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.1,
        *,
        damping: float = 0.1,
        iterations: int = 50,
        tolerance: float = 1e-3,
    ) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        count = sum(p.numel() for p in parameters)
        if count > LARGEST:
            raise LabError(
                f"gauss-newton is an oracle for small models, of at most {LARGEST:,} parameters; "
                f"this one has {count:,}: give a smaller --width, --hidden or --layers, or leave "
                "it out"
            )
        for name, value in (("damping", damping), ("tolerance", tolerance), ("lr", lr)):
            if not value > 0:
                raise ValueError(f"{name} must be a number > 0, got {value!r}")
        if type(iterations) is not int or iterations < 1:
            raise ValueError(f"iterations must be a whole number >= 1, got {iterations!r}")
        _imported()
        defaults = {"lr": lr, "damping": damping, "iterations": iterations, "tolerance": tolerance}
        super().__init__(parameters, defaults)
        self._model = model
        self._inputs: Tensor | None = None
        model.register_forward_hook(self._remember)

    def _remember(self, model: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if torch.is_grad_enabled():  # not those of an evaluation
            self._inputs = inputs[0].detach()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Solve for the step, and take it."""
        if closure is not None:
            raise ValueError("gauss-newton takes no closure")
        if self._inputs is None:
            raise ValueError("gauss-newton needs a forward pass of its model before each step")
        [group] = self.param_groups
        parameters = [p for p in group["params"] if p.grad is not None]
        gradient = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        if not bool(gradient.isfinite().all()):
            raise NonFiniteGradientError("gauss-newton: the gradient is not finite")
        inputs, self._inputs = self._inputs, None
        step = self._solved(parameters, inputs, gradient, group)
        if not bool(step.isfinite().all()):
            raise NonFiniteGradientError("gauss-newton: the curvature is not finite")
        parts = step.split([p.numel() for p in parameters])
        for p, part in zip(parameters, parts, strict=True):
            p.sub_(group["lr"] * part.view_as(p))

    def _solved(
        self, parameters: list[Tensor], inputs: Tensor, gradient: Tensor, group: dict[str, Any]
    ) -> Tensor:
        operator, linear_cg = _imported()
        logits = _Rows(self._model)
        # Fused attention has no second derivative.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of iterations that end before the tolerance
            targets = torch.zeros(len(logits(inputs)), dtype=torch.long)  # of no effect, see above
            curvature = operator(
                logits,
                nn.CrossEntropyLoss(),
                parameters,
                [(inputs, targets)],
                check_deterministic=False,
                num_data=1,
                batch_size_fn=lambda batch: 1,
            )
            length = gradient.norm().clamp_min(torch.finfo(gradient.dtype).tiny)

            def damped(V: Tensor) -> Tensor:
                product: Tensor = curvature @ V + group["damping"] * V
                return product

            try:
                solution: Tensor = linear_cg(
                    damped,
                    (gradient / length).unsqueeze(-1),
                    tolerance=group["tolerance"],
                    max_iter=group["iterations"],
                    max_tridiag_iter=0,
                )
            except RuntimeError as error:  # so it says that a product was NaN
                raise NonFiniteGradientError(f"gauss-newton: {error}") from error
        self._inputs = None  # what the passes above left
        return length * solution.squeeze(-1)


class _Rows(nn.Module):
    """A model whose logits are rows, as the loss takes them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.model(inputs)
        return out.flatten(0, -2)


def _imported() -> tuple[Any, Any]:
    """curvlinops' operator and conjugate gradients; imported late, because they take seconds."""
    try:
        from curvlinops import GGNLinearOperator
        from linear_operator.utils.linear_cg import linear_cg
    except ImportError as error:
        raise LabError(
            "gauss-newton needs the package curvlinops-for-pytorch; install gomuon[lab]"
        ) from error
    return GGNLinearOperator, linear_cg
