"""The tables of verdicts in docs/evidence: models_table.md of models that are cut, models_tp_table.md of models whose
weights are shared: written from what was measured, and read again by the test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from zoo.bytes_sent import BytesSent
from zoo.cases import KINDS, Case
from zoo.verdict import CRASHED, EXACT, REFUSED, UNBUILT, WRONG, Verdict

TABLE = Path(__file__).parents[1] / "docs" / "evidence" / "models_table.md"
TP_TABLE = TABLE.with_name("models_tp_table.md")
OUTCOMES = (EXACT, REFUSED, WRONG, CRASHED, UNBUILT)

_HEAD = """\
# Every model class

Written by `python -m zoo --write docs/evidence/models_table.md`, with transformers {version}. Each class that
transformers' own tables list for these kinds of models was made tiny with random weights, in float64 (float32 where
torch has an operation in no other precision), and trained on one batch: whole, and cut into four parts (`pp=2,
segments=2`; in two or three, as the reason says, where it has no more blocks), in one process. Its loss and all
gradients were compared.

- **exact**: nothing differs by more than 1e-10 (1e-5 in float32). Where the model's own code computes in float32, and
  differences are as large as its roundings, it was compared again with that code in float64; the reason says so.
- **refused**: the model is not cut; the reason is what you would read.
- **wrong**: another loss or gradient, without an error. There must be none.
- **crashed**: an error that does not say what to do, or not done within the time limit.
- **not built**: no tiny model of the class runs by itself here, mostly for lack of rules for its configuration or
  inputs; nothing is known about cutting it.

**Bytes** are those that crossed the three borders between the parts, of them what the blocks right before a border
returned (the hidden states, without which nothing can go on), and of them tensors with other values in which the loss
was the same: such need not have been sent.

**With outputs** (written by the same command with `--outputs`) is the worst verdict on these ways to train the same
model, with hidden states, attentions and router logits as far as the class returns them: asked for by the batch of a
model that was recorded without, and by the configuration, each with the model's own loss and with one that reads them
all; and a loss that reads what the model returns unasked. Empty: not judged yet.
"""


_TP_HEAD = """\
# Every model class with tensor parallelism

Written by `python -m zoo --tp --write docs/evidence/models_tp_table.md`, with transformers {version}. The tiny models
of [the other table](models_table.md), each trained on its batch by two processes that share its weights (`tp=2`), once
with `tp_overlap="none"` and once with `"sub"`, in float64 (float32 where torch has an operation in no other precision).
The loss and all gradients, put together again, were compared with those of the plain model in one process.

- **exact**: in both ways nothing differs by more than 1e-10 (1e-5 in float32). Where the model's own code computes in
  float32, and differences are as large as its roundings, it was compared again with that code in float64; the
  reason says so.
- **refused**: the model is not divided; the reason is what you would read.
- **wrong**: another loss or gradient, without an error. There must be none.
- **crashed**: an error that does not say what to do, or not done within the time limit.
- **not built**: no tiny model of the class runs by itself here.

**With dropout**: the same with a chance of 0.1 wherever the configuration has one, but for layers that are left out,
compared with fold3d on one process, whose masks are the same. *not built*: it has none that counts.
"""


def write(path: Path, found: Mapping[Case, Verdict], *, outputs: bool = False, tp: bool = False) -> None:
    """Puts the verdicts into the table, in the place of those that it has of these cases.

    Args:
        outputs: they are those of `judge_outputs`, and the others stay.
        tp: they are those of `judge_shards`, and so are all in the table.
    """
    import transformers

    rows = read(path) if path.exists() else {}
    for case, verdict in found.items():
        key = case.kind, case.name
        if outputs:
            rows[key] = replace(rows.get(key, verdict), more=str(verdict) if verdict.outcome != UNBUILT else "")
        else:
            rows[key] = verdict if tp or key not in rows else replace(verdict, more=rows[key].more)
    ordered = sorted(rows, key=lambda key: (list(KINDS).index(key[0]), key[1]))
    counts = Counter((kind, rows[kind, name].outcome) for kind, name in ordered)
    further = "with dropout" if tp else "with outputs"
    columns = ["class", "trained on", "verdict", *([] if tp else ["bytes"]), "reason", further]
    lines = [(_TP_HEAD if tp else _HEAD).format(version=transformers.__version__)]
    lines += ["| kind | " + " | ".join(OUTCOMES) + " |", "| --- |" + " ---: |" * len(OUTCOMES)]
    lines += [_counts(kind, [counts[kind, outcome] for outcome in OUTCOMES]) for kind in KINDS]
    lines += [_counts("all", [sum(counts[kind, outcome] for kind in KINDS) for outcome in OUTCOMES])]
    asked = Counter(one.more.split(":")[0] for one in rows.values() if one.more)
    lines += [_counts(f"all, {further}", [asked[outcome] for outcome in OUTCOMES])]
    for kind in KINDS:
        lines += ["", f"## {kind.capitalize()}", "", f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
        for key in (key for key in ordered if key[0] == kind):
            one = rows[key]
            reason = f"`{_plain(one.reason)}`" if one.reason else ""
            sent = [] if tp else [str(one.sent)]
            lines.append(f"| {' | '.join([key[1], one.inputs, one.outcome, *sent, reason, _plain(one.more)])} |")
    path.write_text("\n".join(lines) + "\n")


def missing(path: Path, cases: Iterable[Case], *, outputs: bool = False) -> list[Case]:
    """Returns the cases that a table has no verdict of; with `outputs` those that it has built, and not judged so."""
    rows = read(path) if path.exists() else {}
    if not outputs:
        return [case for case in cases if (case.kind, case.name) not in rows]
    none = Verdict(UNBUILT)
    found = [(case, rows.get((case.kind, case.name), none)) for case in cases]
    return [case for case, row in found if row.outcome != UNBUILT and not row.more]


def changed(path: Path, found: Iterable[tuple[Case, Verdict]]) -> list[str]:
    """Returns a line of each case that has another outcome than its row of the table, or another with dropout where the
    table has that."""
    rows, lines = read(path), []
    for case, one in found:
        row = rows[case.kind, case.name]
        more, before = (verdict.more.split(":")[0] for verdict in (one, row))
        if one.outcome != row.outcome or (more and more != before):
            lines.append(f"{case.name}: {one}; {one.more}, in the table {row.outcome}, {before}")
    return lines


def read(path: Path) -> dict[tuple[str, str], Verdict]:
    """Returns the verdicts of a table by kind and class."""
    found: dict[tuple[str, str], Verdict] = {}
    kind = ""
    for line in path.read_text().splitlines():
        if line.startswith("## "):
            kind = line[3:].lower()
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if kind and line.startswith("| ") and len(cells) in (5, 6) and cells[2] in OUTCOMES:
            sent = BytesSent.parse(cells[3] if len(cells) == 6 else "")
            found[kind, cells[0]] = Verdict(cells[2], cells[-2].strip("`"), cells[1], sent, cells[-1])
    return found


def _plain(text: str) -> str:
    return text.replace("`", "'").replace("|", "/").strip()


def _counts(name: str, numbers: list[int]) -> str:
    return f"| {name} | " + " | ".join(str(number) for number in numbers) + " |"
