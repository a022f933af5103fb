"""The zoo: a handful of classes of every kind now, all of them in the slow part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fold3d.errors import TraceError
from zoo import table, verdict
from zoo.cases import LIMIT_S, PARTS, Case, all_cases, select
from zoo.inputs import Batch
from zoo.outputs import NAMES, everything, judge_outputs
from zoo.run import run
from zoo.verdict import CRASHED, EXACT, REFUSED, UNBUILT, WRONG, Loss, Subject, Verdict, judge

HANDFUL = ["LlamaForCausalLM", "MixtralForCausalLM", "BertForMaskedLM", "ViTForImageClassification"]


@pytest.mark.parametrize("name", HANDFUL)
def test_some_are_exact(name: str) -> None:
    [case] = select(all_cases(), [name])
    assert judge(case) == Verdict(EXACT, "", "images" if "Image" in name else "text")


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees what it is there to see."""
    chained = verdict.chained

    def slightly_off(*args: object, **kwargs: object) -> object:
        loss, gradients = chained(*args, **kwargs)  # type: ignore[arg-type]
        gradients["lm_head.weight"] = gradients["lm_head.weight"] * (1 + 1e-7)
        return loss, gradients

    monkeypatch.setattr(verdict, "chained", slightly_off)
    [case] = select(all_cases(), ["LlamaForCausalLM"])
    found = judge(case)
    assert found.outcome == WRONG
    assert "lm_head.weight" in found.reason


def test_outputs_are_asked_for_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[set[str], bool, bool]] = []

    def compared(subject: Subject, call: Loss, batch: Batch | None = None) -> Verdict:
        config: Any = subject.model.config
        asked.append((set(batch or ()) & set(NAMES), bool(config.output_hidden_states), call is everything))
        return Verdict(WRONG if config.output_hidden_states and call is everything else EXACT, "off", subject.inputs)

    monkeypatch.setattr("zoo.outputs.compared", compared)
    [case] = select(all_cases(), ["LlamaForCausalLM"])
    found = judge_outputs(case)
    both = {"output_hidden_states", "output_attentions"}
    ways = [(both, False, False), (set(), True, False), (both, False, True), (set(), True, True)]
    assert asked[:5] == [(set(), False, True), *ways]
    assert len(asked) == 13  # one by one, to say which
    assert found.outcome == WRONG
    assert "hidden states asked for in the configuration, a loss that reads them: wrong off" in found.reason
    assert "in the batch" not in found.reason


def test_a_loss_of_all_outputs_is_exact() -> None:
    [case] = select(all_cases(), ["MixtralForCausalLM"])
    assert judge_outputs(case) == Verdict(EXACT, "", "text")


class Patches(nn.Module):
    """Puts what it makes into an order that it draws, as ViLT's embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[torch.randperm(len(x))]


class Shuffled(nn.Module):
    """Its loss does not depend on the order, and another output does."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = Patches()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.patches(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return {"loss": x.sum(), "states": x}


def test_what_is_drawn_before_the_blocks_makes_no_difference() -> None:
    torch.manual_seed(0)
    subject = Subject(Shuffled(), {"x": torch.randn(16, 4, dtype=torch.float64)}, "patches")
    first, second = (verdict.train(subject.model, subject.batch, everything, seed=seed)[0] for seed in (0, 1))
    assert abs(first - second) > 1e-3
    assert verdict.compared(subject, everything) == Verdict(EXACT, "", "patches")


def test_refusals_and_crashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    [case] = select(all_cases(), ["LlamaForCausalLM"])

    def refuse(model: nn.Module, **_: object) -> None:
        raise TraceError("no blocks")

    def crash(model: nn.Module, **_: object) -> None:
        raise KeyError("blocks")

    monkeypatch.setattr(verdict, "trace", refuse)
    assert judge(case) == Verdict(REFUSED, "TraceError: no blocks", "text")
    monkeypatch.setattr(verdict, "trace", crash)
    assert judge(case).outcome == CRASHED


def test_a_process_that_dies_ends_only_its_own_case() -> None:
    dying, unknown = Case("dying", "causal", "CAUSAL_LM", ""), Case("NoSuchClass", "causal", "CAUSAL_LM", "")

    def one(case: Case) -> Verdict:
        if case is dying:
            torch.tensor(0).untyped_storage()
            raise SystemExit(3)
        return judge(case)

    found = dict(run([dying, unknown], seconds=60, judging=one))
    assert found[dying] == Verdict(CRASHED, "its process ended with status 3")
    assert found[unknown].outcome == UNBUILT


def test_the_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    one, two = all_cases()[:2]
    table.write(path, {one: Verdict(EXACT, "", "text"), two: Verdict(REFUSED, "TraceError: `a` | b", "text")})
    table.write(path, {one: Verdict(WRONG, "loss off", "text")})
    assert table.read(path) == {
        (one.kind, one.name): Verdict(WRONG, "loss off", "text"),
        (two.kind, two.name): Verdict(REFUSED, "TraceError: 'a' / b", "text"),
    }
    table.write(path, {one: Verdict(REFUSED, "hidden states: no", "text")}, outputs=True)
    table.write(path, {one: Verdict(EXACT, "", "text")})
    read = table.read(path)
    assert [(row.outcome, row.more) for row in read.values()] == [
        (EXACT, "refused: hidden states: no"),
        (REFUSED, ""),
    ]


def test_what_the_table_has_no_verdict_of_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    built, asked, unbuilt, new = all_cases()[:4]
    assert table.missing(path, [built]) == [built]
    table.write(path, {built: Verdict(EXACT), asked: Verdict(EXACT), unbuilt: Verdict(UNBUILT)})
    table.write(path, {asked: Verdict(REFUSED, "why"), unbuilt: Verdict(UNBUILT, "why")}, outputs=True)
    assert not table.read(path)[unbuilt.kind, unbuilt.name].more, "nobody has asked it"
    cases = [built, asked, unbuilt, new]
    assert table.missing(path, cases) == [new]
    assert table.missing(path, cases, outputs=True) == [built]


TABLES = pytest.mark.parametrize("path", [table.TABLE, table.TP_TABLE], ids=lambda path: path.stem)


@TABLES
def test_the_table_has_every_class(path: Path) -> None:
    assert set(table.read(path)) == {(case.kind, case.name) for case in all_cases()}


def test_the_page_counts_what_the_table_has() -> None:
    rows = table.read(table.TABLE).values()
    page = " ".join((table.TABLE.parents[1] / "models.md").read_text().split())
    built = sum(row.outcome != UNBUILT for row in rows)
    exact = sum(row.outcome == EXACT for row in rows)
    assert f"of {len(rows)} classes {built} could be made tiny here, and of these {exact} are exact" in page
    asked = [row.more.split(":")[0] for row in rows if row.more]
    counts = f"{asked.count(EXACT)} are exact and {asked.count(REFUSED)} refused"
    assert f"of {len(asked)} classes judged {counts}" in page


@TABLES
def test_none_in_the_table_is_wrong(path: Path) -> None:
    rows = table.read(path).items()
    assert not [name for (_, name), one in rows if one.outcome == WRONG or one.more.startswith(WRONG)]


def test_the_tables_tell_their_columns_apart(tmp_path: Path) -> None:
    path, [one] = tmp_path / "table.md", all_cases()[:1]
    found = Verdict(REFUSED, "ConfigError: 5 heads", "text", more="exact")
    table.write(path, {one: found}, tp=True)
    [row] = table.read(path).values()
    assert (row, row.more) == (found, "exact")
    assert table.missing(path, all_cases()[:2]) == [all_cases()[1]]


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_the_table_is_current(part: int) -> None:
    lines = table.changed(table.TABLE, run(all_cases()[part::PARTS], LIMIT_S))
    assert not lines, "\n".join(lines)
