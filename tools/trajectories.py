"""Fingerprints of every method's trajectory on a fixed model, to compare two versions of gomuon.

    python tools/trajectories.py > before.txt      # with one version
    python tools/trajectories.py > after.txt       # with the other
    diff before.txt after.txt

Each line is a method, a dtype, a number of ranks and a SHA-256 of all parameters after 20 updates.
With --save DIR each optimizer's checkpoint after 10 updates is kept; with --load DIR the last 10
updates continue from there. Only gomuon's public names are used.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import socket
import warnings
from pathlib import Path

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gomuon

METHODS = sorted(
    name
    for name in gomuon.__all__
    if inspect.isclass(getattr(gomuon, name))
    and issubclass(getattr(gomuon, name), torch.optim.Optimizer)
    and name != "MatrixOptimizer"
)
UPDATES, HALF = 20, 10


class TinyAttention(nn.Module):
    """Two heads, and the names MuonQK looks for."""

    heads = 2

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).flatten(-2))


class Model(nn.Module):
    """An embedding, a convolution in two groups, attention, an MLP and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.convolution = nn.Conv1d(16, 16, 3, padding=1, groups=2)
        self.attention = TinyAttention(16)
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16))
        self.head = nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.convolution(x.mT).mT
        x = x + self.attention(self.norm(x))
        return self.head(x + self.mlp(x))


def fingerprint(
    method: str, dtype: torch.dtype, rank: int, ranks: int, save: Path | None, load: Path | None
) -> str:
    """Train for 20 updates; the SHA-256 of the parameters."""
    torch.manual_seed(0)
    model = Model().to(dtype)
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = getattr(gomuon, method)(wrapped)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(11, (8, 13), generator=generator) for _ in range(UPDATES)]
    file = f"{method}-{str(dtype).removeprefix('torch.')}-{ranks}-{rank}.pt"
    begin = 0
    if load is not None:
        saved = torch.load(load / file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = HALF
    for step in range(begin, UPDATES):
        if save is not None and step == HALF:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, save / file
            )
        tokens = batches[step][rank::ranks]
        logits = wrapped(tokens[:, :-1])
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    sums = hashlib.sha256()
    for parameter in model.parameters():
        sums.update(parameter.detach().numpy().tobytes())
    return sums.hexdigest()


def run(rank: int, ranks: int, port: int, save: Path | None, load: Path | None) -> None:
    """Print the lines of one number of ranks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if ranks > 1:
        address = f"tcp://127.0.0.1:{port}"
        distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    for dtype in (torch.float32, torch.float64):
        for method in METHODS:
            sums = fingerprint(method, dtype, rank, ranks, save, load)
            if rank == 0:
                print(f"{method:12} {str(dtype)[6:]} ranks={ranks} {sums}", flush=True)
    if ranks > 1:
        distributed.destroy_process_group()


def main() -> None:
    """Both numbers of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    options = parser.parse_args()
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
    run(0, 1, 0, options.save, options.load)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(run, (2, port, options.save, options.load), nprocs=2)


if __name__ == "__main__":
    main()
