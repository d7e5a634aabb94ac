"""Run campaigns of faults, print their counts, and keep them if asked to."""

import argparse
import json
import os
import sys
from dataclasses import asdict

from gomuon.lab.machine import facts, versions
from tests.faults.campaign import CAMPAIGNS, Outcome, methods_of, module_of, reason_of, run
from tests.faults.page import RESULTS


def main() -> int:
    """Run what is asked for; the exit code tells of failures."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CAMPAIGNS)}; all by default")
    parser.add_argument("--cases", type=int, help="cases of each campaign; all by default")
    parser.add_argument("--seed", type=int, help="repeat one case of one campaign")
    parser.add_argument("--save", action="store_true", help=f"keep the counts in {RESULTS}")
    arguments = parser.parse_args()
    names = arguments.names or list(CAMPAIGNS)
    if unknown := [name for name in names if name not in CAMPAIGNS]:
        parser.error(f"no campaign {unknown[0]!r}; there are {', '.join(CAMPAIGNS)}")
    if arguments.seed is not None:
        for name in names:
            print(f"{name}, seed {arguments.seed}: {reason_of((name, arguments.seed)) or 'holds'}")
        return 0
    outcomes = []
    for name in names:
        outcomes.append(
            run(name, range(arguments.cases or module_of(name)[1]), os.cpu_count() or 1)
        )
        _print(outcomes[-1])
        if arguments.save:
            _save(outcomes[-1])
    return int(any(outcome.failures for outcome in outcomes))


def _print(outcome: Outcome) -> None:
    print(
        f"{outcome.name}: {outcome.cases} cases, {len(outcome.failures)} failures, "
        f"{outcome.seconds:.0f} s",
        flush=True,
    )
    for failure in outcome.failures:
        print(f"  seed {failure.seed}: {failure.reason.strip()}", flush=True)


def _save(outcome: Outcome) -> None:
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept[outcome.name] = {
        **asdict(outcome),
        "whole": module_of(outcome.name)[1],
        "methods": methods_of(outcome.name),
        "machine": facts(),
        "versions": versions(),
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
