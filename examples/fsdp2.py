"""Go-MUON under FSDP2: torchrun --nproc-per-node 2 examples/fsdp2.py

On CPU with gloo as on GPUs with NCCL. Every rank holds a part of each parameter; a whole matrix is
seen only by the rank that owns it, and only while its step is made. --resume goes on from a
checkpoint of this example or of ddp.py, saved on any number of ranks.
"""

import argparse
import gc
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from gomuon import GoMuon
from gomuon.lab.experiments.models import CharacterModel

SYMBOLS = 31


def batch(step: int, rank: int, device: torch.device) -> torch.Tensor:
    """Sequences that count up by a stride of their own, modulo the alphabet; [16, 33]."""
    generator = torch.Generator().manual_seed(100_000 * rank + step)
    start = torch.randint(SYMBOLS, (16, 1), generator=generator)
    stride = torch.randint(1, 4, (16, 1), generator=generator)
    return ((start + stride * torch.arange(33)) % SYMBOLS).to(device)


def states(model: torch.nn.Module, optimizer: GoMuon) -> dict[str, Any]:
    return {
        "model": dsd.get_model_state_dict(model),
        "optimizer": dsd.get_optimizer_state_dict(model, optimizer),
    }


def train(options: argparse.Namespace, on_gpu: bool) -> None:
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model = CharacterModel(SYMBOLS, width=64, layers=2, heads=2, hidden=160).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.trunk.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = GoMuon(model, lr=0.02)

    if options.resume:
        saved = states(model, optimizer)
        dcp.load(saved, checkpoint_id=options.resume)
        dsd.set_model_state_dict(model, saved["model"])
        dsd.set_optimizer_state_dict(model, optimizer, saved["optimizer"])
    first = optimizer.param_groups[0]["step"]

    for step in range(first, first + options.steps):
        window = batch(step, rank, device)
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 10 == 0 or step == first + options.steps - 1):
            print(f"step {step:3d}  loss {loss.item():.3f}", flush=True)

    dcp.save(states(model, optimizer), checkpoint_id=options.out)
    if rank == 0:
        print(f"saved {options.out}", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=60)
    arguments.add_argument("--resume", help="a checkpoint's folder")
    arguments.add_argument("--out", default="checkpoint-fsdp2")
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
