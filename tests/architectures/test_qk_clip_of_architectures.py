"""QK-clip on the architectures of the table: what it sees, and what it says otherwise."""

import pytest
import torch

from gomuon import QKClip
from tests.architectures.table import CASES

THRESHOLD = 1e-3
# The number of weights that make queries.
CLIPPED = {
    "Llama": 2, "Mistral": 2, "Phi-3": 2, "GPT-NeoX": 2, "OPT": 2, "GPT-2": 2, "Mixtral": 2,
    "BERT": 2, "ALBERT": 1, "DistilBERT": 2, "T5": 6, "BART": 6, "ViT": 2, "CLIP": 4, "Whisper": 6,
    "timm ViT": 2, "nn.Transformer": 6, "linear layers of one's own": 2,
    "parameters and F.linear": 2, "stacked qkv": 2,
}  # fmt: skip
REFUSED = {
    "Qwen3": "q_proj.*normalised",
    "Qwen3-MoE": "q_proj.*normalised",
    "Gemma 2": "'model.layers.0.self_attn.q_proj.weight': 'tanh' changes them",
    "DeepSeek-V3": "joined",
    "timm BEiT": "'blocks.0.attn.qkv.weight': the bias of its layer is computed",
    "WavLM": "q_proj.weight': the bias of its layer is computed",
    "timm Swin V2": "qkv.weight.*not the outputs of one linear layer",
    "LoRA": "adapters",
    "Mamba": "saw no attention",
    "GPT-OSS": "saw no attention",
}


def clipped(architecture: str) -> QKClip:
    case = CASES[architecture]
    model = case.build()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    clip = QKClip(optimizer, model, THRESHOLD)
    case.loss(model).backward()
    optimizer.step()
    return clip


@pytest.mark.parametrize("architecture", CLIPPED)
def test_attention_is_seen(architecture: str) -> None:
    found = clipped(architecture).largest_logits()
    assert len(found) == CLIPPED[architecture]
    for name, largest in found.items():
        assert bool(largest.isfinite().all()), name
        assert largest.max() > THRESHOLD


@pytest.mark.parametrize("architecture", REFUSED)
def test_other_attention_is_an_error_that_says_why(architecture: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=f"(?s)QK-clip.*{REFUSED[architecture]}"):
        clipped(architecture)
