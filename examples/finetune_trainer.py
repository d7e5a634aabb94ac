"""Go-MUON in Transformers' Trainer: python examples/finetune_trainer.py --model NAME --data my.txt

NAME is a folder or a model of the Hub. Without --model it trains a small Llama with random weights,
whose tokens are bytes, and without --data on the text of Python's own help(): nothing is fetched.

    --lora          train adapters (peft) and leave the model as it is
    --resume        go on from the last checkpoint in --out, exactly

It also runs under torchrun: torchrun --nproc-per-node 2 examples/finetune_trainer.py
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from gomuon import GoMuon
from gomuon.integrations.transformers import GatherState


def make_optimizer(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """The one place to change the optimizer. The rate and the decay are those you use for AdamW."""
    return GoMuon(model, lr=options.lr, lr_scale="adamw", weight_decay=options.weight_decay)


def make_model(options: argparse.Namespace) -> nn.Module:
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
                bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip
    if options.lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, adapters)
    return model


def make_data(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The text in pieces of equal length: nine tenths to train on, the rest to validate."""
    text = Path(options.data).read_text("utf-8") if options.data else "\n".join(topics.values())
    if options.model:
        tokens = AutoTokenizer.from_pretrained(options.model)(text)["input_ids"]
    else:
        tokens = list(text.encode())
    pieces = torch.tensor(tokens).split(options.length)[:-1]  # the last one is shorter
    examples = [{"input_ids": piece, "labels": piece} for piece in pieces]
    border = len(examples) * 9 // 10
    return examples[:border], examples[border:][: options.eval_examples]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder or a name on the Hub")
    parser.add_argument("--data", help="a text file")
    parser.add_argument("--out", default="out-trainer", help="folder of the checkpoints")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--lr", type=float, default=1e-3, help="as for AdamW")
    parser.add_argument("--weight_decay", type=float, default=0.0, help="as for AdamW")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in an update")
    parser.add_argument("--length", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--save_every", type=int, default=100, help="updates")
    parser.add_argument("--eval_examples", type=int, default=64)
    options = parser.parse_args(arguments)

    set_seed(0)
    model = make_model(options)
    optimizer = make_optimizer(model, options)
    training, held_out = make_data(options)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            options.out,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulate,
            lr_scheduler_type="cosine",
            warmup_steps=options.steps // 20,
            save_steps=options.save_every,
            logging_steps=max(1, options.steps // 20),
            bf16=torch.cuda.is_available(),
            report_to="none",
        ),
        train_dataset=training,
        eval_dataset=held_out,
        optimizers=(optimizer, None),  # None: the Trainer makes the schedule
        callbacks=[GatherState()],  # several ranks: checkpoints with the state of all of them
    )
    if trainer.is_world_process_zero():
        print(getattr(optimizer, "routing_table", str)())  # who updates what, and why
    trainer.train(resume_from_checkpoint=options.resume)
    print(f"loss on held-out text: {trainer.evaluate()['eval_loss']:.3f}")
    trainer.save_model()


if __name__ == "__main__":
    main()
