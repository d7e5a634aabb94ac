"""QK-clip on Transformers' models, against logits recorded by an attention function of theirs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon import GoMuon, QKClip
from gomuon.functional.attention_logits import MASKED

WHY = "in the test extra: pip install '.[test]'"
transformers = pytest.importorskip("transformers", reason=WHY, exc_type=ModuleNotFoundError)

SMALL = {"vocab_size": 29, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
WIDE = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4}  # fmt: skip
GROUPED = {**WIDE, "num_key_value_heads": 2}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "llama with biases": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "attention_bias": True}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 2}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2}),
    "bert": ("BertForMaskedLM", "BertConfig", WIDE),
    "t5": ("T5ForConditionalGeneration", "T5Config",
           {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
            "decoder_start_token_id": 0}),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", WIDE),
    "phi": ("PhiForCausalLM", "PhiConfig", WIDE),
    "vit": ("ViTForImageClassification", "ViTConfig",
            {**WIDE, "image_size": 8, "patch_size": 4, "num_labels": 3}),
}  # fmt: skip


def made(name: str, attention: str) -> nn.Module:
    transformers.set_seed(0)
    kind, config, sizes = KINDS[name]
    texts = {} if name == "vit" else SMALL
    settings = getattr(transformers, config)(
        **texts, **sizes, attn_implementation=attention, attention_dropout=0.0
    )
    model: nn.Module = getattr(transformers, kind)(settings).eval()
    for parameter_name, parameter in model.named_parameters():  # logits of different sizes
        if parameter_name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
        elif parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.3)
    return model


def inputs(name: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        pixels = torch.randn(3, 3, 8, 8, generator=generator)
        return {"pixel_values": pixels, "labels": torch.arange(3)}
    ids = torch.randint(1, 29, (3, 7), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0  # padded
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


@contextmanager
def recording(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """[heads] largest logits by the name of the attention module, from an attention function."""
    names = {module: name for name, module in model.named_modules()}
    largest: dict[str, Tensor] = {}

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
        scaling = options.get("scaling")
        logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        added = torch.zeros(()) if mask is None else mask[..., : key.shape[-2]]
        bias = options.get("position_bias")
        seen = torch.where(added > MASKED, logits, -torch.inf)
        largest[names[module]] = seen.detach().amax((0, 2, 3))
        weights = (logits + added + (0.0 if bias is None else bias)).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), None

    from transformers.masking_utils import eager_mask

    transformers.AttentionInterface.register("recording", record)
    transformers.AttentionMaskInterface.register("recording", eager_mask)
    config: Any = model.config
    before = config._attn_implementation
    model.set_attn_implementation("recording")  # type: ignore[operator]
    try:
        yield largest
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]


def recorded(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    with torch.no_grad(), recording(model) as largest:
        model(**batch)
    return largest


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", KINDS)
def test_the_logits_of_every_head_are_clipped(name: str, attention: str) -> None:
    model, batch = made(name, attention), inputs(name)
    wanted = recorded(model, batch)
    first = next(iter(wanted))
    threshold = float(wanted[first].sort().values[:2].mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clip = QKClip(optimizer, model, threshold)
    for _ in range(2):  # the second pass knows the weights
        optimizer.zero_grad()
        model(**batch).loss.backward()
        found = clip._watch.known.values()
        before = {clip._names[one.query[0].weight.parameter]: one.maxima for one in found}
    optimizer.step()
    assert len(before) == len(wanted)
    for module, largest in wanted.items():
        (weight,) = (name for name in before if name.startswith(f"{module}."))
        torch.testing.assert_close(before[weight], largest, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(clip.largest_logits()[weight], before[weight])
    # Inputs of the first attention do not depend on any attention.
    after = recorded(model, batch)[first]
    torch.testing.assert_close(after, wanted[first].clamp(max=threshold), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_half_precision_is_clipped_up_to_its_rounding(name: str, attention: str, how: str) -> None:
    model, batch = made(name, attention), inputs(name)
    model = model.bfloat16() if how == "bfloat16" else model
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast")
    with autocast:
        first, S = next(iter(recorded(model, batch).items()))
    threshold = float(S.float().median())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    QKClip(optimizer, model, threshold)
    with autocast:
        model(**batch).loss.backward()
    optimizer.step()
    with autocast:
        after = recorded(model, batch)[first]
    wanted = S.float().clamp(max=threshold)
    torch.testing.assert_close(after.float(), wanted, rtol=2e-2, atol=1e-3)
    assert bool((after < S).any())


@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_normalised_queries_are_told_from_rounding(how: str) -> None:
    transformers.set_seed(0)
    config = transformers.Qwen3Config(**SMALL, **GROUPED, head_dim=8)
    model = transformers.Qwen3ForCausalLM(config)
    model = model.bfloat16() if how == "bfloat16" else model
    QKClip(GoMuon(model), model)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast")
    with autocast, pytest.raises(ValueError, match="normalised"):
        model(**inputs("qwen3"))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_normalised_queries_and_keys_are_an_error_that_says_why(attention: str) -> None:
    transformers.set_seed(0)
    config = transformers.Qwen3Config(**SMALL, **GROUPED, head_dim=8, attn_implementation=attention)
    model = transformers.Qwen3ForCausalLM(config)
    QKClip(GoMuon(model), model)
    with pytest.raises(ValueError, match=r"(?s)self_attn.q_proj.*normalised.*Qwen3"):
        model(**inputs("qwen3"))


def test_attention_of_several_joined_projections_is_an_error() -> None:
    transformers.set_seed(0)
    config = transformers.DeepseekV3Config(
        **SMALL, **WIDE, num_key_value_heads=4, moe_intermediate_size=8, n_routed_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
        kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config)
    QKClip(GoMuon(model), model)
    with pytest.raises(ValueError, match=r"(?s)self_attn.*joined \(as in DeepSeek's attention\)"):
        model(**inputs("deepseek"))


def test_adapters_beside_frozen_projections_are_an_error_once_they_add_something() -> None:
    peft = pytest.importorskip("peft", reason=WHY, exc_type=ModuleNotFoundError)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(made("llama", "sdpa"), lora)
    optimizer = GoMuon(model, lr=0.1)
    QKClip(optimizer, model)
    model(**inputs("llama")).loss.backward()
    with pytest.warns(UserWarning, match=r"saw no attention of 'base_model.*layers\.0"):
        optimizer.step()
    with pytest.raises(ValueError, match="adapters"):
        model(**inputs("llama"))


def test_flash_attention_is_not_seen_and_that_is_an_error() -> None:
    model, batch = made("llama", "sdpa"), inputs("llama")
    optimizer = GoMuon(model)
    QKClip(optimizer, model)
    hidden = torch.library.custom_op("gomuon_tests::attention", _fused, mutates_args=())
    hidden.register_autograd(lambda ctx, g: (g, g, g))

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return hidden(query, value, value).transpose(1, 2), None

    transformers.AttentionInterface.register("hidden", attend)
    model.set_attn_implementation("hidden")  # type: ignore[operator]
    model(**batch).loss.backward()
    with pytest.raises(RuntimeError, match=r'(?s)saw no attention.*attn_implementation="sdpa"'):
        optimizer.step()


def _fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query + key + value
