"""What is written the safetensors library reads, and a cut file is recognised by its header."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fold3d.checkpoint import regions_of, write_all
from fold3d.checkpoint.delivery import Location
from fold3d.checkpoint.manifest import defect
from fold3d.checkpoint.regions import Entry
from fold3d.checkpoint.weights import make_file

TENSORS = {
    "b.weight": torch.randn(3, 5),
    "a.flags": torch.tensor([True, False, True]),
    "c.half": torch.randn(7).bfloat16(),
    "d.double": torch.randn(2, 2, dtype=torch.float64),
    "e.scalar": torch.tensor(4, dtype=torch.int64),
    "f.empty": torch.empty(0, 4),
}


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    begins = make_file(path, {name: Entry.of(tensor) for name, tensor in tensors.items()})
    regions = [region for name in reversed(tensors) for region in regions_of(name, tensors[name], None, 0)]
    write_all(path.parent, [(Location(path.name, begins[region.key]), region) for region in regions])


def test_library_reads_what_was_written(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", TENSORS)
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_same_bytes_as_the_library(tmp_path: Path) -> None:
    write(tmp_path / "ours", TENSORS)
    save_file(TENSORS, tmp_path / "stock", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "stock").read_bytes()


def test_non_contiguous_tensor(tmp_path: Path) -> None:
    transposed = torch.arange(6.0).view(2, 3).t()
    write(tmp_path / "m", {"w": transposed})
    assert torch.equal(load_file(tmp_path / "m")["w"], transposed)


def test_unknown_dtype(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"complex128.*cannot store"):
        make_file(tmp_path / "m", {"w": Entry(torch.complex128, (1,))})


@pytest.mark.parametrize("keep", [0, 5, 40, -1, -20])
def test_cut_file_is_found(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    write(path, TENSORS)
    assert defect(path) is None
    path.write_bytes(path.read_bytes()[:keep])
    problem = defect(path)
    assert problem is not None and "model.safetensors" in problem


def test_unreadable_header(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes((4).to_bytes(8, "little") + b"nope")
    assert defect(path) == "the header of m cannot be read"
