"""The page says what the counts say."""

import json

import pytest

from tests.faults import interrupts, steps, test_steps
from tests.faults.campaign import CAMPAIGNS, methods_of, module_of
from tests.faults.page import PAGE, RESULTS, page


def test_the_page_is_made_of_the_counts() -> None:
    assert PAGE.read_text() == page(json.loads(RESULTS.read_text()))


def test_every_campaign_was_run_whole() -> None:
    """As large as it was when it was run; as it is now, unless methods came since."""
    counts = json.loads(RESULTS.read_text())
    assert counts.keys() == CAMPAIGNS.keys()
    for name in CAMPAIGNS:
        found = counts[name]
        assert found["cases"] == found["whole"]
        assert set(found["methods"]) <= set(methods_of(name))
        if found["methods"] == methods_of(name):
            assert found["whole"] == module_of(name)[1]


@pytest.mark.parametrize("name", ["steps", "interrupts"])
def test_the_page_names_the_methods_that_a_campaign_was_not_run_for(name: str) -> None:
    counts = json.loads(RESULTS.read_text())
    counts[name]["methods"] = methods_of(name)
    said = f"The count of **{name}** holds for"
    assert said not in page(counts)
    counts[name]["methods"].remove("GoMuon")
    (line,) = [line for line in page(counts).splitlines() if said in line]
    assert line.endswith("for them: GoMuon.")


def test_make_test_runs_cases_of_every_method() -> None:
    """As the page says: the cases of test_steps.py and test_interrupts.py."""
    run = {steps.RECIPES[steps.numbered(seed)[0]][0] for seed in range(test_steps.FEW)}
    assert run == set(steps.METHOD_NAMES)
    assert {name for name, _, _ in interrupts.KINDS} == set(interrupts.METHOD_NAMES)
