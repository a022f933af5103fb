"""Sphinx's settings for the site that `make docs` builds."""

import re
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
myst_enable_extensions = ["colon_fence"]

default_role = "literal"  # docstrings write `name`
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # transformers documents its own

html_theme = "furo"
html_title = "fold3d"
html_copy_source = False
html_show_sourcelink = False

_OUTSIDE = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\(\.\./(?P<path>[^)#]+)(#[^)]*)?\)")
_ONE_LINE = re.compile(r"(?P<name>Returns|Raises): (?P<text>.*)")


def _name_files_outside(app: Any, page: str, source: list[str]) -> None:
    """Files of the repository that are no pages have no address on the site."""
    source[0] = _OUTSIDE.sub(lambda m: f"{m['text']} (`{m['path']}` in the repository)", source[0])


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
    app.connect("source-read", _name_files_outside)
    app.connect("autodoc-process-docstring", _set_off_results, priority=400)  # before napoleon
