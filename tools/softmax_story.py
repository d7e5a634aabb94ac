"""How far factors are from the Fisher factor while a classifier learns a known distribution.

    python -m tools.softmax_story

Trains the small classifier of `gomuon verify` with Go-MUON: its inputs are a finite population, and
the distribution q of each input's labels is known, so B_q and B_F are known as well. In one kind of
run factors are made of the observed labels, in the other of labels drawn from the model
(`sample_labels`); the loss is that of observed labels in both. At every refresh it notes the
mismatch ‖B_q − B_F‖ beside its bound, Equation (11), and the four parts of the error of the factor
that the step uses, Equation (20). Writes results/softmax/softmax.json, in seconds.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon import GoMuon
from gomuon.functional import oas, theory
from gomuon.lab import files, machine
from gomuon.lab.verification.factor_statements import second_moment
from gomuon.lab.verification.known_labels import KnownLabels, TrueFactors, network, true_factors
from gomuon.lab.verification.live_checks import effective_factor

FORMAT = 1
FILE = Path("softmax") / "softmax.json"
STEPS, LR, COPIES, SEEDS = 200, 0.2, 16, (0, 1, 2, 3, 4)
OBSERVED, SAMPLED = "observed", "sampled"
LAYERS = ("hidden", "logits")
PARTS = ("finite sample", "model mismatch", "shrinkage and floor", "average and staleness")
DIGITS = 5


@dataclass
class Course:
    """What was noted of one layer in one run; every list has a number for each refresh.

    Attributes:
        labels: those that factors are made of, "observed" or "sampled".
        layer: "hidden" or "logits".
        seed: of data, weights and labels.
        steps: the updates before the refresh.
        apart: the mean of ‖q − p‖ over the inputs.
        mismatch: ‖B_q − B_F‖.
        bound: the mean of 3‖J‖²‖q − p‖ over the inputs.
        parts: the four parts of the error, in the order of Equation (20).
        error: ‖B̄ − B_F‖ of the factor in use.
    """

    labels: str
    layer: str
    seed: int
    steps: list[int] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)
    mismatch: list[float] = field(default_factory=list)
    bound: list[float] = field(default_factory=list)
    parts: list[list[float]] = field(default_factory=list)
    error: list[float] = field(default_factory=list)


def run(labels: str, seed: int, steps: int = STEPS) -> list[Course]:
    """Train, and note what happens to both layers."""
    with machine.on_threads(1):  # the matrices are tiny: threads would wait for each other
        return _run(labels, seed, steps)


def _run(labels: str, seed: int, steps: int) -> list[Course]:
    generator = torch.Generator().manual_seed(seed)
    data = KnownLabels.drawn(generator, torch.device("cpu"))
    model = network(generator, torch.device("cpu"))
    optimizer = GoMuon(model, lr=LR, routes={"*": "matrix"}, preset="paper")
    group = optimizer.param_groups[0]
    courses = [Course(labels, layer, seed) for layer in LAYERS]
    for step in range(steps):
        group["lr"] = LR * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
        inputs, observed = data.batch(COPIES, generator)
        refreshes = step % group["refresh_every"] == 0
        truth, p = true_factors(model, data), _probabilities(model, data)
        logits = model(inputs)
        drawn = observed
        optimizer.zero_grad()  # before labels are drawn: it would drop their sums
        if labels == SAMPLED and refreshes:
            drawn = _next_labels(logits, generator)
            optimizer.sample_labels(logits, generator)
        deltas = _deltas(model, inputs, drawn)
        F.cross_entropy(logits, observed).backward()
        optimizer.step()
        if refreshes:
            for course, layer, own, rows in zip(
                courses, model.parameters(), truth, deltas, strict=True
            ):
                cached = effective_factor(optimizer.state[layer]["left_map"][0], group["alpha"])
                apart = torch.linalg.vector_norm(data.q - p, dim=-1).mean()
                _note(course, step, apart, own, rows, cached)
    return courses


def _note(
    course: Course, step: int, apart: Tensor, truth: TrueFactors, rows: Tensor, cached: Tensor
) -> None:
    estimated = second_moment(rows)
    # What the estimate is one of: with labels drawn from the model there is no mismatch.
    expected = truth.observed if course.labels == OBSERVED else truth.fisher
    current = oas(estimated, len(rows))[0]
    parts = theory.factor_error_terms(cached, current, estimated, expected, truth.fisher)
    course.steps.append(step)
    course.apart.append(_rounded(apart))
    course.mismatch.append(_rounded(_norm(truth.observed - truth.fisher)))
    course.bound.append(_rounded(truth.bounds.mean()))
    course.parts.append([_rounded(part) for part in parts])
    course.error.append(_rounded(_norm(cached - truth.fisher)))


def _norm(S: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(S, ord=2)


def _rounded(number: Tensor) -> float:
    return float(f"{float(number):.{DIGITS}g}")


@torch.no_grad()
def _probabilities(model: nn.Sequential, data: KnownLabels) -> Tensor:
    first, last = model.parameters()  # not by a forward pass: hooks would take it for training
    return (torch.tanh(data.inputs @ first.mT) @ last.mT).softmax(-1)


def _next_labels(logits: Tensor, generator: torch.Generator) -> Tensor:
    """The labels that `sample_labels` will draw with this generator."""
    copy = torch.Generator()
    copy.set_state(generator.get_state())
    p = logits.detach().float().softmax(-1)
    return torch.multinomial(p, 1, generator=copy).squeeze(-1)


@torch.no_grad()
def _deltas(model: nn.Sequential, inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """δ of both layers for every row."""
    first, last = model.parameters()
    hidden = torch.tanh(inputs @ first.mT)
    of_logits = (hidden @ last.mT).softmax(-1) - F.one_hot(labels, len(last))
    return [(of_logits @ last) * (1 - hidden.square()), of_logits]


def story() -> dict[str, Any]:
    """Everything that the file holds."""
    settings = {"steps": STEPS, "lr": LR, "copies": COPIES, "seeds": list(SEEDS)}
    courses = [one for labels in (OBSERVED, SAMPLED) for s in SEEDS for one in run(labels, s)]
    return {
        "format": FORMAT,
        "settings": settings,
        "versions": machine.versions(),
        "courses": [asdict(course) for course in courses],
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """As JSON, with a line for each course."""
    files.make_folder(path.parent)
    lines = [json.dumps(course) for course in content.pop("courses")]
    start = json.dumps(content)[:-1]
    text = f'{start}, "courses": [\n' + ",\n".join(lines) + "\n]}\n"
    files.write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))
    print(path)


def main() -> None:
    """Write the file."""
    write(Path("results") / FILE, story())


if __name__ == "__main__":
    main()
