"""The paper's five experiments, each a plan that is written down before it runs."""

from __future__ import annotations

import dataclasses

from gomuon.lab import paper_figures
from gomuon.lab.errors import LabError, unknown_name
from gomuon.lab.plans import Arm, Plan, Quick
from gomuon.lab.selection import Selection
from gomuon.lab.statistics import PAPER_WINDOWS

TRAJECTORY = "geometric mean of the three window means of pre-update training loss; lower is better"
PAIRED = "every seed pairs the arms by hash; the interval is Student's t at 95 % over the pairs"

PTB = Plan(
    experiment="ptb",
    title="Penn Treebank: Go-MUON against Muon",
    task="ptb",
    arms=(
        Arm("muon", "Muon", "muon", 0.02),
        Arm("go-muon", "Go-MUON (K=4)", "go-muon", 0.08),
    ),
    seeds=(0, 1, 2),
    steps=1000,
    windows=PAPER_WINDOWS,
    statistic=TRAJECTORY,
    rule=f"rates fixed in advance to the paper's; {PAIRED}",
    comparisons=(("muon", "go-muon"),),
    quick=Quick(steps=100, seeds=2),
    paper=paper_figures.PTB,
)

SHAKESPEARE = Plan(
    experiment="shakespeare",
    title="Tiny Shakespeare: Go-MUON against the Q/K control and a tuned Muon",
    task="shakespeare",
    arms=(
        Arm("muon-qk", "Muon + Q/K (a reading)", "muon-qk", 0.018, grid=(0.018,)),
        Arm("muon", "Muon (tuned)", "muon", None, grid=(0.01, 0.02, 0.04)),
        Arm("go-muon", "Go-MUON (K=4)", "go-muon", 0.08, grid=(0.04, 0.08, 0.16)),
    ),
    seeds=(17402, 17403, 17404),
    tuning_seed=17401,
    steps=1000,
    windows=PAPER_WINDOWS,
    statistic=TRAJECTORY,
    rule=(
        "Muon takes the rate of its grid with the lowest statistic on tuning seed 17401; Go-MUON "
        "and the Q/K control keep the paper's rates, whose grids are run and shown for equal "
        f"budgets; {PAIRED}"
    ),
    comparisons=(("muon-qk", "go-muon"), ("muon", "go-muon")),
    quick=Quick(steps=60, seeds=2),
    paper=paper_figures.SHAKESPEARE,
)


def _grokking_arms() -> tuple[Arm, ...]:
    return tuple(
        Arm(
            f"p{modulus}-{optimizer}-{rate:g}",
            f"{title} {rate:g}",
            optimizer,
            rate,
            settings={"modulus": modulus},
            group=f"p={modulus}",
        )
        for modulus in (103, 107)
        for optimizer, title, rates in (
            ("muon", "Muon", (0.16, 0.32)),
            ("go-muon", "Go-MUON", (0.08, 0.16)),
        )
        for rate in rates
    )


GROKKING = Plan(
    experiment="grokking",
    title="Modular addition: when do they grok?",
    task="grokking",
    arms=_grokking_arms(),
    seeds=(0,),
    steps=5000,
    statistic="first of five consecutive held-out evaluations, every 10 updates, of at least 99 %",
    rule=(
        "per optimizer the rate of its screen with the lowest sum of grok steps over the moduli; "
        "a run that never groks counts as one update more than it made"
    ),
    comparisons=(
        ("p103-muon-0.16", "p103-go-muon-0.08"),
        ("p107-muon-0.16", "p107-go-muon-0.08"),
    ),
    settings={"width": 64, "hidden": 192, "adamw_lr": 1e-2},
    quick=Quick(steps=200, seeds=1),
    paper=paper_figures.GROKKING,
)

MAPBACK = Plan(
    experiment="mapback",
    title="Penn Treebank: matched map-back against the halfspace reading",
    task="ptb",
    arms=(
        Arm("halfspace", "Halfspace (a reading)", "halfspace", 0.08),
        Arm("go-muon", "Go-MUON (K=1)", "go-muon", 0.08, options={"refresh_every": 1}),
    ),
    seeds=(0, 1, 2, 3),
    steps=1000,
    windows=PAPER_WINDOWS,
    statistic="mean pre-update training loss of the window 201-300; the later windows beside it",
    rule=f"both arms at rate .08, fixed in advance; {PAIRED}",
    comparisons=(("halfspace", "go-muon"),),
    quick=Quick(steps=60, seeds=2),
    paper=paper_figures.MAPBACK,
)

LAZY = Plan(
    experiment="lazy",
    title="Penn Treebank: geometry renewed every step against every fourth",
    task="ptb",
    arms=(
        Arm("refresh-1", "Refresh 1 (K=1)", "go-muon", 0.08, options={"refresh_every": 1}),
        Arm("lazy-4", "Lazy (K=4)", "go-muon", 0.08, options={"refresh_every": 4}),
    ),
    seeds=(0, 1, 2, 3),
    steps=1000,
    windows=PAPER_WINDOWS,
    statistic=TRAJECTORY,
    rule=f"both arms at rate .08, fixed in advance; {PAIRED}; step times interleaved",
    comparisons=(("refresh-1", "lazy-4"),),
    settings={"telemetry": True},
    timing=("refresh-1", "lazy-4"),
    quick=Quick(steps=60, seeds=2),
    paper=paper_figures.LAZY,
)

EXPERIMENTS: dict[str, Plan] = {
    plan.experiment: plan for plan in (PTB, SHAKESPEARE, GROKKING, MAPBACK, LAZY)
}


def find(name: str) -> Plan:
    """The plan of that name.

    Raises:
        LabError: there is none; the nearest name is suggested.
    """
    if name not in EXPERIMENTS:
        raise unknown_name("experiment", name, [*EXPERIMENTS, "all"])
    return EXPERIMENTS[name]


def with_selection(plan: Plan, selection: Selection) -> Plan:
    """The plan at the rates and momenta a sweep picked, instead of those declared.

    Arms that differed only in their rate become one; what the sweep did not try stays as it is.

    Raises:
        LabError: the sweep was of another task, or of none of the plan's optimizers.
    """
    selection.require_task(plan.task)
    swept = [arm for arm in plan.arms if arm.optimizer in selection.picked]
    if not swept:
        raise LabError(
            f"the selection has no rate for {plan.experiment}, which compares "
            f"{', '.join(dict.fromkeys(arm.optimizer for arm in plan.arms))}"
        )
    new = {arm.name: _at_selected(arm, selection) if arm in swept else arm for arm in plan.arms}
    arms = tuple({arm.name: arm for arm in new.values()}.values())
    comparisons = ((new[a].name, new[b].name) for a, b in plan.comparisons)
    paper = plan.paper
    if paper is not None:
        # Beside an arm stands what the paper compared, at the paper's own rate.
        compared = {name for pair in plan.comparisons for name in pair}
        printed = {new[name].name: row for name, row in paper.grokking.items() if name in compared}
        note = "the rates here were tuned; the paper's figures are at the paper's rates"
        paper = dataclasses.replace(paper, grokking=printed, notes=(*paper.notes, note))
    methods = ", ".join(dict.fromkeys(arm.optimizer for arm in swept))
    return dataclasses.replace(
        plan,
        arms=arms,
        comparisons=tuple(dict.fromkeys(comparisons)),
        rule=f"settings of {methods} {selection.words}, instead of the declared; {PAIRED}",
        tuning_seed=plan.tuning_seed if any(arm.grid for arm in arms) else None,
        paper=paper,
    )


def _at_selected(arm: Arm, selection: Selection) -> Arm:
    rate, _ = selection.picked[arm.optimizer]
    name, title = arm.name, arm.title
    if arm.lr is not None and name.endswith(f"-{arm.lr:g}"):
        name, title = name.removesuffix(f"-{arm.lr:g}"), title.removesuffix(f" {arm.lr:g}")
        title = f"{title} {rate:g}"
    options = {**arm.options, **selection.options(arm.optimizer)}
    return dataclasses.replace(arm, name=name, title=title, lr=rate, grid=(), options=options)
