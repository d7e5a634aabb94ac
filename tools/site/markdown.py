"""How a page of docs/ becomes a page of the site: links and pictures change, words do not.

The pages are also read as files of the repository. There a link may leave docs/, and a picture has
a light and a dark form that the reader's system chooses. The site has a page for each file that is
linked from docs/, and a switch of its own between light and dark.
"""

import posixpath
import re

# Files outside of docs/ that have a page of their own here.
PAGES = {
    "../README.md": "index.md",
    "../CHANGELOG.md": "changelog.md",
    "../CONTRIBUTING.md": "contributing.md",
    "../CODE_OF_CONDUCT.md": "conduct.md",
    "../SECURITY.md": "security.md",
    "../results/README.md": "results.md",
}
_LINK = re.compile(r"\]\((?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")
_PICTURE = re.compile(
    r'<picture><source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">'
    r'<img (?P<before>[^>]*)src="(?P<light>[^"]+)"(?P<after>[^>]*)></picture>'
)
_HEADING = re.compile(r"^(?P<level>#{1,6}) +(?P<title>.*?)\s*$")
_FENCE = re.compile(r"^ {0,3}(```+|~~~+)")


def for_site(text: str) -> str:
    """The page with links to repository files and pictures as the site needs them."""
    return _PICTURE.sub(_both_pictures, _LINK.sub(_to_page, text))


def _to_page(link: re.Match[str]) -> str:
    path = PAGES.get(link["path"])
    # A heading of a file is not one of the page made for it, so its anchor is dropped.
    return f"]({path})" if path else link[0]


def seen_from_docs(text: str, name: str) -> str:
    """The links of the file `name`, a path from docs/, as they are from docs/."""
    folder = posixpath.dirname(name)

    def moved(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link["path"]))
        return f"]({path.removeprefix('../docs/')}{link['anchor'] or ''})"

    return _LINK.sub(moved, text)


def _both_pictures(picture: re.Match[str]) -> str:
    rest = f"{picture['before']}{picture['after']}".strip()
    return "".join(
        f'<img src="{picture[which]}" class="only-{which}" {rest}>' for which in ("light", "dark")
    )


def section(text: str, title: str) -> str:
    """What stands under the heading `title`, up to the next heading of any level.

    Raises:
        ValueError: no heading has this title, or more than one has.
    """
    lines, headings, fenced = text.splitlines(), [], False
    for number, line in enumerate(lines):
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced and (found := _HEADING.match(line)):
            headings.append((number, found["title"]))
    places = [i for i, (_, name) in enumerate(headings) if name == title]
    if len(places) != 1:
        raise ValueError(f"{len(places)} headings say {title!r}; expected one")
    begin = headings[places[0]][0] + 1
    end = headings[places[0] + 1][0] if places[0] + 1 < len(headings) else len(lines)
    return "\n".join(lines[begin:end]).strip() + "\n"


def only_rows(text: str, wanted: list[str]) -> str:
    """The tables of `text` alone, with those rows that have a wanted cell.

    Raises:
        ValueError: there is no such row.
    """
    kept, missing = [], dict.fromkeys(wanted)
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if not line.startswith("|"):
            continue
        after = lines[i + 1] if i + 1 < len(lines) else ""
        is_head = re.match(r"\|[\s:|-]+\|$", line) or re.match(r"\|[\s:|-]+\|$", after)
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found = [name for name in wanted if name in cells]
        if is_head or found:
            kept.append(line)
        for name in found:
            missing.pop(name, None)
    if missing:
        raise ValueError(f"no row says {next(iter(missing))!r}")
    return "\n".join(kept) + "\n"


def without_title(text: str) -> str:
    """A file without its first heading, for a page that has a title of its own."""
    first, _, rest = text.lstrip().partition("\n")
    return rest if first.startswith("# ") else text
