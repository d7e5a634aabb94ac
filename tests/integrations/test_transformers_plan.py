"""What `gomuon plan` says of Transformers' experts, against real steps."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon.lab.costs.input_uses import find_input_uses
from tests.lab.costs.test_unit_costs import SYMBOL_ROWS, Case, check_every_operation_and_byte
from tests.models import SYMBOLS

WHY = "in the test extra: pip install '.[test]'"
transformers = pytest.importorskip("transformers", reason=WHY, exc_type=ModuleNotFoundError)


class Mixtral(nn.Module):
    """It returns logits alone."""

    def __init__(self, experts: str = "eager") -> None:
        super().__init__()
        transformers.set_seed(0)
        config = transformers.MixtralConfig(
            vocab_size=SYMBOLS, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, num_local_experts=3,
            num_experts_per_tok=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        config._experts_implementation = experts
        self.model = transformers.MixtralForCausalLM(config)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x).logits
        return out


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("GoMuon", {}),
        ("GoMuon", {"input_decay": 0.9, "block_size": 10, "state_dtype": "int8"}),
        ("KFAC", {}),
        ("Muon", {}),
    ],
)
def test_every_operation_and_every_byte_is_predicted(name: str, settings: dict[str, Any]) -> None:
    case = Case(lambda: Mixtral().double(), SYMBOL_ROWS)
    check_every_operation_and_byte(name, case, settings)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_all_implementations_of_experts_read_as_many_rows(experts: str) -> None:
    """On the meta device only one of them runs."""
    with torch.device("meta"):
        model = Mixtral(experts)
    uses = find_input_uses(model, torch.zeros(4, 8, dtype=torch.long, device="meta"))
    stacks = [p for name, p in model.named_parameters() if ".experts." in name]
    assert [(uses[p].rows, uses[p].calls) for p in stacks] == [(2 * 32, 3)] * 2
    replaced = [name for name, part in model.named_modules() if "forward" in vars(part)]
    assert replaced == []
