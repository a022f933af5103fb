"""Checkpoints of whole runs: to and from the stock Trainer, under other layouts, cut short, interrupted."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig

import fold3d
from fold3d.checkpoint import delivery
from fold3d.errors import CheckpointError
from tests.helpers.launch import launch
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import (
    Job,
    Outcome,
    Variant,
    assert_same,
    collate,
    error_of,
    model_of,
    run_fold3d,
    run_stock,
    stock_arguments,
    trainer_arguments,
)

FOLDED = {"dp": 2, "pp": 2, "segments": 2, "dp_sync": "zero1", "bucket_bytes": 1}
"""Each replica has half of the optimizer's state."""
SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "gradient_accumulation_steps": 4}
STEP = "checkpoint-3"


class Another(Variant):
    """Sets another model when training is over, as scripts do that merge adapters, and saves it."""

    def after(self, trainer: Any) -> Any:
        trainer.model = model_of(Job(""))
        trainer.save_model(f"{trainer.args.output_dir}/another")
        dist.barrier() if dist.is_initialized() else None
        saved = load_file(f"{trainer.args.output_dir}/another/model.safetensors")
        own = trainer.model.state_dict()
        trainer.model = trainer.engine.model
        return {name: torch.equal(value, own[name]) for name, value in saved.items()}


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("layout", [{"dp": 2, "dp_sync": "zero1"}, {}], ids=str)
def test_another_model_is_saved_as_it_is(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    """The file was empty, or had the trained model's weights."""
    for found in ranks.run(run_fold3d, layout.get("dp", 1), Job(str(tmp_path), variant=Another()), layout):
        assert len(found.extra) > 20 and all(found.extra.values())


class Masks(Variant):
    """Draws in the collator, as for masked language modelling."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"data_collator": masked}


def masked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = collate(samples)
    chosen = torch.rand(batch["input_ids"].shape) < 0.3
    return batch | {"input_ids": batch["input_ids"].masked_fill(chosen, 3)}


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("layout", [{"pp": 2}, {"tp": 2}], ids=str)
def test_a_replica_s_ranks_draw_alike_on_another_mesh(ranks: RankPool, tmp_path: Path, layout: dict[str, int]) -> None:
    """Of as many processes: each took the numbers of its own file, and a replica's ranks had other batches."""
    few = SAVING | {"save_steps": 2, "max_steps": 4, "optim": "sgd"}
    first = Job(str(tmp_path / "first"), layers=2, samples=32, variant=Masks(), arguments=few)
    ranks.run(run_fold3d, 2, replace(first, arguments=few | {"gradient_accumulation_steps": 2}), {"dp": 2})
    later = replace(first, folder=str(tmp_path / "later"), resume=f"{first.folder}/checkpoint-2")
    ours = ranks.run(run_fold3d, 2, later, layout)[0]
    assert_same(ours, ranks.run(run_fold3d, 1, later, {})[0], 1e-10)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("way", ["sub", "none"])
def test_training_goes_on_behind_a_save(ranks: RankPool, tmp_path: Path, way: str) -> None:
    """transformers notes things in the configuration when it saves, on process 0 only, by which processes took the
    next micro-batch for one of another form, and exchanged other things."""
    few = SAVING | {"save_steps": 2, "max_steps": 4, "optim": "sgd"}
    job = Job(str(tmp_path), layers=2, arguments=few)
    ours = ranks.run(run_fold3d, 2, job, {"tp": 2, "tp_overlap": way})[0]
    assert_same(ours, run_stock(replace(job, folder=str(tmp_path / "stock"))), 1e-10)


@pytest.fixture(scope="module")
def folded(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Outcome]:
    """A run on four processes without dropout that saved after steps 3 and 6."""
    job = Job(str(tmp_path_factory.mktemp("folded")), samples=40, arguments=SAVING)
    return job, ranks.run(run_fold3d, 4, job, FOLDED, timeout=120)[0]


def continued(job: Job, folder: Path, checkpoint: str = STEP, **arguments: Any) -> Job:
    """Returns `job` resumed from its checkpoint, with an output folder of its own."""
    source = str(Path(job.folder) / checkpoint)
    return replace(job, folder=str(folder), resume=source, arguments=job.arguments | arguments)


def assert_continues(resumed: Outcome, whole: Outcome, tolerance: float) -> None:
    """The resumed run logged what the whole run logged after the checkpoint, and ended with its weights."""
    logs = [{k: v for k, v in entry.items() if k != "train_loss"} for entry in whole.logs]
    again = [{k: v for k, v in entry.items() if k != "train_loss"} for entry in resumed.logs]
    assert_same(replace(resumed, logs=again), replace(whole, logs=logs), tolerance)


@pytest.mark.gate
def test_files_are_those_of_the_stock_trainer(folded: tuple[Job, Outcome], tmp_path: Path) -> None:
    job, _ = folded
    run_stock(replace(job, folder=str(tmp_path)), replicas=2)
    ours = {path.name for path in (Path(job.folder) / STEP).iterdir()}
    stock = {path.name for path in (tmp_path / STEP).iterdir()}
    rng = {f"rng_state_{rank}.pth" for rank in range(4)}
    assert ours == stock - {"rng_state.pth"} | rng | {"fold3d.json"}
    assert sorted(path.name for path in Path(job.folder).iterdir()) == ["checkpoint-3", "checkpoint-6"]


def test_from_pretrained_loads_it(folded: tuple[Job, Outcome]) -> None:
    job, outcome = folded
    model = AutoModelForCausalLM.from_pretrained(Path(job.folder) / "checkpoint-6")
    weights = model.state_dict()
    assert model.dtype == torch.float64 and model.lm_head.weight is model.transformer.wte.weight
    for name, value in outcome.weights.items():
        assert torch.equal(weights[name], value), name


@pytest.mark.gate
def test_optimizer_file_equals_the_stock_one(folded: tuple[Job, Outcome], tmp_path: Path) -> None:
    job, _ = folded
    run_stock(replace(job, folder=str(tmp_path)), replicas=2)
    ours, stock = (
        torch.load(Path(folder) / STEP / "optimizer.pt", weights_only=True) for folder in (job.folder, tmp_path)
    )
    assert ours["param_groups"] == stock["param_groups"]
    assert ours["state"].keys() == stock["state"].keys()
    for index, state in stock["state"].items():
        assert state.keys() == ours["state"][index].keys()
        for key, value in state.items():
            found = ours["state"][index][key]
            assert found.dtype == value.dtype
            torch.testing.assert_close(found, value, rtol=0, atol=1e-10)


def train_twice(job: Job, ours: bool, layout: dict[str, Any]) -> None:
    """Trains one model with two Trainers, one after the other, the second of which saves; called on every rank."""
    base: Any = fold3d if ours else transformers
    named = trainer_arguments(job)
    for saving in ("no", "steps"):
        args = base.TrainingArguments(**(stock_arguments(job) | {"save_strategy": saving} | layout))
        base.Trainer(args=args, **named).train()


def test_a_second_trainer_on_the_model_saves_the_whole_optimizer(ranks: RankPool, tmp_path: Path) -> None:
    arguments = {"max_steps": 2, "save_steps": 2}
    ours, stock = (Job(str(tmp_path / name), arguments=arguments) for name in ("ours", "stock"))
    ranks.run(train_twice, 2, ours, True, {"pp": 2, "segments": 2})
    train_twice(stock, False, {})
    found, wanted = (torch.load(Path(job.folder) / "checkpoint-2" / "optimizer.pt") for job in (ours, stock))
    assert found["param_groups"] == wanted["param_groups"] and found["state"].keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        torch.testing.assert_close(found["state"][index]["exp_avg"], state["exp_avg"], rtol=0, atol=1e-10)


def test_stock_trainer_resumes_ours(folded: tuple[Job, Outcome], tmp_path: Path) -> None:
    job, whole = folded
    assert_continues(run_stock(continued(job, tmp_path), replicas=2), with_eval(job, whole, tmp_path), 1e-10)


def with_eval(job: Job, outcome: Outcome, folder: Path) -> Outcome:
    """Returns the outcome with the metrics of one process: an evaluation batch is larger with two replicas."""
    alone = run_stock(replace(job, folder=str(folder), arguments=job.arguments | {"save_strategy": "no"}), replicas=2)
    return replace(outcome, metrics=alone.metrics)


@pytest.mark.gate
def test_ours_resumes_stock(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(str(tmp_path / "stock"), samples=40, arguments=SAVING)
    whole = run_stock(job)
    resumed = ranks.run(run_fold3d, 2, continued(job, tmp_path / "ours"), {"pp": 2, "segments": 2})
    assert_continues(resumed[0], whole, 1e-10)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_stop_and_resume_gives_the_identical_curve(ranks: RankPool, tmp_path: Path, family: str) -> None:
    job = Job(str(tmp_path / "whole"), family=family, dtype="float32", dropout=0.1, samples=24, arguments=SAVING)
    whole = ranks.run(run_fold3d, 4, job, FOLDED)[0]
    resumed = ranks.run(run_fold3d, 4, continued(job, tmp_path / "again"), FOLDED)[0]
    assert_continues(resumed, whole, 0.0)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(
    ("processes", "layout", "micro_batches"),
    [
        (1, {}, 8),
        (2, {"pp": 2}, 8),
        (4, {"pp": 4, "schedule": "gpipe"}, 8),
        (4, {"dp": 4, "dp_sync": "zero1"}, 2),
        (2, {"dp": 2, "dp_sync": "early"}, 4),
    ],
)
def test_resume_under_another_layout(
    ranks: RankPool, tmp_path: Path, processes: int, layout: dict[str, Any], micro_batches: int
) -> None:
    """With dropout: its masks do not depend on the layout either."""
    job = Job(str(tmp_path / "whole"), dropout=0.1, samples=48, arguments=SAVING)
    whole = ranks.run(run_fold3d, 4, job, FOLDED)[0]
    other = continued(job, tmp_path / "other", gradient_accumulation_steps=micro_batches)
    resumed = ranks.run(run_fold3d, processes, other, layout)[0]
    assert_continues(resumed, replace(whole, metrics=resumed.metrics), 1e-10)


SPARING = {"schedule": "aiao", "recompute": "blocks:2", "offload": "activations", "offload_optimizer": True}
"""What saves memory, of a folded layout."""
TO_DISK = {"segments": 2, "schedule": "aiao", "recompute": "full", "offload": "boundaries", "offload_disk": "."}


def test_what_saves_memory_is_not_in_a_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    """A run goes on under another layout that recomputes, offloads and steps on the host otherwise."""
    job = Job(str(tmp_path / "whole"), dropout=0.1, samples=48, arguments=SAVING)
    whole = ranks.run(run_fold3d, 4, job, FOLDED | SPARING)[0]
    other = continued(job, tmp_path / "other", gradient_accumulation_steps=8)
    resumed = ranks.run(run_fold3d, 2, other, {"pp": 2} | TO_DISK)[0]
    assert_continues(resumed, replace(whole, metrics=resumed.metrics), 1e-10)


@pytest.mark.parametrize(
    ("processes", "layout", "micro_batches"), [(4, {"dp": 4, "dp_sync": "zero1"}, 2), (1, {"segments": 2}, 8)]
)
def test_zero1_resumes_what_others_wrote(
    ranks: RankPool, tmp_path: Path, processes: int, layout: dict[str, Any], micro_batches: int
) -> None:
    """Shards of four become shards of two, and so does the state of one process."""
    arguments = SAVING | {"gradient_accumulation_steps": micro_batches}
    job = Job(str(tmp_path / "whole"), samples=48, arguments=arguments)
    whole = ranks.run(run_fold3d, processes, job, layout)[0]
    other = continued(job, tmp_path / "other", gradient_accumulation_steps=4)
    resumed = ranks.run(run_fold3d, 2, other, {"dp": 2, "dp_sync": "zero1", "bucket_bytes": 1})[0]
    assert_continues(resumed, replace(whole, metrics=resumed.metrics), 1e-10)


class Master(torch.optim.Optimizer):
    """Keeps weights and moments in fp32, and has `load_state_dict` leave them so, as optimizers of other libraries."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["master"], state["moment"] = parameter.float(), torch.zeros_like(parameter).float()
                state["moment"].lerp_(parameter.grad.float(), 0.3)
                state["master"].sub_(state["moment"].sign() * 0.7 + state["moment"], alpha=group["lr"])
                parameter.copy_(state["master"])

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                for key, value in state_dict["state"].get(number, {}).items():
                    self.state[parameter][key] = value.float().clone()


class WithMaster(Variant):
    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"optimizers": (Master(named["model"].parameters()), None)}


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(
    ("processes", "layout"), [(2, {"dp": 2, "dp_sync": "zero1"}), (1, {"offload_optimizer": True})], ids=str
)
def test_a_state_that_keeps_its_dtype_goes_on_with_the_same_bits(
    ranks: RankPool, tmp_path: Path, processes: int, layout: dict[str, Any]
) -> None:
    """It was rounded to that of the weights, or met wrappers of fold3d's."""
    job = Job(str(tmp_path / "whole"), dtype="bfloat16", samples=48, arguments=SAVING, variant=WithMaster())
    whole = ranks.run(run_fold3d, processes, job, layout)[0]
    resumed = ranks.run(run_fold3d, processes, continued(job, tmp_path / "on"), layout)[0]
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())


class TwoModes(torch.optim.SGD):
    """Has other weights to train than to evaluate, as schedule-free optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-2)
        for group in self.param_groups:
            group["train_mode"] = False

    def _move(self, by: float, *, trains: bool) -> None:
        for group in (one for one in self.param_groups if one["train_mode"] is not trains):
            group["train_mode"] = trains
            for parameter in group["params"]:
                parameter.data.mul_(by)

    def train(self) -> None:
        self._move(2.0, trains=True)

    def eval(self) -> None:
        self._move(0.5, trains=False)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError("not in train mode")
        super().step(closure)


class WithTwoModes(Variant):
    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"optimizers": (TwoModes(named["model"].parameters()), None)}


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2}], ids=str)
def test_an_optimizer_with_two_modes_goes_on(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    """It was loaded, in the mode in which it was saved, behind the moment when the stock loop has it train."""
    arguments = SAVING | {"eval_strategy": "steps", "eval_steps": 3}
    job = Job(str(tmp_path / "whole"), samples=48, arguments=arguments, variant=WithTwoModes())
    whole = ranks.run(run_fold3d, 2, job, layout)[0]
    resumed = ranks.run(run_fold3d, 2, continued(job, tmp_path / "on"), layout)[0]
    assert_continues(resumed, replace(whole, metrics=resumed.metrics), 1e-10)


class Loses(Variant):
    """The best checkpoint is deleted while training goes on."""

    def trainer(self, base: type[Any]) -> type[Any]:
        class Trainer(base):  # type: ignore[misc]
            def _load_best_model(self) -> None:
                if self.is_world_process_zero():
                    shutil.rmtree(self.state.best_model_checkpoint)
                dist.barrier() if dist.is_initialized() else None
                super()._load_best_model()

        return Trainer


def test_a_best_model_that_is_gone_leaves_the_weights(ranks: RankPool, tmp_path: Path) -> None:
    """As in the stock Trainer: it ended a training that was done."""
    job = Job(str(tmp_path), arguments=BEST, variant=Loses(), samples=24)
    assert len(ranks.run(run_fold3d, 2, job, {"pp": 2})) == 2


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
@pytest.mark.parametrize("manifest", [True, False])
def test_cut_short(ranks: RankPool, folded: tuple[Job, Outcome], tmp_path: Path, file: str, manifest: bool) -> None:
    job, _ = folded
    folder = tmp_path / STEP
    shutil.copytree(Path(job.folder) / STEP, folder)
    path = folder / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if not manifest:
        (folder / "fold3d.json").unlink()
    damaged = replace(continued(job, tmp_path), resume=str(folder))
    errors = ranks.run(error_of, 2, damaged, {"pp": 2}, CheckpointError)
    assert all("cut short" in error and file in error for error in errors), errors


def test_resume_needs_a_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(str(tmp_path), resume=str(tmp_path / "checkpoint-9"))
    errors = ranks.run(error_of, 2, job, {"pp": 2}, CheckpointError)
    assert all("checkpoint-9: the folder does not exist" in error for error in errors)


def train_on_a_full_disk(job: Job, layout: dict[str, Any]) -> str:
    """Trains while the last rank cannot write its part of the optimizer's state."""
    write = delivery.Writer.write

    def fail(self: Any, location: Any, *arguments: Any) -> None:
        if location.file == "optimizer.pt" and dist.get_rank() == 3:
            raise OSError(28, "No space left on device")
        write(self, location, *arguments)

    with mock.patch.object(delivery.Writer, "write", fail):
        return outcome_of(job, layout)


def outcome_of(job: Job, layout: dict[str, Any]) -> str:
    try:
        run_fold3d(job, layout)
    except (OSError, ValueError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_that_fails_leaves_nothing(ranks: RankPool, tmp_path: Path, asynchronous: bool) -> None:
    """An asynchronous one fails at the end of a later step, and the checkpoint before stays."""
    job = Job(str(tmp_path), samples=40, arguments=SAVING | {"async_save": asynchronous})
    errors = ranks.run(train_on_a_full_disk, 4, job, {"dp": 2, "pp": 2})
    assert errors[3].startswith("OSError") and "No space left" in errors[3]
    assert all("failed on rank 3" in error and "No space left" in error for error in errors[:3]), errors
    assert list(tmp_path.iterdir()) == []


class UnreadableState(Variant):
    """The optimizer of rank 1 cannot say what its state is."""

    def trainer(self, base: type[Any]) -> type[Any]:
        def refuse(optimizer: Any) -> None:
            raise ValueError("no state today")

        class Refuses(base):  # type: ignore[misc]
            def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
                if self.args.process_index == 1:
                    self._plain_optimizer().register_state_dict_pre_hook(refuse)
                super()._save_optimizer_and_scheduler(output_dir)

        return Refuses


def test_a_rank_that_cannot_read_its_optimizer_ends_the_save_on_all(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(str(tmp_path), arguments=SAVING, variant=UnreadableState())
    errors = ranks.run(outcome_of, 4, job, {"dp": 2, "pp": 2})
    assert errors[1] == "ValueError: no state today"
    others = [errors[rank] for rank in (0, 2, 3)]
    assert all("failed on rank 1: ValueError: no state today" in error for error in others), errors
    assert list(tmp_path.iterdir()) == []


class KilledWhileSaving(Variant):
    """The process dies in the middle of writing the second checkpoint."""

    def trainer(self, base: type[Any]) -> type[Any]:
        class Killed(base):  # type: ignore[misc]
            def _save_rng_state(self, output_dir: str) -> None:
                if self.state.global_step == 6:
                    os._exit(9)
                super()._save_rng_state(output_dir)

        return Killed


def train_and_die(folder: str) -> None:
    run_fold3d(Job(folder, arguments=SAVING, variant=KilledWhileSaving()), {})


def test_a_killed_save_is_cleaned_up(ranks: RankPool, tmp_path: Path) -> None:
    result = launch(train_and_die, 1, str(tmp_path), timeout=120)
    assert result[0].returncode == 9, result.report()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "tmp-checkpoint-6"]
    job = Job(str(tmp_path), arguments=SAVING, resume=True)
    resumed = ranks.run(run_fold3d, 1, job, {})[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-6"]
    assert resumed.column("step")[-1] == 6


BEST = {
    "save_strategy": "steps",
    "eval_strategy": "steps",
    "save_steps": 1,
    "eval_steps": 1,
    "max_steps": 4,
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "save_total_limit": 2,
    "load_best_model_at_end": True,
}
"""The learning rate is absurd: the first evaluation is the best one."""


@pytest.mark.gate
def test_limit_and_best_model(ranks: RankPool, tmp_path: Path) -> None:
    """The learning rate is absurd: the first evaluation is the best one, and its weights come back at the end."""
    ours = ranks.run(run_fold3d, 2, Job(str(tmp_path / "ours"), arguments=BEST), {"pp": 2})
    stock = run_stock(Job(str(tmp_path / "stock"), arguments=BEST))
    assert_same(ours[0], stock, 1e-10)
    for run in ("ours", "stock"):
        assert sorted(p.name for p in (tmp_path / run).iterdir()) == ["checkpoint-1", "checkpoint-4"]
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "checkpoint-1").state_dict()
    assert all(torch.equal(best[name], value) for name, value in ours[0].weights.items())


class Experts(Variant):
    """Mixtral: its files hold every expert by itself, its memory one tensor of all experts."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        torch.manual_seed(3)
        config = MixtralConfig(
            num_hidden_layers=4,
            hidden_size=16,
            intermediate_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            num_local_experts=4,
            max_position_embeddings=64,
            bos_token_id=0,
            eos_token_id=0,
        )
        return named | {"model": AutoModelForCausalLM.from_config(config, experts_implementation="batched_mm").double()}

    def after(self, trainer: Any) -> Any:
        trainer.save_model()


def test_files_with_other_tensors_than_memory(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(str(tmp_path / "run"), samples=40, arguments=SAVING, variant=Experts())
    whole = ranks.run(run_fold3d, 4, job, FOLDED)[0]
    assert_same(whole, replace(run_stock(replace(job, folder=str(tmp_path)), replicas=2), metrics=whole.metrics), 1e-10)
    for folder, tensors in (("run", 79), ("run/checkpoint-6", 39)):
        assert len(load_file(tmp_path / folder / "model.safetensors")) == tensors
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in whole.weights.items())
    resumed = ranks.run(run_fold3d, 4, continued(job, tmp_path / "again"), FOLDED)[0]
    assert_continues(resumed, whole, 0.0)


class Begins(Variant):
    """Looks at weights, schedule and optimizer when training begins, and changes weights."""

    def trainer(self, base: type[Any]) -> type[Any]:
        seen: dict[str, Any] = {}
        self.seen = seen

        class Begin(transformers.TrainerCallback):
            def on_train_begin(
                self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None,
                lr_scheduler: Any = None, **_: Any,
            ) -> None:  # fmt: skip
                bias = dict(model.named_parameters())["transformer.h.0.ln_1.bias"].data
                seen["bias"], seen["last"] = bias.clone(), lr_scheduler.last_epoch
                seen["state"] = bool(optimizer.state)
                bias.fill_(0.5)

        class Trainer(base):  # type: ignore[misc]
            def __init__(self, *args: Any, **named: Any) -> None:
                super().__init__(*args, **named)
                self.add_callback(Begin())

        return Trainer

    def after(self, trainer: Any) -> Any:
        return self.seen


@pytest.mark.parametrize("layout", [{}, {"segments": 2}], ids=str)
def test_what_training_goes_on_from_is_there_when_it_begins(tmp_path: Path, layout: dict[str, Any]) -> None:
    """A cut model had its weights from before, and what a callback wrote to them was lost."""
    job = Job(str(tmp_path / "whole"), samples=24, arguments=SAVING)
    run_fold3d(job, layout)
    again = replace(continued(job, tmp_path / "stock"), variant=Begins())
    expected = run_stock(again)
    found = run_fold3d(replace(continued(job, tmp_path / "again"), variant=Begins()), layout)
    assert found.extra["state"] and found.extra["last"] == expected.extra["last"] == 3
    torch.testing.assert_close(found.extra["bias"], expected.extra["bias"], rtol=1e-10, atol=0)
    assert_continues(found, expected, 1e-10)


def test_what_a_training_that_failed_was_to_load_no_other_one_loads(tmp_path: Path) -> None:
    """A script that begins anew where it cannot go on trained weights of the checkpoint."""
    job = Job(str(tmp_path / "whole"), samples=24, arguments=SAVING)
    run_fold3d(job, {})
    expected = run_fold3d(replace(job, folder=str(tmp_path / "anew")), {"segments": 2})
    again = replace(job, folder=str(tmp_path / "again"))
    args = fold3d.TrainingArguments(**stock_arguments(again), segments=2)
    trainer = fold3d.Trainer(args=args, **trainer_arguments(again))
    gone = OSError("the data are gone")
    with mock.patch.object(trainer, "get_train_dataloader", side_effect=gone), pytest.raises(OSError, match="gone"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / STEP))
    trainer.train()
    for name, value in trainer.engine.state_dict()["model"].items():
        assert torch.equal(value, expected.weights[name]), name
    trainer.engine.close()


def other_folders(job: Job) -> str:
    """Each process has a folder of its own."""
    return error_of(replace(job, folder=f"{job.folder}/{dist.get_rank()}", resume=True), {"dp": 2}, fold3d.Fold3dError)


@pytest.mark.gate
@pytest.mark.parametrize("kind", ["older", "of another training"])
def test_processes_that_go_on_from_different_checkpoints_are_told(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    """Replicas trained with different weights, and stayed different."""
    run_fold3d(Job(str(tmp_path / "0"), samples=24, arguments=SAVING), {})
    other = {"seed": 5} if kind != "older" else {"max_steps": 3}
    run_fold3d(Job(str(tmp_path / "1"), samples=24, arguments=SAVING | other), {})
    job = Job(str(tmp_path), samples=24, arguments=SAVING | {"max_steps": 8, "gradient_accumulation_steps": 2})
    mine = "checkpoint-3, step 3" if kind == "older" else "checkpoint-6, step 6"
    for text in ranks.run(other_folders, 2, job):
        assert f"ranks [1] have another checkpoint to go on from than rank 0: {mine} (" in text, text
        assert "and checkpoint-6, step 6 (" in text


def own_folder(job: Job) -> str:
    return error_of(replace(job, folder=f"{job.folder}/{dist.get_rank()}"), {"pp": 2}, fold3d.ConfigError)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("more", [{}, {"async_save": True}], ids=["best", "async"])
def test_what_needs_a_folder_that_all_hosts_see(ranks: RankPool, tmp_path: Path, more: dict[str, Any]) -> None:
    """It failed at the end of the training, or with its first checkpoint."""
    for text in ranks.run(own_folder, 2, Job(str(tmp_path), arguments=BEST | more)):
        assert "=True needs an output_dir that all hosts see" in text and "mount one on all hosts" in text, text
    assert not list(tmp_path.glob("*/checkpoint-*"))


class Settings:
    """A configuration of the user's, which is no JSON."""

    width = 4


def test_a_configuration_that_is_no_json_does_not_end_the_first_checkpoint(tmp_path: Path) -> None:
    trainer = fold3d.Trainer(
        Plain(),
        fold3d.TrainingArguments(str(tmp_path), use_cpu=True, max_steps=2, save_steps=1, report_to=[]),
        train_dataset=[{"x": torch.ones(4)}] * 32,
    )
    trainer.train()
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()
    before = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    full = mock.patch.object(delivery.Writer, "write", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(OSError, match="No space left"):
        trainer.save_model(str(tmp_path / "checkpoint-2"))
    after = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Settings()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        return {"loss": x.square().mean()}


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([{"x": torch.ones(4)}] * 64)


class OnOne(Variant):
    """Only process 0 has a callback that may look at the beginning."""

    def trainer(self, base: type[Any]) -> type[Any]:
        class Trainer(base):  # type: ignore[misc]
            def __init__(self, *args: Any, **named: Any) -> None:
                super().__init__(*args, **named)
                if self.is_world_process_zero():
                    self.add_callback(Nothing())

        return Trainer


@pytest.mark.gate
def test_a_process_may_be_the_only_one_that_looks_at_the_beginning(ranks: RankPool, tmp_path: Path) -> None:
    """All load what it would look at, or none: it waited for the others."""
    job = Job(str(tmp_path / "whole"), samples=24, arguments=SAVING)
    whole = ranks.run(run_fold3d, 2, job, {"pp": 2})[0]
    again = replace(continued(job, tmp_path / "again"), variant=OnOne())
    for found in ranks.run(run_fold3d, 2, again, {"pp": 2}):
        assert_continues(found, whole, 1e-12)


class Nothing(transformers.TrainerCallback):
    def on_train_begin(self, *args: Any, **named: Any) -> None:
        """May read weights."""


def test_a_model_that_only_a_batch_can_record_goes_on_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A callback that looks at the beginning must not keep a job from going on; it is said."""

    def trainer(**more: Any) -> Any:
        named = {"max_steps": 2, "save_steps": 2, "report_to": [], "segments": 2, "blocks": "layers"} | more
        return fold3d.Trainer(
            Stack(), fold3d.TrainingArguments(str(tmp_path), use_cpu=True, **named), train_dataset=Stream()
        )

    trainer().train()
    again = trainer(max_steps=4)
    again.add_callback(Nothing())
    assert again.train(resume_from_checkpoint=True).global_step == 4
    assert "on_train_begin comes before the checkpoint is loaded" in caplog.text
