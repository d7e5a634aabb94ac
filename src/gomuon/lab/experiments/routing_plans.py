"""Plans about routing: which convolutions a matrix optimizer should update."""

from __future__ import annotations

from gomuon.lab.experiments import tasks
from gomuon.lab.experiments.loss_windows import windows_for
from gomuon.lab.experiments.plan import PAIRED, Arm, Plan, Quick, loss_statistic

# Each task with the parameters in question.
QUESTIONS = {
    "digits-conv": ("depthwise convolutions", "*.depthwise.weight"),
    "digits-vit": ("the patch embedding", "patches.weight"),
}


def _routing(task: str, what: str, pattern: str) -> Plan:
    settings = dict(tasks.DEFAULTS[task])
    steps = settings.pop("steps")
    arms = tuple(
        Arm(
            f"{treatment}-{rate:g}",
            f"{what}: {treatment}, rate {rate:g}",
            "go-muon",
            rate,
            options={"polar": "auto", "routes": {pattern: treatment}},
        )
        for rate in (0.02, 0.04, 0.08)
        for treatment in ("matrix", "adamw")
    )
    return Plan(
        experiment=f"routing-{task}",
        title=f"Digits: {what} as matrices or with AdamW",
        task=task,
        arms=arms,
        seeds=(951, 952, 953, 954, 955),
        steps=steps,
        windows=windows_for(steps),
        statistic=loss_statistic(task),
        rule=(
            "both treatments at the rate that is better for it on average; they stay matrices "
            f"unless AdamW is lower with an interval that excludes zero; {PAIRED}"
        ),
        comparisons=tuple((f"matrix-{rate:g}", f"adamw-{rate:g}") for rate in (0.02, 0.04, 0.08)),
        settings=settings,
        quick=Quick(steps=60, seeds=1),
    )


ROUTING = tuple(_routing(task, *question) for task, question in QUESTIONS.items())
