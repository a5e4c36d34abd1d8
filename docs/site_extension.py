"""A Sphinx extension for the site: navigation, files of the repository as pages, and diagrams."""

from __future__ import annotations

import html
import importlib
import posixpath
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.nodes import Node
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import SphinxError
from sphinx.ext.autodoc.mock import mock
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/farprop/farprop/blob/main"

# Files of the repository that are pages of the site as well. In docs/, such a page is a link to its file.
PUBLISHED = {
    "README.md": "project/readme",
    "CHANGELOG.md": "project/changelog",
    "CONTRIBUTING.md": "project/contributing",
    "SECURITY.md": "project/security",
    "CODE_OF_CONDUCT.md": "project/conduct",
}
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^ *(```|~~~)")


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_config_value("navigation", {}, "env")
    app.add_directive("mermaid", Mermaid)
    app.add_node(Diagram, html=(_visit_diagram, None))
    app.connect("source-read", _on_source_read)
    app.connect("html-page-context", _on_page)
    app.connect("env-check-consistency", _check_reference)
    app.connect("build-finished", _check_that_nothing_is_fetched)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


# Pages


def _on_source_read(app: Sphinx, name: str, source: list[str]) -> None:
    file = next((file for file, page in PUBLISHED.items() if page == name), None)
    if file is not None:
        source[0] = (ROOT / file).read_text()
    if app.env.doc2path(name).suffix != ".md":
        return
    source[0] = _with_links(source[0], file or f"docs/{name}.md", name) + _toctree(app, name)


def _with_links(text: str, file: str, page: str) -> str:
    """The page with its links to files of the repository led to their pages, or to where the repository is."""

    def led(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(file), found[1]))
        anchor = found[2] or ""
        if path in PUBLISHED:
            target = f"{PUBLISHED[path]}.md"
        elif path.startswith("docs/"):
            target = path.removeprefix("docs/")
        else:
            return f"{REPOSITORY}/{path}{anchor}"
        return posixpath.relpath(target, posixpath.dirname(page) or ".") + anchor

    lines = []
    in_fence = False
    for line in text.splitlines():
        in_fence ^= bool(_FENCE.match(line))
        lines.append(line if in_fence else _LINK.sub(led, line))
    return "\n".join(lines) + "\n"


def _toctree(app: Sphinx, name: str) -> str:
    navigation = app.config.navigation
    below = list(navigation.get(name, []))
    named = {page for pages in navigation.values() for page in pages} | {"index"}
    others = sorted(app.env.found_docs - named)
    if name == "guides/index":
        below += [page for page in others if "/" not in page]
    elif name == "examples/index":
        below += [page for page in others if page.startswith("examples/")]
    if not below:
        return ""
    return "\n```{toctree}\n:hidden:\n\n" + "".join(f"/{page}\n" for page in below) + "```\n"


# Diagrams


class Diagram(nodes.General, nodes.Element):
    """A diagram in Mermaid's language."""


class Mermaid(SphinxDirective):
    """Draws a block of the language ``mermaid``, as GitHub does."""

    has_content = True

    def run(self) -> list[Node]:
        return [Diagram(text="\n".join(self.content))]


def _visit_diagram(translator: Any, node: Diagram) -> None:
    translator.body.append(f'<pre class="mermaid">{html.escape(node["text"])}</pre>\n')
    raise nodes.SkipNode


def _on_page(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: nodes.document | None) -> None:
    if tree is not None and tree.next_node(Diagram) is not None:
        app.add_js_file("vendor/mermaid.tiny.js")
        app.add_js_file("diagrams.js")


# Checks


def _check_reference(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names without an entry: Sphinx leaves out what has no docstring, and says nothing."""
    python = env.domains.python_domain
    for module in python.modules:
        with mock(app.config.autodoc_mock_imports):
            names = getattr(importlib.import_module(module), "__all__", ())
        for name in names:
            if f"{module}.{name}" not in python.objects:
                logging.getLogger(__name__).warning("%s.%s is not in the reference", module, name)


def _check_that_nothing_is_fetched(app: Sphinx, error: Exception | None) -> None:
    """The site has to work without a network."""
    if error is not None:
        return
    for page in Path(app.outdir).rglob("*.html"):
        fetched = re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(?:https?:)?//[^\"]*", page.read_text())
        if fetched:
            raise SphinxError(f"{page} fetches something from elsewhere: {fetched[0]}")
