"""The plans of the paper's five experiments, and of questions that the paper leaves open."""

from __future__ import annotations

import dataclasses

from gomuon.lab.errors import LabError, unknown_name
from gomuon.lab.experiments import optimizers, published
from gomuon.lab.experiments.clock_plans import ADAPTIVE, COHERENCE
from gomuon.lab.experiments.cost_plans import BLOCKS, FAST, PRESETS, SPEED
from gomuon.lab.experiments.loss_windows import PAPER_WINDOWS, windows_for
from gomuon.lab.experiments.plan import PAIRED, TRAJECTORY, Arm, Plan, Quick
from gomuon.lab.experiments.rate_plans import DEFAULTS, NANOGPT
from gomuon.lab.experiments.routing_plans import ROUTING
from gomuon.lab.experiments.selection import Selection
from gomuon.lab.experiments.state_plans import STATE

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
    paper=published.PTB,
)

SHAKESPEARE = Plan(
    experiment="shakespeare",
    title="Tiny Shakespeare: Go-MUON against the Q/K control and a tuned Muon",
    task="shakespeare",
    arms=(
        Arm("muon-qk", "Muon + Q/K (our interpretation)", "muon-qk", 0.018, grid=(0.018,)),
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
    paper=published.SHAKESPEARE,
)


def _grokking_arms() -> tuple[Arm, ...]:
    return tuple(
        Arm(
            f"p{modulus}-{optimizer}-{rate:g}",
            f"{optimizers.title(optimizer)} {rate:g}",
            optimizer,
            rate,
            settings={"modulus": modulus},
            group=f"p={modulus}",
        )
        # The rates that the paper selected come first: they matter most.
        for rates in ({"muon": 0.16, "go-muon": 0.08}, {"muon": 0.32, "go-muon": 0.16})
        for modulus in (103, 107)
        for optimizer, rate in rates.items()
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
    paper=published.GROKKING,
)

MAPBACK = Plan(
    experiment="mapback",
    title="Penn Treebank: matched map-back against the halfspace baseline (our interpretation)",
    task="ptb",
    arms=(
        Arm("halfspace", "Halfspace (our interpretation)", "halfspace", 0.08),
        Arm("go-muon", "Go-MUON (K=1)", "go-muon", 0.08, options={"refresh_every": 1}),
    ),
    seeds=(0, 1, 2, 3),
    steps=1000,
    windows=PAPER_WINDOWS,
    statistic="mean pre-update training loss of the window 201-300; the later windows beside it",
    rule=f"both arms at rate .08, fixed in advance; {PAIRED}",
    comparisons=(("halfspace", "go-muon"),),
    quick=Quick(steps=60, seeds=2),
    paper=published.MAPBACK,
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
    paper=published.LAZY,
)

EXPERIMENTS: dict[str, Plan] = {
    plan.experiment: plan for plan in (PTB, SHAKESPEARE, GROKKING, MAPBACK, LAZY)
}

# ---- what the paper leaves open ------------------------------------------------------------------

DECAY = 0.025  # with a cosine from .08 over 1,000 updates, Σ lr·wd = 1

ABLATIONS = Plan(
    experiment="ablations",
    title="Penn Treebank: Go-MUON with one thing changed",
    task="ptb",
    arms=(
        Arm("k4", "K = 4 (the paper's)", "go-muon", 0.08),
        Arm("k1", "K = 1", "go-muon", 0.08, options={"refresh_every": 1}),
        Arm("k16", "K = 16", "go-muon", 0.08, options={"refresh_every": 16}),
        Arm("average-a", "A averaged too", "go-muon", 0.08, options={"input_decay": 0.9}),
        Arm("input-only", "input side only", "go-muon-input", 0.08),
        Arm("output-only", "output side only", "go-muon-output", 0.08),
        Arm("plain-decay", "plain decay", "go-muon", 0.08, options={"weight_decay": DECAY}),
        Arm(
            "geometry-decay",
            "geometry decay",
            "go-muon",
            0.08,
            options={"weight_decay": DECAY, "geometry_decay": True},
        ),
    ),
    seeds=(0, 1, 2),
    steps=1000,
    windows=PAPER_WINDOWS,
    statistic=TRAJECTORY,
    rule=f"all arms at rate .08, fixed in advance; {PAIRED}",
    comparisons=(
        *(("k4", name) for name in ("k1", "k16", "average-a", "input-only", "output-only")),
        ("output-only", "input-only"),
        ("plain-decay", "geometry-decay"),
    ),
    quick=Quick(steps=60, seeds=1),
)

ADAMW_RATES = {"1e-3": 1e-3, "3e-3": 3e-3, "1e-2": 1e-2}
ADAMW_RATE = Plan(
    experiment="adamw-rate",
    title="Modular addition: how much AdamW's rate for the embedding matters",
    task="grokking",
    arms=tuple(
        Arm(
            f"{optimizer}-{word}",
            f"{optimizers.title(optimizer)}, AdamW {word}",
            optimizer,
            rate,
            settings={"adamw_lr": adamw_lr},
            group=f"AdamW {word}",
        )
        for word, adamw_lr in ADAMW_RATES.items()
        for optimizer, rate in {"muon": 0.16, "go-muon": 0.08}.items()
    ),
    seeds=(0, 1, 2),
    steps=600,
    statistic=GROKKING.statistic,
    rule="matrix rates fixed in advance to those the paper selected",
    comparisons=tuple((f"muon-{word}", f"go-muon-{word}") for word in ADAMW_RATES),
    settings={"width": 64, "hidden": 192, "modulus": 59},
    quick=Quick(steps=60, seeds=1),
)


RACE_STEPS = 600


def muon_rate(task: str, corpus: str) -> Plan:
    """Muon at rates below the one that a short sweep picks, for as many updates as a race."""
    lower = {f"muon-{rate:g}": rate for rate in (0.02, 0.04)}
    return Plan(
        experiment=f"muon-rate-{task}",
        title=f"{corpus}: Muon at rates that suit longer runs than the sweep's",
        task=task,
        arms=(
            *(Arm(name, f"Muon {rate:g}", "muon", rate) for name, rate in lower.items()),
            Arm("go-muon", "Go-MUON 0.08", "go-muon", 0.08),
        ),
        seeds=(101, 102, 103),
        steps=RACE_STEPS,
        windows=windows_for(RACE_STEPS),
        statistic=TRAJECTORY,
        rule=f"Go-MUON at the rate of its race, Muon at lower ones than in its own; {PAIRED}",
        comparisons=tuple((name, "go-muon") for name in lower),
        quick=Quick(steps=60, seeds=1),
    )


MUON_RATES = tuple(
    muon_rate(task, corpus)
    for task, corpus in {"ptb": "Penn Treebank", "shakespeare": "Tiny Shakespeare"}.items()
)

NULL_SPACE_STEPS = 400
NULL_SPACE = Plan(
    experiment="null-space",
    title="Penn Treebank: the null space completed as in the paper, or left alone",
    task="ptb",
    # The embedding has fewer symbols than columns, so sources in the first block lack rank.
    arms=(
        Arm("completed", "completed", "go-muon", 0.08, options={"polar": "svd"}),
        Arm("left-alone", "left alone", "go-muon", 0.08, options={"polar": "exact"}),
    ),
    seeds=(201, 202, 203, 204, 205),
    steps=NULL_SPACE_STEPS,
    windows=windows_for(NULL_SPACE_STEPS),
    statistic=TRAJECTORY,
    rule=f"both arms at rate .08, fixed in advance; {PAIRED}",
    comparisons=(("completed", "left-alone"),),
    quick=Quick(steps=60, seeds=1),
)

OPEN_QUESTIONS: dict[str, Plan] = {
    plan.experiment: plan
    for plan in (
        *(ABLATIONS, ADAMW_RATE, *MUON_RATES, NULL_SPACE),
        *(*FAST, *PRESETS, *BLOCKS, *SPEED, STATE, NANOGPT, *DEFAULTS, *ROUTING),
        *(*ADAPTIVE, *COHERENCE),
    )
}


def find(name: str) -> Plan:
    """The plan of that name.

    Raises:
        LabError: the name is unknown; the message suggests the nearest one.
    """
    known = {**EXPERIMENTS, **OPEN_QUESTIONS}
    if name not in known:
        raise unknown_name("experiment", name, [*known, "all"])
    return known[name]


def with_selection(plan: Plan, selection: Selection) -> Plan:
    """The plan with the rates and momenta that a sweep picked, instead of its own.

    Arms that differ only in their rate become one; optimizers that the sweep did not try keep
    theirs.

    Raises:
        LabError: the sweep was on another task, tried none of the plan's optimizers, or has no rate
            for one of them.
    """
    selection.require_task(plan.task)
    selection.require_rates(arm.optimizer for arm in plan.arms)
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
        # The paper's numbers for the arms it compared, at the paper's rates.
        compared = {name for pair in plan.comparisons for name in pair}
        printed = {new[name].name: row for name, row in paper.grokking.items() if name in compared}
        note = "the rates here were tuned; the paper's results are at the paper's rates"
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
