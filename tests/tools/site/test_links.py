"""The link check finds what leads nowhere."""

from pathlib import Path

from tools.site.links import dead_links, main

WHOLE = '<h1 id="top">T</h1><a href="b.html#there">b</a><a href="#top">t</a><img src="p.svg">'


def write_site(folder: Path, page: str) -> None:
    (folder / "a.html").write_text(page)
    (folder / "b.html").write_text('<h2 id="there">There</h2><a href="https://a.b/c">out</a>')
    (folder / "p.svg").write_text("<svg/>")


def test_a_whole_site_has_none(tmp_path: Path) -> None:
    write_site(tmp_path, WHOLE)
    assert dead_links(tmp_path) == []
    assert main(str(tmp_path)) == 0


def test_each_kind_is_found(tmp_path: Path) -> None:
    broken = (
        '<a href="c.html">c</a><a href="b.html#gone">b</a><img src="q.svg">'
        '<script src="https://cdn.example/x.js"></script>'
    )
    write_site(tmp_path, WHOLE + broken)
    assert dead_links(tmp_path) == [
        "a.html links to b.html#gone, which has no such heading",
        "a.html links to c.html, which does not exist",
        "a.html links to q.svg, which does not exist",
        "a.html loads https://cdn.example/x.js from elsewhere",
    ]
    assert main(str(tmp_path)) == 1
