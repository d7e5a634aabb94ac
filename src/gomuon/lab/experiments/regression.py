"""Linear regression with badly conditioned inputs and outputs, and its exact optimum.

Inputs x have covariance Σ, and the noise of the outputs y = W★x + noise has precision G. Both have
eigenvalues in geometric progression and random eigenvectors. The loss is the negative logarithm of
the likelihood, ½ (Wx − y)ᵀ G (Wx − y), so its Hessian is Σ ⊗ G everywhere, and its condition
number is the product of both. This is the Kronecker form that curvature methods assume, and at the
optimum the mean of δδᵀ is G: the moments of x and δ alone give the right step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.lab.experiments import schedules
from gomuon.lab.experiments.run_config import VALIDATION_LOSS, RunConfig

INPUT_CONDITION, OUTPUT_CONDITION = 1e4, 1e2  # together: 1e6
SIGNAL = 4.0  # the part of an output's variance that can be predicted; the noise has 1


class LinearMap(nn.Module):
    """y = Wx, from W = 0."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.map = nn.Linear(inputs, outputs, bias=False)
        nn.init.zeros_(self.map.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.map(x)
        return out


class RegressionTask:
    """Fresh examples on every update; what remains to the optimum is computed, not sampled.

    W★ is drawn so that every direction of the Hessian holds an equal part of the loss at the start:
    steps that follow the gradient need as many updates as the condition number for the last part.
    """

    max_norm: float | None = None

    def __init__(self, config: RunConfig, data_dir: str | Path | None = None) -> None:
        self.config = config
        self.inputs, self.outputs = config.width, config.hidden
        generator = torch.Generator().manual_seed(config.seed)
        # In float64, so that the distance to the optimum is exact to float32's rounding.
        self.input_root, input_inverse = _root(self.inputs, INPUT_CONDITION, generator)
        self.output_root, output_inverse = _root(self.outputs, OUTPUT_CONDITION, generator)
        drawn = torch.randn(self.outputs, self.inputs, generator=generator, dtype=torch.float64)
        self.solution = output_inverse @ drawn @ input_inverse * (SIGNAL / self.inputs) ** 0.5
        self.noise_root = output_inverse
        # One seed for each update, so that a shorter run sees the first batches of a longer one.
        self.seeds = torch.randint(2**62, (config.steps,), generator=generator)

    def model(self) -> nn.Module:
        return LinearMap(self.inputs, self.outputs)

    def multipliers(self) -> list[float]:
        return schedules.cosine(self.config.steps)

    def fingerprints(self) -> dict[str, Any]:
        return {
            "stream": self.seeds,
            "corpus": self.solution,
            "model": {
                "kind": "regression",
                "inputs": self.inputs,
                "outputs": self.outputs,
                "batch": self.config.batch,
                "conditions": [INPUT_CONDITION, OUTPUT_CONDITION],
                "signal": SIGNAL,
            },
        }

    def examples(self, step: int) -> tuple[Tensor, Tensor]:
        """The inputs and outputs of an update, from 1, in float32."""
        generator = torch.Generator().manual_seed(int(self.seeds[step - 1]))
        sizes = (self.inputs, self.outputs)
        white, noise = (
            torch.randn(self.config.batch, n, generator=generator, dtype=torch.float64)
            for n in sizes
        )
        x = white @ self.input_root
        return x.float(), (x @ self.solution.mT + noise @ self.noise_root).float()

    def loss(self, model: nn.Module, step: int) -> tuple[Tensor, dict[str, float]]:
        x, y = self.examples(step)
        residual = (model(x) - y) @ self.output_root.float()
        return 0.5 * residual.square().mean(), {}

    def evaluate(self, model: nn.Module, step: int) -> dict[str, float]:
        """The expected loss above that of the optimum, ½ ‖G^½ (W − W★) Σ^½‖² per output."""
        if step % self.config.evaluate_every and step != self.config.steps:
            return {}
        assert isinstance(model, LinearMap)
        error = model.map.weight.detach().double() - self.solution
        excess = (self.output_root @ error @ self.input_root).square().sum() / self.outputs
        return {VALIDATION_LOSS: 0.5 * excess.item()}


def _root(size: int, condition: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The root of a matrix of that condition number and mean eigenvalue 1, and its inverse."""
    values = torch.logspace(0, 1, size, base=condition, dtype=torch.float64)
    roots = (values / values.mean()).sqrt()
    drawn = torch.randn(size, size, generator=generator, dtype=torch.float64)
    vectors, _ = torch.linalg.qr(drawn)
    return (vectors * roots) @ vectors.mT, (vectors / roots) @ vectors.mT
