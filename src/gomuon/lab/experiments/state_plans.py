"""A plan about memory: does state in fewer bits cost loss?"""

from __future__ import annotations

from typing import Any

from gomuon.lab.experiments.loss_windows import windows_for
from gomuon.lab.experiments.plan import PAIRED, TRAJECTORY, Arm, Plan, Quick

STATE_UPDATES = 400
STATE_SEEDS = (501, 502, 503, 504, 505)
STATE_FREE = (
    "an arm is free if, over its pairs, its mean is at most .2 % above float32's and its interval "
    "ends below +.5 %"
)
STATE_ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("state in float32", {"polar": "fast", "state_dtype": None}),
    "bfloat16": ("state in bfloat16", {"polar": "fast", "state_dtype": "bfloat16"}),
    "int8": ("momentum in 8 bits", {"polar": "fast", "state_dtype": "int8"}),
}

STATE = Plan(
    experiment="state-ptb",
    title="Penn Treebank: Go-MUON with its state in fewer bits",
    task="ptb",
    arms=tuple(
        Arm(name, title, "go-muon", 0.08, options=options)
        for name, (title, options) in STATE_ARMS.items()
    ),
    seeds=STATE_SEEDS,
    steps=STATE_UPDATES,
    windows=windows_for(STATE_UPDATES),
    statistic=TRAJECTORY,
    rule=f"all arms at rate .08, fixed in advance; {STATE_FREE}; {PAIRED}",
    comparisons=tuple(("float32", name) for name in STATE_ARMS if name != "float32"),
    quick=Quick(steps=60, seeds=1),
)
