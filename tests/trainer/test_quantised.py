"""LoRA over a quantised base: trained as the stock Trainer trains it on one process, saved in PEFT's files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

import fold3d
from fold3d.errors import ConfigError
from fold3d.trace import trace
from fold3d.trace.compound import holders, is_compound
from fold3d.trace.from_config import model_from_config
from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Outcome, assert_same, run_fold3d, run_stock
from tests.trainer.test_adapters import SAVING, Adapted, assert_folders_alike

FOLDED = {"dp": 2, "pp": 2, "segments": 2, "bucket_bytes": 1, "dp_sync": "zero1"}


def quantisation(kind: str) -> Any:
    """Returns the configuration, skipping the test where its library is missing."""
    import transformers

    if kind == "torchao":
        pytest.importorskip("torchao", reason="torchao is not installed")
        from torchao.quantization import Int8WeightOnlyConfig

        return transformers.TorchAoConfig(Int8WeightOnlyConfig())
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    if kind == "8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=kind == "4bit double",
    )


@dataclass
class Quantised(Adapted):
    """The model of a folder, quantised when it is loaded."""

    folder: str
    kind: str
    empty: bool = False
    """Whether it is loaded without values, which each rank then reads for itself."""

    def __post_init__(self) -> None:
        super().__init__()
        if self.empty:
            self.settings["init_lora_weights"] = True

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        dtype = torch.float32
        if self.empty:
            with fold3d.empty_weights():
                model = self.load(dtype)
        else:
            model = self.load(dtype)
            for parameter in model.parameters():  # what is not quantised computes in double precision
                if not is_compound(parameter):
                    parameter.data = parameter.data.double()
        return super().arguments(named | {"model": model})

    def adapted(self, model: Any) -> PeftModel:
        found = super().adapted(model)
        for parameter in found.parameters():  # PEFT makes adapters of quantised layers in single precision
            if parameter.requires_grad and not self.empty:
                parameter.data = parameter.data.double()
        return found

    def load(self, dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=dtype, quantization_config=quantisation(self.kind)
        )

    def after(self, trainer: Any) -> Any:
        here = [module for _, module in holders(trainer.model) if not module.weight.is_meta]  # type: ignore[union-attr]
        frozen = [p for p in trainer.model.parameters() if not p.requires_grad]
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        return {
            "quantised": len(here),
            "kinds": sorted({type(module.weight).__name__ for module in here}),
            "gradients": sum(p.grad is not None for p in frozen),
            "state": sum(p in optimizer.state for p in frozen),
        }


def job_of(folder: Path, base: Path, kind: str, **changes: Any) -> Job:
    empty = changes.pop("empty", False)
    return Job(
        str(folder), family="llama", samples=40, arguments=SAVING | changes,
        variant=Quantised(str(base), kind, empty),
    )  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that is not quantised; 64 wide, as bitsandbytes packs blocks of 64 numbers."""
    folder = tmp_path_factory.mktemp("base")
    models.build(models.llama_config(layers=4, hidden=64)).save_pretrained(folder)
    return folder


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(
    "processes, layout, kind",
    [
        (2, {"pp": 2, "segments": 2}, "8bit"),
        (4, FOLDED, "4bit double"),
        (2, {"pp": 2}, "4bit"),
        (2, {"pp": 2, "recompute": "full"}, "torchao"),
        (2, {"dp": 2, "dp_sync": "early"}, "8bit"),
        (2, {"pp": 2, "schedule": "zb_h1"}, "4bit"),
        (4, FOLDED, "torchao"),
        (1, {"segments": 2}, "4bit"),
    ],
)
def test_trains_as_the_stock_trainer(
    ranks: RankPool, tmp_path: Path, base: Path, processes: int, layout: dict[str, Any], kind: str
) -> None:
    quantisation(kind)
    replicas = layout.get("dp", 1)
    ours, stock = (job_of(tmp_path / name, base, kind) for name in ("ours", "stock"))
    found = ranks.run(run_fold3d, processes, ours, layout)
    wanted = run_stock(stock, replicas=replicas)
    if replicas > 1:  # the loss of an evaluation batch is that of all replicas' batches, as under DDP
        wanted.metrics = found[0].metrics
    everything = wanted.extra["quantised"]
    for one in found:
        assert_same(plain(one), plain(wanted), 1e-10)
        assert one.extra["gradients"] == one.extra["state"] == 0
        assert one.extra["kinds"] == wanted.extra["kinds"]
        assert one.extra["quantised"] == everything // layout.get("pp", 1), "each rank holds its own layers"
    assert_folders_alike(Path(ours.folder) / "checkpoint-2", Path(stock.folder) / "checkpoint-2", processes)


def plain(outcome: Outcome) -> Outcome:
    """Adapters, norms, embedding: a quantised weight is in no state of the engine."""
    return replace(outcome, weights={n: v for n, v in outcome.weights.items() if "base_layer" not in n})


@pytest.mark.parametrize("kind", ["4bit", "8bit", "torchao"])
def test_each_rank_quantises_its_own_layers(ranks: RankPool, tmp_path: Path, base: Path, kind: str) -> None:
    """The numbers are those of one process that began in the same way."""
    quantisation(kind)
    layouts = {"one": {"segments": 1}, "many": {"pp": 2, "segments": 2}}
    found = {
        name: ranks.run(run_fold3d, layout.get("pp", 1), job_of(tmp_path / name, base, kind, empty=True), layout)
        for name, layout in layouts.items()
    }
    (one,) = found["one"]
    for rank in found["many"]:
        assert_same(rank, one, 1e-5)
        assert rank.extra["quantised"] == one.extra["quantised"] // 2
        assert rank.extra["kinds"] == one.extra["kinds"]
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=quantisation(kind))
    adapted = PeftModel.from_pretrained(loaded, tmp_path / "many" / "checkpoint-4")
    values = adapted.state_dict()
    for name, value in found["many"][0].weights.items():
        if "lora_" in name:
            torch.testing.assert_close(values[name], value, rtol=0, atol=0, msg=name)


def test_resumes_on_another_layout(ranks: RankPool, tmp_path: Path, base: Path) -> None:
    quantisation("4bit")
    first, again = job_of(tmp_path / "first", base, "4bit"), job_of(tmp_path / "again", base, "4bit")
    whole = ranks.run(run_fold3d, 4, first, FOLDED)[0]
    again = replace(again, resume=str(tmp_path / "first" / "checkpoint-2"), arguments=again.arguments | {})
    again.arguments["gradient_accumulation_steps"] = 2 * first.arguments["gradient_accumulation_steps"]
    resumed = ranks.run(run_fold3d, 2, again, {"pp": 2})[0]
    for name, value in whole.weights.items():
        torch.testing.assert_close(resumed.weights[name], value, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_refused_with_shards(tmp_path: Path, base: Path, kind: str) -> None:
    quantisation(kind)
    model = Quantised(str(base), kind).arguments({})["model"]
    with pytest.raises(ConfigError, match="tp=2 is not available for quantised weights"):
        fold3d.Engine(model, fold3d.ParallelConfig(tp=2))


def test_weights_that_are_quantised_in_the_files(tmp_path: Path, base: Path) -> None:
    model = Quantised(str(base), "4bit").load(torch.float32) if quantisation("4bit") else None
    assert model is not None
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="quantised weights already"), fold3d.empty_weights():
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any(p.is_meta for p in AutoModelForCausalLM.from_pretrained(tmp_path).parameters())


def test_a_recording_before_and_after_quantising_is_that_of_the_plain_model(base: Path) -> None:
    plain_model = model_from_config(str(base))
    wanted = trace(plain_model)
    with fold3d.empty_weights():
        empty = Quantised(str(base), "4bit").load(torch.float32) if quantisation("4bit") else None
    assert empty is not None and all(p.is_meta for p in empty.parameters())
    for model in (empty, Quantised(str(base), "4bit").load(torch.float32)):
        found = trace(model)
        assert [cost.flops for cost in found.costs] == [cost.flops for cost in wanted.costs]
        assert isinstance(model, nn.Module)


def test_adapters_of_another_kind_on_the_meta_device(tmp_path: Path, base: Path) -> None:
    from peft import LoraConfig, get_peft_model

    with fold3d.empty_weights():
        model = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    args = fold3d.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ConfigError, match=r"init_lora_weights=False.*before get_peft_model"):
        fold3d.Trainer(adapted, args, train_dataset=[])
