"""empty_weights(): from_pretrained reads nothing, and each rank reads its own part; who reads all of it is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import fold3d
from fold3d.errors import ConfigError
from fold3d.topology import Topology
from fold3d.weights import empty
from fold3d.weights.empty import folder_of, whole_on_each
from fold3d.weights.materialize import materialize
from tests.helpers import models


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tied GPT-2, whose files have one of the two names."""
    models.build(models.gpt2_config(layers=2)).save_pretrained(tmp_path)
    return tmp_path


def test_nothing_is_read_until_a_rank_reads_its_part(folder: Path) -> None:
    with fold3d.empty_weights():
        model = AutoModelForCausalLM.from_pretrained(folder)
        plain = nn.Linear(2, 2)
    assert all(tensor.is_meta for tensor in (*model.parameters(), plain.weight))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert folder_of(model) == str(folder) and folder_of(plain) is None
    wanted = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    kept = {name for name in wanted if ".h.1." in name}
    materialize(model, kept, seed=0, folder=folder_of(model))
    for name, parameter in model.named_parameters():
        assert parameter.is_meta != (name in kept)
        if name in kept:
            torch.testing.assert_close(parameter, wanted[name], rtol=0, atol=0)


def test_the_engine_takes_the_folder_that_was_noted(folder: Path) -> None:
    with fold3d.empty_weights():
        model = AutoModelForCausalLM.from_pretrained(folder)
    ids = {"input_ids": torch.arange(8).view(1, 8)}
    engine = fold3d.Engine(model, fold3d.ParallelConfig(segments=2), example=ids)
    wanted = AutoModelForCausalLM.from_pretrained(folder)
    found = engine.state_dict()["model"]
    for name, parameter in wanted.named_parameters():
        torch.testing.assert_close(found[name], parameter, rtol=0, atol=0, msg=name)
    engine.close()


def test_transformers_is_as_before(folder: Path) -> None:
    stock = PreTrainedModel.__dict__["from_pretrained"]
    with pytest.raises(RuntimeError, match="over"), fold3d.empty_weights():
        raise RuntimeError("over")
    assert PreTrainedModel.__dict__["from_pretrained"] is stock
    assert not any(p.is_meta for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert not nn.Linear(2, 2).weight.is_meta


def test_files_of_another_format(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"reads safetensors.*save_pretrained"), fold3d.empty_weights():
        AutoModelForCausalLM.from_pretrained(folder)


def test_who_loads_everything_on_every_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build(models.gpt2_config(layers=2))
    size = sum(parameter.nbytes for parameter in model.parameters())
    spread, replicas = Topology(dp=1, tp=1, pp=4, rank=0), Topology(dp=4, tp=1, pp=1, rank=0)
    assert whole_on_each(model, spread, 4) == "", "of a small model nobody need hear"
    monkeypatch.setattr(empty, "MANY_BYTES", 4 * size)
    told = whole_on_each(model, spread, 4)
    assert "each of the 4 processes" in told
    assert "with fold3d.empty_weights():\n        model = GPT2LMHeadModel.from_pretrained(...)" in told
    for topology, processes in ((spread, 3), (replicas, 4), (spread, 1)):
        assert whole_on_each(model, topology, processes) == ""
