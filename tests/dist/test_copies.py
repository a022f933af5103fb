"""Copies of a model that an engine uses are models of their own; a model has one engine."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from fold3d import ConfigError, Engine, MissingWeightsError, ParallelConfig
from tests.helpers import data, models
from tests.helpers.ranks import RankPool

SGD = functools.partial(torch.optim.SGD, lr=0.1)
Copy = Callable[[nn.Module], nn.Module]


def saved(model: nn.Module) -> nn.Module:
    """Writes the model with torch.save and reads it again."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def averaged(model: nn.Module) -> nn.Module:
    """Returns what an average of weights begins with."""
    module: nn.Module = AveragedModel(model).module
    return module


WAYS: dict[str, Copy] = {"deepcopy": copy.deepcopy, "torch.save": saved, "AveragedModel": averaged}


def batch(rows: int) -> dict[str, torch.Tensor]:
    """Returns `rows` samples."""
    return data.batch(rows, 8)


def compare(way: str, layout: dict[str, Any], on_meta: bool = False) -> list[float]:
    """Trains a step, copies, changes the copy, trains on; returns losses of the original and of copies."""
    device = "meta" if on_meta else "cpu"
    model = models.build(models.gpt2_config(), dtype=torch.float64, device=device)
    config = ParallelConfig(micro_batches=2, **layout)
    engine = Engine(model, config, optimizer=SGD)
    engine.step(batch(4))
    copied = WAYS[way](model)
    original = model(**batch(2)).loss.item()
    first = copied(**batch(2)).loss.item()
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    zeroed = copied(**batch(2)).loss.item()
    again = model(**batch(2)).loss.item()
    copied.load_state_dict(model.state_dict())
    engine.step(batch(4))
    kept = copied(**batch(2)).loss.item()
    Engine(copied, ParallelConfig(segments=2)).evaluate(batch(2)) if engine.topology.world == 1 else None
    engine.close()
    return [original, first, again, kept, zeroed]


ONE = [{"segments": 1}, {"segments": 2}, {"segments": 4, "recompute": True}, {"segments": 1, "recompute": True}]


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("layout", ONE, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_on_one_process(way: str, layout: dict[str, Any]) -> None:
    original, first, again, kept, zeroed = compare(way, layout)
    assert original == first == again == kept
    assert zeroed == pytest.approx(torch.tensor(64.0).log().item())


@pytest.mark.parametrize("dp_sync", ["zero1", "early"])
@pytest.mark.parametrize("way", WAYS)
def test_on_replicas(ranks: RankPool, way: str, dp_sync: str) -> None:
    layout = {"dp": 2, "segments": 2, "dp_sync": dp_sync, "bucket_bytes": 4096}
    for original, first, again, kept, zeroed in ranks.run(compare, 2, way, layout):
        assert original == first == again == kept
        assert zeroed == pytest.approx(torch.tensor(64.0).log().item())


def refused(layout: dict[str, Any], folder: str) -> dict[str, str]:
    """Returns what the ways to copy or save a part of a model raise, with the engine and when it is gone."""
    model = models.build(models.gpt2_config())
    engine = Engine(model, ParallelConfig(segments=1, micro_batches=2, **layout), example=batch(2))
    ways = {**WAYS, "save_pretrained": lambda model: model.save_pretrained(folder)}
    if "tp" in layout:  # with pp the names are there, and only who reads values is told
        ways["state_dict"] = lambda model: model.state_dict()
        ways["a module's state_dict"] = lambda model: model.transformer.h[0].mlp.state_dict()
    said: dict[str, str] = {}
    for when in ("before", "after"):
        for way, copied in ways.items():
            try:
                copied(model)
                said[f"{way}, {when}"] = "nothing"
            except MissingWeightsError as error:
                said[f"{way}, {when}"] = str(error)
        if when == "before":
            assert len(engine.state_dict()["model"]) > 10, "its names are read"
            engine.close()
    return said


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("layout", [{"pp": 2}, {"tp": 2}], ids=str)
def test_a_part_of_a_model_is_neither_copied_nor_saved(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    for rank, found in enumerate(ranks.run(refused, 2, layout, str(tmp_path))):
        assert len(found) >= 8
        for how, text in found.items():
            if rank and how.startswith("save_pretrained"):
                continue  # transformers has the first process write
            assert "trainer.save_model() and returned by engine.state_dict()" in text, how
    assert not list(tmp_path.glob("*.safetensors"))


def called_late(layout: dict[str, Any]) -> tuple[list[float], list[str]]:
    """Returns losses with an engine, and with another one when that is closed; and what calls say in between."""
    model = models.build(models.gpt2_config(), dtype=torch.float64)
    config = ParallelConfig(segments=1, micro_batches=2, **layout)
    engine = Engine(model, config, example=batch(2))
    losses, said = [engine.evaluate(batch(4)).item(), model(**batch(4)).loss.item()], []
    engine.close()
    with pytest.raises(ConfigError, match="segments"):  # and leaves the model as it found it
        Engine(model, ParallelConfig(segments=9, micro_batches=2, **layout), example=batch(2))
    for call in (lambda: model(**batch(4)), lambda: model.transformer.h[0].mlp(torch.zeros(1, 1, 16).double())):
        with pytest.raises(MissingWeightsError) as told:
            call()
        said.append(str(told.value))
    other = Engine(model, config, example=batch(2))
    losses += [other.evaluate(batch(4)).item(), model(**batch(4)).loss.item()]
    other.close()
    return losses, said


def test_parts_that_nobody_puts_together_are_not_computed_with(ranks: RankPool) -> None:
    """After `engine.close()` blocks with parts of weights would return sums of a part, which look like results."""
    for losses, said in ranks.run(called_late, 2, {"tp": 2}):
        assert losses[2:] == pytest.approx(losses[:2], abs=1e-12)
        for text in said:
            assert "is spread over the 2 ranks" in text and "Call the model before engine.close()" in text


def take_over(first: dict[str, Any], second: dict[str, Any]) -> tuple[list[float], list[float], list[str]]:
    """Trains with two engines, one after the other, and with one alone; returns the losses of both, and what the first
    of two says when it is asked again."""
    outcomes, said = [], []
    for engines in (2, 1):
        model = models.build(models.gpt2_config(dropout=0.1), dtype=torch.float64)
        one = other = Engine(model, ParallelConfig(micro_batches=2, seed=3, **first), optimizer=SGD)
        losses = [one.step(batch(4)).loss.item()]
        if engines == 2:
            other = Engine(model, ParallelConfig(micro_batches=2, seed=3, **second), optimizer=SGD)
        losses.append(other.evaluate(batch(2)).item())
        other.step_index = one.step_index
        losses += [other.step(batch(4)).loss.item(), other.evaluate(batch(2)).item()]
        for call in (one.evaluate, one.step) if engines == 2 else ():
            with pytest.raises(ConfigError) as told:
                call(batch(4))
            said.append(str(told.value))
        if one is not other:
            one.close()
        losses.append(other.evaluate(batch(2)).item())
        other.close()
        assert not any("forward" in vars(module) for module in model.modules())
        outcomes.append(losses)
    return outcomes[0], outcomes[1], said


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("second", ONE[1:], ids=str)
@pytest.mark.parametrize("first", ONE[:3], ids=str)
def test_a_later_engine_closes_the_one_before(first: dict[str, Any], second: dict[str, Any]) -> None:
    in_turn, alone, said = take_over(first, second)
    torch.testing.assert_close(in_turn, alone, rtol=0, atol=1e-12)
    assert len(said) == 2 and all("this engine is closed, perhaps by a later one" in text for text in said)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2, "segments": 2},
        {"dp": 2, "segments": 1, "dp_sync": "zero1", "bucket_bytes": 4096},
        {"dp": 2, "segments": 1, "dp_sync": "early", "bucket_bytes": 4096},
    ],
    ids=str,
)
def test_a_later_engine_on_two_processes(ranks: RankPool, layout: dict[str, Any]) -> None:
    for in_turn, alone, said in ranks.run(take_over, 2, layout, layout):
        torch.testing.assert_close(in_turn, alone, rtol=0, atol=1e-12)
        assert len(said) == 2 and all("this engine is closed" in text for text in said)


def test_an_engine_that_is_gone_leaves_the_model_free() -> None:
    model = models.build(models.gpt2_config(), dtype=torch.float64)
    losses = []
    for segments in (1, 2, 2, 1):
        engine = Engine(model, ParallelConfig(segments=segments))
        losses.append(engine.evaluate(batch(2)).item())
        del engine
    assert len(set(losses)) == 1, losses


def interrupt() -> tuple[str, list[float]]:
    """Evaluates with another engine between run and step; returns what the step says, and losses of both engines."""
    model = models.build(models.gpt2_config())
    config = ParallelConfig(dp=2, segments=1, micro_batches=2)
    one = Engine(model, config, optimizer=SGD)
    losses = [one.evaluate(batch(2)).item()]
    one.run([batch(2), batch(2)], lambda module, rows: module(**rows).loss)
    other = Engine(model, config, example=batch(2))
    assert one.optimizer is not None
    with pytest.raises(ConfigError) as told:
        one.optimizer.step()
    losses.append(other.evaluate(batch(2)).item())
    other.close()
    return str(told.value), losses


def test_a_later_engine_between_run_and_step(ranks: RankPool) -> None:
    """The gradients are gone with the engine, and the optimizer's step says so instead of doing nothing."""
    for text, losses in ranks.run(interrupt, 2):
        assert "this engine is closed, perhaps by a later one" in text and losses[0] == losses[1]
