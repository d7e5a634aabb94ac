"""A classifier whose labels have a known distribution, so that B_q and B_F are known too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gomuon.functional import theory

INPUTS, HIDDEN, CLASSES, POPULATION = 6, 10, 4, 32


@dataclass(frozen=True)
class KnownLabels:
    """A finite population of inputs, and the distribution of each input's labels.

    Attributes:
        inputs: [population, inputs].
        q: [population, classes], the softmax of a network like the one that learns it.
    """

    inputs: Tensor
    q: Tensor

    @classmethod
    def drawn(cls, generator: torch.Generator, device: torch.device) -> KnownLabels:
        inputs = torch.randn(POPULATION, INPUTS, generator=generator, dtype=torch.float64)
        teacher = network(generator, torch.device("cpu"))
        with torch.no_grad():
            q = (2 * teacher(inputs)).softmax(-1)
        return cls(inputs.to(device), q.to(device))

    def batch(self, copies: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Every input so many times, each time with a label of its own."""
        labels = torch.multinomial(self.q.cpu(), copies, replacement=True, generator=generator)
        return self.inputs.repeat_interleave(copies, 0), labels.flatten().to(self.inputs.device)


def network(generator: torch.Generator, device: torch.device) -> nn.Sequential:
    """Two layers without biases."""
    layers = nn.Sequential(
        nn.Linear(INPUTS, HIDDEN, bias=False, device="meta"),
        nn.Tanh(),
        nn.Linear(HIDDEN, CLASSES, bias=False, device="meta"),
    ).to_empty(device=device)
    layers.double()
    with torch.no_grad():
        for weight in layers.parameters():
            drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(drawn / weight.shape[1] ** 0.5)
    return layers


@dataclass(frozen=True)
class TrueFactors:
    """What the model's factors would be without noise, for one layer.

    Attributes:
        observed: B_{q,l}, the mean over the population.
        fisher: B_{F,l}.
        bounds: 3‖J_l‖₂²‖q − p‖₂ of every input, [population].
        mismatches: ‖B_{q,l} − B_{F,l}‖₂ of every input, [population].
    """

    observed: Tensor
    fisher: Tensor
    bounds: Tensor
    mismatches: Tensor


@torch.no_grad()
def true_factors(model: nn.Sequential, data: KnownLabels) -> list[TrueFactors]:
    """Of both layers at the model's weights now."""
    first, last = model.parameters()  # not by a forward pass: hooks would take it for training
    hidden = torch.tanh(data.inputs @ first.mT)
    p = (hidden @ last.mT).softmax(-1)
    eye = torch.eye(CLASSES, dtype=p.dtype, device=p.device).expand(POPULATION, -1, -1)
    found = []
    for J in (last * (1 - hidden.square()).unsqueeze(1), eye):  # [population, classes, m]
        observed = J.mT @ theory.observed_label_factor(data.q, p) @ J
        fisher = J.mT @ theory.softmax_fisher(p) @ J
        found.append(
            TrueFactors(
                observed.mean(0),
                fisher.mean(0),
                theory.observed_label_mismatch_bound(data.q, p, J),
                torch.linalg.matrix_norm(observed - fisher, ord=2),
            )
        )
    return found
