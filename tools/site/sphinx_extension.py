"""The directives of the site, and what every page goes through. Loaded by docs/conf.py.

```{quoted} reproduction.md        the text under one heading of another page, as it is there
:rows: Go-MUON; Muon               of its tables only these rows, and nothing else
How often must the geometry be renewed?
```
```{methods}                       the class of every registered method, from its docstring
```
```{file} ../CHANGELOG.md          a file of the repository, without its first heading
```
"""

from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

import gomuon
from tools.site.markdown import for_site, only_rows, section, seen_from_docs, without_title


class _Markdown(SphinxDirective):
    """A directive whose content is Markdown made by code."""

    def parsed(self, text: str, origin: str) -> list[nodes.Node]:
        holder = nodes.Element()
        holder.document = self.state.document
        lines = StringList(for_site(text).splitlines(), origin)
        self.state.nested_parse(lines, self.content_offset, holder, match_titles=True)
        return holder.children

    def read(self, name: str) -> str:
        relative, path = self.env.relfn2path(name)
        self.env.note_dependency(relative)
        return Path(path).read_text(encoding="utf-8")


class Quoted(_Markdown):
    """The text under one heading of another page, and where it is from."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar = {"rows": lambda words: [word.strip() for word in words.split(";")]}

    def run(self) -> list[nodes.Node]:
        name, title = self.arguments[0], " ".join(self.content)
        try:
            text = section(self.read(name), title)
            if "rows" in self.options:
                text = only_rows(text, self.options["rows"])
        except (OSError, ValueError) as error:
            raise self.error(f"{name}: {error}") from error
        quote = nodes.container(classes=["quoted"])
        quote += self.parsed(f"**{title}**\n\n{text}\n\nFrom [{name}]({name}).", name)
        return [quote]


class File(_Markdown):
    """A file of the repository as the content of a page."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        return self.parsed(seen_from_docs(without_title(self.read(name)), name), name)


class Methods(_Markdown):
    """Every registered method beside Go-MUON, which has a section of its own."""

    def run(self) -> list[nodes.Node]:
        names = (name for name in gomuon.recipes.registry.METHODS if name != "GoMuon")
        classes = [f".. autoclass:: gomuon.{name}\n" for name in names]
        return self.parsed("\n".join(["```{eval-rst}", *classes, "```"]), "the registry of methods")


def _prepare(app: Sphinx, docname: str, source: list[str]) -> None:
    if app.env.doc2path(docname, base=False).suffix == ".md":
        source[0] = for_site(source[0])


def setup(app: Sphinx) -> ExtensionMetadata:
    """Called by Sphinx."""
    app.connect("source-read", _prepare)
    for name, directive in {"quoted": Quoted, "file": File, "methods": Methods}.items():
        app.add_directive(name, directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
