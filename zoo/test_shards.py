"""judge_shards: what it finds exact, wrong and crashed; and, in the slow part, every class as the table has it."""

from __future__ import annotations

import os

import pytest
from torch import Tensor

from zoo import shards, table
from zoo.cases import LIMIT_S, PARTS, all_cases, select
from zoo.run import run
from zoo.shards import judge_shards
from zoo.verdict import CRASHED, EXACT, UNBUILT, WRONG, Subject, Verdict


def verdict_on(name: str) -> Verdict:
    [(_, found)] = run(select(all_cases(), [name]), LIMIT_S, judge_shards)
    return found


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM", "ViTForImageClassification"])
def test_some_are_exact(name: str) -> None:
    found = verdict_on(name)
    assert (found.outcome, found.more) == (EXACT, EXACT)
    assert ("double precision" in found.reason) == (name == "LlamaForCausalLM")


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    by_engine = shards._by_engine

    def slightly_off(subject: Subject, **layout: object) -> tuple[Tensor, dict[str, Tensor]]:
        loss, gradients = by_engine(subject, **layout)
        if layout.get("tp_overlap") == "sub":
            gradients["lm_head.weight"] *= 1 + 1e-7
        return loss, gradients

    slightly_off.__name__ = by_engine.__name__
    monkeypatch.setattr(shards, "_by_engine", slightly_off)
    found = verdict_on("LlamaForCausalLM")
    assert found.outcome == WRONG
    assert found.reason.startswith("sub: wrong gradient of lm_head.weight off by")
    assert found.more.startswith("wrong: sub: wrong gradient of lm_head.weight off by")


def test_dropout_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other masks on one of the processes nothing is as on one; without any there is nothing to compare."""
    monkeypatch.setattr(shards, "CHANCE", 0.0)
    assert verdict_on("GPT2LMHeadModel").more.startswith(UNBUILT)
    monkeypatch.undo()
    by_engine = shards._by_engine

    def of_other_masks(subject: Subject, **layout: object) -> tuple[Tensor, dict[str, Tensor]]:
        return by_engine(subject, **layout, seed=len(layout))

    of_other_masks.__name__ = by_engine.__name__
    monkeypatch.setattr(shards, "_by_engine", of_other_masks)
    found = verdict_on("GPT2LMHeadModel")
    assert found.outcome == EXACT
    assert found.more.startswith(WRONG)


def test_a_process_that_dies_has_crashed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.getpid()
    plainly = shards._plainly

    def dies_in_the_copy(subject: Subject) -> tuple[Tensor, dict[str, Tensor]]:
        if os.getppid() != here:
            os._exit(3)
        return plainly(subject)

    monkeypatch.setattr(shards, "_plainly", dies_in_the_copy)
    monkeypatch.setattr(shards, "_WAIT_S", 5.0)
    assert verdict_on("BertForMaskedLM").outcome == CRASHED


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS), ids=lambda part: f"half{1 + part % 2}-{part}")
def test_the_table_is_current(part: int) -> None:
    """With dropout, too: a verdict says both. In halves: all of it takes longer than an hour."""
    lines = table.changed(table.TP_TABLE, run(all_cases()[part::PARTS], LIMIT_S, judge_shards))
    assert not lines, "\n".join(lines)
