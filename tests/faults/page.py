"""docs/faults.md, from the counts under results/faults.

`--save` keeps the methods that a campaign went through with its counts. Whoever changes what one of
them computes, or adds options to it in `tests/methods/table.py`, takes its name out there. Until
the campaign is run again, the page says which methods were not run as they are now.
"""

import json
from pathlib import Path
from typing import Any

from tests.faults.campaign import CAMPAIGNS, methods_of

RESULTS = Path("results/faults/faults.json")
PAGE = Path("docs/faults.md")

HEAD = """\
# Faults

These campaigns cause the faults that can occur in training, many times, from numbered seeds.
`make faults` runs all of them; `make test` runs a few cases of each. Repeat a case that fails with
`python -m tests.faults CAMPAIGN --seed SEED`.

| campaign | one case | cases | failures |
|---|---|---|---|
"""
TAIL = """
What each campaign checks:

- **steps**: every method × three precisions × raise, skip and allow × ten faults (NaN, infinity,
  numbers whose squares overflow, denormals, zeros, constant rows, one row, duplicated rows, no
  rows) × inputs, one layer's output, all gradients, one gradient × a refresh step and a reuse
  step. With "raise" and "skip", five clean steps afterwards must give finite weights and a lower
  loss. With "allow" gradients are not checked, so NaN may reach the weights; no error may occur.
- **interrupts**: an exception instead of one operation, for every operation of a step, every
  method, refresh and reuse steps. Afterwards the optimizer must continue bit for bit like a new one
  with the same weights and state, and all global settings must be as before.
- **calls**: public functions and constructors. A wrong argument must give a ValueError or a
  TypeError that names it.
- **checkpoints**: bit flips, truncations, other methods and models, impossible settings, wrong
  types and shapes at any depth. Loading must raise a ValueError and change nothing, or succeed, and
  then training must work.
- **commands**: every command and flag of `gomuon`. There may be no traceback, no raw escape
  sequence, and no change outside the command's folder.
- **kills**: a campaign of runs is killed and continued. Its results must equal those of a campaign
  that was never killed.
- **ranks**: a rank is killed, raises or stalls. The other ranks must end by themselves with an
  error that says so.
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
    return HEAD + "".join(rows) + where + _methods(counts) + TAIL


def _methods(counts: dict[str, Any]) -> str:
    """Which methods the campaigns that go through all of them were run for."""
    lines = []
    for name in CAMPAIGNS:
        run, present = counts[name]["methods"], methods_of(name)
        if missing := [method for method in present if method not in run]:
            lines.append(
                f"\nThe count of **{name}** holds for {', '.join(run)}. Others were added or "
                "changed since that campaign was run; only the few cases of `make test` have been "
                f"run for them: {', '.join(missing)}.\n"
            )
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
