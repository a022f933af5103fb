"""materialize(): values by (seed, name) or from a folder, for any subset of a model built on the meta
device."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fold3d.errors import CheckpointError, TraceError
from fold3d.stage.split_model import SplitModel
from fold3d.weights.materialize import materialize
from fold3d.weights.pretrained import check_folder
from tests.trace.chains import assert_equal, chained, needed_parameters, record, whole
from tests.trace.zoo import FAMILIES, Block, Plain, build, tokens


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def names_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def real_names(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters(remove_duplicate=False) if not p.is_meta}


class Resettable(Plain):
    """Plain with an initialisation for the parameters that the root holds, as a model built on meta needs."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.position)
        nn.init.ones_(self.scale)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{family: (lambda make=make: make(0.0)) for family, make in FAMILIES.items()},
    "plain": Resettable,
}


@pytest.mark.gate(cases=4)
@pytest.mark.parametrize("family", MODELS)
def test_any_subset_gets_the_same_bits(family: str) -> None:
    full = on_meta(MODELS[family])
    names = names_of(full)
    torch.manual_seed(5)
    materialize(full, set(names), seed=7)
    values = dict(full.named_parameters(remove_duplicate=False))
    assert not any(p.is_meta for p in values.values())
    state = torch.get_rng_state()
    for subset in (names[: len(names) // 2], names[len(names) // 2 :], names[1::3]):
        torch.manual_seed(len(subset))  # the global generator has no influence
        part = on_meta(MODELS[family])
        materialize(part, set(subset), seed=7)
        got = dict(part.named_parameters(remove_duplicate=False))
        aliases = {alias for name in subset for alias in names if values[alias] is values[name]}
        assert real_names(part) == aliases
        for name in subset:
            assert torch.equal(got[name], values[name]), name
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state)  # and is left as it was


@pytest.mark.parametrize("family", MODELS)
def test_distribution_is_the_models_own(family: str) -> None:
    torch.manual_seed(0)
    stock = MODELS[family]()
    ours = on_meta(MODELS[family])
    materialize(ours, set(names_of(ours)), seed=3)
    assert len(list(ours.parameters())) == len(list(stock.parameters()))  # tied parameters are tied
    values = {name: p.detach() for name, p in ours.named_parameters()}
    for name, parameter in stock.named_parameters():
        assert values[name].dtype == parameter.dtype
        spread = float(parameter.detach().std())
        if spread == 0:
            assert torch.equal(values[name], parameter), name
        elif parameter.numel() >= 500:
            assert abs(float(values[name].std()) - spread) < 0.15 * spread, name
    buffers = dict(ours.named_buffers())
    for name, buffer in stock.named_buffers():
        assert torch.equal(buffers[name], buffer), name


def test_seeds_and_names_give_different_values() -> None:
    first, second = on_meta(MODELS["gpt2"]), on_meta(MODELS["gpt2"])
    materialize(first, set(names_of(first)), seed=1)
    materialize(second, set(names_of(second)), seed=2)
    a, b = first.transformer.h[0].attn.c_attn.weight, first.transformer.h[1].attn.c_attn.weight
    assert not torch.equal(a, b)
    assert not torch.equal(a, second.transformer.h[0].attn.c_attn.weight)


def test_chunks_of_a_meta_model_are_never_whole_and_equal_the_whole_model() -> None:
    torch.set_default_dtype(torch.float64)
    full = on_meta(MODELS["gpt2"])
    recorded = record(full)
    ranges = [(0, 1), (1, 3), (3, 4)]
    ranks = []
    for chunk in range(3):
        model = on_meta(MODELS["gpt2"])
        keep = set(needed_parameters(model, recorded, ranges, chunk))
        materialize(model, keep, seed=11)
        assert real_names(model) == keep
        assert len(keep) < len(names_of(model))
        ranks.append(SplitModel(model, recorded, ranges))
    materialize(full, set(names_of(full)), seed=11)
    batch = tokens()
    assert_equal(chained(ranks, recorded, 3, batch), whole(full.train(), batch))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
def test_pretrained_folder(family: str, sharded: bool, tmp_path: Path) -> None:
    source = build(family).float()
    source.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    want = dict(source.named_parameters(remove_duplicate=False))
    model = on_meta(MODELS[family])
    keep = {name for name in want if ".1." in name or "embed" in name or "wte" in name or "lm_head" in name}
    materialize(model, keep, seed=0, folder=tmp_path)
    got = dict(model.named_parameters(remove_duplicate=False))
    assert keep <= real_names(model)
    for name in keep:
        assert torch.equal(got[name], want[name]), name
    assert len(list(model.parameters())) == len(list(source.parameters()))


def test_folder_of_the_base_model_and_new_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import LlamaForSequenceClassification

    base = build("llama").float()
    base.model.save_pretrained(tmp_path)  # names without the prefix "model."
    model = on_meta(lambda: LlamaForSequenceClassification(base.config))
    materialize(model, set(names_of(model)), seed=4, folder=tmp_path)
    assert torch.equal(model.model.layers[2].mlp.up_proj.weight, base.model.layers[2].mlp.up_proj.weight)
    assert "no values for 1 parameters (score.weight)" in caplog.text
    assert model.score.weight.std().item() > 0


def test_values_are_converted_and_real_ones_are_kept(tmp_path: Path) -> None:
    source = build("llama").float()
    source.save_pretrained(tmp_path)
    model = on_meta(MODELS["llama"]).to(torch.bfloat16)
    kept = nn.Parameter(torch.full((32,), 5.0, dtype=torch.bfloat16))
    model.model.norm.weight = kept
    materialize(model, set(names_of(model)), seed=0, folder=tmp_path)
    assert model.model.norm.weight is kept
    assert float(kept.detach().min()) == 5.0
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, source.lm_head.weight.bfloat16())


class TestBadFolders:
    def folder(self, tmp_path: Path) -> Path:
        build("llama").float().save_pretrained(tmp_path)
        return tmp_path

    def load(self, folder: Path) -> None:
        model = on_meta(MODELS["llama"])
        materialize(model, set(names_of(model)), seed=0, folder=folder)

    def test_empty(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"neither model.safetensors nor"):
            self.load(tmp_path)

    def test_cut_short(self, tmp_path: Path) -> None:
        file = self.folder(tmp_path) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(CheckpointError, match=r"cut short or damaged"):
            self.load(tmp_path)

    def test_of_another_model(self, tmp_path: Path) -> None:
        save_file({"something": torch.zeros(2)}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"has no weight of LlamaForCausalLM: it has something"):
            self.load(tmp_path)

    def test_of_another_size(self, tmp_path: Path) -> None:
        save_file({"model.norm.weight": torch.zeros(31)}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"has shape \(31,\), but .* has \(32,\)"):
            self.load(tmp_path)

    def test_missing_shard(self, tmp_path: Path) -> None:
        index = {"weight_map": {"model.norm.weight": "gone.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"names gone.safetensors, which is not there"):
            self.load(tmp_path)


class TestLostValues:
    def test_parameter_without_initialisation(self) -> None:
        model = on_meta(Plain)
        with pytest.raises(TraceError, match=r"parameter 'position' .* Plain has no initialisation"):
            materialize(model, set(names_of(model)), seed=0)

    def test_parameters_that_stay_on_meta_need_none(self) -> None:
        model = on_meta(Plain)
        materialize(model, {"layers.2.up.weight"}, seed=0)
        assert real_names(model) == {"layers.2.up.weight"}

    def test_buffer_without_initialisation(self) -> None:
        def make() -> nn.Module:
            block = Block(4)
            block.register_buffer("table", torch.arange(4.0))
            return block

        with pytest.raises(TraceError, match=r"buffer 'table' .* Block has no initialisation"):
            materialize(on_meta(make), set(), seed=0)

    def test_plain_tensor_attribute(self) -> None:
        model = on_meta(lambda: Block(4))
        model.table = torch.zeros(2, device="meta")
        with pytest.raises(TraceError, match=r"no parameter and no buffer"):
            materialize(model, set(), seed=0)


def test_what_has_values_may_be_of_another_size_than_in_the_folder(tmp_path: Path) -> None:
    """A body of a folder that had another head."""
    save_file({"0.weight": torch.ones(4, 4), "1.weight": torch.ones(2, 4)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 7, bias=False))
    with pytest.raises(CheckpointError, match=r"'1.weight' has shape \(2, 4\), but"):
        check_folder(model, tmp_path)
    model[1] = nn.Linear(4, 7, bias=False)
    check_folder(model, tmp_path)
    materialize(model, {"0.weight", "1.weight"}, seed=0, folder=tmp_path)
    assert torch.equal(model[0].weight, torch.ones(4, 4))


def test_normalisation_buffers_and_attention_of_torch() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(8), nn.MultiheadAttention(8, 2), nn.LSTM(8, 8))

    model = on_meta(make)
    materialize(model, set(names_of(model)), seed=0)
    assert torch.equal(model[0].running_var, torch.ones(8))
    assert int(model[0].num_batches_tracked) == 0
    assert float(model[1].out_proj.bias.abs().max()) == 0
    assert float(model[1].in_proj_weight.std()) > 0
    assert model[2].weight_ih_l0 is model[2]._flat_weights[0]


def test_transformers_model_inside_a_plain_one() -> None:
    def make() -> nn.Module:
        return nn.ModuleDict({"body": MODELS["llama"](), "extra": nn.Linear(32, 3)})

    model = on_meta(make)
    materialize(model, set(names_of(model)), seed=0)
    alone = on_meta(make)
    materialize(alone, {"extra.weight"}, seed=0)
    assert torch.equal(alone["extra"].weight, model["extra"].weight)
    assert abs(float(model["body"].lm_head.weight.std()) - 0.02) < 0.002
    copy.deepcopy(model)
