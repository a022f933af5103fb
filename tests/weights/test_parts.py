"""Parts of parameters: from whole models, from initial values, from folders; equal to the whole for every number of
ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from fold3d.errors import CheckpointError, ConfigError, TraceError
from fold3d.sharding.plan import ShardingPlan
from fold3d.sharding.shard import Runs, Shard
from fold3d.trace.wrappers import whole_shape
from fold3d.weights.materialize import materialize
from fold3d.weights.named_init import initialise
from fold3d.weights.parts import Parts, shard_parameters
from fold3d.weights.safetensors_file import read_part
from tests.trace.zoo import FAMILIES, Plain


class Resettable(Plain):
    """Plain with an initialisation for the parameters that the root holds, as a model built on meta needs."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.position)
        nn.init.ones_(self.scale)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{family: (lambda make=make: make(0.0)) for family, make in FAMILIES.items()},
    "plain": Resettable,
    "torch": lambda: nn.Sequential(nn.MultiheadAttention(12, 2), nn.LSTM(12, 8), nn.Embedding(9, 12, padding_idx=3)),
}


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def plan(model: nn.Module, tp: int) -> ShardingPlan:
    """Returns a plan of all kinds of parts: even, uneven, permuted, overlapping, empty, replicated."""
    shards: dict[str, Shard] = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        dim = number % parameter.ndim if parameter.ndim else None
        if dim is None or number % 7 == 6:
            continue
        size, kind = parameter.shape[dim], number % 5
        if kind == 0 or size < 4:
            shards[name] = Shard.even(dim, size, tp)
        elif kind == 1:  # the last index is on every rank
            own = Shard.even(dim, size - 1, tp).parts
            shards[name] = Shard(dim, size, tuple((*runs, (size - 1, size)) for runs in own))
        elif kind == 2:  # two halves, of each a part, the second one first
            half = Shard.even(dim, size // 2, tp).parts
            rest: tuple[Runs, ...] = Shard.even(dim, size - size // 2, tp).parts
            moved = [tuple((first + size // 2, end + size // 2) for first, end in runs) for runs in rest]
            shards[name] = Shard(dim, size, tuple((*b, *a) for a, b in zip(half, moved, strict=True)))
        elif kind == 3:
            shards[name] = Shard.replicated(parameter.shape, tp, summed=True)
        else:  # the first rank has a piece, the last one the rest
            parts: list[Runs] = [() for _ in range(tp)]
            parts[0] = ((0, 1),)
            parts[-1] = (*parts[-1], (1, size)) if tp > 1 else ((0, size),)
            shards[name] = Shard(dim, size, tuple(parts))
    return ShardingPlan(tp=tp, shards=shards)


def check_parts(make: Callable[[], nn.Module], whole: dict[str, Tensor], parts: Parts, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.is_contiguous() or parts.shard_of(name) is None
        assert torch.equal(parameter, parts.take(name, whole[name])), name
        assert whole_shape(parameter) == whole[name].shape
    reference = on_meta(make)
    tied = [len(list(m.named_parameters(remove_duplicate=False))) for m in (model, reference)]
    assert tied[0] == tied[1] and len(list(model.parameters())) == len(list(reference.parameters()))


@pytest.mark.parametrize("family", MODELS)
def test_real_models_are_cut_in_place(family: str) -> None:
    torch.manual_seed(3)
    source = MODELS[family]()
    whole = {name: p.detach().clone() for name, p in source.named_parameters()}
    for tp in (1, 2, 3):
        for rank in range(tp):
            torch.manual_seed(3)
            model = MODELS[family]()
            before = {name: id(p) for name, p in model.named_parameters()}
            parts = Parts(plan(source, tp), rank)
            shard_parameters(model, parts)
            assert {name: id(p) for name, p in model.named_parameters()} == before
            check_parts(MODELS[family], whole, parts, model)


def test_old_memory_is_given_up_and_gradients_are_cut() -> None:
    model = nn.Linear(6, 4)
    model(torch.ones(1, 6)).sum().backward()
    assert model.weight.grad is not None
    gradient = model.weight.grad.clone()
    old = model.weight.untyped_storage()
    shard = Shard.even(1, 6, 3)
    shard_parameters(model, Parts(ShardingPlan(tp=3, shards={"weight": shard}), 2))
    assert model.weight.shape == (4, 2) and model.weight.untyped_storage().nbytes() == 32
    assert old.data_ptr() != model.weight.untyped_storage().data_ptr()
    assert torch.equal(model.weight.grad, gradient[:, 4:])


def test_a_model_that_was_cut_stays_so_or_is_refused() -> None:
    model = nn.Linear(6, 4)
    parts = Parts(ShardingPlan(tp=2, shards={"weight": Shard.even(0, 4, 2)}), 1)
    shard_parameters(model, parts)
    value = model.weight.detach().clone()
    shard_parameters(model, parts)
    assert torch.equal(model.weight, value)
    for other in (Parts(parts.plan, 0), Parts.whole()):
        with pytest.raises(ConfigError, match=r"cut by another Engine.*a part of weight here, of shape \(2, 6\)"):
            shard_parameters(model, other)


def test_plans_of_other_shapes_are_refused() -> None:
    wrong = Parts(ShardingPlan(tp=2, shards={"weight": Shard.even(0, 6, 2)}), 0)
    with pytest.raises(ValueError, match=r"dimension 0 of 'weight' as one of 6.*\(4, 6\)"):
        shard_parameters(nn.Linear(6, 4), wrong)
    with pytest.raises(ValueError, match=r"dimension 0 of 'weight' as one of 6"):
        materialize(on_meta(lambda: nn.Linear(6, 4)), {"weight"}, seed=0, parts=wrong)


# Initial values


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("family", MODELS)
def test_initial_values_are_those_of_the_whole(family: str) -> None:
    full = on_meta(MODELS[family])
    names = [name for name, _ in full.named_parameters(remove_duplicate=False)]
    materialize(full, set(names), seed=7)
    whole = {name: p.detach() for name, p in full.named_parameters()}
    buffers = dict(full.named_buffers())
    for tp in (1, 2, 3, 4):
        for rank in range(tp):
            torch.manual_seed(rank)
            state = torch.get_rng_state()
            model = on_meta(MODELS[family])
            parts = Parts(plan(full, tp), rank)
            materialize(model, set(names), seed=7, parts=parts)
            assert torch.equal(torch.get_rng_state(), state)
            check_parts(MODELS[family], whole, parts, model)
            assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
            for name, parameter in model.named_parameters():
                if name in parts.plan.shards:  # no more memory than the part needs
                    assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()


class Odd(nn.Module):
    """An initialisation that draws in `.data`, in views, in turns, from the parent, and after what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.experts = nn.Parameter(torch.empty(3, 6, 4))
        self.gates = nn.Parameter(torch.empty(3, 6))

    def reset_parameters(self) -> None:
        self.first.weight.data.normal_(0.0, 0.5)
        for expert in range(3):
            nn.init.normal_(self.experts[expert])
            nn.init.uniform_(self.gates[expert])
        with torch.no_grad():
            self.second.weight.mul_(2.0)  # which the child has drawn
            self.second.bias.copy_(self.first.bias + torch.randn(6))
            self.first.weight[2:4].zero_()


def test_unusual_initialisations() -> None:
    full = on_meta(Odd)
    names = {name for name, _ in full.named_parameters()}
    materialize(full, names, seed=1)
    whole = {name: p.detach() for name, p in full.named_parameters()}
    assert float(whole["first.weight"][2:4].abs().max()) == 0
    for tp in (2, 3):
        for rank in range(tp):
            model = on_meta(Odd)
            parts = Parts(plan(full, tp), rank)
            materialize(model, names, seed=1, parts=parts)
            check_parts(Odd, whole, parts, model)


def test_what_is_not_drawn_is_still_told() -> None:
    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(4, 3))

        def reset_parameters(self) -> None:
            nn.init.normal_(self.table[:2])

    spread = ShardingPlan(tp=2, shards={"table": Shard.even(0, 4, 2)})
    materialize(on_meta(Forgetful), {"table"}, seed=0, parts=Parts(spread, 0))
    with pytest.raises(TraceError, match=r"parameter 'table' .* Forgetful has no initialisation"):
        materialize(on_meta(Forgetful), {"table"}, seed=0, parts=Parts(spread, 1))


def test_values_that_are_there_stay_and_shapes_look_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight.data = torch.ones(2, 4)
    model[0].bias.data = torch.full((2,), float("nan"))
    shards = {"0.weight": Shard.even(0, 4, 2), "0.bias": Shard.even(0, 4, 2)}
    initialise(model, {"0.bias": model[0].bias}, 5, Parts(ShardingPlan(tp=2, shards=shards), 0))
    assert torch.equal(model[0].weight, torch.ones(2, 4))
    reference = on_meta(lambda: nn.Sequential(nn.Linear(4, 4)))
    materialize(reference, {"0.weight", "0.bias"}, seed=5)
    assert torch.equal(model[0].bias, reference[0].bias[:2])  # its bound is that of the whole weight


def test_an_initialisation_cannot_look_at_values_that_are_there_in_parts() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given, self.made = nn.Linear(3, 4), nn.Linear(3, 4)

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.made.weight.copy_(self.given.weight)

    model = Copies()
    shards = {name: Shard.even(0, 4, 2) for name in ("given.weight", "made.weight")}
    parts = Parts(ShardingPlan(tp=2, shards=shards), 0)
    shard_parameters(model, parts)
    with pytest.raises(TraceError, match=r"looks at 'given\.weight', of which this rank has a part only"):
        initialise(model, {"made.weight": model.made.weight}, 0, parts)
    assert model.given.weight.shape == model.made.weight.shape == (2, 3)


# Folders


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
def test_parts_are_read_from_a_folder(family: str, sharded: bool, tmp_path: Path) -> None:
    source = MODELS[family]().float()
    source.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")  # type: ignore[operator]
    whole = {name: p.detach() for name, p in source.named_parameters()}
    for tp in (1, 2, 3):
        for rank in range(tp):
            model = on_meta(MODELS[family])
            parts = Parts(plan(source, tp), rank)
            materialize(model, set(whole), seed=0, folder=tmp_path, parts=parts)
            check_parts(MODELS[family], whole, parts, model)


@pytest.mark.parametrize("as_in_memory", [False, True])
def test_experts_that_a_folder_has_one_by_one(tmp_path: Path, as_in_memory: bool) -> None:
    config = MixtralConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=3, num_experts_per_tok=2, vocab_size=40,
    )  # fmt: skip
    source = MixtralForCausalLM(config)
    if as_in_memory:
        save_file(source.state_dict(), tmp_path / "model.safetensors")
    else:
        source.save_pretrained(tmp_path)
        assert any("experts.2.w1" in key for key in load_file(tmp_path / "model.safetensors"))
    whole = {name: p.detach() for name, p in source.named_parameters()}
    assert any(p.ndim == 3 for p in whole.values())
    for tp in (1, 2):
        for rank in range(tp):
            model = on_meta(lambda: MixtralForCausalLM(config))
            parts = Parts(plan(source, tp), rank)
            materialize(model, {n for n in whole if "layers.0" not in n}, seed=0, folder=tmp_path, parts=parts)
            for name, parameter in model.named_parameters():
                if "layers.0" in name:
                    assert parameter.is_meta
                else:
                    assert torch.equal(parameter, parts.take(name, whole[name])), name


def test_a_folder_of_another_size_names_the_whole_shape(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(5, 6), "bias": torch.zeros(4)}, tmp_path / "model.safetensors")
    model = on_meta(lambda: nn.Linear(6, 4))
    parts = Parts(ShardingPlan(tp=2, shards={"weight": Shard.even(0, 4, 2)}), 0)
    with pytest.raises(CheckpointError, match=r"has shape \(5, 6\), but 'weight' of Linear has \(4, 6\)"):
        materialize(model, {"weight", "bias"}, seed=0, folder=tmp_path, parts=parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int8])
@pytest.mark.parametrize("shape", [(8, 6, 4), (6, 3000), (3000, 6), (4, 6, 2000)])
@pytest.mark.parametrize("dim", [0, 1])
def test_any_part_of_any_tensor(dtype: torch.dtype, shape: tuple[int, ...], dim: int, tmp_path: Path) -> None:
    whole = (100 * torch.randn(shape)).to(dtype)
    path = tmp_path / "tensor"
    path.write_bytes(b"before" + whole.reshape(-1).view(torch.uint8).numpy().tobytes() + b"behind")
    size = shape[dim]
    three = ((size // 2, size - 1), (0, 1), (size - 1, size))
    shard = Shard(dim, size, (three, ((1, size // 2), (size - 1, size)), ()))
    with path.open("rb") as file:
        for rank in range(3):
            part = torch.empty(shard.shape(shape, rank), dtype=dtype)
            read_part(file.fileno(), 6, part, shard, rank)
            assert torch.equal(part, shard.take(whole, rank))


def test_only_the_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of long rows are read one by one; of short rows a window is read at once, never all of the tensor."""
    read: list[int] = []
    preadv = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        read.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counting)
    path = tmp_path / "tensor"
    for shape, most in (((1024, 8192), 1024 * 2048 * 4), ((100_000, 64), 4 << 20)):
        read.clear()
        path.write_bytes(bytes(shape[0] * shape[1] * 4))
        with path.open("rb") as file:
            shard = Shard.even(1, shape[1], 4)
            read_part(file.fileno(), 0, torch.empty(shard.shape(shape, 1)), shard, 1)
        assert max(read) <= 4 << 20 and (sum(read) == most or shape[1] == 64)


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    path = tmp_path / "tensor"
    path.write_bytes(bytes(30))
    with path.open("rb") as file, pytest.raises(EOFError, match="2 bytes too early"):
        read_part(file.fileno(), 0, torch.empty(8))


# Memory

CONFIG = LlamaConfig(
    num_hidden_layers=6, hidden_size=512, intermediate_size=2048, num_attention_heads=8, num_key_value_heads=8,
    vocab_size=4096, tie_word_embeddings=False,
)  # fmt: skip

PEAK = """
import sys
import torch
from tests.weights.test_parts import CONFIG, even_plan, on_meta
from transformers import LlamaForCausalLM
from fold3d.weights.materialize import materialize
from fold3d.weights.parts import Parts

tp, folder = int(sys.argv[1]), sys.argv[2] or None
warm = on_meta(lambda: torch.nn.Linear(4, 4))
materialize(warm, {"weight", "bias"}, seed=0)
model = on_meta(lambda: LlamaForCausalLM(CONFIG))
names = {name for name, _ in model.named_parameters()}
plan = even_plan(model, tp)

def memory(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

open("/proc/self/clear_refs", "w").write("5")  # the highest so far is forgotten
before = memory("VmRSS")
materialize(model, names, seed=0, folder=folder, parts=Parts(plan, 0))
print(memory("VmHWM") - before)
"""


def even_plan(model: nn.Module, tp: int) -> ShardingPlan:
    """Returns Megatron's plan of a Llama."""
    rows = ("o_proj", "down_proj")
    shards = {
        name: Shard.even(int(any(key in name for key in rows)), p.shape[int(any(key in name for key in rows))], tp)
        for name, p in model.named_parameters()
        if p.ndim == 2
    }
    return ShardingPlan(tp=tp, shards=shards)


def peak(tp: int, folder: str) -> int:
    """Returns by how many bytes `materialize` raises the highest resident memory of a process."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PEAK), str(tp), folder], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stdout.split()[-1])


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("source", ["drawn", "folder"])
def test_memory_is_that_of_the_parts_and_of_one_whole(source: str, tmp_path: Path) -> None:
    total = 4 * sum(p.numel() for p in on_meta(lambda: LlamaForCausalLM(CONFIG)).parameters())
    largest = 4 * CONFIG.vocab_size * CONFIG.hidden_size
    if source == "folder":
        LlamaForCausalLM(CONFIG).save_pretrained(tmp_path)
    folder = str(tmp_path) if source == "folder" else ""
    allowed = total // 4 + largest + (24 << 20)
    assert allowed < 0.6 * total  # the test would show a whole model
    assert peak(4, folder) < allowed
