"""TrainingArguments: help, round trips, and errors that name the value, the reason and the setting to change."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from transformers import HfArgumentParser

from fold3d import TrainingArguments
from fold3d.checkpoint import manifest
from fold3d.errors import ConfigError
from tests.helpers.ranks import RankPool

OURS = [
    field.name
    for field in dataclasses.fields(TrainingArguments)
    if field.name not in {stock.name for stock in dataclasses.fields(transformers.TrainingArguments)}
]


def arguments(**named: Any) -> TrainingArguments:
    return TrainingArguments(output_dir="unused", use_cpu=True, **named)


def test_new_arguments_have_help() -> None:
    assert OURS == [
        "parallel",
        "global_batch_size",
        "strategy",
        "dp",
        "tp",
        "tp_plan",
        "tp_overlap",
        "sequence_parallel",
        "pp",
        "segments",
        "schedule",
        "micro_batch_size",
        "loss_reduction",
        "group_size",
        "dp_sync",
        "dp_sync_dtype",
        "gradient_delay",
        "flush",
        "weight_versions",
        "delay_correction",
        "bucket_bytes",
        "memory_limit",
        "offload",
        "offload_pool",
        "offload_disk",
        "offload_optimizer",
        "kernels",
        "chunked_loss",
        "blocks",
        "partition",
        "recompute",
        "retune",
        "comm_timeout",
        "timeline",
        "weights",
        "async_save",
        "resume",
        "preemption_grace",
        "exit_when_preempted",
    ]
    text = HfArgumentParser(TrainingArguments).format_help()  # type: ignore[arg-type]
    for field in dataclasses.fields(TrainingArguments):
        if field.name in OURS:
            assert f"--{field.name}" in text and len(field.metadata["help"]) > 20


def test_late_gradients_are_not_scaled() -> None:
    assert arguments(gradient_delay=1).layout.gradient_delay == 1
    with pytest.raises(ConfigError, match="gradient_delay=1 is not available with fp16"):
        arguments(gradient_delay=1, fp16=True)


def test_json_round_trip() -> None:
    args = arguments(
        segments=2, gradient_accumulation_steps=4, schedule="fold", group_size=2, comm_timeout=20.0, timeline=3
    )
    values = json.loads(args.to_json_string())
    assert {name: values[name] for name in ("segments", "group_size", "dp")} == {
        "segments": 2,
        "group_size": 2,
        "dp": None,
    }
    again = TrainingArguments(**values)
    assert again.to_dict() == args.to_dict() and again.layout == args.layout
    (parsed,) = HfArgumentParser(TrainingArguments).parse_dict(values)  # type: ignore[arg-type]
    assert parsed.to_dict() == args.to_dict()


def test_command_line() -> None:
    words = "--output_dir unused --use_cpu --segments 2 --schedule fold --group_size 2 --comm_timeout 1.5"
    parser = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    (args,) = parser.parse_args_into_dataclasses([*words.split(), "--gradient_accumulation_steps", "4"])
    layout = args.layout
    assert (layout.segments, layout.group_size, layout.comm_timeout, layout.blocks) == (2, 2, 1.5, "auto")
    assert layout.micro_batches == 4 and layout.seed == args.seed
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", "unused", "--use_cpu"])
    layout = args.layout
    assert (layout.segments, layout.schedule, layout.group_size, layout.dp_sync) == ("auto",) * 4


def test_settings_of_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")  # of a job that is never joined
    monkeypatch.setattr(transformers.TrainingArguments, "__post_init__", lambda self: None)
    monkeypatch.setattr(TrainingArguments, "world_size", 4)
    monkeypatch.setattr(TrainingArguments, "n_gpu", 0)
    words = "--output_dir unused --use_cpu --pp 2 --segments auto --group_size auto --dp_sync zero1 --bucket_bytes 4096"
    words += " --memory_limit 1MB"
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words.split())  # type: ignore[arg-type]
    assert (args.layout.dp_sync, args.layout.bucket_bytes, args.layout.segments) == ("zero1", 4096, "auto")
    assert args.layout.memory_limit == 1_000_000
    for named, message in (
        ({"dp_sync": "zero3"}, "dp_sync='zero3': must be one of auto, zero1"),
        ({"bucket_bytes": -5}, "bucket_bytes=-5: must be a number of bytes"),
        ({"pp": 4, "dp_sync": "early"}, "dp_sync='early' has no effect with one replica"),
        (
            {"segments": "2", "schedule": "aiao", "dp_sync": "zero1", "memory_limit": 9000}
            | {"recompute": "none", "offload": "none"},
            "memory_limit=9000 has no effect",
        ),
        ({"pp": 4, "bucket_bytes": 9}, "bucket_bytes=9 has no effect with one replica"),
    ):
        with pytest.raises(ConfigError, match=message):
            arguments(**named)
    assert not dist.is_initialized()


def test_types_are_what_was_meant() -> None:
    """A command line gives text; what a script reads back is the number."""
    words = "--output_dir unused --use_cpu --segments 2 --schedule fold --group_size 2 --recompute"
    parser = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    (args,) = parser.parse_args_into_dataclasses([*words.split(), "--gradient_accumulation_steps", "4"])
    assert (args.segments, args.group_size, args.recompute) == (2, 2, "full")
    for word, meant in (("True", "full"), ("False", "none"), ("blocks:2", "blocks:2"), ("attn.*,mlp", "attn.*,mlp")):
        (args,) = parser.parse_args_into_dataclasses(["--output_dir", "unused", "--use_cpu", "--recompute", word])
        assert args.recompute == args.layout.recompute == meant
    assert arguments().recompute == "auto"


def test_a_timeline_without_matplotlib_ends_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    assert arguments().timeline is None
    with pytest.raises(ConfigError, match="timeline=3 draws a picture with matplotlib, which is not installed: pip"):
        arguments(timeline=3)


def test_pickles(tmp_path: Path) -> None:
    args = arguments(segments=2)
    torch.save(args, tmp_path / "training_args.bin")
    again = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert type(again) is TrainingArguments and again.to_dict() == args.to_dict()


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "dp too large": ({"dp": 2}, r"dp\*tp\*pp = 2\*1\*1 = 2, but the job has 1 process"),
    "pp too large": ({"pp": 3}, r"but the job has 1 process"),
    "tp too large": ({"tp": 2}, r"tp\*pp = 2\*1 = 2 needs 2 processes, .* but the job has 1 process"),
    "tp_plan without tp": ({"tp_plan": {"lm_head": "whole"}}, r"tp_plan=.* has no effect with tp=1"),
    "tp_plan in no JSON": ({"tp_plan": "lm_head"}, r"tp_plan='lm_head' is no JSON"),
    "tp_plan of another type": ({"tp_plan": [1]}, r"tp_plan=\[1\]: must be a dict"),
    "tp_plan that is a list": ({"tp_plan": "[1]"}, r"tp_plan='\[1\]': must be a JSON object"),
    "unknown schedule": ({"schedule": "zigzag"}, r"unknown schedule 'zigzag'.*1f1b"),
    "segments with 1f1b": ({"segments": 2, "schedule": "1f1b"}, r"segments=2 has no effect on schedule '1f1b'"),
    "segments with gpipe": ({"segments": 2, "schedule": "gpipe"}, r"segments=2 has no effect"),
    "micro_batch_size": (
        {"per_device_train_batch_size": 6, "micro_batch_size": 4},
        r"micro_batch_size=4 does not divide per_device_train_batch_size=6; take one of 1, 2, 3, 6",
    ),
    "micro_batch_size 0": ({"micro_batch_size": 0}, r"micro_batch_size=0: must be an integer of at least 1"),
    "micro_batch_size in words": (
        {"micro_batch_size": "half"},
        r"micro_batch_size='half': must be an integer of at least 1 or \"auto\"",
    ),
    "group_size with aiao": (
        {"segments": 2, "group_size": 2, "gradient_accumulation_steps": 4},
        r"group_size=2 has no effect on schedule 'aiao'",
    ),
    "blocks of a whole model": ({"blocks": "transformer.h"}, r"blocks='transformer.h' has no effect with pp=1"),
    "timeline too late": ({"timeline": 9, "max_steps": 5}, r"timeline=9 has no effect.*max_steps=5"),
    "timeline 0": ({"timeline": 0}, r"timeline=0: must be an optimizer step"),
    "timeline that is no step": ({"timeline": "last"}, r"timeline='last': must be an optimizer step"),
    "comm_timeout": ({"comm_timeout": 0}, r"comm_timeout=0: must be a positive"),
    "comm_timeout in words": ({"comm_timeout": "5m"}, r"comm_timeout='5m': must be a positive"),
    "no micro-batch": ({"gradient_accumulation_steps": 0}, r"^gradient_accumulation_steps=0: must be an integer"),
    "segments 0": ({"segments": 0}, r"segments=0: must be an integer of at least 1"),
    "segments in words": ({"segments": "two"}, r"segments='two': must be an integer of at least 1 or \"auto\""),
    "group_size in words": ({"group_size": "all"}, r"group_size='all': must be an integer of at least 1 or \"auto\""),
    "group_size 0": ({"group_size": "0"}, r"group_size=0: must be an integer of at least 1"),
    "dp_sync": ({"dp_sync": "later"}, r"dp_sync='later': must be one of auto, zero1, early, serial"),
    "dp_sync of one replica": ({"dp_sync": "zero1"}, r"dp_sync='zero1' has no effect with one replica"),
    "full eval": ({"bf16_full_eval": True}, r"bf16_full_eval=True is not available.*bf16=True"),
    "deepspeed": ({"deepspeed": {"zero_optimization": {}}}, r"deepspeed=.* is not available"),
    "fsdp": ({"fsdp": "full_shard"}, r"fsdp='full_shard' is not available: .*dp, pp and segments"),
    "liger": ({"use_liger_kernel": True}, r"use_liger_kernel=True is not available.*head"),
    "ddp": ({"ddp_bucket_cap_mb": 25}, r"ddp_bucket_cap_mb=25 is not available: .*has no effect"),
    "lomo": ({"optim": "lomo"}, r"optim='lomo' is not available"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    named, message = ERRORS[case]
    with pytest.raises(ConfigError, match=message):
        arguments(**named)


def test_wrong_world_size_is_found_before_a_group_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's environment, and nobody at the rendezvous: an attempt to build a group would hang."""
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "6",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"dp\*tp\*pp = 2\*1\*2 = 4, but the job has 6 process"):
        arguments(dp=2, pp=2)
    with pytest.raises(ConfigError, match="unknown schedule"):
        arguments(pp=2, schedule="zigzag")
    assert not dist.is_initialized()


def test_mixed_precision_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ConfigError, match="ACCELERATE_MIXED_PRECISION=fp8"):
        arguments()


def replicas() -> tuple[int, int]:
    args = arguments(pp=2)
    return args.layout.resolve_dp(args.world_size), args.world_size


def test_default_dp(ranks: RankPool) -> None:
    assert ranks.run(replicas, 4) == [(2, 4)] * 4


def test_what_has_no_effect_in_saving_is_refused() -> None:
    with pytest.raises(ConfigError, match="resume='last': must be 'auto'"):
        arguments(resume="last")
    with pytest.raises(ConfigError, match="async_save=True has no effect with save_strategy='no'"):
        arguments(async_save=True, save_strategy="no")
    with pytest.raises(ConfigError, match="preemption_grace has no effect without enable_jit_checkpoint"):
        arguments(preemption_grace=20.0)
    with pytest.raises(ConfigError, match="preemption_grace=0: must be a number of seconds greater than 0"):
        arguments(preemption_grace=0, enable_jit_checkpoint=True)
    with pytest.raises(ConfigError, match="exit_when_preempted=True has no effect without enable_jit_checkpoint"):
        arguments(exit_when_preempted=True)


def test_resuming_by_itself_keeps_the_global_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    save_file({"w": torch.zeros(1)}, folder / "model.safetensors")
    named: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "resume": "auto",
        "per_device_train_batch_size": 4,
    }
    assert TrainingArguments(**named).gradient_accumulation_steps == 1, "the stock Trainer's checkpoints do not say"
    manifest.write(folder, step_index=3, batch=12)
    assert TrainingArguments(**named).gradient_accumulation_steps == 3
    assert "gradient_accumulation_steps=3 instead of 1" in caplog.text
    with pytest.raises(ConfigError, match="12 samples per step, which 1 replicas with per_device_train_batch_size=5"):
        TrainingArguments(**named | {"per_device_train_batch_size": 5})


def test_a_strategy_says_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    spared = "recompute=blocks offload=none offload_optimizer=False dp_sync_dtype=float32 gradient_delay=0"
    text = "dp=1 pp=1 micro_batches=4 segments=2 blocks=0-2/2-3 schedule=aiao dp_sync=early bucket_bytes=4096 " + spared
    made = arguments(strategy=text)
    assert (made.dp, made.tp, made.pp, made.segments, made.schedule) == (1, 1, 1, 2, "aiao")
    assert (made.gradient_accumulation_steps, made.recompute, made.layout.strategy) == (4, "blocks", text)
    again = arguments(strategy=text, gradient_accumulation_steps=4, segments=2)
    assert again.layout == made.layout
    with pytest.raises(
        ConfigError, match=r"micro_batches=2 \(of the Trainer: gradient_accumulation_steps\) contradicts"
    ):
        arguments(strategy=text, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match="global_batch_size=8, with which it is 1"):
        arguments(strategy=text, global_batch_size=8)
    with pytest.raises(ConfigError, match="strategy='pp=1 segments=1': must be what `fold3d plan` prints"):
        arguments(strategy="pp=1 segments=1")
