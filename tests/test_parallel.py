"""Two processes under DDP equal one with the union batch."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gomuon import KFAC, GoMuon
from gomuon.optimizer import MatrixOptimizer

RANKS, STEPS = 2, 8


class Net(nn.Module):
    """q and k share an input; the expert sees tokens on one rank only, in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(5, 6), nn.Linear(5, 6)
        self.expert, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        hidden = torch.tanh(self.q(x)) * self.k(x)
        if chosen.any():
            extra = torch.tanh(self.expert(hidden[chosen]))  # its gradients have full rank
            hidden = hidden.index_add(0, chosen.nonzero()[:, 0], extra)
        return self.head(hidden)


def batch(step: int) -> tuple[Tensor, Tensor, list[int]]:
    """Rows, which of them go to the expert, and how many each rank takes."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(20, 5, generator=generator, dtype=torch.float64)
    chosen = torch.zeros(20, dtype=torch.bool)
    chosen[9:] = step % 2 == 0  # the second rank's, or nobody's
    return x, chosen, [8, 12]


def make(method: str, model: nn.Module) -> MatrixOptimizer:
    if method == "KFAC":
        return KFAC(model, lr=0.05, loss_reduction="sum")
    return GoMuon(model, lr=0.05, refresh_every=2, loss_reduction="sum")


def work(rank: int, method: str, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model = Net()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = make(method, wrapped)
    for step in range(STEPS):
        x, chosen, sizes = batch(step)
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        optimizer.zero_grad()
        # DDP averages gradients; times the number of ranks it is the sum over all rows. The first
        # micro-batch waits for the second before anything is sent.
        first, second = slice(mine.start, mine.start + 3), slice(mine.start + 3, mine.stop)
        with wrapped.no_sync():
            (RANKS * wrapped(x[first], chosen[first]).square().sum()).backward()
        (RANKS * wrapped(x[second], chosen[second]).square().sum()).backward()
        optimizer.step()
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def states(method: str, folder: Path) -> list[dict[str, Tensor]]:
    """The weights every rank ends with.

    A run that stalls, seen once on a loaded machine, is tried again; a rank that fails is not.
    """
    context = mp.get_context("spawn")
    for attempt in range(3):
        here = folder / str(attempt)
        here.mkdir()
        ranks = [context.Process(target=work, args=(r, method, str(here))) for r in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout=40)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
            process.join()
        assert all(code in (0, None) for code in codes), codes
        if codes == [0] * RANKS:
            return [torch.load(here / f"{r}.pt", weights_only=True) for r in range(RANKS)]
    pytest.fail("the ranks stalled three times")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["GoMuon", "KFAC"])
def test_two_ranks_equal_one_with_the_union(method: str, tmp_path: Path) -> None:
    ranks = states(method, tmp_path)
    alone = Net()
    optimizer = make(method, alone)
    for step in range(STEPS):
        x, chosen, _ = batch(step)
        optimizer.zero_grad()
        alone(x, chosen).square().sum().backward()
        optimizer.step()
    for name, p in alone.state_dict().items():
        assert torch.equal(ranks[0][name], ranks[1][name]), f"{name}: the ranks differ"
        torch.testing.assert_close(ranks[0][name], p, rtol=1e-9, atol=1e-11, msg=name)
