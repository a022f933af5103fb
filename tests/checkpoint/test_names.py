"""Saved names: those that the stock save_pretrained writes, whatever of the model lies on this rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from fold3d.checkpoint.names import saved_names
from fold3d.weights.release import release
from tests.helpers import models
from tests.trace import zoo


def stock_keys(model: nn.Module, folder: Path) -> set[str]:
    """Returns the names in the file that the stock save_pretrained writes."""
    model.save_pretrained(folder)  # type: ignore[operator]
    with safe_open(folder / "model.safetensors", framework="pt") as file:  # type: ignore[no-untyped-call]
        return set(file.keys())


def check(model: nn.Module, folder: Path) -> None:
    """The names are the stock ones with all weights here, with some of them and with none."""
    wanted = stock_keys(model, folder)
    names = [name for name, _ in model.named_parameters()]
    for keep in (names, names[::2], names[1::2], []):
        release(model, set(keep))
        saved = saved_names(model)
        assert set(saved.values()) == wanted
        # Under the name of the one parameter object that this rank knows the tensor by.
        assert saved.keys() <= set(names) | {name for name, _ in model.named_buffers()}


@pytest.mark.parametrize("family", [*zoo.FAMILIES, *zoo.FURTHER])
def test_families(tmp_path: Path, family: str) -> None:
    check(zoo.build(family), tmp_path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", models.MODELS)
def test_tied_or_not(tmp_path: Path, family: str, tied: bool) -> None:
    check(models.build(models.MODELS[family](tied=tied)), tmp_path)


def test_a_plain_model_has_its_first_names() -> None:
    model = models.build_plain(tied=True)
    saved = saved_names(model)
    assert all(name == there for name, there in saved.items())
    assert "embedding.weight" in saved and "head.weight" not in saved


def test_tied_otherwise_than_the_configuration_says() -> None:
    """The stock save_pretrained refuses such a model; so do we, on every rank."""
    model = models.build(models.gpt2_config(layers=2))
    blocks = model.transformer.h
    blocks[1].mlp.c_fc.weight = blocks[0].mlp.c_fc.weight
    release(model, set())
    with pytest.raises(RuntimeError, match="shared tensors"):
        saved_names(model)
    assert isinstance(blocks[0].mlp.c_fc.weight, torch.nn.Parameter)


def test_loaded_from_a_folder_of_the_base_model(tmp_path: Path) -> None:
    model = models.build(models.gpt2_config(layers=2))
    model.base_model.save_pretrained(tmp_path / "base")
    check(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "again")
