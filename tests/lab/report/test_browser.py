"""A report in a real browser: nothing is missing or cut off, and there are no errors."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gomuon.lab.experiments.racing import race_plan
from gomuon.lab.experiments.tuning import tune_plan
from gomuon.lab.report.writing import write_report
from tests.lab.helpers.made_campaigns import race, short, write_campaign

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--enable-logging=stderr", "--virtual-time-budget=3000"),
)
WIDTHS = {"phone": 375, "desktop": 1280}
SCHEMES = {"light": 1, "dark": 0}  # Blink's numbers

# Runs first, so that it hears of every error, and reports when all is loaded.
PROBE = """<script>
const errors = [];
addEventListener("error", e => errors.push(String(e.message || e.target.outerHTML)), true);
addEventListener("load", () => {
  document.querySelectorAll("details").forEach(d => { d.open = true; });
  const page = document.documentElement;
  const inside = e => { const b = e.getBoundingClientRect(); return [b.left, b.right]; };
  const seen = {
    errors,
    width: innerWidth,
    overflow: page.scrollWidth - page.clientWidth,
    images: [...document.images].map(i => ({
      loaded: i.complete, natural: [i.naturalWidth, i.naturalHeight], shown: inside(i), alt: i.alt
    })),
    cards: [...document.querySelectorAll("section, details, .card, h1")].map(inside),
    tables: [...document.querySelectorAll(".scroll")].map(inside),
    small: Math.min(...[...document.querySelectorAll("p, td, li, dd, span")]
      .map(e => parseFloat(getComputedStyle(e).fontSize))),
    paper: getComputedStyle(document.body).backgroundColor,
  };
  parent.postMessage(JSON.stringify(seen), "*");
});
</script>"""

# A browser's window is never as narrow as a phone, a frame can be.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><body>
<script>
addEventListener("message", event => {
  const pre = document.createElement("pre");
  pre.id = "probe";
  pre.textContent = event.data;
  document.body.append(pre);
});
</script>
<iframe src="watched.html" style="border:0;width:WIDTHpx;height:900px"></iframe>"""


def opened(page: Path, profile: Path, width: int, scheme: str) -> tuple[dict[str, Any], str]:
    """Open a copy of the page that watches itself; what it saw and what the browser logged."""
    assert BROWSER is not None
    text = page.read_text(encoding="utf-8")
    watched = text.replace("<head>", "<head>" + PROBE, 1)
    page.with_name("watched.html").write_text(watched, encoding="utf-8")
    frame = page.with_name("frame.html")
    frame.write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    done = subprocess.run(
        [
            *(BROWSER, *FLAGS, f"--user-data-dir={profile}", "--window-size=1400,1000"),
            *(f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--dump-dom"),
            frame.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, f"the page did not finish loading: {done.stderr[-2000:]}"
    return json.loads(html.unescape(found[1])), done.stderr


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    plans = {
        "race": race(steps=400),
        "seeds": race_plan("grokking", "go-muon,muon,soap,kfac,adamw", steps=400),
        "held out": race_plan("experts", "go-muon,muon,soap,kfac,adamw", steps=90, target=1.5),
        "sweep": tune_plan("shakespeare", "go-muon,muon", grid=3, seeds="0-2", steps=60),
        "grokking": short("grokking"),
        # Two controls and tuning runs: the widest tables there are.
        "shakespeare": short("shakespeare"),
    }
    return {
        name: write_report(write_campaign(folder / name, plan))[1] for name, plan in plans.items()
    }


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        *(("race", "light"), ("race", "dark"), ("grokking", "light"), ("shakespeare", "dark")),
        *(("seeds", "light"), ("held out", "dark"), ("sweep", "light")),
    ],
)
@pytest.mark.parametrize("device", WIDTHS)
def test_a_report_in_a_browser(
    name: str, device: str, scheme: str, pages: dict[str, Path], tmp_path: Path
) -> None:
    width = WIDTHS[device]
    seen, log = opened(pages[name], tmp_path / "profile", width, scheme)
    assert seen["errors"] == []
    assert "CONSOLE" not in log
    assert seen["width"] == width
    assert seen["overflow"] <= 0

    pictures = {"race": 1, "grokking": 1, "shakespeare": 2, "seeds": 2, "held out": 4, "sweep": 3}
    assert len(seen["images"]) == pictures[name]
    for image in seen["images"]:
        assert image["loaded"]
        assert min(image["natural"]) > 100
        assert image["shown"][1] - image["shown"][0] > 0.7 * min(width, 1000)
        assert len(image["alt"]) > 40
        # The variant drawn for this kind of screen, so that its letters stay legible.
        assert (image["natural"][0] < 500) == (device == "phone")
    for left, right in (*seen["cards"], *seen["tables"]):
        assert 0 <= left < right <= width
    assert seen["small"] >= 13
    dark = sum(int(part) for part in re.findall(r"\d+", seen["paper"])[:3]) < 200
    assert dark == (scheme == "dark")


def test_the_probe_sees_what_is_broken(tmp_path: Path) -> None:
    """A test of the test: a page with every fault must not pass unnoticed."""
    page = tmp_path / "broken.html"
    page.write_text(
        "<!doctype html><html><head></head><body><p>x</p><div style='width:3000px'>wide</div>"
        "<img src='missing.png' alt=''><script>nonsense()</script></body></html>"
    )
    seen, log = opened(page, tmp_path / "profile", 1280, "light")
    assert any("nonsense" in error for error in seen["errors"])
    assert "CONSOLE" in log
    assert seen["overflow"] > 1000
    assert seen["images"][0]["natural"] == [0, 0]
