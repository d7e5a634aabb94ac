"""One step of a real training run, taken apart for the pictures of docs/how-it-works.md.

A classifier of handwritten digits (64 → 32 → 24 → 10) is trained in float64 by Go-MUON with its
defaults, and what the step did to the weight in the middle is computed once more, piece by piece.
"""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon import GoMuon
from gomuon.functional import frobenius_graft, matched_direction, polar
from gomuon.watching.layer_updates import LayerUpdate

UPDATES = 43  # the last one is two steps after a refresh: its maps are cached ones
BATCH, LAYER = 256, "2.weight"


@dataclass(frozen=True)
class RealStep:
    """The weight's quantities in that step; the maps are those of the last refresh."""

    source: Tensor  # M̂ [m, n]
    left: Tensor  # P_B [m, m]
    right: Tensor  # P_A [n, n]
    update: Tensor  # U, what the optimizer moved the weight by at rate 1

    @property
    def mapped(self) -> Tensor:
        """C = P_B M̂ P_A."""
        return self.left @ self.source @ self.right

    @property
    def levelled(self) -> Tensor:
        """polar(C)."""
        return polar(self.mapped)

    @property
    def direction(self) -> Tensor:
        """D, of Muon's length."""
        return frobenius_graft(matched_direction(self.source, self.left, self.right))

    @property
    def muon(self) -> Tensor:
        """Muon's direction for the same source."""
        return polar(self.source)

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """B̄ and A, whose roots the maps are: P^(−4)."""
        return _fourth_power_of_inverse(self.left), _fourth_power_of_inverse(self.right)


def _fourth_power_of_inverse(P: Tensor) -> Tensor:
    return torch.linalg.matrix_power(torch.linalg.inv(P), 4)


def take() -> RealStep:
    """Train, and return the last step."""
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16.0), torch.tensor(digits)
    random = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 10)
        ).double()
    optimizer = GoMuon(model, lr=0.08)
    seen: dict[str, RealStep] = {}

    def keep(step: LayerUpdate) -> None:
        assert step.left_map is not None
        assert step.right_map is not None
        tensors = (step.source, step.left_map, step.right_map, step.update)
        seen[step.layer] = RealStep(*(tensor[0].clone() for tensor in tensors))

    optimizer.add_observer(keep)
    for _ in range(UPDATES):
        rows = torch.randint(len(images), (BATCH,), generator=random)
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return seen[LAYER]
