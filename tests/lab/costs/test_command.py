"""`gomuon plan`: the published models, numbers that add up, clear errors."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.cells import cell_len
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import gomuon
from gomuon.lab import cli
from gomuon.lab.costs import planned_model, scaling_page
from gomuon.lab.costs.cost_tables import human
from gomuon.lab.costs.estimate import RankLayout, estimate_cost
from gomuon.lab.costs.published_models import CONFIGURATIONS
from gomuon.lab.costs.traffic import Mesh, status_bytes
from gomuon.lab.experiments import optimizers
from tests.counting import counted, kept_bytes
from tests.lab.helpers.commands import refused

DOCS = Path(__file__).parents[3] / "docs" / "scaling.md"
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-8b": 8_030_261_248,
    "llama-70b": 68_976_648_192,
}


class Custom(nn.Module):
    """A user's model: two layers read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 6), nn.Linear(8, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.left(x) * self.right(x))
        return out


class Normalised(nn.Module):
    """Its batch norms see one value of each channel, if there is one example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)
        self.of_maps, self.of_rows = nn.BatchNorm2d(8), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.of_maps(self.conv(x).mean((-2, -1), keepdim=True)).flatten(1)
        out: Tensor = self.head(self.of_rows(self.fc(h)))
        return out


def planned(arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main(["plan", *arguments.split(), "--json"]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_configurations_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = CONFIGURATIONS[name].build()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_forward_and_backward_are_what_a_real_pass_multiplies() -> None:
    about = planned_model.published_model("character", tokens=256, dtype="float32")
    model = CONFIGURATIONS["character"].build()
    tokens = torch.zeros(2, 128, dtype=torch.long)
    # The CPU's fused attention has no formula in torch's counter.
    with sdpa_kernel(SDPBackend.MATH):
        real, _ = counted(lambda: model(tokens).sum().backward())
    assert real == about.model_flops


@pytest.mark.parametrize(
    "name", ["go-muon", "go-muon-input", "muon", "muon-qk", "shampoo", "soap", "kfac", "adamw"]
)
def test_one_rank_holds_what_the_real_optimizer_holds(name: str) -> None:
    about = planned_model.published_model("character", tokens=None, dtype="float32")
    predicted = estimate_cost(name, about, RankLayout(Mesh()), {"polar": "svd"})
    model = CONFIGURATIONS["character"].build()
    optimizer = optimizers.build(name, model, 1e-3, 1e-3, {})
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randint(0, 65, (2, 16))).logsumexp(-1).mean().backward()
        optimizer.step()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert predicted.state.largest == kept_bytes(optimizer)


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_narrow_state_is_what_the_real_optimizer_holds(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"character --optimizers go-muon --state-dtype {form}"
    (figures,) = planned(arguments, capsys)["methods"]
    model = CONFIGURATIONS["character"].build()
    optimizer = optimizers.build("go-muon", model, 1e-3, 1e-3, {"state_dtype": form})
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randint(0, 65, (2, 16))).logsumexp(-1).mean().backward()
        optimizer.step()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert figures["state"]["largest"] == kept_bytes(optimizer)
    assert not figures["offloaded"]["largest"]


def test_offloaded_state_has_a_row_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    held = []
    for offload in ("", "--offload factors", "--offload maps"):
        arguments = f"character --optimizers go-muon,muon {offload}"
        method, plain = planned(arguments, capsys)["methods"]
        held.append((method["state"]["largest"], method["offloaded"]["largest"]))
        assert plain["offloaded"]["largest"] == 0
        assert cli.main(["plan", *arguments.split()]) == 0
        assert ("state on the host" in capsys.readouterr().out) == bool(offload)
    assert len({sum(both) for both in held}) == 1
    assert held[0][1] == 0 < held[1][1] < held[2][1]


@pytest.mark.parametrize("flag", ["--state-dtype", "--offload"])
def test_unknown_forms_of_state_are_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "'float8'" in refused(["plan", "character", flag, "float8"], capsys)


def test_a_method_that_states_no_costs_says_what_to_add(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = dataclasses.replace(gomuon.SOAP.recipe, work=None)
    monkeypatch.setattr(gomuon.SOAP, "recipe", silent)
    message = refused(["plan", "character", "--optimizers", "soap"], capsys)
    assert "SOAP does not state its costs" in message
    assert "add work=StepWork(...) to its recipe" in message


def test_kfacs_first_step_is_dearer_if_bases_are_found_by_products() -> None:
    about = planned_model.published_model("character", tokens=None, dtype="float32")
    costs = {
        roots: estimate_cost("kfac", about, RankLayout(Mesh()), {"roots": roots})
        for roots in ("eigh", "products")
    }
    assert costs["eigh"].first is None
    first, refresh = costs["products"].first, costs["products"].refresh
    assert first is not None
    assert refresh is not None
    assert first.largest > refresh.largest


def test_only_soap_has_a_first_step_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    first = planned("character --optimizers soap,go-muon", capsys)["methods"]
    assert first[0]["first"]["largest"] > first[0]["reuse"]["largest"]
    assert first[1]["first"] is None
    for names, shown in (("soap,muon", True), ("muon", False)):
        assert cli.main(["plan", "character", "--optimizers", names]) == 0
        assert ("work, first step" in capsys.readouterr().out) == shown


def test_sharding_spreads_state_and_work_and_keeps_their_sums(
    capsys: pytest.CaptureFixture[str],
) -> None:
    alone = planned("character --tokens 512", capsys)
    for mesh in ("--ranks 4", "--ranks 4 --shards 4", "--ranks 4 --shards 2"):
        together = planned(f"character --tokens 512 {mesh}", capsys)
        for one, many in zip(alone["methods"], together["methods"], strict=True):
            matrices = one["state"]["mean"] - many["state"]["mean"]
            assert matrices > 0.6 * one["state"]["mean"]  # of which three quarters went elsewhere
            assert many["moments"] == one["moments"]
            assert one["held"] == one["moments"]
            assert 1 <= many["imbalance"] <= 4
            assert {owner for _, owner in many["owned"]} == {0, 1, 2, 3}
            assert len(many["owned"]) == len(one["owned"])


def test_where_ranks_share_the_work_layers_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    def go_muon(arguments: str) -> dict[str, Any]:
        found = planned(f"character --tokens 512 --optimizers go-muon {arguments}", capsys)
        method: dict[str, Any] = found["methods"][0]
        return method

    alone, turns = go_muon(""), go_muon("--ranks 4")
    together = go_muon("--ranks 4 --stagger off")
    assert [x["staggered"] for x in (alone, turns, together)] == [False, True, False]
    assert not go_muon("--ranks 4 --replicate")["staggered"]
    assert go_muon("--stagger on")["staggered"]
    assert turns["amortised"] == together["amortised"]
    assert turns["owned"] == together["owned"]
    assert turns["reuse"] is None  # some layers refresh at every step
    for method in (turns, together):
        assert len(method["cycle"]) == 4
        work = sum(step["work"]["mean"] for step in method["cycle"])
        assert work == pytest.approx(4 * method["amortised"]["mean"])
        sent = [step["sent"]["largest"] for step in method["cycle"]]
        assert method["sent_refresh"]["largest"] == max(sent)
        assert method["held"] == max(step["held"] for step in method["cycle"])
        assert [step["refreshes"] for step in method["cycle"]][1:] == [method is turns] * 3
    for key in ("refresh", "sent_refresh"):
        assert turns[key]["largest"] < together[key]["largest"]
    assert turns["held"] < together["held"]
    for arguments, shown in (("--ranks 4", True), ("--ranks 4 --stagger off", False)):
        assert cli.main(["plan", "character", *arguments.split()]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert ("4, in turns" in text) == ("the busiest of the K" in text) == shown


def test_replicated_work_is_every_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    alone = planned("character --tokens 512", capsys)
    together = planned("character --tokens 512 --ranks 4 --replicate", capsys)
    for one, many in zip(alone["methods"], together["methods"], strict=True):
        for key in ("state", "reuse", "refresh", "amortised"):
            assert many[key] == one[key]
        assert many["held"] == many["moments"] == one["moments"]
        assert many["owned"] == []
    assert together["methods"][1]["sent_reuse"]["largest"] == status_bytes(4)  # Muon


def test_only_the_moments_depend_on_the_tokens_and_k_spreads_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def go_muon(arguments: str) -> dict[str, Any]:
        method: dict[str, Any] = planned(f"character {arguments}", capsys)["methods"][0]
        return method

    base, double = go_muon("--tokens 1024"), go_muon("--tokens 2048")
    assert base["reuse"] == double["reuse"]
    moments = double["refresh"]["largest"] - base["refresh"]["largest"]
    strided = go_muon("--tokens 2048 --token-stride 2")
    assert strided["refresh"] == base["refresh"]
    assert go_muon("--tokens 2048 --rows 1024")["refresh"] == base["refresh"]
    assert go_muon("--tokens 1024 --rows 2048")["refresh"] == base["refresh"]
    rare = go_muon("--tokens 1024 --refresh-every 16")
    renewal = base["refresh"]["largest"] - base["reuse"]["largest"]
    assert rare["refresh_every"] == 16
    assert renewal > moments > 0
    for method in (base, rare):
        expected = method["reuse"]["largest"] + renewal / method["refresh_every"]
        assert method["amortised"]["largest"] == pytest.approx(expected)


def test_a_models_own_function_with_and_without_an_input(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = "--model tests.lab.costs.test_command:Custom --optimizers go-muon --tokens 12"
    alone = planned(own, capsys)
    assert (alone["shares"], len(alone["methods"][0]["owned"])) == (False, 2)
    assert alone["model_flops"] == 6 * alone["parameters"] * 12
    seen = planned(f"{own} --input 3,8", capsys)
    assert (seen["shares"], len(seen["methods"][0]["owned"])) == (True, 1)
    assert seen["model_flops"] == 3 * 2 * 12 * (8 * 6 * 2 + 6 * 2)
    assert seen["methods"][0]["moments"] == 4 * (8 * 8 + 6 * 6 * 2)
    assert {row["treatment"]: row["parameters"] for row in seen["treated"]}["matrix"] == 96


def test_a_model_with_batch_norms_is_planned_for_one_example(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = "--model tests.lab.costs.test_command:Normalised --optimizers go-muon --tokens 12"
    one = planned(f"{own} --input 1,3,8,8", capsys)
    several = planned(f"{own} --input 4,3,8,8", capsys)
    assert one["model_flops"] == several["model_flops"] > 0


@pytest.mark.parametrize("columns", [80, 140])
def test_the_tables_stay_on_the_screen(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["plan", "character", "--ranks", "2"]) == 0
    text = capsys.readouterr().out
    assert max(cell_len(line) for line in text.splitlines()) <= columns
    for words in (
        "linear layer",
        "Go-MUON",
        "Shampoo",
        "sent, refresh step",
        "4 more; show them",
    ):
        assert words in text
    assert cli.main(["plan", "character", "--ranks", "2", "--owners"]) == 0
    assert "trunk.blocks.2.mlp.down.weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "give one model: a name such as gpt2-124m"),
        ("llama7b", "unknown model 'llama7b'; did you mean 'llama-7b'?"),
        ("character --model a:b", "give one model"),
        ("character --ranks 0", "--ranks must be at least 1, not 0"),
        ("character --ranks 6 --shards 4", "--ranks (6) must be a multiple of --shards (4)"),
        ("character --ranks 4 --shards 2 --replicate", "--replicate needs --shards 1, not 2"),
        ("character --tokens -1", "--tokens must be at least 1, not -1"),
        ("character --dtype float31", "unknown dtype 'float31'; did you mean 'float32'?"),
        ("character --stagger of", "unknown value of --stagger 'of'; did you mean 'off'?"),
        ("character --polar sdv", "unknown polar method 'sdv'; did you mean 'svd'?"),
        ("character --optimizers go-muo", "did you mean 'go-muon'?"),
        ("character --optimizers ,", "has no names"),
        ("character --input 1,2", "--input '1,2' needs --model"),
        ("--model nowhere", "write package.module:function"),
        ("--model nowhere:made", "cannot be imported"),
        ("--model gomuon.lab.experiments.models:NORM", "cannot be imported"),
        ("--model gomuon.lab.experiments.models:Block", "cannot be built on the meta device"),
        ("--model builtins:dict", "returned a dict; expected a torch.nn.Module"),
        (
            "--model torch.nn:ReLU",
            "returned a ReLU without parameters; give another",
        ),
        ("--model torch.nn:ReLU --input 3,8", "returned a ReLU without parameters"),
        (
            "--model tests.lab.costs.test_command:Custom --input 3,x",
            "--input '3,x' is not understood",
        ),
        ("--model tests.lab.costs.test_command:Custom --input 3,9", "fails on an input of"),
        ("--markdown nowhere.md", "nowhere.md cannot be read"),
    ],
)
def test_bad_input_is_one_line(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(["plan", *arguments.split()], capsys)


def test_the_committed_page_has_the_figures_of_today() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert scaling_page.renewed(text) == text, "run: make pages"
    assert re.findall(r"^### (\S+):", text, re.MULTILINE) == [
        name for name, *_ in scaling_page.SHOWN
    ]


def test_a_page_without_markers_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "page.md"
    made.write_text("no markers")
    assert "has no lines" in refused(["plan", "--markdown", str(made)], capsys)
    assert made.read_text() == "no markers"
    assert list(tmp_path.iterdir()) == [made]


def test_units_read_well() -> None:
    values = (0, 12, 999, 1000, 1234, 99_960, 123_456, 999_999, 1.5e13)
    assert [human(value, "B") for value in values] == [
        *("0 B", "12 B", "999 B", "1.00 kB", "1.23 kB", "100 kB", "123 kB", "1.00 MB", "15.0 TB")
    ]
