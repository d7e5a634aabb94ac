"""Settings of single parameters: patterns, functions, errors, schedules and checkpoints."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon import KFAC, GoMuon, Muon
from gomuon.optimizer import MatrixOptimizer
from tests.models import language_loss, mlp, transformer


class Deep(nn.Module):
    """Blocks of two layers and a norm, an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4), "norm": nn.LayerNorm(4)})
            for _ in range(3)
        )
        self.lm_head = nn.Linear(4, 7, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x = x + block["down"](torch.tanh(block["up"](block["norm"](x))))
        logits: Tensor = self.lm_head(x)
        return logits


def settings_of(optimizer: MatrixOptimizer, key: str) -> dict[str, Any]:
    return {name: group[key] for group in optimizer.param_groups for name in group["param_names"]}


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 7, (5, 9), generator=generator)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimizer.step()


def test_patterns_by_treatment() -> None:
    optimizer = GoMuon(
        Deep(),
        overrides={
            "blocks.0.*.bias": {"weight_decay": 0.5},
            "blocks.0.norm.*": {"betas": (0.8, 0.9), "eps": 1e-6},
            "blocks.0.*": {"lr": 0.01, "momentum": 0.5},
            "blocks.1.*": {"lr": 0.02, "adamw": {"lr": 1e-4}},
            "blocks.2.*": {"lr_factor": 0.5},
        },
    )
    rates, decays = settings_of(optimizer, "lr"), settings_of(optimizer, "weight_decay")
    adamw, momenta = settings_of(optimizer, "adamw"), settings_of(optimizer, "momentum")
    assert rates["blocks.0.up.weight"] == 0.01
    assert momenta["blocks.0.up.weight"] == 0.5
    assert momenta["blocks.1.up.weight"] == 0.8
    assert rates["blocks.0.up.bias"] == 3e-3
    assert decays["blocks.0.up.bias"] == 0.5  # the first match, and only it
    assert decays["blocks.1.up.bias"] == 0.0
    # *.bias came first, so of the norm only the weight is left.
    assert adamw["blocks.0.norm.weight"]["betas"] == (0.8, 0.9)
    assert adamw["blocks.0.norm.weight"]["eps"] == 1e-6
    assert adamw["blocks.0.norm.bias"]["betas"] == (0.9, 0.95)
    assert (rates["blocks.1.up.weight"], rates["blocks.1.up.bias"]) == (0.02, 1e-4)
    assert (rates["blocks.2.up.weight"], rates["blocks.2.up.bias"]) == (0.04, 1.5e-3)
    assert (rates["tokens.weight"], rates["lm_head.weight"]) == (3e-3, 3e-3)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(Deep().parameters()))


def test_layer_wise_decay_of_rates() -> None:
    """The three lines of docs/routing.md."""

    def by_depth(name: str, module: nn.Module, parameter: nn.Parameter) -> Any:
        depth = int(name.split(".")[1]) if name.startswith("blocks.") else 0
        return {"lr_factor": 0.8 ** (2 - depth)}

    rates = settings_of(GoMuon(Deep(), overrides=by_depth), "lr")
    for depth in range(3):
        assert rates[f"blocks.{depth}.up.weight"] == pytest.approx(0.08 * 0.8 ** (2 - depth))
        assert rates[f"blocks.{depth}.norm.bias"] == pytest.approx(3e-3 * 0.8 ** (2 - depth))
    # Parameters with equal settings are one group.
    assert len(GoMuon(Deep(), overrides=by_depth).param_groups) == 6
    one_rate = settings_of(GoMuon(Deep(), lr=1e-3, lr_scale="adamw", overrides=by_depth), "lr")
    assert one_rate["blocks.1.down.weight"] == one_rate["blocks.1.norm.bias"] == 1e-3 * 0.8


def test_a_function_may_leave_parameters_alone() -> None:
    seen: list[tuple[str, str]] = []

    def only_heads(name: str, module: nn.Module, parameter: nn.Parameter) -> Any:
        seen.append((name, type(module).__name__))
        return {"lr": 1e-4} if isinstance(module, nn.Linear) and name == "lm_head.weight" else None

    rates = settings_of(GoMuon(Deep(), overrides=only_heads), "lr")
    assert rates.pop("lm_head.weight") == 1e-4
    assert set(rates.values()) == {0.08, 3e-3}
    assert ("blocks.0.norm.bias", "LayerNorm") in seen


def test_an_override_moves_what_it_says() -> None:
    """A rate of zero keeps these weights; all others move as without it."""
    plain, model = Deep(), Deep()
    learn(plain, GoMuon(plain), 0)
    learn(model, GoMuon(model, overrides={"blocks.1.*": {"lr": 0.0}}), 0)
    start = Deep()
    for name, parameter in model.named_parameters():
        same = start if name.startswith("blocks.1.") else plain
        assert torch.allclose(parameter, same.get_parameter(name), atol=1e-6), name


def test_all_are_captured() -> None:
    optimizer = GoMuon(Deep(), overrides={"blocks.0.*.weight": {"lr": 0.01}})
    geometry = {row.name: row.geometry for row in optimizer.routing_table()}
    assert geometry["blocks.0.up.weight"] == geometry["blocks.1.up.weight"] == "6 × 4"


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"blcks.0.*": {"lr": 0.1}}, ValueError, "'blcks.0.*', which matches no parameter"),
        ({"blocks.*": {"lr": 0.1}, "blocks.0.*": {"lr": 0.2}}, ValueError,
         "an earlier pattern matches all"),
        ({"*.bias": {"momentum": 0.5}}, ValueError,
         r"sets momentum, which 'blocks.0.up.bias' cannot follow: it is updated by AdamW"),
        ({"*.up.weight": {"betas": (0.9, 0.9)}}, ValueError,
         r"sets betas, which 'blocks.0.up.weight' cannot follow: it is a matrix"),
        ({"*.up.weight": {"adamw": {"lr": 0.1}}}, ValueError, "only settings of AdamW"),
        ({"*.up.weight": {"lr": -1.0}}, ValueError,
         r"overrides\['\*.up.weight'\]: lr must be a finite number >= 0, got -1.0"),
        ({"*.bias": {"eps": -1.0}}, ValueError, "eps must be a finite number >= 0"),
        ({"*.bias": {"adamw": {"epsilon": 1.0}}}, ValueError, "no 'epsilon'"),
        ({"*.bias": {"lr_factor": -1}}, ValueError, "lr_factor must be a finite number >= 0"),
        ({"*.bias": {"lr_factor": 2, "lr": 1.0}}, ValueError, "give one of them"),
        ({"*.bias": {"treatment": "matrix"}}, ValueError, "sets treatment, which"),
        ({"*.bias": 0.1}, TypeError, "must be a dict of settings, got 0.1"),
        (lambda name, module, parameter: 0.1, TypeError, "must be a dict of settings"),
        ("*.bias", TypeError, "must be a dict, a function or None"),
        ({3: {"lr": 0.1}}, TypeError, "must have names as keys"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(overrides: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        GoMuon(Deep(), overrides=overrides)


def test_what_is_not_trained_cannot_be_overridden() -> None:
    with pytest.raises(ValueError, match=r"'tokens.weight', which is not trained"):
        GoMuon(Deep(), routes={"tokens.*": "frozen"}, overrides={"tokens.*": {"lr": 0.1}})


def test_an_empty_override_leaves_its_parameters_as_they_are() -> None:
    optimizer = GoMuon(
        Deep(),
        routes={"tokens.*": "frozen"},
        overrides={"*.bias": {}, "*norm*": {}, "tokens.*": {}, "blocks.*": {"momentum": 0.5}},
    )
    momenta = settings_of(optimizer, "momentum")
    assert momenta["blocks.0.up.weight"] == 0.5
    assert momenta["blocks.0.up.bias"] == 0.8
    assert len(optimizer.param_groups) == 2  # no matrix is without an override


def test_it_needs_the_model() -> None:
    with pytest.raises(ValueError, match="need the model"):
        GoMuon(Deep().parameters(), overrides={"*": {"lr": 0.1}})


def test_a_bias_that_joins_its_weight_has_its_settings() -> None:
    with pytest.raises(ValueError, match="the bias joins its weight"):
        KFAC(Deep(), overrides={"blocks.0.up.weight": {"lr": 0.1}})
    optimizer = KFAC(Deep(), overrides={"blocks.0.up.*": {"lr": 0.01}})
    rates = settings_of(optimizer, "lr")
    assert rates["blocks.0.up.weight"] == rates["blocks.0.up.bias"] == 0.01
    model = Deep()
    learn(model, KFAC(model, overrides={"blocks.0.up.*": {"lr": 0.01}}), 0)


def test_schedules_and_checkpoints() -> None:
    """A scheduler multiplies each rate; a resumed run is the run."""

    def run(steps: range, saved: Any = None, model: Any = None) -> tuple[Any, Any]:
        model = model or Deep()
        optimizer = GoMuon(model, overrides={"blocks.0.*": {"lr_factor": 0.5}})
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        if saved is not None:
            optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
        for step in steps:
            learn(model, optimizer, step)
            scheduler.step()
        both = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        return model, both

    whole, state = run(range(6))
    rates = {
        name: group["lr"]
        for group in state["optimizer"]["param_groups"]
        for name in group["param_names"]
    }
    assert rates["blocks.0.up.weight"] == pytest.approx(0.04 * 0.9**6)
    assert rates["blocks.1.up.weight"] == pytest.approx(0.08 * 0.9**6)
    half, state = run(range(3))
    resumed, _ = run(range(3, 6), state, half)
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
    with pytest.raises(ValueError, match="make it with the groups and overrides of the one that"):
        GoMuon(Deep()).load_state_dict(state["optimizer"])


def test_added_groups_come_after() -> None:
    optimizer = Muon(mlp(3, 4, 4, 2), overrides={"0.*": {"lr_factor": 0.5}})
    count = len(optimizer.param_groups)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 3))], "lr": 0.5})
    assert [group["lr"] for group in optimizer.param_groups[count:]] == [0.5]
    assert optimizer.param_groups[0]["lr"] == 0.02


def test_equal_settings_change_nothing() -> None:
    """Other groups, but the same steps: to rounding, because other layers are stacked."""
    models = [transformer(), transformer()]
    plain = GoMuon(models[0])
    divided = GoMuon(models[1], overrides={"trunk.blocks.1.*": {"lr_factor": 1.0}})
    assert len(divided.param_groups) == 4
    for step in range(6):
        for model, optimizer in zip(models, (plain, divided), strict=True):
            optimizer.zero_grad()
            language_loss(model, step).backward()
            optimizer.step()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-10)
