"""The campaigns that the page shows: the folder of each, and what its plan must declare."""

from __future__ import annotations

from dataclasses import dataclass

from gomuon.lab.errors import unknown_name
from gomuon.lab.experiments.clock_plans import ADAPTIVE, COHERENCE
from gomuon.lab.experiments.cost_plans import BLOCK_TASKS, FAST_TASKS, SPEED_CORPORA
from gomuon.lab.experiments.rate_plans import SENSITIVE_TASKS as SENSITIVE
from gomuon.lab.experiments.routing_plans import QUESTIONS

TASKS = {"ptb": "Penn Treebank", "shakespeare": "Tiny Shakespeare", "grokking": "modular addition"}


@dataclass(frozen=True)
class ExpectedCampaign:
    """A folder under ``results/`` and the experiment and task its plan.json must declare."""

    folder: str
    experiment: str
    task: str


TITLES = {**TASKS, "gpt": "a GPT with LayerNorm", "nanogpt": "nanoGPT's recipe"}
TITLES |= dict.fromkeys(QUESTIONS, "digits")
PAPER = ("ptb", "shakespeare", "grokking", "mapback", "lazy")
ON_PTB = ("mapback", "lazy")
CORPORA = ("ptb", "shakespeare")
CAMPAIGNS: dict[str, ExpectedCampaign] = {
    campaign.folder: campaign
    for campaign in (
        *(ExpectedCampaign(name, name, "ptb" if name in ON_PTB else name) for name in PAPER),
        *(ExpectedCampaign(f"tune-{task}", "tune", task) for task in TASKS),
        *(ExpectedCampaign(f"race-{task}", "race", task) for task in TASKS),
        ExpectedCampaign("ablations", "ablations", "ptb"),
        ExpectedCampaign("adamw-rate", "adamw-rate", "grokking"),
        *(ExpectedCampaign(f"muon-rate-{task}", f"muon-rate-{task}", task) for task in CORPORA),
        ExpectedCampaign("null-space", "null-space", "ptb"),
        *(ExpectedCampaign(f"fast-{task}", f"fast-{task}", task) for task in FAST_TASKS),
        *(ExpectedCampaign(f"preset-{task}", f"preset-{task}", task) for task in FAST_TASKS),
        *(ExpectedCampaign(f"blocks-{task}", f"blocks-{task}", task) for task in BLOCK_TASKS),
        *(ExpectedCampaign(f"speed-{task}", f"speed-{task}", task) for task in SPEED_CORPORA),
        ExpectedCampaign("state-ptb", "state-ptb", "ptb"),
        ExpectedCampaign("nanogpt", "nanogpt", "nanogpt"),
        *(ExpectedCampaign(f"defaults-{task}", f"defaults-{task}", task) for task in SENSITIVE),
        *(ExpectedCampaign(f"routing-{task}", f"routing-{task}", task) for task in QUESTIONS),
        *(ExpectedCampaign(p.experiment, p.experiment, p.task) for p in (*ADAPTIVE, *COHERENCE)),
    )
}


def find(folder: str) -> ExpectedCampaign:
    """The campaign that belongs in this folder of ``results/``.

    Raises:
        LabError: the page shows no such campaign; the nearest name is suggested.
    """
    if folder not in CAMPAIGNS:
        raise unknown_name("campaign", folder, CAMPAIGNS)
    return CAMPAIGNS[folder]
