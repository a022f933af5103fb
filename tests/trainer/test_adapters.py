"""Adapters of PEFT through the Trainer: trained as the stock Trainer trains them, saved as PEFT saves them."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

import fold3d
from fold3d.errors import CheckpointError, ConfigError
from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Variant, assert_same, model_of, run_fold3d, run_stock

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "gradient_accumulation_steps": 4}
FOLDED = {"dp": 2, "pp": 2, "segments": 2, "bucket_bytes": 1}
ADAPTER = "adapter_model.safetensors"


def double_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """Of the next tokens; transformers' own casts logits to fp32, and shards of weights round otherwise."""
    logits, wanted = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum") / num_items_in_batch


class Adapted(Variant):
    """A model with one adapter or several; what follows is counted after training."""

    def __init__(self, *names: str, **settings: Any):
        self.names = names or ("default",)
        self.settings = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | settings

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"model": self.adapted(named["model"]), "compute_loss_func": double_loss}

    def adapted(self, model: Any) -> PeftModel:
        torch.manual_seed(5)  # of the values that LoRA begins with
        found = get_peft_model(model, LoraConfig(**self.settings), adapter_name=self.names[0])
        for name in self.names[1:]:
            found.add_adapter(name, LoraConfig(**self.settings))
        return found

    def after(self, trainer: Any) -> Any:
        trained = [p for p in trainer.model.parameters() if p.requires_grad]
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        engine = getattr(trainer, "engine", None)
        with contextlib.nullcontext() if engine is None else engine.whole_optimizer_state():
            state = sum(value.numel() for one in optimizer.state.values() for value in one.values() if value.ndim)
        breakdown = None if engine is None else engine.breakdown()
        return {
            "trained": sum(p.numel() for p in trained),
            "gradients": sum(p.grad is not None for p in trainer.model.parameters() if not p.requires_grad),
            "state": state,
            "dp_bytes": None if breakdown is None else breakdown.dp_bytes,
        }


GPT2 = {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}


def job_of(folder: Path, **changes: Any) -> Job:
    lora = changes.pop("lora", {})
    family = "gpt2" if "c_attn" in lora.get("target_modules", ()) else "llama"
    return Job(str(folder), family=family, samples=40, arguments=SAVING | changes, variant=Adapted(**lora))


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(
    "processes, layout, lora",
    [
        (1, {"segments": 2}, {}),
        (2, {"pp": 2}, {"layers_to_transform": [3]}),  # the first stage trains nothing
        (2, {"dp": 2, "dp_sync": "zero1"}, {"modules_to_save": ["lm_head"]}),
        (2, {"pp": 2, "segments": 2, "recompute": "full"}, {"use_dora": True} | GPT2),
        (4, FOLDED | {"dp_sync": "early"}, {"bias": "all"}),
        (4, FOLDED | {"dp_sync": "zero1"}, {}),
        (2, {"tp": 2}, GPT2),  # Llama's norms compute in fp32
    ],
)
def test_trains_as_the_stock_trainer(
    ranks: RankPool, tmp_path: Path, processes: int, layout: dict[str, Any], lora: dict[str, Any]
) -> None:
    replicas = layout.get("dp", 1)
    ours, stock = job_of(tmp_path / "ours", lora=lora), job_of(tmp_path / "stock", lora=lora)
    found = ranks.run(run_fold3d, processes, ours, layout)
    wanted = run_stock(stock, replicas=replicas)
    if replicas > 1:  # the loss of an evaluation batch is that of all replicas' batches, as under DDP
        wanted.metrics = found[0].metrics
    for one in found:
        assert_same(one, wanted, 1e-10)
    assert_folders_alike(Path(ours.folder) / "checkpoint-2", Path(stock.folder) / "checkpoint-2", processes)


def assert_folders_alike(ours: Path, stock: Path, processes: int) -> None:
    rng = {f"rng_state_{rank}.pth" for rank in range(processes)} if processes > 1 else {"rng_state.pth"}
    names, wanted = ({str(path.relative_to(folder)) for path in folder.rglob("*")} for folder in (ours, stock))
    assert names == wanted - {"rng_state.pth"} | rng | {"fold3d.json"}
    for file in (path for path in stock.rglob("*") if path.name == ADAPTER):
        mine, theirs = load_file(ours / file.relative_to(stock)), load_file(file)
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(mine[key], value, rtol=0, atol=1e-10, msg=key)
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in (ours, stock)]
    for config in configs:
        config["target_modules"] = sorted(config["target_modules"])  # a set's
    assert configs[0] == configs[1]


class Switches(TrainerCallback):  # type: ignore[misc]
    """Trains the adapters in turn, a step each."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        model.set_adapter("ab"[state.global_step % 2])


class Switching(Adapted):
    """Adapters that the optimizer has, and of which one at a time is switched on."""

    def __init__(self, by: str) -> None:
        super().__init__("a", "b")
        self.by = by

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        found = super().arguments(named)
        for name, parameter in found["model"].named_parameters():
            parameter.requires_grad_("lora_" in name)
        return found | ({"callbacks": [Switches()]} if self.by == "step" else {})

    def trainer(self, base: type[Any]) -> type[Any]:
        """Returns one whose loss also looks at what the model says without its adapters."""

        class Compares(base):  # type: ignore[misc]
            def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **named: Any) -> Any:
                with torch.no_grad(), model.disable_adapter():
                    plain = model(**inputs)["logits"]
                logits = model(**inputs)["logits"]
                loss = (logits - plain - 0.1).square().mean() / self.args.gradient_accumulation_steps
                return (loss, {"logits": logits}) if named.get("return_outputs") else loss

        return Compares if self.by == "reference" else base


@pytest.mark.parametrize("by", ["step", "reference"])
def test_adapters_that_take_turns(ranks: RankPool, tmp_path: Path, by: str) -> None:
    """Those that are frozen when the engine is built are trained later: the optimizer has them."""
    ours, stock = (
        Job(str(tmp_path / name), family="llama", layers=2, samples=40, variant=Switching(by))
        for name in ("ours", "stock")
    )
    wanted = run_stock(stock, replicas=2)
    for one in ranks.run(run_fold3d, 2, ours, {"dp": 2, "dp_sync": "zero1"}):
        wanted.metrics = one.metrics
        assert_same(one, wanted, 1e-10)


def test_what_is_frozen_costs_nothing(ranks: RankPool, tmp_path: Path) -> None:
    job = job_of(tmp_path, save_strategy="no")
    whole = sum(p.numel() for p in model_of(job).parameters())
    for rank in ranks.run(run_fold3d, 2, job, {"dp": 2, "dp_sync": "zero1"}):
        counts, size = rank.extra, 8
        assert counts["gradients"] == 0
        assert counts["state"] == 2 * counts["trained"], "two moments"
        # Gradients one way and weights the other; buckets are padded.
        assert 2 * counts["trained"] * size <= counts["dp_bytes"] < 2 * 1.2 * counts["trained"] * size
        assert counts["trained"] < whole / 20


class Saved(Adapted):
    """Saves the model itself, too."""

    def after(self, trainer: Any) -> Any:
        trainer.save_model()
        return trainer.predict(trainer.eval_dataset).predictions


def test_peft_loads_what_was_saved(ranks: RankPool, tmp_path: Path) -> None:
    """Two adapters, the second of which lies in a folder of its own."""
    job = replace(job_of(tmp_path, save_strategy="no"), variant=Saved("default", "other"))
    outcome = ranks.run(run_fold3d, 2, job, {"pp": 2, "segments": 2})[0]
    assert sorted(path.parent.name for path in tmp_path.rglob(ADAPTER)) == ["other", tmp_path.name]
    loaded = PeftModel.from_pretrained(model_of(job), tmp_path)
    loaded.load_adapter(str(tmp_path / "other"), "other")
    values = loaded.state_dict()
    for name, value in outcome.weights.items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_resumes(ranks: RankPool, tmp_path: Path, writer: str) -> None:
    """Under another layout, and between the Trainers."""
    first, again = job_of(tmp_path / "first"), job_of(tmp_path / "again")
    again = replace(again, resume=str(tmp_path / "first" / "checkpoint-2"))
    if writer == "ours":
        ranks.run(run_fold3d, 4, first, FOLDED | {"dp_sync": "zero1"})
        resumed = run_stock(again, replicas=2)
        whole = run_stock(replace(first, folder=str(tmp_path / "whole")), replicas=2)
    else:
        whole = run_stock(first)
        resumed = ranks.run(run_fold3d, 2, again, {"pp": 2, "segments": 2})[0]
    logs = [{k: v for k, v in entry.items() if k != "train_loss"} for entry in whole.logs]
    found = [{k: v for k, v in entry.items() if k != "train_loss"} for entry in resumed.logs]
    assert_same(replace(resumed, logs=found), replace(whole, logs=logs), 1e-10)


class Best(Adapted):
    """Trains on until it stops by itself, and loads the best adapter."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return super().arguments(named) | {"callbacks": [EarlyStoppingCallback(1)]}


def test_the_best_adapter(ranks: RankPool, tmp_path: Path) -> None:
    better = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 0.5}
    ours, stock = (
        replace(job_of(tmp_path / name, metric_for_best_model="loss", **better), variant=Best())
        for name in ("ours", "stock")
    )
    assert_same(ranks.run(run_fold3d, 2, ours, {"pp": 2})[0], run_stock(stock), 1e-10)


def test_another_models_adapter(tmp_path: Path) -> None:
    run_fold3d(job_of(tmp_path / "first"), {})
    again = replace(job_of(tmp_path, lora={"r": 4}), resume=str(tmp_path / "first" / "checkpoint-2"))
    with pytest.raises(CheckpointError, match=r"has shape \(2, 16\), but the model's has \(4, 16\)"):
        run_fold3d(again, {})


def prompted() -> torch.nn.Module:
    return get_peft_model(tiny(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))


def added() -> torch.nn.Module:
    model = tiny()
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    return model


def on_meta() -> torch.nn.Module:
    with torch.device("meta"):
        return get_peft_model(tiny("meta"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))


def tiny(device: str = "cpu") -> Any:
    return models.build(models.MODELS["llama"](layers=2), device=device)


@pytest.mark.parametrize(
    "build, words", [(prompted, "PROMPT_TUNING.*such as LoRA"), (added, "get_peft_model"), (on_meta, "meta device")]
)
def test_refused(tmp_path: Path, build: Any, words: str) -> None:
    args = fold3d.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ConfigError, match=words):
        fold3d.Trainer(build(), args, train_dataset=[])
