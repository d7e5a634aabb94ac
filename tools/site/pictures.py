"""Draw the pictures of the site's own pages, light and dark.

    python -m tools.site.pictures [FOLDER]

Writes rates*.svg from results/tune-*, and step-*.svg from one step of a training run that takes
about a second. Nothing else of docs/pictures is touched: `make evidence` draws the others.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from gomuon.lab.report.svg import Style, render_svg
from tools.site.rate_drawing import draw_rates
from tools.site.real_step import RealStep, take
from tools.site.step_drawing import draw_balls, draw_factors, draw_stations

FOLDER, RESULTS = Path("docs") / "pictures", Path("results")


def drawn(step: RealStep, results: Path = RESULTS) -> dict[str, str]:
    """File name -> SVG."""
    drawers: dict[str, tuple[Callable[[Figure, Style], None], float]] = {
        "step-factors": (partial(draw_factors, step), 5.0),
        "step-stations": (partial(draw_stations, step), 5.4),
        "step-balls": (partial(draw_balls, step), 4.4),
        "rates": (partial(draw_rates, results), 5.2),
    }
    return {
        f"{name}{'-dark' if dark else ''}.svg": render_svg(draw, Style(wide=False, dark=dark), high)
        for name, (draw, high) in drawers.items()
        for dark in (False, True)
    }


def main(folder: str = str(FOLDER)) -> None:
    """Draw and write."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, svg in drawn(take()).items():
        path = Path(folder) / name
        path.write_text(svg, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main(*sys.argv[1:2])
