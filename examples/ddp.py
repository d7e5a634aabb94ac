"""Go-MUON under DistributedDataParallel: torchrun --nproc-per-node 2 examples/ddp.py

On CPU with gloo as on GPUs with NCCL. Every rank trains on its own batches; each matrix has one
rank that keeps its state and makes its steps. Ends with a checkpoint that any number of ranks, or a
single process, can go on from.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gomuon import GoMuon
from gomuon.lab.experiments.models import CharacterModel

SYMBOLS = 31


def batch(step: int, rank: int, device: torch.device) -> torch.Tensor:
    """Sequences that count up by a stride of their own, modulo the alphabet; [16, 33]."""
    generator = torch.Generator().manual_seed(100_000 * rank + step)
    start = torch.randint(SYMBOLS, (16, 1), generator=generator)
    stride = torch.randint(1, 4, (16, 1), generator=generator)
    return ((start + stride * torch.arange(33)) % SYMBOLS).to(device)


def train(options: argparse.Namespace, on_gpu: bool) -> None:
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(0)  # the same model on every rank
    model = CharacterModel(SYMBOLS, width=64, layers=2, heads=2, hidden=160).to(device)
    wrapped = DistributedDataParallel(model, device_ids=[local] if on_gpu else None)
    optimizer = GoMuon(wrapped, lr=0.02)

    for step in range(options.steps):
        window = batch(step, rank, device)
        loss = F.cross_entropy(wrapped(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:3d}  loss {loss.item():.3f}", flush=True)

    state = {
        "model": get_model_state_dict(wrapped),
        "optimizer": get_optimizer_state_dict(wrapped, optimizer),
    }
    dcp.save(state, checkpoint_id=options.out)
    if rank == 0:
        print(f"saved {options.out}", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=60)
    arguments.add_argument("--out", default="checkpoint-ddp")
    options = arguments.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        train(options, on_gpu)
        dist.barrier()  # nobody closes a connection that another still reads from
        print(f"rank {dist.get_rank()} is done", flush=True)
    finally:
        gc.collect()  # what still holds the group goes first, so that its threads end here
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
