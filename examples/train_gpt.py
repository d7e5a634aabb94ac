"""A small GPT on any text, as nanoGPT trains one: python examples/train_gpt.py --data my.txt

Without --data it learns the text of Python's own help(). Other ways to run it:

    python examples/train_gpt.py --optimizer adamw        the same rate, decay and schedule
    python examples/train_gpt.py --matrix_lr 0.02         the paper's scale: matrices at Muon's rate
    python examples/train_gpt.py --resume                 go on from the last checkpoint, exactly
    torchrun --nproc-per-node 2 examples/train_gpt.py     the same batches, divided among ranks

To try another optimizer, change `make_optimizer` and nothing else.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gomuon import GoMuon, MatrixOptimizer, Muon


def option(default: Any, text: str, **more: Any) -> Any:
    """A field of `Config` and an option of the command line."""
    return field(default=default, metadata={"help": f"{text} ({default!r})", **more})


@dataclass
class Config:
    data: str = option("", "a text file; by default the text of Python's own help()")
    out: str = option("out-gpt", "folder of checkpoint.pt and log.jsonl")
    resume: bool = option(False, "go on from the checkpoint in --out")
    optimizer: str = option("gomuon", "what trains", choices=("gomuon", "muon", "adamw"))
    lr: float = option(3e-3, "AdamW's rate; matrices take it too, scaled to AdamW's updates")
    matrix_lr: float = option(0.0, "a rate for matrices alone, in the paper's scale (Muon's)")
    weight_decay: float = option(0.1, "AdamW's weight decay, of everything but vectors")
    clip: float = option(1.0, "largest norm of the gradient")
    steps: int = option(2000, "updates")
    warmup: int = option(100, "updates until the rate is reached; it then falls to a tenth")
    batch: int = option(12, "sequences in an update, over all ranks and micro-batches")
    accumulate: int = option(1, "micro-batches in an update")
    context: int = option(64, "length of a sequence")
    layers: int = option(4, "blocks")
    heads: int = option(4, "attention heads in a block")
    width: int = option(128, "length of a token's vector")
    compile: bool = option(False, "torch.compile the model")
    log_every: int = option(10, "updates between two lines of the log")
    eval_every: int = option(250, "updates between two validations, each with a checkpoint")
    eval_batches: int = option(20, "batches in a validation")
    seed: int = option(1337, "of the model and of the batches")


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """The one place to change the optimizer."""
    lr, decay, betas = config.lr, config.weight_decay, (0.9, 0.95)
    if config.optimizer == "adamw":
        decaying = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=lr, betas=betas, weight_decay=decay)
    method = {"gomuon": GoMuon, "muon": Muon}[config.optimizer]
    if config.matrix_lr:  # the paper's scale, where decay per update is the same: rate x decay
        adamw = {"lr": lr, "betas": betas, "weight_decay": decay}
        matrix_decay = decay * lr / config.matrix_lr
        return method(model, lr=config.matrix_lr, weight_decay=matrix_decay, adamw=adamw)
    return method(model, lr=lr, lr_scale="adamw", weight_decay=decay, adamw={"betas": betas})


def rate_factor(step: int, config: Config) -> float:
    """Linear warmup, then a cosine down to a tenth."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, width / heads]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, symbols: int, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(symbols, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.lm_head = nn.Linear(config.width, symbols, bias=False)
        self.lm_head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            ends_branch = name.endswith(("mix.weight", "down.weight"))
            if parameter.dim() == 2:  # as GPT-2 starts
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** (ends_branch / 2))

    def forward(self, window: Tensor) -> Tensor:
        """The mean loss of predicting each symbol of [batch, context + 1] from those before it."""
        x = self.tokens(window[:, :-1]) + self.positions.weight[: window.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), window[:, 1:].flatten())


def read_data(path: str) -> tuple[Tensor, Tensor, int]:
    """Nine tenths of the text to train on, the rest to validate, and the number of its symbols."""
    text = Path(path).read_bytes() if path else "\n".join(topics.values()).encode()
    bytes_of_text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    symbols, tokens = bytes_of_text.unique(return_inverse=True)  # a token for each byte in use
    border = len(tokens) * 9 // 10
    return tokens[:border], tokens[border:], len(symbols)


def train(config: Config, rank: int, ranks: int) -> None:
    if config.batch % (ranks * config.accumulate):
        raise SystemExit(f"--batch must be a multiple of {ranks} ranks x --accumulate")
    on_gpu, local = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    torch.manual_seed(config.seed)  # the same model on every rank
    text, held_out, symbols = read_data(config.data)
    bare = GPT(symbols, config).to(device)
    model = torch.compile(bare) if config.compile else bare
    if ranks > 1:
        model = DistributedDataParallel(model, device_ids=[local] if on_gpu else None)
    optimizer = make_optimizer(model, config)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, config))
    first, out = 0, Path(config.out)
    if config.resume:
        saved = torch.load(out / "checkpoint.pt", map_location="cpu", weights_only=True)
        bare.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first = saved["step"]
    elif rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / "log.jsonl").write_text("")
        if isinstance(optimizer, MatrixOptimizer):
            print(optimizer.routing_table())  # which parameter is treated how, and why

    def loss_of(network: nn.Module, source: Tensor, starts: Tensor) -> Tensor:
        """The mean loss of the windows that begin there."""
        window = source[starts[:, None] + torch.arange(config.context + 1)].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            return network(window)

    def mean_of_ranks(x: Tensor) -> float:
        if ranks > 1:
            dist.all_reduce(x)
        return x.item() / ranks

    @torch.no_grad()
    def validate() -> float:
        """The loss on the same windows of the held-out text every time."""
        last = len(held_out) - config.context - 1
        starts = torch.linspace(0, last, config.eval_batches * config.batch).long()
        parts = starts[rank::ranks].split(config.batch)
        bare.eval()
        losses = [loss_of(bare, held_out, part) * len(part) for part in parts]
        bare.train()
        return mean_of_ranks(torch.stack(losses).sum()) / len(starts) * ranks

    def save(step: int) -> None:
        """On all ranks: each may have a part of the optimizer's state."""
        if isinstance(optimizer, MatrixOptimizer):
            optimizer.consolidate_state_dict()
        if rank == 0:
            parts = {"model": bare, "optimizer": optimizer, "schedule": schedule}
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**state, "step": step, "config": asdict(config)}, out / "checkpoint.part")
            os.replace(out / "checkpoint.part", out / "checkpoint.pt")  # never half a file

    def log(**numbers: float) -> None:
        if rank == 0:
            print("  ".join(f"{name} {number:.5g}" for name, number in numbers.items()), flush=True)
            with (out / "log.jsonl").open("a") as file:
                file.write(json.dumps(numbers) + "\n")

    began = time.perf_counter()
    for step in range(first, config.steps):
        # Batches follow from seed and step alone: the same after a resume and on any ranks.
        draw = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        starts = torch.randint(len(text) - config.context, (config.batch,), generator=draw)
        parts = starts[rank::ranks].chunk(config.accumulate)
        total, rate = torch.zeros((), device=device), schedule.get_last_lr()[0]
        optimizer.zero_grad()
        for number, part in enumerate(parts, start=1):
            more = ranks > 1 and number < len(parts)  # DDP averages with the last one
            with model.no_sync() if more else contextlib.nullcontext():
                loss = loss_of(model, text, part) / len(parts)
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(bare.parameters(), config.clip)
        optimizer.step()
        schedule.step()

        done = step + 1
        is_last = done == config.steps
        if done % config.log_every == 0 or done == 1 or is_last:
            seconds = (time.perf_counter() - began) / (done - first)
            log(step=done, loss=mean_of_ranks(total), lr=rate, seconds=seconds)
        if done % config.eval_every == 0 or is_last:
            log(step=done, validation=validate())
            save(done)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for one in fields(Config):
        how = {"action": "store_true"} if one.default is False else {"type": type(one.default)}
        parser.add_argument(f"--{one.name}", default=one.default, **how, **one.metadata)
    config = Config(**vars(parser.parse_args(arguments)))
    ranks = int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
    if ranks == 1:
        return train(config, 0, 1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        train(config, dist.get_rank(), ranks)
        dist.barrier()  # nobody closes a connection that another still reads from
        print(f"rank {dist.get_rank()} is done", flush=True)
    finally:
        gc.collect()  # what still holds the group goes first, so that its threads end here
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
