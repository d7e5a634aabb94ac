"""Plans about when the geometry is renewed: by its age or by its efficiency, and why age helps."""

from __future__ import annotations

from typing import Any

from gomuon.intervals import Adaptive
from gomuon.lab.experiments import tasks
from gomuon.lab.experiments.loss_windows import windows_for
from gomuon.lab.experiments.plan import PAIRED, TRAJECTORY, Arm, Plan, Quick
from gomuon.lab.experiments.racing import GROKKING

RATE = 0.08
CORPORA = {"ptb": "Penn Treebank", "shakespeare": "Tiny Shakespeare"}
UPDATES = 400

# ---- an interval that adapts ---------------------------------------------------------------------

FIXED = (1, 4, 16, 64)
TARGETS = (0.9, 0.95)
PAPERS = "k4"
REFRESHES = 0.5  # of those with K = 4
LOSS = 0.003  # above that of K = 4
WORTH_IT = (
    "an adaptive clock is worth it if it makes at most half the refreshes of K = 4 and its mean is "
    "at most .3 % above"
)
# Modular addition without decay, at the rates of its other plans.
ADDITION: dict[str, Any] = {"width": 64, "hidden": 192, "modulus": 59, "adamw_lr": 1e-2}


def _clocks() -> tuple[Arm, ...]:
    fixed = [Arm(f"k{K}", f"K = {K}", "go-muon", RATE, options={"refresh_every": K}) for K in FIXED]
    adaptive = [
        Arm(
            f"adaptive-{target:g}",
            f"Adaptive({target:g})",
            "go-muon",
            RATE,
            options={"refresh_every": Adaptive(target).as_dict()},
        )
        for target in TARGETS
    ]
    return (*fixed, *adaptive)


def _adaptive(task: str, title: str, steps: int, settings: dict[str, Any]) -> Plan:
    arms = _clocks()
    return Plan(
        experiment=f"adaptive-{task}",
        title=f"{title}: the interval of refreshes fixed, or by the efficiency of cached maps",
        task=task,
        arms=arms,
        seeds=(1001, 1002, 1003, 1004, 1005),
        steps=steps,
        windows=() if task == "grokking" else windows_for(steps),
        statistic=GROKKING if task == "grokking" else TRAJECTORY,
        rule=f"all arms at rate .08, fixed in advance; {WORTH_IT}; {PAIRED}",
        comparisons=tuple((PAPERS, arm.name) for arm in arms if arm.name != PAPERS),
        settings={**settings, "telemetry": True},
        quick=Quick(steps=60, seeds=1),
    )


ADAPTIVE = (
    *(_adaptive(task, title, UPDATES, {}) for task, title in CORPORA.items()),
    _adaptive("grokking", "Modular addition", tasks.DEFAULTS["grokking"]["steps"], ADDITION),
)

# ---- sampling or holding -------------------------------------------------------------------------

HELD = "held-4"
COHERENCE_ARMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    HELD: ("observed and held four steps (the paper's)", "go-muon", {"refresh_every": 4}),
    "observed-1": (
        "observed every step, held four",
        "go-muon",
        {"refresh_every": 4, "statistics_every": 1},
    ),
    "interpolated-4": (
        "observed every fourth step, maps interpolated",
        "go-muon-interpolated",
        {"refresh_every": 4},
    ),
    "every-1": ("observed and renewed every step", "go-muon", {"refresh_every": 1}),
    "staggered-4": (
        "held four steps, layers take turns",
        "go-muon",
        {"refresh_every": 4, "stagger": True},
    ),
}
# Each pair of arms differs in one thing; with what that is.
ONE_THING = {
    (HELD, "observed-1"): "more observations, maps held as long",
    ("every-1", "observed-1"): "maps held, observed as often",
    (HELD, "interpolated-4"): "maps that move in every step, observed as often",
    (HELD, "staggered-4"): "layers that do not refresh together",
    ("every-1", HELD): "both: fewer observations, and maps held",
}


def _coherence(task: str, title: str) -> Plan:
    return Plan(
        experiment=f"coherence-{task}",
        title=f"{title}: is it sparse observation or holding that helps?",
        task=task,
        arms=tuple(
            Arm(name, title, optimizer, RATE, options=options)
            for name, (title, optimizer, options) in COHERENCE_ARMS.items()
        ),
        seeds=(1051, 1052, 1053, 1054, 1055),
        steps=UPDATES,
        windows=windows_for(UPDATES),
        statistic=TRAJECTORY,
        rule=(
            "all arms at rate .08, fixed in advance; a cause is found where the interval of the "
            f"pair that differs in it alone excludes zero on both texts, with one sign; {PAIRED}"
        ),
        comparisons=tuple(ONE_THING),
        quick=Quick(steps=60, seeds=1),
    )


COHERENCE = tuple(_coherence(task, title) for task, title in CORPORA.items())
