"""Write the report of a campaign: `report.md` and `report.html`, rendered from one document.

A sweep also gets its picture as `rates.svg` and `rates-dark.svg`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gomuon.lab import formatting as w
from gomuon.lab.experiments.selection import EXPERIMENT
from gomuon.lab.files import write_text
from gomuon.lab.input_checks import errors_naming
from gomuon.lab.report import common_sections, grokking_sections, language_sections, sweep_sections
from gomuon.lab.report.document import Document, Note, Plot, Section, Standing
from gomuon.lab.report.html import render_html
from gomuon.lab.report.markdown import render_markdown
from gomuon.lab.results.campaigns import Campaign, read_campaign
from gomuon.lab.results.candidates import picks_of_campaign
from gomuon.lab.results.grokking_outcomes import analyse as analyse_grokking
from gomuon.lab.results.language_outcomes import analyse as analyse_language

MARKDOWN, HTML = "report.md", "report.html"
RATES, RATES_DARK = "rates.svg", "rates-dark.svg"


def write_report(folder: str | Path) -> tuple[Path, Path]:
    """Write the files into the folder of a campaign or a single run; return the report's paths.

    Raises:
        LabError: the folder is neither, a file is damaged, the runs may not be compared, or the
            folder cannot be written. Files are written completely or not at all.
    """
    folder = Path(folder)
    with errors_naming(folder):
        document = build_document(read_campaign(folder))
        texts = {MARKDOWN: render_markdown(document), HTML: render_html(document)}
        texts |= _pictures(document)
    for name, text in texts.items():
        write_text(folder / name, text)
    return folder / MARKDOWN, folder / HTML


def _pictures(document: Document) -> dict[str, str]:
    """The picture of a sweep, for use outside of the report."""
    for section in document.sections:
        for block in section.blocks if section.title == sweep_sections.TITLE else ():
            if isinstance(block, Plot):
                return {RATES: block.wide, RATES_DARK: block.wide_dark}
    return {}


def build_document(campaign: Campaign) -> Document:
    """The content of the report: text, tables and plots."""
    headline, evidence, standings, sections = _findings(campaign)
    return Document(
        title=campaign.title,
        headline=headline,
        evidence=evidence,
        introduction=_introduction(campaign),
        quick=campaign.label == "quick",
        standings=standings,
        sections=(*_caution(campaign), *sections, *common_sections.sections(campaign)),
    )


def _findings(campaign: Campaign) -> tuple[str, str, tuple[Standing, ...], list[Section]]:
    if campaign.experiment == EXPERIMENT:
        picks = picks_of_campaign(campaign)
        race = dataclasses.replace(sweep_sections.picked_race(campaign, picks), experiment="race")
        headline, evidence, standings, sections = _findings(race)
        if len(standings) > 1:
            evidence = f"{evidence} {sweep_sections.caution(campaign)}".strip()
        return headline, evidence, standings, [sweep_sections.section(campaign, picks), *sections]
    if campaign.task == "grokking":
        grok = analyse_grokking(campaign)
        return (
            grokking_sections.headline(grok),
            grokking_sections.evidence(grok),
            grokking_sections.standings(grok),
            grokking_sections.sections(grok),
        )
    language = analyse_language(campaign)
    return (
        language_sections.headline(language),
        language_sections.evidence(language),
        language_sections.standings(language),
        language_sections.sections(language),
    )


def _introduction(campaign: Campaign) -> str:
    done = sum(len(arm.finished) for arm in campaign.arms)
    total = len(campaign.arms) * len(campaign.seeds)
    arms = w.many(len(campaign.arms), "arm")
    text = f"{arms}, {w.seeds(campaign.seeds)}, {w.many(campaign.steps, 'update')} each"
    if done < total:
        text += f"; {done} of {total} runs finished"
    return f"{text}. Arms that share a seed share initial parameters, minibatches and schedule."


def _caution(campaign: Campaign) -> list[Section]:
    """A warning at the top of the report of an unfinished campaign."""
    left = len(campaign.missing) + len(campaign.unfinished)
    if not left:
        return []
    text = f"This campaign is not finished: {w.many(left, 'run')} to go. Numbers may still change."
    return [Section("Unfinished", (Note(text, "warn"),))]
