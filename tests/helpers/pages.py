"""What is on the project's pages: links, anchors and blocks of code, read from Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/cluster/README.md")),
    *SITE,
]

_FENCE = re.compile(r"^(?P<mark>```+)(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=mark)\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(?P<title>.+?)\s*$", re.MULTILINE)
_MARKDOWN = MarkdownIt("commonmark").enable("table")


def name(path: Path) -> str:
    """Returns the path as the project writes it."""
    return str(path.relative_to(ROOT))


def blocks(page: Path, language: str) -> Iterator[str]:
    """Yields the code in fences of that language."""
    for fence in _FENCE.finditer(page.read_text()):
        if fence["language"].strip() == language:
            yield fence["code"]


def shell(page: Path) -> Iterator[str]:
    """Yields what a shell runs: blocks of bash, and the containers of Kubernetes' manifests that start bash."""
    yield from blocks(page, "bash")
    for manifest in manifests(page):
        for container in manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
            if container["command"] == ["bash", "-c"]:
                yield from container["args"]


def manifests(page: Path) -> list[dict[str, Any]]:
    """Returns the documents in the page's blocks of YAML."""
    return [document for code in blocks(page, "yaml") for document in yaml.safe_load_all(code)]


def prose(page: Path) -> str:
    """Returns the page without its fences."""
    return _FENCE.sub("", page.read_text())


def links(page: Path, *, images: bool = False) -> Iterator[str]:
    """Yields where the links, or the images, of the page lead."""
    for link in _LINK.finditer(prose(page)):
        if bool(link["image"]) == images:
            yield link["target"]


def anchors(page: Path) -> set[str]:
    """Returns what follows a # in links to the page's headings, as code hosts and the site make it."""
    titles = [
        re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading["title"]) for heading in _HEADING.finditer(prose(page))
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def code_spans(page: Path) -> Iterator[str]:
    """Yields what stands in backticks outside of fences."""
    yield from re.findall(r"`([^`\n]+)`", prose(page))


def raw(text: str) -> Iterator[str]:
    """Yields what a reader in the repository sees raw, or not at all: directives and roles of Sphinx, links without a
    text, rows that stand outside of a table."""
    for token in _MARKDOWN.parse(text):
        if token.type == "fence" and token.info.startswith("{"):
            yield token.info
        if token.type == "inline":
            yield from re.findall(r"^(?:\||:::).*", token.content, re.MULTILINE)
            for one, following in pairwise(token.children or []):
                if (one.type, following.type) == ("link_open", "link_close"):
                    yield f"[]({one.attrs['href']})"
                if following.type == "code_inline" and re.search(r"\{[\w:-]+\}$", one.content):
                    yield f"{one.content}`{following.content}`"
