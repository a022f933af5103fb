"""Weights written from stages, in one file or in shards, and read back by name."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fold3d.checkpoint import Delivery, WeightsFiles, load_weights, regions_of
from fold3d.checkpoint.regions import Entry
from fold3d.comms.world_group import WorldGroup
from fold3d.errors import CheckpointError
from fold3d.topology import Topology

TENSORS = {"a": torch.randn(10, 10), "b": torch.randn(100, 10), "c": torch.randn(3).bfloat16()}


def save(tensors: dict[str, Tensor], files: WeightsFiles) -> None:
    alone = Delivery(WorldGroup(Topology(dp=1, pp=1, rank=0), 30), 30, is_shared=True)
    alone.to_files([region for name, one in tensors.items() for region in regions_of(name, one, None, 0)], None, files)
    alone.finish()


def zeros() -> nn.Module:
    """Returns a module whose parameters have the tensors' names."""
    module = nn.Module()
    for name, tensor in TENSORS.items():
        module.register_parameter(name, nn.Parameter(torch.zeros_like(tensor)))
    return module


def load(module: nn.Module, folder: Path) -> dict[str, Tensor]:
    targets = {name: parameter.data for name, parameter in module.named_parameters()}
    load_weights(module, targets, folder)
    return targets


@pytest.mark.parametrize("max_shard_size", ["50GB", 3000])
def test_round_trip(tmp_path: Path, max_shard_size: int | str) -> None:
    save(TENSORS, WeightsFiles(tmp_path, max_shard_size=max_shard_size))
    targets = load(zeros(), tmp_path)
    assert all(torch.equal(targets[name], TENSORS[name]) for name in TENSORS)
    assert (tmp_path / "model.safetensors").exists() == (max_shard_size == "50GB")


def test_shards_are_the_stock_format(tmp_path: Path) -> None:
    save(TENSORS, WeightsFiles(tmp_path, max_shard_size=3000))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 1103, "total_size": 4406}
    assert set(index["weight_map"]) == set(TENSORS)
    read = {}
    for file in set(index["weight_map"].values()):
        read.update(load_file(tmp_path / file))
    assert all(torch.equal(read[name], TENSORS[name]) for name in TENSORS)


def test_incomplete_files_never_get_their_names(tmp_path: Path) -> None:
    files = WeightsFiles(tmp_path, max_shard_size=3000)
    files.make({name: Entry.of(tensor) for name, tensor in TENSORS.items()}, [])
    assert all(path.suffix == ".tmp" for path in tmp_path.iterdir())
    save({"a": TENSORS["a"]}, WeightsFiles(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"], "the next save removes them"


def test_a_smaller_save_removes_old_shards(tmp_path: Path) -> None:
    save(TENSORS, WeightsFiles(tmp_path, max_shard_size=3000))
    save(TENSORS, WeightsFiles(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    save(TENSORS, WeightsFiles(tmp_path, max_shard_size=3000))
    assert not (tmp_path / "model.safetensors").exists()


def test_tied_name_and_other_dtype(tmp_path: Path) -> None:
    save_file({"embedding": TENSORS["a"]}, tmp_path / "model.safetensors")
    module = nn.Module()
    module.head = nn.Parameter(torch.zeros(10, 10, dtype=torch.float64))
    module.embedding = module.head
    assert torch.equal(load(module, tmp_path)["head"], TENSORS["a"].double())


def test_missing_tensor(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"belongs to another model: it does not hold b, c$"):
        load(zeros(), tmp_path)


def test_what_the_model_says_it_does_not_save_is_not_missed(tmp_path: Path) -> None:
    """MarianMT's positions; no training with it could be resumed."""
    save({name: tensor for name, tensor in TENSORS.items() if name != "c"}, WeightsFiles(tmp_path))
    module = zeros()
    module._keys_to_ignore_on_save = ["c"]  # type: ignore[assignment]
    targets = load(module, tmp_path)
    assert torch.equal(targets["a"], TENSORS["a"]) and not targets["c"].any()


def test_other_shape(tmp_path: Path) -> None:
    save_file(TENSORS | {"b": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'b' has shape \(1,\), but.*\(100, 10\)"):
        load(zeros(), tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load(zeros(), tmp_path)


def test_a_disk_without_room_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    full = OSError(28, "No space left on device")
    with mock.patch("os.pwrite", side_effect=full), pytest.raises(OSError, match=r"device: .*model\.safetensors"):
        save(TENSORS, WeightsFiles(tmp_path))
