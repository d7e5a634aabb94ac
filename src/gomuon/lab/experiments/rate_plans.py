"""Plans about rates: does AdamW's own carry over, and which defaults suit most tasks?"""

from __future__ import annotations

from typing import Any

from gomuon.lab.experiments import tasks
from gomuon.lab.experiments.loss_windows import windows_for
from gomuon.lab.experiments.plan import HELD_OUT, PAIRED, Arm, Plan, Quick, loss_statistic
from gomuon.lab.experiments.racing import GROKKING

# nanoGPT's own rate for this recipe is 1e-3.
NANOGPT_RATES = (1e-3, 2e-3, 4e-3, 8e-3)
# As in its train.py: one rate and one schedule for all groups, decay of everything but norms.
NANOGPT_ADAMW: dict[str, Any] = {"betas": [0.9, 0.99], "weight_decay": 0.1}
NANOGPT_GO_MUON: dict[str, Any] = {**NANOGPT_ADAMW, "lr_scale": "adamw", "polar": "auto"}


def _nanogpt() -> Plan:
    settings = dict(tasks.DEFAULTS["nanogpt"])
    steps = settings.pop("steps")
    kinds = {"adamw": ("AdamW", NANOGPT_ADAMW), "go-muon": ("Go-MUON", NANOGPT_GO_MUON)}
    return Plan(
        experiment="nanogpt",
        title="nanoGPT's recipe for small machines: AdamW's rate in Go-MUON",
        task="nanogpt",
        arms=tuple(
            Arm(f"{name}-{rate:g}", f"{title} {rate:g}", name, rate, options=options)
            for rate in NANOGPT_RATES
            for name, (title, options) in kinds.items()
        ),
        seeds=(801, 802, 803),
        steps=steps,
        windows=windows_for(steps),
        statistic=HELD_OUT,
        rule=(
            'Go-MUON with lr_scale="adamw" takes the rate at which AdamW is best on average, and '
            f"the decay and schedule of AdamW; the other rates are shown beside it; {PAIRED}"
        ),
        comparisons=tuple((f"adamw-{rate:g}", f"go-muon-{rate:g}") for rate in NANOGPT_RATES),
        settings=settings,
        quick=Quick(steps=60, seeds=1),
    )


NANOGPT = _nanogpt()

# Rate and momentum around the paper's .08 and .8 on four tasks, and decay at the paper's pair.
SENSITIVE_RATES = (0.02, 0.04, 0.08, 0.16)
SENSITIVE_MOMENTA = (0.8, 0.95)
SENSITIVE_TASKS = {  # with their number of updates
    "ptb": ("Penn Treebank", 250),
    "shakespeare": ("Tiny Shakespeare", 250),
    "nanogpt": ("nanoGPT's recipe", 1000),
    "grokking": ("Modular addition", 350),
}


def _sensitivity(task: str, corpus: str, steps: int) -> Plan:
    arms = [
        Arm(
            f"m{momentum:g}-{rate:g}",
            f"momentum {momentum:g}, rate {rate:g}",
            "go-muon",
            rate,
            options={"polar": "auto", "momentum": momentum},
        )
        for momentum in SENSITIVE_MOMENTA
        for rate in SENSITIVE_RATES
    ]
    decayed = {"polar": "auto", "momentum": 0.8, "weight_decay": 0.1}
    arms.append(
        Arm("decay-0.1", "momentum 0.8, rate 0.08, decay 0.1", "go-muon", 0.08, options=decayed)
    )
    settings = dict(tasks.DEFAULTS[task])
    settings.pop("steps")
    return Plan(
        experiment=f"defaults-{task}",
        title=f"{corpus}: rate, momentum and decay of Go-MUON",
        task=task,
        arms=tuple(arms),
        seeds=(901, 902, 903),
        steps=steps,
        windows=() if task == "grokking" else windows_for(steps),
        statistic=GROKKING if task == "grokking" else loss_statistic(task),
        rule=(
            "the default is the pair of rate and momentum whose statistic, divided by the task's "
            "best, has the lowest geometric mean over the four tasks; the paper's .08 and .8 stay "
            f"unless another pair is more than 1 % below them; {PAIRED}"
        ),
        comparisons=tuple(("m0.8-0.08", arm.name) for arm in arms if arm.name != "m0.8-0.08"),
        settings=settings,
        quick=Quick(steps=60, seeds=1),
    )


DEFAULTS = tuple(_sensitivity(task, *of_task) for task, of_task in SENSITIVE_TASKS.items())
