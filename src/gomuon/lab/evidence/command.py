"""The command `gomuon evidence`."""

from __future__ import annotations

import importlib
from pathlib import Path

from gomuon.lab import files
from gomuon.lab.errors import LabError
from gomuon.lab.evidence import page as pages
from gomuon.lab.evidence.collecting import collect as collect_campaign
from gomuon.lab.evidence.reading import read_evidence
from gomuon.lab.flags import OptionalPath, OptionalText
from gomuon.lab.input_checks import errors_naming, is_folder
from gomuon.lab.terminal import SafeConsole

PAGE, PICTURES = "reproduction.md", "pictures"


def evidence(
    collect: OptionalPath = None,
    name: OptionalText = "",
    results: OptionalPath = None,
    out: OptionalPath = None,
) -> None:
    """Make docs/reproduction.md and its pictures from the files under results/.

    With --collect, copy a campaign into results/ first of all: its plan, and of every finished run
    the manifest, the result and a curve of a few kB. The page is then made by another call.

    Args:
        collect: A campaign folder to copy; nothing else is done.
        name: Its place in results; by default the folder's own name.
        results: Where campaigns are kept; by default results.
        out: Folder of the page and its pictures; by default docs.
    """
    console = SafeConsole()
    kept = results or Path("results")
    if collect is not None:
        with errors_naming(collect):
            study = collect_campaign(collect, kept, name)
        paths = [path for path in (kept / study.name).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in paths)
        said = f"{kept / study.name}: {len(study.runs)} of {study.declared} runs, {size:,} bytes"
        console.print(said, markup=False, highlight=False, soft_wrap=True)
        return
    if name:
        raise LabError("--name is for --collect; give the campaign's folder with --collect")
    if not is_folder(kept):
        raise LabError(f"{kept} does not exist; gomuon evidence --collect FOLDER fills it")
    folder = out or Path("docs")
    with errors_naming(kept):
        found = read_evidence(kept)
        files.make_folder(folder)
        files.refuse_links(folder / PICTURES)
        # Imported late: matplotlib takes a while.
        pictures = importlib.import_module("gomuon.lab.evidence.pictures")
        drawn = pictures.write(found, folder / PICTURES)
        text = pages.markdown(found, drawn, PICTURES)
    files.write_atomically(folder / PAGE, lambda part: part.write_text(text, encoding="utf-8"))
    for path in (folder / PAGE, *(folder / PICTURES / one for one in drawn)):
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)
