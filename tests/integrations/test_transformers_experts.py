"""Transformers' experts: most of a mixture's weights are matrices, one for each expert."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon import GoMuon
from gomuon.parameters.routing import RoutingTable

WHY = "in the test extra: pip install '.[test]'"
transformers = pytest.importorskip("transformers", reason=WHY, exc_type=ModuleNotFoundError)

SYMBOLS = 61
COMMON: dict[str, Any] = {
    "vocab_size": SYMBOLS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        "intermediate_size": 48, "moe_intermediate_size": 48, "num_experts": 4,
        "num_experts_per_tok": 2, "head_dim": 8,
    },
    "GptOss": {  # stored inputs × outputs, with biases
        "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
    },
}  # fmt: skip


def build(name: str, experts: str) -> nn.Module:
    transformers.set_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON, **MODELS[name])
    config._experts_implementation = experts
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model.train()


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, SYMBOLS, (4, 1), generator=generator) + torch.arange(12) * 3


def share_of_matrices(table: RoutingTable) -> float:
    """Of all weights that are not embeddings."""
    counted = [route for route in table if not route.reason.startswith("embedding")]
    matrices = sum(r.parameter.numel() for r in counted if r.treatment == "matrix")
    return matrices / sum(route.parameter.numel() for route in counted)


@pytest.mark.filterwarnings("error::gomuon.GeometryWarning")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_experts_are_matrices_and_captured(name: str, experts: str) -> None:
    model = build(name, experts)
    optimizer = GoMuon(model, lr=0.05, adamw={"lr": 1e-2}, refresh_every=2)
    table = optimizer.routing_table()
    stacks = [r for r in table if r.name.endswith(("gate_up_proj", "down_proj"))]
    assert all((r.treatment, r.reason) == ("matrix", "4 experts") for r in stacks)
    assert len(stacks) == 4
    assert {r.geometry for r in stacks} == {"4 of 96 × 32", "4 of 32 × 48"}
    assert share_of_matrices(table) >= 0.9
    losses = []
    for step in range(10):
        tokens = batch(step) % SYMBOLS
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for route in stacks:
        state = optimizer.state[route.parameter]
        assert state["left_factor"].shape[0] == 4
        assert {"left_map", "right_map", "left_seen_each"} <= state.keys()


def test_all_implementations_of_experts_give_the_same_factors() -> None:
    found: dict[str, list[Tensor]] = {}
    for experts in ("eager", "grouped_mm", "batched_mm"):
        model = build("Mixtral", experts)
        optimizer = GoMuon(model, lr=0.0, rows=None, refresh_every=1)
        tokens = batch(0) % SYMBOLS
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        found[experts] = [
            optimizer.state[p][key]
            for name, p in model.named_parameters()
            if "experts" in name
            for key in ("left_factor", "right_map")
        ]
    for other in ("grouped_mm", "batched_mm"):
        for one, expected in zip(found[other], found["eager"], strict=True):
            assert float((one - expected).norm() / expected.norm()) < 1e-4
