"""optimizer.pt: the stock format, written from parts and read in parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fold3d.checkpoint import OptimizerFiles, OptimizerLayout, write_all
from fold3d.checkpoint.regions import Entry
from fold3d.checkpoint.torch_file import TorchFile
from fold3d.data_parallel.bucket import Piece
from fold3d.errors import CheckpointError, ConfigError
from fold3d.sharding.plan import ShardingPlan
from fold3d.sharding.shard import Shard
from fold3d.weights.parts import Parts, shard_parameters

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def optimizer_over(module: nn.Module, kind: str = "adamw") -> torch.optim.Optimizer:
    """Returns an optimizer with weights decayed and biases not, after one step."""
    parameters = dict(module.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in parameters.items() if "weight" in n], "weight_decay": 0.1},
        {"params": [p for n, p in parameters.items() if "bias" in n], "weight_decay": 0.0},
    ]
    made: dict[str, torch.optim.Optimizer] = {
        "adamw": torch.optim.AdamW(groups, lr=1e-2),
        "sgd": torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
        "adagrad": torch.optim.Adagrad(groups, lr=1e-2),
    }
    return made[kind]


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(5)
    optimizer.zero_grad()
    module(torch.randn(6, 4)).square().sum().backward()
    optimizer.step()


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def shares(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, list[tuple[OptimizerLayout, Any, Any]]]:
    """Returns a whole optimizer and the same one cut into two ranks, one layer each, all after one step."""
    whole_model = model()
    whole = optimizer_over(whole_model, kind)
    step(whole_model, whole)
    parts = []
    for layer in ("0", "1"):
        part_model = model()
        part = optimizer_over(part_model, kind)
        step(part_model, part)  # over the whole model; then this rank keeps only its share
        parameters = dict(part_model.named_parameters())
        owned = {name: p for name, p in parameters.items() if name.startswith(layer)}
        layout = OptimizerLayout.restrict(part, {id(p): name for name, p in parameters.items()}, owned)
        parts.append((layout, part, owned))
    return whole_model, whole, parts


def write(path: Path, parts: list[tuple[OptimizerLayout, Any, Any]]) -> None:
    layout, first, _ = parts[0]
    files = OptimizerFiles(path.parent, layout, first.state_dict()["param_groups"])
    gathered = [layout.state_regions(optimizer, owned, set(owned), Parts.whole()) for layout, optimizer, owned in parts]
    regions = [region for share, _, _ in gathered for region in share]
    assert not any(own for _, own, _ in gathered)
    locations = files.make({one.key: Entry.of(one.data) for one in regions}, [rest for _, _, rest in gathered])
    write_all(path.parent, [(locations[one.key], one) for one in reversed(regions)])
    files.finish()


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adagrad"])
def test_parts_write_what_the_whole_optimizer_would(tmp_path: Path, kind: str) -> None:
    _, whole, parts = shares(kind)
    write(tmp_path / "optimizer.pt", parts)
    assert equal(torch.load(tmp_path / "optimizer.pt", weights_only=True), whole.state_dict())


def test_tensors_that_lie_elsewhere_are_written(tmp_path: Path) -> None:
    """A learning rate in a group, and what is kept in lists, were zeros in the file."""
    module = model()
    names = {id(p): name for name, p in module.named_parameters()}
    whole = torch.optim.SGD(module.named_parameters(), lr=torch.tensor(1e-2), momentum=0.9)
    step(module, whole)
    for number, parameter in enumerate(module.parameters()):
        whole.state[parameter]["last"] = [torch.full((2, 3), number + 0.5), torch.arange(3).bfloat16()[1:]]
    expected = whole.state_dict()
    owned = dict(module.named_parameters())
    write(tmp_path / "optimizer.pt", [(OptimizerLayout.restrict(whole, names, owned), whole, owned)])
    assert equal(torch.load(tmp_path / "optimizer.pt", weights_only=True), expected)


def test_lists_of_parameters_are_cut_with_them() -> None:
    module = model()
    owned = {name: p for name, p in module.named_parameters() if name.startswith("1")}
    cut = torch.optim.SGD(module.named_parameters(), lr=0.1)
    OptimizerLayout.restrict(cut, {id(p): name for name, p in module.named_parameters()}, owned)
    assert cut.param_groups[0]["param_names"] == list(owned)


def test_lists_that_are_settings_stay_whole() -> None:
    """As many as there are parameters: betas of a file with JSON."""
    module = nn.Linear(2, 2)
    names = {id(p): name for name, p in module.named_parameters()}
    cut = torch.optim.AdamW([{"params": list(module.parameters()), "betas": [0.8, 0.9]}])
    OptimizerLayout.restrict(cut, names, {"weight": module.weight})
    assert cut.param_groups[0]["betas"] == [0.8, 0.9]


def test_what_would_not_be_saved_is_refused() -> None:
    class Counting(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return {**super().state_dict(), "count": 3}

    module = model()
    owned = dict(module.named_parameters())
    layout = OptimizerLayout.restrict(Counting(owned.values(), lr=0.1), {id(p): n for n, p in owned.items()}, owned)
    with pytest.raises(ConfigError, match=r"state_dict of Counting has \['count'\] beside"):
        layout.state_regions(Counting(owned.values(), lr=0.1), owned, set(owned), Parts.whole())


def test_layout_has_the_order_of_the_groups() -> None:
    layout = shares("adamw")[2][1][0]
    assert layout.groups == (("0.weight", "1.weight"), ("0.bias", "1.bias"))
    assert layout.local({"1.weight": None, "1.bias": None}) == ["1.weight", "1.bias"]  # type: ignore[dict-item]


def test_each_part_reads_its_share(tmp_path: Path) -> None:
    whole_model, whole, parts = shares("adamw")
    torch.save(whole.state_dict(), tmp_path / "optimizer.pt")
    reference = dict(whole_model.named_parameters())
    for layout, optimizer, owned in parts:
        optimizer.state.clear()
        optimizer.param_groups[0]["lr"] = 9.0
        layout.load(tmp_path / "optimizer.pt", optimizer, owned)
        assert optimizer.param_groups[0]["lr"] == 1e-2
        assert len(optimizer.state) == 2
        for name, parameter in owned.items():
            assert equal(optimizer.state[parameter], whole.state[reference[name]])


def test_read_state_outlives_the_file(tmp_path: Path) -> None:
    _, whole, parts = shares("adamw")
    path = tmp_path / "optimizer.pt"
    torch.save(whole.state_dict(), path)
    layout, optimizer, owned = parts[0]
    layout.load(path, optimizer, owned)
    before = {name: optimizer.state[p]["exp_avg"].clone() for name, p in owned.items()}
    path.write_bytes(b"\0" * path.stat().st_size)  # same inode: a mapped tensor would change
    assert all(torch.equal(optimizer.state[p]["exp_avg"], before[name]) for name, p in owned.items())


def spread_plan() -> dict[str, Shard]:
    return {
        "0.weight": Shard(0, 3, (((2, 3),), ((0, 2),))),
        "0.bias": Shard(0, 3, (((2, 3),), ((0, 2),))),
        "1.weight": Shard.even(1, 3, 2),
    }


def shards_of(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, list[Any]]:
    """Returns a whole optimizer and the same one cut into two shards, all after one step."""
    whole_model = model()
    whole = optimizer_over(whole_model, kind)
    step(whole_model, whole)
    ranks = []
    for rank in range(2):
        part_model = model()
        part = optimizer_over(part_model, kind)
        step(part_model, part)
        parts = Parts(ShardingPlan(tp=2, shards=spread_plan()), rank)
        shard_parameters(part_model, parts)
        owned = dict(part_model.named_parameters())
        layout = OptimizerLayout.restrict(part, {id(p): name for name, p in owned.items()}, owned, parts)
        ranks.append((layout, part, owned, parts))
    return whole_model, whole, ranks


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adagrad"])
def test_a_state_is_cut_with_its_parameters_and_read_in_parts(tmp_path: Path, kind: str) -> None:
    whole_model, whole, ranks = shards_of(kind)
    torch.save(whole.state_dict(), tmp_path / "optimizer.pt")
    reference = dict(whole_model.named_parameters())
    regions: list[Any] = []
    counts: dict[Any, Tensor] = {}
    for layout, optimizer, owned, parts in ranks:
        for attempt in ("cut", "read"):
            for name, parameter in owned.items():
                for key, value in whole.state[reference[name]].items():
                    found = optimizer.state[parameter][key]
                    if isinstance(value, Tensor) and value.ndim:
                        assert found.shape == parameter.shape and torch.equal(found, parts.take(name, value)), attempt
                    else:
                        assert equal(found, value), attempt
            optimizer.state.clear()
            layout.load(tmp_path / "optimizer.pt", optimizer, owned, parts)
        primary = set(owned) if parts.rank == 0 else set(spread_plan())  # the first has what is not spread
        everywhere, own, _ = layout.state_regions(optimizer, owned, primary, parts)
        regions += everywhere
        assert not own
    for region in regions:
        name, key = region.key
        value = whole.state[reference[name]][key]
        place = tuple(slice(s, s + n) for s, n in zip(region.starts, region.data.shape, strict=True))
        assert torch.equal(region.data, value[place])
        counts.setdefault(region.key, torch.zeros(value.shape))[place] += 1
    tensors = [(n, k) for n, p in reference.items() for k, v in whole.state[p].items() if isinstance(v, Tensor)]
    assert sorted(counts) == sorted(tensors) and all((count == 1).all() for count in counts.values())


def test_what_is_read_is_the_state_without_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of each would leave holes between those that stay: memory that nobody uses until the end."""
    whole = model()
    optimizer = optimizer_over(whole)
    owned = dict(whole.named_parameters())
    layout = OptimizerLayout.restrict(optimizer, {id(p): n for n, p in owned.items()}, owned)
    step(whole, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    places, read = set[int](), TorchFile.read_box

    def noted(self: TorchFile, like: Tensor, starts: Any, data: Tensor) -> None:
        places.add(data.data_ptr())
        read(self, like, starts, data)

    monkeypatch.setattr(TorchFile, "read_box", noted)
    again = optimizer_over(whole)
    layout.load(tmp_path / "optimizer.pt", again, owned)
    held = [value.data_ptr() for state in again.state.values() for value in state.values()]
    assert len(held) == 3 * len(NAMES)
    assert set(held) <= places


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    """Adafactor keeps means over rows and over columns: those of parts are not parts of them."""
    whole_model = model()
    whole = torch.optim.Adafactor(whole_model.parameters())
    step(whole_model, whole)
    torch.save(whole.state_dict(), tmp_path / "optimizer.pt")
    part_model = model()
    parts = Parts(ShardingPlan(tp=2, shards=spread_plan()), 0)
    shard_parameters(part_model, parts)
    part = torch.optim.Adafactor(part_model.parameters())
    owned = dict(part_model.named_parameters())
    layout = OptimizerLayout.restrict(part, {id(p): name for name, p in owned.items()}, owned, parts)
    with pytest.raises(CheckpointError, match=r"'row_var' of 0\.weight has shape \(3, 1\), the parameter \(3, 4\)"):
        layout.load(tmp_path / "optimizer.pt", part, owned, parts)


def test_a_layout_that_is_not_contiguous_is_read_in_parts(tmp_path: Path) -> None:
    made, optimizer = image_model()
    image_step(made, optimizer, 1)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    parts = Parts(ShardingPlan(tp=2, shards={"weight": Shard.even(0, 5, 2)}), 1)
    whole = {key: value.clone() for key, value in optimizer.state[made.weight].items()}
    shard_parameters(made, parts)
    own = dict(made.named_parameters())
    layout = OptimizerLayout.restrict(optimizer, {id(p): name for name, p in own.items()}, own, parts)
    layout.load(tmp_path / "optimizer.pt", optimizer, own, parts)
    assert torch.equal(optimizer.state[made.weight]["exp_avg"], whole["exp_avg"][3:])


def test_state_of_other_optimizer_is_refused(tmp_path: Path) -> None:
    _, _, parts = shares("adamw")
    other = torch.optim.AdamW(model().parameters())
    torch.save(other.state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"groups hold \[4\] parameters, this run's \[2, 2\]"):
        parts[0][0].load(tmp_path / "optimizer.pt", *parts[0][1:])


@pytest.mark.parametrize("content", [[1, 2], {"optimizer": {}}, {"0.weight": torch.ones(2)}], ids=str)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: Any) -> None:
    _, _, parts = shares("adamw")
    layout, part, owned = parts[0]
    torch.save(content, tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt holds no state of an optimizer"):
        layout.load(tmp_path / "optimizer.pt", part, owned)


def test_a_state_of_parameters_of_other_shapes_is_refused(tmp_path: Path) -> None:
    """torch's kernels read past its end."""
    _, whole, parts = shares("adamw")
    layout, part, owned = parts[0]
    saved = whole.state_dict()
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"][:1].clone()
    torch.save(saved, tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"'exp_avg' of 0\.weight has shape \(1, 4\), and the parameter \(3, 4\)"):
        layout.load(tmp_path / "optimizer.pt", part, owned)


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    _, whole, parts = shares("adamw")
    path = tmp_path / "optimizer.pt"
    torch.save(whole.state_dict(), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"optimizer\.pt cannot be read"):
        parts[0][0].load(path, *parts[0][1:])


def test_foreign_parameters_are_refused() -> None:
    foreign = torch.optim.SGD([nn.Parameter(torch.zeros(3, 2))], lr=1.0)
    with pytest.raises(ConfigError, match=r"1 parameter\(s\) that are not the model's.*\(3, 2\).*register it there"):
        OptimizerLayout.restrict(foreign, {}, {})


def image_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    made = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return made, torch.optim.AdamW(made.parameters(), lr=0.01, fused=True)


def image_step(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    module(torch.randn(2, 3, 8, 8)).square().sum().backward()
    optimizer.step()


def test_a_fused_optimizer_goes_on_with_parameters_that_are_not_contiguous(tmp_path: Path) -> None:
    """It goes through the memory of parameter and state side by side, whatever their strides."""
    before, optimizer = image_model()
    own = dict(before.named_parameters())
    layout = OptimizerLayout.restrict(optimizer, {id(p): name for name, p in own.items()}, own)
    image_step(before, optimizer, 1)
    write(tmp_path / "optimizer.pt", [(layout, optimizer, own)])
    after, resumed = image_model()
    after.load_state_dict(before.state_dict())
    layout.load(tmp_path / "optimizer.pt", resumed, dict(after.named_parameters()))
    image_step(before, optimizer, 2)
    image_step(after, resumed, 2)
    assert torch.equal(before.weight, after.weight)  # type: ignore[arg-type]


class Kept:
    """A replica that keeps the state of the second half of each parameter."""

    def __init__(self, owned: dict[str, nn.Parameter]) -> None:
        self.names = frozenset(owned)
        halves = {name: parameter.numel() // 2 for name, parameter in owned.items()}
        self.pieces = [Piece(n, p, 0, halves[n], p.numel(), halves[n]) for n, p in owned.items()]
        self.states: dict[str, dict[str, Any] | None] = {}

    def load_held(self, read: Callable[[Piece], dict[str, Any] | None]) -> None:
        self.states = {piece.name: read(piece) for piece in self.pieces}


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adagrad"])
def test_the_state_of_pieces_is_read_and_written(tmp_path: Path, kind: str) -> None:
    whole_model = model()
    whole = optimizer_over(whole_model, kind)
    step(whole_model, whole)
    torch.save(whole.state_dict(), tmp_path / "optimizer.pt")
    reference = dict(whole_model.named_parameters())
    part = optimizer_over(made := model(), kind)
    owned = dict(made.named_parameters())
    layout = OptimizerLayout.restrict(part, {id(p): name for name, p in owned.items()}, owned)
    part.state.clear()
    kept = Kept(owned)
    layout.load(tmp_path / "optimizer.pt", part, owned, keep=kept)
    assert not part.state
    for piece in kept.pieces:
        saved, found = whole.state[reference[piece.name]], kept.states[piece.name]
        assert found is not None and found.keys() == saved.keys()
        for key, value in saved.items():
            is_whole = isinstance(value, Tensor) and value.ndim
            assert equal(found[key], value.flatten()[piece.offset :] if is_whole else value), key
    pieces = [(piece, kept.states[piece.name] or {}) for piece in kept.pieces]
    everywhere, own, rest = layout.state_regions(part, owned, set(owned), Parts.whole(), pieces)
    assert everywhere == []
    for region in own:
        place = tuple(slice(s, s + n) for s, n in zip(region.starts, region.data.shape, strict=True))
        assert torch.equal(region.data, whole.state[reference[region.key[0]]][region.key[1]][place])
    assert not any(rest.values()), "what is no element falls to the replica with the first piece"


def test_reading_leaves_nothing_behind(tmp_path: Path) -> None:
    """Each checkpoint of a long training reads one; torch's cache of operators kept its storages, 250 kB a time."""
    torch.save({"state": [torch.ones(3), torch.ones(2, 2)]}, tmp_path / "file.pt")
    known = len(FakeTensorMode.cache)
    for _ in range(3):
        assert TorchFile(tmp_path / "file.pt").content["state"][1].shape == (2, 2)
    assert len(FakeTensorMode.cache) == known
