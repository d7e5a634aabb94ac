"""docs/faults.md, from the counts under results/faults."""

import json
from pathlib import Path
from typing import Any

from tests.faults.campaign import CAMPAIGNS

RESULTS = Path("results/faults/faults.json")
PAGE = Path("docs/faults.md")

HEAD = """\
# Faults

What may go wrong in training goes wrong here on purpose, many times, from numbered seeds. `make
faults` runs all of it; a few cases of each campaign are part of `make test`. A case that fails is
repeated with `python -m tests.faults CAMPAIGN --seed SEED`.

| campaign | one case | cases | failures |
|---|---|---|---|
"""
TAIL = """
What a case asks:

- **steps**: every method × three precisions × raise, skip and allow × ten faults (NaN, infinity,
  numbers whose squares overflow, denormals, zeros, constant rows, one row, duplicated rows, no
  rows) × inputs, one layer's output, all gradients, one gradient × a refresh step and a reuse
  step. With "raise" and "skip" five clean steps must leave finite weights and a lower loss. With
  "allow" nobody looks at gradients, so NaN may reach the weights; nothing may be raised.
- **interrupts**: an exception instead of one operation, for every operation of a step, every
  method, refresh and reuse steps. The optimizer must go on bit for bit as a new one with the same
  weights and state, and all global settings must be as before.
- **calls**: public functions and constructors. A wrong argument must give a ValueError or a
  TypeError that names it.
- **checkpoints**: bit flips, truncations, foreign methods and models, impossible settings, wrong
  types and shapes at any depth. Loading must raise a ValueError and change nothing, or train on.
- **commands**: every command and flag of `gomuon`. No traceback, no raw escape sequence, nothing
  changed outside its folder.
- **kills**: a campaign of runs is killed and continued. Its results must be those of one that was
  never killed.
- **ranks**: a rank is killed, raises or stalls. The others must end by themselves with an error
  that says so.
"""


def page(counts: dict[str, Any]) -> str:
    """The page of these counts."""
    rows = []
    for name, what in CAMPAIGNS.items():
        found = counts[name]
        failures = len(found["failures"])
        rows.append(f"| {name} | {what} | {found['cases']:,} | {failures} |\n")
    versions = next(iter(counts.values()))["versions"]
    machine = next(iter(counts.values()))["machine"]
    where = (
        f"\nCounted with torch {versions['torch']} and Python {versions['python']} on "
        f"{machine['cores']} cores ({machine['processor']}, {machine['system']}); "
        "results/faults/faults.json has each campaign's own versions and the seeds of failures.\n"
    )
    return HEAD + "".join(rows) + where + TAIL


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
