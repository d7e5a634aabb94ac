"""The command line of `python -m tools.evidence`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from gomuon.lab import files
from gomuon.lab.errors import LabError
from gomuon.lab.flags import refuse_empty
from gomuon.lab.input_checks import errors_naming, is_folder
from gomuon.lab.terminal import escaped, one_line
from tools.evidence.collect import collect
from tools.evidence.page import markdown
from tools.evidence.results_folder import read_evidence
from tools.evidence.softmax_courses import read_courses

PROGRAM = "python -m tools.evidence"
PAGE, PICTURES = "reproduction.md", "pictures"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Make docs/reproduction.md and its pictures from the files under results/.",
    )
    made.add_argument(
        "--collect",
        type=Path,
        metavar="CAMPAIGN",
        help="copy this campaign folder into results/ (plan, and per finished run the manifest, "
        "the result and a small curve) and do nothing else",
    )
    made.add_argument(
        "--name", help="with --collect: the folder in results/; by default the campaign's own name"
    )
    made.add_argument(
        "--results", type=Path, default=Path("results"), help="where campaigns are kept"
    )
    made.add_argument(
        "--out", type=Path, default=Path("docs"), help="folder of the page and its pictures"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 2 for a user's error."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        refuse_empty(words)
        given = parser().parse_args(words)
        if given.collect is not None:
            collect_campaign(given.collect, given.results, given.name or "")
        elif given.name is not None:
            raise LabError("--name is for --collect; give the campaign's folder with --collect")
        else:
            write_page(given.results, given.out)
    except (LabError, OSError) as error:
        print(one_line(f"{PROGRAM}: {error}"), file=sys.stderr)
        return 2
    return 0


def collect_campaign(folder: Path, results: Path, name: str) -> None:
    """Copy a campaign into ``results`` and print how much was copied."""
    with errors_naming(folder):
        study = collect(folder, results, name)
    place = results / study.name
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    print(escaped(f"{place}: {len(study.runs)} of {study.declared} runs, {size:,} bytes"))


def write_page(results: Path, out: Path) -> None:
    """Write the page and its pictures, and print their paths."""
    if not is_folder(results):
        raise LabError(f"{results} does not exist; {PROGRAM} --collect CAMPAIGN fills it")
    with errors_naming(results):
        evidence = read_evidence(results)
        files.make_folder(out)
        files.refuse_links(out / PICTURES)
        # Imported late: matplotlib takes a while, and collecting does not need it.
        drawing = importlib.import_module("tools.evidence.picture_drawing")
        drawn = drawing.write_pictures(evidence, out / PICTURES)
        courses = read_courses(results)
        of_labels = importlib.import_module("tools.evidence.softmax_drawing")
        drawn += of_labels.write_picture(courses, out / PICTURES)
        text = markdown(evidence, drawn, PICTURES, courses)
    files.write_atomically(out / PAGE, lambda part: part.write_text(text, encoding="utf-8"))
    for path in (out / PAGE, *(out / PICTURES / name for name in drawn)):
        print(escaped(str(path)))
