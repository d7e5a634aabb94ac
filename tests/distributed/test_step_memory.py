"""What ranks hold while steps are sent is what `gomuon plan --fit` counts, to the byte."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gomuon.distributed.owned import OwnedMatrix
from gomuon.distributed.owners import Owners
from gomuon.lab.costs import planned_model
from gomuon.lab.costs.estimate import RankLayout, estimate_cost
from gomuon.lab.experiments import optimizers
from tests.distributed.launcher import Place, launch
from tests.distributed.test_traffic import MESHES, small
from tests.distributed.worlds import wrapped


def size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def held_by_steps(place: Place, cases: list[tuple[str, str]]) -> list[int]:
    """Bytes of buffers, whole steps, and what was collected from other ranks."""
    counted: list[int] = []
    real = Owners.send

    def send(self: Owners, matrices: Sequence[OwnedMatrix]) -> None:
        real(self, matrices)
        exchange: Any = self._sent[-1][1]
        held = size([exchange._sent, exchange._buffer])
        for matrix in matrices:
            if (layer := matrix.layer) is not None:
                held += size(layer.steps)
                if matrix.row_ranges[0].sharded:
                    held += size(layer.whole_gradients) + size(layer.whole_weights)
        counted[-1] += held  # the groups of a step are on their way at the same time

    found = []
    for kind, method in cases:
        model = wrapped(small(), kind)
        optimizer = optimizers.build(method, model, 1e-3, 1e-3, {})
        Owners.send = send  # type: ignore[method-assign]
        try:
            for step in range(2):
                tokens = torch.randint(
                    0, 65, (2, 16), generator=torch.Generator().manual_seed(step)
                )
                optimizer.zero_grad()
                model(tokens).logsumexp(-1).mean().backward()
                counted.append(0)
                optimizer.step()
        finally:
            Owners.send = real  # type: ignore[method-assign]
        found.append(counted[-1])
    return found


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [("ddp", "go-muon"), ("fsdp", "go-muon"), ("fsdp", "muon-qk"), ("ddp", "soap")]),
        (4, [("hybrid", "go-muon"), ("fsdp", "muon")]),
    ],
    ids=["2", "4"],
)
def test_memory_of_sending_steps_is_the_plans(
    ranks: int, cases: list[tuple[str, str]], tmp_path: Path
) -> None:
    answers = launch(ranks, held_by_steps, tmp_path, cases=cases)
    about = planned_model.published_model("character", tokens=None, dtype="float32")
    for index, (kind, method) in enumerate(cases):
        planned = estimate_cost(method, about, RankLayout(MESHES[kind](ranks)), {}).messages
        held = [answer[index] for answer in answers]
        assert max(held) == planned.largest, (kind, method)
        assert sum(held) / ranks == planned.mean, (kind, method)
