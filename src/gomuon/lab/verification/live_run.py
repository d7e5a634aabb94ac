"""A short training run of the optimizer, in which statements are checked at each step.

What is checked is what the optimizer did: the direction is read from how the weights moved, source,
maps and factor from its state. Rows and output gradients are taken by hooks of our own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gomuon import GoMuon
from gomuon.lab.verification.known_labels import KnownLabels, TrueFactors, network, true_factors

STEPS, LR = 100, 0.2
FEWEST, MOST = 1, 512  # labels for each input, in the first and in the last step
Maps = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LayerStep:
    """What happened to one layer in one step.

    Attributes:
        source: M̂.
        direction: D̂, from the weights.
        maps: P_B and P_A of this step.
        factor: B̄ of this step.
        refreshed: whether this step renewed the maps.
        full_rank: whether the source may have full rank: δ of the logits adds up to zero.
        inputs: x of every row, [N, n].
        deltas: δ of every row, [N, m].
        truth: the factors without noise, at the weights before the step.
        settings: the optimizer's α, β_B and K.
        held: if refreshed, the layer's steps with the maps before.
    """

    source: Tensor
    direction: Tensor
    maps: Maps
    factor: Tensor
    refreshed: bool
    full_rank: bool
    inputs: Tensor
    deltas: Tensor
    truth: TrueFactors
    settings: dict[str, float]
    held: list[LayerStep] = field(default_factory=list)


def run(device: torch.device, seed: int) -> Iterator[list[LayerStep]]:
    """Train; yields what happened to both layers in every step."""
    generator = torch.Generator().manual_seed(seed)
    data = KnownLabels.drawn(generator, device)
    model = network(generator, device)
    optimizer = GoMuon(model, lr=LR, routes={"*": "matrix"}, preset="paper")
    rows = _Rows(model)
    held: list[list[LayerStep]] = [[], []]
    for step in range(STEPS):
        group = optimizer.param_groups[0]
        group["lr"] = LR * (0.02 + 0.98 * (1 + math.cos(math.pi * step / STEPS)) / 2)
        copies = round(FEWEST * (MOST / FEWEST) ** (step / (STEPS - 1)))
        inputs, labels = data.batch(copies, generator)
        truth = true_factors(model, data)
        before = [layer.weight.detach().clone() for layer in rows.layers]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        refreshed = step % group["refresh_every"] == 0
        happened = []
        for index, layer in enumerate(rows.layers):
            W, state = layer.weight.detach(), optimizer.state[layer.weight]
            assert layer.weight.grad is not None
            beta, (m, n) = group["momentum"], W.shape
            x, delta = rows.taken(layer)
            now = LayerStep(
                source=(1 - beta) * layer.weight.grad + beta * state["momentum"],
                direction=(before[index] - W) / (group["lr"] * math.sqrt(max(1, m / n))),
                maps=(state["left_map"][0], state["right_map"][0]),
                factor=state["left_factor"][0],
                refreshed=refreshed,
                full_rank=index == 0,
                inputs=x,
                deltas=len(x) * delta,  # the loss is a mean over the rows
                truth=truth[index],
                settings={key: group[key] for key in ("alpha", "factor_decay", "refresh_every")},
                held=held[index] if refreshed else [],
            )
            held[index] = [now] if refreshed else [*held[index], now]
            happened.append(now)
        yield happened


class _Rows:
    """Inputs and output gradients of every linear layer, from hooks."""

    def __init__(self, model: nn.Sequential) -> None:
        self.layers = [module for module in model if isinstance(module, nn.Linear)]
        self._inputs: dict[nn.Module, Tensor] = {}
        self._gradients: dict[nn.Module, Tensor] = {}
        for layer in self.layers:
            layer.register_forward_hook(self._keep)

    def _keep(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self._inputs[layer] = args[0].detach()
        output.register_hook(lambda g: self._gradients.__setitem__(layer, g.detach()))

    def taken(self, layer: nn.Module) -> tuple[Tensor, Tensor]:
        return self._inputs.pop(layer), self._gradients.pop(layer)
