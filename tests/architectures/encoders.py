"""Transformers' encoders, and pairs of encoder and decoder: text, images, sound."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.architectures.case import fixed, images, like
from tests.architectures.decoders import ENDS, IDS, SIZES, SYMBOLS, made

LABELS = torch.tensor([0, 1, 2, 1])
T5_SIZES: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
PAIR_SIZES: dict[str, Any] = {
    "vocab_size": SYMBOLS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "decoder_start_token_id": 1, **ENDS,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4
}  # fmt: skip
PICTURE: dict[str, Any] = {"image_size": 16, "patch_size": 4}


def every_token(model: Any) -> Tensor:
    """The loss of a masked language model on all tokens, or of a pair that copies its input."""
    loss: Tensor = model(input_ids=IDS, labels=IDS).loss
    return loss


def bert() -> nn.Module:
    return made("BertForMaskedLM", "BertConfig", **SIZES)


def bert_classifier() -> nn.Module:
    return made("BertForSequenceClassification", "BertConfig", num_labels=3, **SIZES)


def sentence_class(model: Any) -> Tensor:
    loss: Tensor = model(input_ids=IDS, labels=LABELS).loss
    return loss


def albert() -> nn.Module:
    """All layers have the same weights; embeddings are narrower than layers."""
    return made("AlbertForMaskedLM", "AlbertConfig", embedding_size=16, **SIZES)


def distilbert() -> nn.Module:
    sizes: dict[str, Any] = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
    common: dict[str, Any] = {
        "vocab_size": SYMBOLS,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
    }
    return made("DistilBertForMaskedLM", "DistilBertConfig", **sizes, **common)


def t5() -> nn.Module:
    common: dict[str, Any] = {"vocab_size": SYMBOLS, "decoder_start_token_id": 1, **ENDS}
    return made("T5ForConditionalGeneration", "T5Config", **T5_SIZES, **common)


def bart() -> nn.Module:
    sizes = {**PAIR_SIZES, "max_position_embeddings": 32}
    return made("BartForConditionalGeneration", "BartConfig", **sizes)


def vit() -> nn.Module:
    return made("ViTForImageClassification", "ViTConfig", num_labels=3, **TOWER, **PICTURE)


def picture_class(model: Any) -> Tensor:
    loss: Tensor = model(pixel_values=like(model, images()), labels=LABELS).loss
    return loss


def clip() -> nn.Module:
    text = {**SIZES, "eos_token_id": 2}
    vision = {**TOWER, **PICTURE}
    return made("CLIPModel", "CLIPConfig", text_config=text, vision_config=vision,
                projection_dim=24)  # fmt: skip


def pairs(model: Any) -> Tensor:
    found = model(input_ids=IDS, pixel_values=like(model, images()), return_loss=True)
    loss: Tensor = found.loss
    return loss


def whisper() -> nn.Module:
    sizes = {**PAIR_SIZES, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}
    return made("WhisperForConditionalGeneration", "WhisperConfig", **sizes)


def transcript(model: Any) -> Tensor:
    loss: Tensor = model(input_features=like(model, fixed(4, 8, 16)), labels=IDS).loss
    return loss


def wavlm() -> nn.Module:
    """Its attention gives its weights to a function of torch."""
    sizes: dict[str, Any] = {
        **TOWER, "conv_dim": (16, 16), "conv_kernel": (5, 3), "conv_stride": (4, 2),
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2, "num_labels": 3, "classifier_proj_size": 16,
        "num_buckets": 8, "max_bucket_distance": 16, "apply_spec_augment": False, "layerdrop": 0.0,
    }  # fmt: skip
    return made("WavLMForSequenceClassification", "WavLMConfig", **sizes)


def sound_class(model: Any) -> Tensor:
    loss: Tensor = model(input_values=like(model, fixed(4, 160)), labels=LABELS).loss
    return loss
