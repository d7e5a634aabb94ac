"""The page says what the counts say."""

import json

from tests.faults.campaign import CAMPAIGNS, module_of
from tests.faults.page import PAGE, RESULTS, page


def test_the_page_is_made_of_the_counts() -> None:
    assert PAGE.read_text() == page(json.loads(RESULTS.read_text()))


def test_every_campaign_was_run_whole() -> None:
    counts = json.loads(RESULTS.read_text())
    assert counts.keys() == CAMPAIGNS.keys()
    for name in CAMPAIGNS:
        assert counts[name]["cases"] == module_of(name)[1]
