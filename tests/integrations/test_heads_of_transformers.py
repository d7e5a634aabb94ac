"""Output heads of Transformers' models: by rule, and seen in a forward pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gomuon.parameters.heads import heads_by_rule
from gomuon.parameters.traced_heads import traced_heads

WHY = "in the test extra: pip install '.[test]'"
transformers = pytest.importorskip("transformers", reason=WHY, exc_type=ModuleNotFoundError)

IDS = torch.arange(10).view(2, 5)
SMALL = {"vocab_size": 29, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
GPT2 = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
BERT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2}  # fmt: skip
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
VIT = {**BERT, "image_size": 8, "patch_size": 4, "num_labels": 3}


def made(kind: str, config: str, **sizes: Any) -> nn.Module:
    settings = getattr(transformers, config)(**SMALL, **sizes)
    model: nn.Module = getattr(transformers, kind)(settings)
    return model


def t5() -> nn.Module:
    return made("T5ForConditionalGeneration", "T5Config", tie_word_embeddings=False, **T5)


def vit() -> nn.Module:
    config = transformers.ViTConfig(**VIT)
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


Case = tuple[Callable[[], nn.Module], Any, set[str], set[str]]
CASES: dict[str, Case] = {
    "Llama": (lambda: made("LlamaForCausalLM", "LlamaConfig", **LLAMA), {"input_ids": IDS},
              {"lm_head"}, {"lm_head"}),
    "GPT-2, classes": (
        lambda: made("GPT2ForSequenceClassification", "GPT2Config", **GPT2), {"input_ids": IDS},
        {"score"}, {"score"}),
    # Its output is the residual stream.
    "GPT-2, no head": (lambda: made("GPT2Model", "GPT2Config", **GPT2), IDS, set(), set()),
    "T5": (t5, {"input_ids": IDS, "decoder_input_ids": IDS}, {"lm_head"}, {"lm_head"}),
    # The second head has no usual name; the first is tied to the embedding.
    "BERT": (lambda: made("BertForPreTraining", "BertConfig", **BERT), {"input_ids": IDS},
             {"cls.predictions.decoder"}, {"cls.predictions.decoder", "cls.seq_relationship"}),
    "ViT": (vit, {"pixel_values": torch.randn(2, 3, 8, 8)}, {"classifier"}, {"classifier"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_heads(name: str) -> None:
    make, example_input, by_rule, traced = CASES[name]
    model = make()
    for found, expected in (
        (heads_by_rule(model), by_rule),
        (traced_heads(model, example_input), traced),
    ):
        assert {key for key, module in model.named_modules() if module in found} == expected
