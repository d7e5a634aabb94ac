"""What the site makes of a page's links and pictures, and which part of a page is quoted."""

import pytest

from tools.site.markdown import for_site, only_rows, section, seen_from_docs, without_title

PAGE = """# Title

Before.

## First

One.

```sh
# not a heading
```

| name | loss |
| --- | ---: |
| Muon | 1.5 |
| AdamW | 1.7 |

### Second

Two.

## Second

Again.
"""


def test_links_to_files_that_have_a_page_lead_there() -> None:
    text = (
        "[a](../results/README.md#what) [b](../results/x.json) [c](watch.md#rates) [d](https://e.f)"
    )
    wanted = "[a](results.md) [b](../results/x.json) [c](watch.md#rates) [d](https://e.f)"
    assert for_site(text) == wanted


def test_a_picture_becomes_one_for_each_theme() -> None:
    text = (
        '<picture><source media="(prefers-color-scheme: dark)" srcset="p-dark.svg">'
        '<img alt="A" src="p.svg" width="400"></picture>'
    )
    assert for_site(text) == (
        '<img src="p.svg" class="only-light" alt="A"  width="400">'
        '<img src="p-dark.svg" class="only-dark" alt="A"  width="400">'
    )


def test_links_of_an_included_file_are_those_of_its_folder() -> None:
    assert seen_from_docs("[a](docs/speed.md#x)", "../CHANGELOG.md") == "[a](speed.md#x)"
    assert seen_from_docs("[a](../docs/speed.md)", "../results/README.md") == "[a](speed.md)"
    assert seen_from_docs("[a](ptb/plan.json)", "../results/README.md") == (
        "[a](../results/ptb/plan.json)"
    )
    assert without_title("# T\n\nrest") == "\nrest"
    assert without_title("no title") == "no title"


def test_a_section_ends_at_the_next_heading_of_any_level() -> None:
    first = section(PAGE, "First")
    assert first.startswith("One.")
    assert "# not a heading" in first
    assert "Two." not in first
    with pytest.raises(ValueError, match="2 headings say 'Second'"):
        section(PAGE, "Second")
    with pytest.raises(ValueError, match="0 headings say 'Third'"):
        section(PAGE, "Third")


def test_rows_are_chosen_by_a_cell() -> None:
    chosen = only_rows(section(PAGE, "First"), ["AdamW"])
    assert chosen == "| name | loss |\n| --- | ---: |\n| AdamW | 1.7 |\n"
    with pytest.raises(ValueError, match="no row says 'SOAP'"):
        only_rows(PAGE, ["AdamW", "SOAP"])
