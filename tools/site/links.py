"""Find links of the built site that lead nowhere.

    python -m tools.site.links [FOLDER]

Sphinx checks the links that it makes. This looks at the pages as a browser gets them: every link,
picture, script and style sheet inside of the site must exist, and so must every heading that a link
names. Nothing may be loaded from elsewhere, so that the site is whole without a network.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FOLDER = Path("site")
LOADED = {"img": "src", "script": "src", "link": "href", "source": "srcset"}


class Page(HTMLParser):
    """The anchors of a page, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def has(self, anchor: str) -> bool:
        """Whether a link may name it; the empty one is the page itself."""
        return not anchor or anchor in self.anchors

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by the parser."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in LOADED and LOADED[tag] in given and given.get("rel") != "canonical":
            self.loaded.append(given[LOADED[tag]])


def dead_links(folder: Path) -> list[str]:
    """One sentence for each link that leads nowhere, or leaves the site to load something."""
    pages = {p.resolve(): Page(p.read_text(encoding="utf-8")) for p in folder.rglob("*.html")}
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        for link in page.loaded:
            if urlsplit(link).netloc:
                found.append(f"{name} loads {link} from elsewhere")
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                found.append(f"{name} links to {link}, which does not exist")
            elif target in pages and not pages[target].has(unquote(parts.fragment)):
                found.append(f"{name} links to {link}, which has no such heading")
    return sorted(set(found))


def main(folder: str = str(FOLDER)) -> int:
    """Print what was found; the exit code is 1 if there is anything."""
    found = dead_links(Path(folder))
    print("\n".join(found) or f"{folder}: no dead links")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
