"""Writes tables of the pages: those of docs/compatibility.md from docs/compatibility.toml and from what the package
refuses, that of the arguments in docs/api.md from their help.

After a change of these: `.venv/bin/python docs/tables.py`. tests/trainer/test_compatibility.py compares.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from fold3d import TrainingArguments
from fold3d.trainer.refused import REFUSED

FOLDER = Path(__file__).parent
PAGE = FOLDER / "compatibility.md"
PAGES = (PAGE, FOLDER / "api.md")
STATES = ("works", "differs", "refused")
Row = Mapping[str, Any]


def tables() -> dict[str, dict[str, Row]]:
    """Returns the rows by table and name."""
    with (FOLDER / "compatibility.toml").open("rb") as file:
        return tomllib.load(file)


def state_of(row: Row) -> str:
    """Returns the row's state; an argument of which only some values are refused has the state of the others."""
    (state,) = [state for state in ("works", "differs") if state in row] or ["refused"]
    return state


def _words(table: str, name: str, row: Row) -> str:
    state = state_of(row)
    said = [row[state]] if table != "arguments" or state != "refused" else []
    if table == "arguments" and "refused" in row:
        reason = REFUSED[name][1]
        said.append(_sentence(reason) if state == "refused" else f"`{row['refused']}`: {reason}.")
    text = " ".join(words for words in said if words)
    return re.sub(r"(?<![\w`])([\w-]+\.md)", r"[\1](\1)", text).replace("|", r"\|")


def _sentence(reason: str) -> str:
    return (reason if reason.startswith("fold3d") else reason[0].upper() + reason[1:]) + "."


def _table(table: str, rows: Mapping[str, Row]) -> str:
    lines = ["| name | | |", "| --- | --- | --- |"]
    for name, row in rows.items():
        shown = name if table == "features" else f"`{name}`"
        state = state_of(row)
        mark = f"{state}, some refused" if state != "refused" and "refused" in row else state
        lines.append(f"| {shown} | {mark} | {_words(table, name, row)} |")
    return "\n".join(lines)


def _count(rows: Mapping[str, Row]) -> str:
    states = [state_of(row) for row in rows.values()]
    return ", ".join(f"{states.count(state)} {state}" for state in STATES if state in states)


def _own_arguments() -> str:
    stock = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    lines = ["| argument | default | |", "| --- | --- | --- |"]
    for field in dataclasses.fields(TrainingArguments):
        if field.name not in stock:
            lines.append(f"| `{field.name}` | `{field.default!r}` | {field.metadata['help']} |")
    return "\n".join(lines)


def _filled(page: str, name: str, made: str) -> str:
    begin, end = f"<!-- begin of {name} -->", f"<!-- end of {name} -->"
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{made}\n\n{end}{rest.split(end)[1]}"


def filled(page: Path) -> str:
    """Returns the text of the page with current tables between its marks."""
    text = page.read_text()
    if page.name == "api.md":
        return _filled(text, "arguments", _own_arguments())
    for name, rows in tables().items():
        text = _filled(text, name, f"{len(rows)}: {_count(rows)}.\n\n{_table(name, rows)}")
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page))
        print(page)
