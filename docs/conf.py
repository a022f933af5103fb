"""Sphinx's settings for the site that `make docs` builds."""

import os
import re
from pathlib import Path
from typing import Any

from fold3d import __version__

project = "fold3d"
author = copyright = "The fold3d authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["img"]
nitpicky = False

myst_heading_anchors = 4  # headings can be linked to as on a code host

default_role = "literal"  # docstrings write `name`
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # transformers documents its own

html_theme = "furo"
html_title = "fold3d"
html_copy_source = False
html_show_sourcelink = False

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<path>[^)#:]+)(#[^)]*)?\)")
_SECTION = re.compile(r"^## (?P<title>.+)$\n(?P<text>(?:(?!^## ).*\n?)*)", re.MULTILINE)
_DIRECTIVES = re.compile(r"<!-- eval-rst\n(?P<code>.*?)-->", re.DOTALL)
_ONE_LINE = re.compile(r"(?P<name>Returns|Raises): (?P<text>.*)")


def _make_site_page(app: Any, page: str, source: list[str]) -> None:
    """Pages are plain Markdown, readable in the repository. The site also gets what only Sphinx understands."""
    text = _DIRECTIVES.sub(lambda found: f"```{{eval-rst}}\n{found['code']}```", source[0])
    if page == "index":
        text += "".join(_table_of_contents(section) for section in _SECTION.finditer(text))
    source[0] = _LINK.sub(lambda link: _name_file_outside(page, link), text)


def _table_of_contents(section: re.Match[str]) -> str:
    """Returns the entries of the site's menu for one section of index.md: the pages that it links to."""
    pages = [link["path"].removesuffix(".md") for link in _LINK.finditer(section["text"])]
    inside = [path for path in dict.fromkeys(pages) if not path.startswith("..")]
    entries = "\n".join(inside)
    settings = f":caption: {section['title']}\n:maxdepth: 1\n:hidden:"
    return f"\n```{{toctree}}\n{settings}\n\n{entries}\n```\n" if inside else ""


def _name_file_outside(page: str, link: re.Match[str]) -> str:
    """Files of the repository that are not pages have no address on the site."""
    path = os.path.normpath(Path("docs", page).parent / link["path"])
    return link[0] if path.startswith("docs/") else f"{link['text']} (`{path}` in the repository)"


def _set_off_results(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """`Returns: ...` and `Raises: ...` begin on the line of their name, which reads as part of what is before."""
    for index in reversed(range(len(lines))):
        if found := _ONE_LINE.fullmatch(lines[index]):
            lines[index : index + 1] = ["", f"**{found['name']}:** {found['text']}"]
            following = index + 2
            while following < len(lines) and lines[following].startswith("    "):
                lines[following] = lines[following].strip()
                following += 1
            lines.insert(following, "")


def setup(app: Any) -> None:
    app.connect("source-read", _make_site_page)
    app.connect("autodoc-process-docstring", _set_off_results, priority=400)  # before napoleon
