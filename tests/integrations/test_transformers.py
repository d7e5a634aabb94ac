"""Hugging Face Transformers' Trainer, as docs/integrations.md says to use it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon import GeometryWarning, GoMuon, LayerSpec
from gomuon.optimizer import MatrixOptimizer

# Missing is a reason to skip, broken is not.
WHY = "in the test extra: pip install '.[test]'"
pytest.importorskip("accelerate", reason=WHY, exc_type=ModuleNotFoundError)
transformers = pytest.importorskip("transformers", reason=WHY, exc_type=ModuleNotFoundError)

SYMBOLS = 29
LR, ADAMW_LR = 0.05, 0.01


def gpt2(seed: int = 0) -> nn.Module:
    """Projections are `Conv1D`, qkv is one of them, the head is tied; dropout as it comes."""
    transformers.set_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=SYMBOLS, n_positions=16, n_embd=16, n_layer=2, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def llama(seed: int = 0) -> nn.Module:
    """Linear layers, two queries to a key, a head of its own."""
    transformers.set_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=SYMBOLS, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


MODELS = [pytest.param(gpt2, id="gpt2"), pytest.param(llama, id="llama")]


def sentences(count: int = 96, length: int = 12) -> list[dict[str, Tensor]]:
    """Each counts on from a symbol of its own in steps of its own; a few are padded."""
    generator = torch.Generator().manual_seed(7)
    starts = torch.randint(0, SYMBOLS, (count, 1), generator=generator)
    strides = torch.randint(1, 4, (count, 1), generator=generator)
    tokens = (starts + strides * torch.arange(length)) % SYMBOLS
    labels = tokens.clone()
    labels[::5, -4:] = -100
    return [{"input_ids": t, "labels": l} for t, l in zip(tokens, labels, strict=True)]


def arguments(folder: Path, **options: Any) -> Any:
    settings = {
        "max_steps": 10,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "report_to": "none",
        "use_cpu": True,
        "seed": 3,
        **options,
    }
    return transformers.TrainingArguments(output_dir=str(folder), **settings)


def trainer(model: nn.Module, folder: Path, optimizer: Any = None, **options: Any) -> Any:
    return transformers.Trainer(
        model=model,
        args=arguments(folder, **options),
        train_dataset=sentences(),
        eval_dataset=sentences(8),
        optimizers=(optimizer or optimizer_of(model), None),
    )


def optimizer_of(model: nn.Module, **settings: Any) -> GoMuon:
    return GoMuon(model, lr=LR, adamw={"lr": ADAMW_LR}, **settings)


def losses(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def treatments(model: nn.Module) -> dict[str, str]:
    return {r.name: f"{r.treatment}: {r.reason}" for r in optimizer_of(model).routing_table()}


def without_blocks(names: dict[str, str]) -> dict[str, str]:
    return {name.replace(".0.", ".").replace(".1.", "."): how for name, how in names.items()}


def test_gpt2_is_routed_by_what_its_layers_do() -> None:
    assert without_blocks(treatments(gpt2())) == {
        "transformer.wte.weight": "adamw: embedding, tied to lm_head.weight",
        "transformer.wpe.weight": "adamw: embedding",
        **{
            f"transformer.h.{layer}.weight": "matrix: linear layer"
            for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        },
        **{
            f"transformer.h.{layer}.bias": "adamw: bias of Conv1D"
            for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        },
        **{
            f"transformer.{norm}.{part}": f"adamw: {kind} of LayerNorm"
            for norm in ("h.ln_1", "h.ln_2", "ln_f")
            for part, kind in (("weight", "vector"), ("bias", "bias"))
        },
    }


def test_llama_is_routed_by_what_its_layers_do() -> None:
    projections = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o")
    feedforward = ("mlp.gate", "mlp.up", "mlp.down")
    norms = ("layers.input_layernorm", "layers.post_attention_layernorm", "norm")
    assert without_blocks(treatments(llama())) == {
        "model.embed_tokens.weight": "adamw: embedding",
        "lm_head.weight": "adamw: output head (declared by get_output_embeddings)",
        **{
            f"model.layers.{layer}_proj.weight": "matrix: linear layer"
            for layer in projections + feedforward
        },
        **{f"model.{norm}.weight": "adamw: vector of LlamaRMSNorm" for norm in norms},
    }


@pytest.mark.parametrize("make", MODELS)
def test_training_lowers_the_loss_with_captured_geometry(make: Any, tmp_path: Path) -> None:
    model = make()
    optimizer = optimizer_of(model)
    run = trainer(
        model, tmp_path, optimizer, max_steps=40, eval_strategy="steps", eval_steps=7
    )  # an evaluation in the midst of the refresh cycle
    run.train()
    seen = losses(run)
    assert sum(seen[-5:]) < 0.75 * sum(seen[:5]), seen
    assert_captured(model, optimizer)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("option", ["bf16", "gradient_checkpointing"])
def test_what_the_trainer_adds_leaves_the_geometry_alone(
    make: Any, option: str, tmp_path: Path
) -> None:
    model = make()
    optimizer = optimizer_of(model)
    run = trainer(model, tmp_path, optimizer, max_steps=16, **{option: True})
    run.train()
    assert sum(losses(run)[-3:]) < 0.95 * sum(losses(run)[:3])
    assert_captured(model, optimizer)


def assert_captured(model: nn.Module, optimizer: MatrixOptimizer) -> None:
    """Every matrix has maps of its outputs' and inputs' sizes, and none is the identity."""
    routes = optimizer.routing_table().treated("matrix")
    assert routes
    for route in routes:
        state = optimizer.state[route.parameter]
        m, n = route.parameter.shape
        if "c_" in route.name:  # stored inputs × outputs
            m, n = n, m
        for side, size in (("left_map", m), ("right_map", n)):
            assert state[side].shape == (1, size, size), route.name
            scaled = state[side] / state[side].diagonal(dim1=1, dim2=2).mean()
            assert not torch.allclose(scaled[0], torch.eye(size), atol=1e-2), route.name
        assert "failures" not in state


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("saved_at", [4, 6])
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(
    make: Any, saved_at: int, tmp_path: Path
) -> None:
    whole = make()
    run = trainer(whole, tmp_path, save_strategy="steps", save_steps=saved_at)
    run.train()
    resumed = make(seed=99)
    again = trainer(resumed, tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{saved_at}"))
    assert again.state.global_step == 10
    assert losses(again)[saved_at:] == pytest.approx(losses(run)[saved_at:], abs=1e-6)
    for (name, p), q in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6, msg=name)


def double_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """As Transformers' own, which is always in float32."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


# Nothing after a LayerNorm sees a mean, so in GPT-2 what is written before one has a gradient of
# deficient rank, whose polar factor is not unique: beyond one step only Llama is comparable.
@pytest.mark.parametrize(("make", "steps"), [(gpt2, 1), (llama, 6)])
def test_micro_batches_count_as_their_union_does(make: Any, steps: int, tmp_path: Path) -> None:
    """The Trainer divides by the tokens of all micro-batches, which padding makes unequal."""
    optimizers = []
    for size, accumulated in ((4, 2), (8, 1)):
        model = without_dropout(make().double())
        optimizers.append(optimizer_of(model))
        run = trainer(
            model,
            tmp_path,
            optimizers[-1],
            max_steps=steps,
            warmup_steps=0,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulated,
        )
        run.compute_loss_func = double_loss
        run.train()
    one, other = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for index, entries in one.items():
        for key, value in entries.items():
            torch.testing.assert_close(value, other[index][key], rtol=1e-8, atol=1e-10, msg=key)


def test_the_scheduler_keeps_both_rates_in_ratio(tmp_path: Path) -> None:
    model = gpt2()
    optimizer = optimizer_of(model)
    run = trainer(model, tmp_path, optimizer)
    rates: list[tuple[float, float]] = []

    class Listen(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            first, second = optimizer.param_groups
            rates.append((first["lr"], second["lr"]))

    run.add_callback(Listen())
    run.train()
    assert rates[0] == (0.0, 0.0)  # the warmup's first step
    assert max(rates) == pytest.approx((LR, ADAMW_LR))
    assert rates[-1][0] < 0.1 * LR
    for matrices, others in rates:
        assert others == pytest.approx(matrices * ADAMW_LR / LR)


def test_heads_of_a_fused_projection_are_matrices_of_their_own(tmp_path: Path) -> None:
    model = gpt2()
    specs = {"*.c_attn.weight": LayerSpec(parts=3, heads=2)}
    optimizer = GoMuon(model, lr=LR, specs=specs)
    run = trainer(model, tmp_path, optimizer, max_steps=16)
    run.train()
    assert sum(losses(run)[-3:]) < sum(losses(run)[:3])
    fused = optimizer.state[model.get_parameter("transformer.h.0.attn.c_attn.weight")]
    assert fused["left_map"].shape == (6, 8, 8)
    assert fused["right_map"].shape == (1, 16, 16)


def test_made_by_the_trainer_it_would_be_muon_and_says_so(tmp_path: Path) -> None:
    run = transformers.Trainer(
        model=gpt2(), args=arguments(tmp_path), optimizer_cls_and_kwargs=(GoMuon, {"lr": LR})
    )
    with pytest.warns(GeometryWarning, match="pass the model itself"):
        run.create_optimizer()


class GoMuonTrainer(transformers.Trainer):  # type: ignore[name-defined, misc]
    """The override of the documentation."""

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        if self.optimizer is None:
            self.optimizer: Any = optimizer_of(self.model if model is None else model)
        return self.optimizer


def test_made_by_an_override_it_trains_with_geometry(tmp_path: Path) -> None:
    model = llama()
    run = GoMuonTrainer(model=model, args=arguments(tmp_path), train_dataset=sentences())
    run.train()
    assert_captured(model, run.optimizer.optimizer)  # inside Accelerate's wrapper
