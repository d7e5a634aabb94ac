"""Transformers' language models: decoders, mixtures of experts, and a state space model."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.architectures.case import Use, Uses, layer_of, package

SYMBOLS = 61
STRIDES = torch.tensor([[1], [2], [3], [5]])
IDS = (torch.arange(4)[:, None] * 7 + torch.arange(12) * STRIDES) % SYMBOLS
ENDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SIZES: dict[str, Any] = {
    "vocab_size": SYMBOLS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32, **ENDS,
}  # fmt: skip
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}


def made(name: str, config: str, experts: str | None = None, **settings: Any) -> nn.Module:
    """A model of Transformers with random weights."""
    transformers = package("transformers")
    configuration = getattr(transformers, config)(**settings)
    if experts is not None:
        configuration._experts_implementation = experts
    model: nn.Module = getattr(transformers, name)(configuration)
    return model


def next_token(model: Any) -> Tensor:
    """The loss of a language model, which shifts the labels by itself."""
    loss: Tensor = model(input_ids=IDS, labels=IDS).loss
    return loss


def llama() -> nn.Module:
    return made("LlamaForCausalLM", "LlamaConfig", **GROUPED)


def mistral() -> nn.Module:
    return made("MistralForCausalLM", "MistralConfig", sliding_window=8, **GROUPED)


def gemma2() -> nn.Module:
    return made("Gemma2ForCausalLM", "Gemma2Config", head_dim=8, sliding_window=8, **GROUPED)


def qwen3() -> nn.Module:
    return made("Qwen3ForCausalLM", "Qwen3Config", head_dim=8, **GROUPED)


def phi3() -> nn.Module:
    return made("Phi3ForCausalLM", "Phi3Config", **GROUPED)


def gpt_neox() -> nn.Module:
    return made("GPTNeoXForCausalLM", "GPTNeoXConfig", **SIZES)


def opt() -> nn.Module:
    """With projections between embeddings and blocks, as the one of 350M parameters."""
    sizes = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
    return made("OPTForCausalLM", "OPTConfig", ffn_dim=48, word_embed_proj_dim=16, **sizes)


def gpt2() -> nn.Module:
    sizes: dict[str, Any] = {
        "vocab_size": SYMBOLS,
        "n_positions": 32,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
    }
    return made("GPT2LMHeadModel", "GPT2Config", **sizes, **ENDS)


def mixtral() -> nn.Module:
    return made("MixtralForCausalLM", "MixtralConfig", "eager", **EXPERTS)


def qwen3_moe() -> nn.Module:
    sizes: dict[str, Any] = {
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    }
    return made("Qwen3MoeForCausalLM", "Qwen3MoeConfig", "batched_mm", **GROUPED, **sizes)


def gpt_oss() -> nn.Module:
    sizes = {**EXPERTS, "max_position_embeddings": 131072}  # its positions are scaled to these
    return made("GptOssForCausalLM", "GptOssConfig", "grouped_mm", head_dim=8, **sizes)


def deepseek_v3() -> nn.Module:
    """Low-rank projections of the attention; the first layer is dense, the other one sparse."""
    sizes: dict[str, Any] = {
        **SIZES, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
        "moe_intermediate_size": 24, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    }  # fmt: skip
    return made("DeepseekV3ForCausalLM", "DeepseekV3Config", "eager", **sizes)


def mamba() -> nn.Module:
    sizes: dict[str, Any] = {
        "vocab_size": SYMBOLS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4,
        "time_step_rank": 4, **ENDS,
    }  # fmt: skip
    return made("MambaForCausalLM", "MambaConfig", **sizes)


# ---- the same by linear layers -------------------------------------------------------------------


class LoopOfLinears(nn.Module):
    """A mixture's experts, each of two linear layers, called one after another."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.gate = experts._apply_gate
        self.up, self.down = (
            nn.ModuleList(linears(experts, name)) for name in ("gate_up_proj", "down_proj")
        )

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden)
        for e, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            tokens, place = torch.where(chosen == e)
            if len(tokens):
                out = down(self.gate(up(hidden[tokens]))) * weights[tokens, place, None]
                total = total.index_add(0, tokens, out)
        return total


def linears(experts: Any, name: str) -> list[nn.Linear]:
    """The matrices of a stack as linear layers."""
    stack, biases = getattr(experts, name), getattr(experts, f"{name}_bias", None)
    weights = stack.mT if getattr(experts, "is_transposed", False) else stack
    return [layer_of(w, None if biases is None else biases[e]) for e, w in enumerate(weights)]


def experts_as_layers(model: nn.Module) -> Uses:
    """Give every mixture a linear layer for each expert."""
    uses: Uses = {}
    for prefix, block in list(model.named_modules()):
        experts = getattr(block, "experts", None)
        if isinstance(experts, nn.Module):
            loop = LoopOfLinears(experts)
            for name, layers in (("gate_up_proj", loop.up), ("down_proj", loop.down)):
                own = [Use(layer, matrix=e) for e, layer in enumerate(layers)]
                uses[f"{prefix}.experts.{name}"] = own
            block.experts = loop
    return uses


class CallsLayer:
    """Stands for a weight W: W @ x calls the layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __matmul__(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.mT).mT
        return y


def mamba_as_layers(model: nn.Module) -> Uses:
    """Mamba multiplies with the weight of `dt_proj` and adds its bias elsewhere."""
    uses: Uses = {}
    for prefix, mixer in list(model.named_modules()):
        projection = getattr(mixer, "dt_proj", None)
        if isinstance(projection, nn.Linear):
            layer = layer_of(projection.weight)
            stand_in = nn.Module()
            stand_in.__dict__["weight"] = CallsLayer(layer)
            stand_in.bias = projection.bias
            mixer.dt_proj = stand_in
            uses[f"{prefix}.dt_proj.weight"] = [Use(layer)]
    return uses
