"""Read reports back and damage folders, for the tests of reports."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from gomuon.lab.report.writing import write_report


class Tags(HTMLParser):
    """What a browser would make elements of."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def reported(folder: Path) -> tuple[str, str]:
    """Write the report; the text of both files."""
    markdown, page = write_report(folder)
    return markdown.read_text(encoding="utf-8"), page.read_text(encoding="utf-8")


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
