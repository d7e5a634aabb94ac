"""`gomuon plan --tensor-parallel`: which layers are divided, and what is refused."""

import json
from typing import Any

import pytest
from torch import nn

from gomuon.lab import cli
from gomuon.lab.costs.tensor_plan import TensorPlan, place_parameters
from gomuon.lab.costs.traffic import status_bytes
from gomuon.lab.errors import LabError
from tests.lab.costs.test_tensor_parallel import PLAN, about
from tests.lab.helpers.commands import refused

OWN = "--model tests.lab.costs.test_tensor_parallel:llama --input 1,10 --tokens 30"


def plan(arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main(["plan", *arguments.split(), "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize("mode", ["blocks", "exact"])
def test_a_published_model_has_its_usual_plan(
    mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "gpt2-124m --dtype bfloat16 --optimizers go-muon"
    whole = plan(arguments, capsys)
    arguments += f" --ranks 4 --tensor-parallel 4 --tensor-parallel-mode {mode}"
    part = plan(arguments, capsys)
    assert part["mesh"] == {"replicas": 1, "shards": 1, "parts": 4}
    assert part["exact"] == (mode == "exact")
    assert part["parameters"] == whole["parameters"]
    head = 2 * 50257 * 768 * part["tokens"] * 3  # with the embedding, it stays whole
    assert part["model_flops"] == pytest.approx((whole["model_flops"] - head) / 4 + head)
    (one,), (other,) = whole["methods"], part["methods"]
    assert other["staggered"] == (mode == "exact")
    if mode == "blocks":
        assert other["state"]["largest"] < one["state"]["largest"]
        assert other["sent_refresh"]["largest"] == status_bytes(4)
        assert other["moments"] < one["moments"]
    else:
        assert other["moments"] == one["moments"]
        assert other["sent_refresh"]["largest"] > other["cycle"][0]["sent"]["mean"] > 0


def test_patterns_choose_the_layers_of_a_model_of_ones_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    usual = [f"--colwise {','.join(PLAN.colwise)}", f"--rowwise {','.join(PLAN.rowwise)}"]
    two = f"{OWN} --ranks 2 --tensor-parallel 2 --optimizers go-muon"
    every = plan(f"{two} {' '.join(usual)}", capsys)
    about_model = about("llama").divided(PLAN, 2)
    assert every["model_flops"] == about_model.model_flops
    mlp = plan(f"{two} --colwise *.gate,*.up --rowwise *.down", capsys)
    assert every["model_flops"] < mlp["model_flops"] < about("llama").model_flops
    assert every["wrapper"] == mlp["wrapper"] == 0
    shared = plan(f"{two} {' '.join(usual)} --shared-inputs", capsys)
    assert shared["methods"][0]["moments"] < every["methods"][0]["moments"]


def test_without_a_forward_pass_the_work_is_that_of_a_ranks_parameters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = OWN.replace("--input 1,10 ", "")
    answer = plan(
        f"{own} --ranks 2 --tensor-parallel 2 --colwise *.up,*.gate --optimizers muon", capsys
    )
    assert answer["model_flops"] == 6 * 30 * (answer["parameters"] - 2 * 24 * 16 / 2)


@pytest.mark.parametrize("mode", ["blocks", "exact"])
def test_a_fit_counts_what_a_rank_has(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "gpt2-124m --ranks 8 --shards 4 --optimizers go-muon,adamw --fit 20GB"
    whole = plan(arguments, capsys)
    part = plan(f"{arguments} --tensor-parallel 2 --tensor-parallel-mode {mode}", capsys)
    for one, other in zip(whole["methods"], part["methods"], strict=True):
        assert one["fits"] and other["fits"]  # noqa: PT018
        assert one["found"]["need"]["weights"] > other["found"]["need"]["weights"]
    small = f"{arguments.replace('20GB', '1MB')} --reserve 1B --tensor-parallel 2"
    assert cli.main(["plan", *small.split()]) == 2
    said = capsys.readouterr()
    assert "nothing fits into 1.00 MB" in said.err
    text = " ".join(said.out.split())
    assert "8 ranks (replicas × shards × parts = 1 × 4 × 2)" in text
    assert "2 ranks divide each layer: each part is a matrix of its own" in text


def test_routes_make_matrices_of_other_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    own = "--model tests.lab.costs.test_input_uses:Functions --input 6,10,20 --optimizers go-muon"
    plain = plan(own, capsys)
    routed = plan(f"{own} --routes plain=matrix,stack=matrix", capsys)
    moments = [answer["methods"][0]["moments"] for answer in (plain, routed)]
    # Σδδᵀ and Σxxᵀ of 9 × 12, and of four matrices 7 × 9.
    assert moments[1] - moments[0] == 4 * (9 * 9 + 12 * 12 + 4 * (7 * 7 + 9 * 9))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("llama-7b --ranks 8 --tensor-parallel 3", "--ranks (8) must be a multiple of --shards (1"),
        ("llama-7b --ranks 4 --shards 4 --tensor-parallel 2", "× --tensor-parallel (2)"),
        ("llama-7b --ranks 4 --tensor-parallel 0", "--tensor-parallel must be at least 1, not 0"),
        ("llama-7b --tensor-parallel-mode exact", "exact needs --tensor-parallel, a number"),
        (
            "llama-7b --ranks 2 --tensor-parallel 2 --tensor-parallel-mode whole",
            "unknown value of --tensor-parallel-mode 'whole'",
        ),
        ("llama-7b --colwise *.up", "--colwise needs --tensor-parallel"),
        ("llama-7b --shared-inputs", "--shared-inputs needs --tensor-parallel"),
        (
            "llama-70b --ranks 16 --tensor-parallel 16",
            "does not divide the 8 heads of 'llama-70b'; choose one of 2, 4, 8",
        ),
        ("gpt2-xl --ranks 2 --tensor-parallel 2", "the 25 heads of 'gpt2-xl'; choose one of 5, 25"),
        (
            "llama-7b --ranks 16 --shards 4 --tensor-parallel 2",
            "2 replicas × 4 shards × 2 parts are possible only with --tensor-parallel-mode exact",
        ),
        (
            "llama-7b --ranks 4 --tensor-parallel 2 --tensor-parallel-mode exact --replicate",
            "--replicate is not possible with --tensor-parallel-mode exact",
        ),
        ("character --ranks 2 --tensor-parallel 2", "'character' has no usual plan: say with"),
        (f"{OWN} --ranks 2 --tensor-parallel 2", "a model of your own has no usual plan"),
        (f"{OWN} --ranks 2 --tensor-parallel 2 --rowwise *.dwn", "matches no linear layer or"),
        (
            f"{OWN} --ranks 2 --tensor-parallel 2 --rowwise layers.0.mlp.dow",
            "did you mean 'layers.0.mlp.down'?",
        ),
        (
            f"{OWN} --ranks 2 --tensor-parallel 2 --rowwise *.up --colwise *.up",
            "--colwise and --rowwise both match 'layers.0.mlp.up'",
        ),
        (
            f"{OWN} --ranks 5 --tensor-parallel 5 --colwise *.up",
            "--tensor-parallel 5 does not divide dimension 0 of 'layers.0.mlp.up.weight', (24, 16)",
        ),
        ("llama-7b --routes *.q_proj", "--routes '*.q_proj' is not understood; write pattern="),
        ("llama-7b --routes *.q_proj=muon", "with one of matrix, adamw, frozen"),
        ("gpt2-124m --routes *.none=matrix", "matches no parameter"),
    ],
)
def test_what_is_not_possible_is_one_line(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(["plan", *arguments.split()], capsys)


def test_a_tied_weight_is_divided_in_one_way() -> None:
    model = nn.ModuleDict({"one": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
    model["other"].weight = model["one"].weight
    with pytest.raises(
        LabError, match="would be divided in two ways, along its dimensions 0 and 1"
    ):
        place_parameters("tied", model, TensorPlan(("one",), ("other",)), 2)
