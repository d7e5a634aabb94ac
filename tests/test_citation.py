"""CITATION.cff names this version and the paper."""

import re
from pathlib import Path

import gomuon

TEXT = (Path(__file__).parents[1] / "CITATION.cff").read_text(encoding="utf-8")


def test_the_version_is_the_packages() -> None:
    assert re.findall(r"^version: (\S+)$", TEXT, re.MULTILINE) == [gomuon.__version__]


def test_it_names_the_paper_and_its_author() -> None:
    assert "Second-Order Muon Done Right" in TEXT
    assert re.search(r'family-names: "Che"\s+given-names: "Tong"', TEXT)
