"""The pictures of the site show what their pages say."""

import re
from pathlib import Path

import pytest
import torch

from gomuon.functional import weighted_norm
from tools.site.pictures import drawn
from tools.site.rate_drawing import METHODS, SWEEPS, courses
from tools.site.real_step import RealStep, take
from tools.site.step_drawing import _outline, _place, _plane

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def step() -> RealStep:
    return take()


def test_the_pieces_make_the_optimizers_own_step(step: RealStep) -> None:
    assert torch.allclose(step.direction, step.update, rtol=0, atol=1e-9)
    values = torch.linalg.svdvals(step.levelled)
    assert torch.allclose(values, torch.ones_like(values), atol=1e-6)


def test_what_the_page_says_of_the_pictures(step: RealStep) -> None:
    """Two orders of magnitude in a factor, about three in a map; D's singular values, six."""
    for factor, the_map in zip(step.factors, (step.left, step.right), strict=True):
        assert 50 < torch.linalg.cond(factor) < 200
        assert 2.5 < torch.linalg.cond(the_map) < 4
    assert 5 < torch.linalg.cond(step.direction) < 8
    both = [(step.source * x).sum() for x in (step.direction, step.muon)]
    assert 0 < both[0] < both[1]  # "Muon climbs higher with this length"


def test_each_step_is_the_highest_point_of_its_ball(step: RealStep) -> None:
    plane = _plane(step)
    balls = ((step.direction, step.left, step.right), (step.muon, None, None))
    for direction, left, right in balls:
        outline = _outline(plane, direction, left, right)
        height = _place(plane, direction)[1]
        assert outline[:, 1].max() <= height + 1e-9
        assert outline[:, 1].max() > 0.98 * height
        in_plane = outline[7, 0] * plane[0] + outline[7, 1] * plane[1]
        assert torch.isclose(
            weighted_norm(in_plane, left, right), weighted_norm(direction, left, right)
        )


def test_the_committed_pictures_are_those_that_are_drawn(step: RealStep) -> None:
    """By their sizes and words; last digits of the step may differ between machines."""
    pictures = drawn(step, ROOT / "results")
    for name, svg in pictures.items():
        kept = (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8")
        for pattern in (r"<svg [^>]*>", r"<!-- (.*?) -->"):
            assert re.findall(pattern, kept) == re.findall(pattern, svg), f"{name}: make pages"
    for dark in ("", "-dark"):  # this one holds nothing but numbers from files
        name = f"rates{dark}.svg"
        kept = (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8")
        assert kept == pictures[name], f"{name}: make pages"


def test_what_the_page_says_of_the_rates() -> None:
    """Half of Go-MUON's best rate costs more than twice of it, on both texts."""
    import json

    for folder in SWEEPS:
        selection = json.loads((ROOT / "results" / folder / "selection.json").read_text())
        assert set(METHODS) <= set(selection["methods"])
        losses = dict(courses(selection, "go-muon")[0.8])
        best = min(losses, key=lambda rate: losses[rate])
        assert losses[best / 2] > losses[best * 2]
