"""The site builds without a warning, and no link of it leads nowhere."""

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gomuon.recipes.registry import METHODS
from tools.site.links import dead_links

pytest.importorskip("furo", reason='needs the "docs" extra')
pytest.importorskip("myst_nb", reason='needs the "docs" extra')

ROOT = Path(__file__).parents[3]
# tests/test_notebooks.py runs them.
WITHOUT_NOTEBOOKS = ("-D", "nb_execution_mode=off")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    builder = (sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html")
    cache = tmp_path_factory.mktemp("doctrees")
    run = subprocess.run(
        [*builder, *WITHOUT_NOTEBOOKS, "-d", str(cache), "docs", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    assert "WARNING" not in run.stderr
    return folder


@pytest.mark.slow
def test_no_link_leads_nowhere(site: Path) -> None:
    assert dead_links(site) == []


@pytest.mark.slow
def test_every_page_is_there_and_can_be_reached(site: Path) -> None:
    index = (site / "index.html").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").exists(), page
        assert page.stem == "index" or f'href="{page.stem}.html"' in index, page
    for notebook in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        assert f'href="notebooks/{notebook.stem}.html"' in index


@pytest.mark.slow
def test_the_api_has_every_public_name(site: Path) -> None:
    import gomuon

    api = (site / "api.html").read_text(encoding="utf-8")
    for name in {*gomuon.__all__, *METHODS} - {"functional"}:
        assert f'id="gomuon.{name}"' in api, name
    for name in gomuon.functional.__all__:
        wanted = (
            "module-gomuon.functional.theory" if name == "theory" else f"gomuon.functional.{name}"
        )
        assert f'id="{wanted}"' in api, name


@pytest.mark.slow
def test_quotes_are_the_pages_own_words(site: Path) -> None:
    choosing = (site / "choosing.html").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `ablations` \| K = 16.*\| ([−+][\d.]+ %) \| [^|]* \| [^|]*\|$", page, re.M
    )
    assert len(rows) == 1
    assert rows[0] in html.unescape(choosing)


@pytest.mark.slow
def test_no_formula_was_taken_for_emphasis(site: Path) -> None:
    """Markdown reads ‖D‖_op … ‖M‖_* as emphasis unless it is escaped."""
    for page in site.glob("*.html"):
        for words in re.findall(r"<em>([^<]*)</em>", page.read_text(encoding="utf-8")):
            assert "‖" not in words, f"{page.name}: {words}"
