"""MeasuringTrainer: what the Trainer logs of its steps: speed, memory, where the time went, the timeline."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from torch import Tensor
from torch.nn import Module

from fold3d.cluster.devices import known_device
from fold3d.engine.engine import Engine
from fold3d.observe.announce import announce
from fold3d.observe.memory import peak_bytes
from fold3d.observe.step_breakdown import gather_records
from fold3d.observe.timeline import write_trace
from fold3d.observe.timeline_picture import write_picture
from fold3d.trace.shadow import fake_copy
from fold3d.trace.without_values import WithoutValues
from fold3d.trainer.console import printing_lines
from fold3d.trainer.evaluation import EvaluatingTrainer
from fold3d.trainer.events import EventHandler


def peak_flops(device: torch.device, mixed_precision: str) -> float | None:
    """Returns the device's FLOPs per second in the precision in use; None where that is not known.

    Args:
        mixed_precision: "bf16", "fp16" or "no", as accelerate says.
    """
    if device.type != "cuda" or mixed_precision not in ("bf16", "fp16"):
        return None
    return flops_of(torch.cuda.get_device_name(device))


def flops_of(name: str) -> float | None:
    """Returns the FLOPs per second of a device called so by its driver, None for one that is not known."""
    device = known_device(name)
    return None if device is None else device.flops_16_bit


@contextlib.contextmanager
def counting_parameters(trainable: Callable[[], int]) -> Iterator[None]:
    """In its body the stock loop takes the number of trainable parameters from `trainable`."""
    module: Any = transformers.trainer
    stock = module.get_model_param_count

    def count(model: Any, trainable_only: bool = False) -> int:
        return trainable() if trainable_only else stock(model)

    module.get_model_param_count = count
    try:
        yield
    finally:
        module.get_model_param_count = stock


class WholeSizes:
    """The model as code sees it that counts its parameters, where this process has parts of them."""

    def __init__(self) -> None:
        self._copy: Module | None = None

    def of(self, model: Module) -> Module:
        """Returns a copy of `model`, without values whose parameters have the whole shapes; always the same one."""
        if self._copy is None:
            self._copy = fake_copy(model, WithoutValues())
        return self._copy


logger = logging.getLogger(__name__)

_SAID = 16
"""Ranks that are named."""
_TOLD_SECONDS = 1.0
"""A set-up that took less is not worth a line."""


def own_peaks(engine: Engine) -> tuple[float, ...]:
    """Returns this rank's: of the process, of what training needs, and the rank."""
    return float(peak_bytes(engine.device)), float(engine.memory.peak), float(engine.topology.rank)


def highest_peaks(engine: Engine, peaks: Tensor) -> dict[str, float]:
    """Returns the log's keys; all ranks call.

    Args:
        peaks: [replicas, 3], `own_peaks` of the ranks of this stage.
    """
    fullest = peaks[peaks[:, 1].argmax()].tolist()
    highest = _highest_of_replica(engine, fullest[1])
    where = fullest[2] if fullest[1] == highest else -1.0
    measured = {
        "peak_memory_gb": round(_highest_of_replica(engine, peaks[:, 0].max().item()) / 1e9, 2),
        "peak_memory_mb": round(highest / 1e6, 1),
        "peak_memory_rank": _highest_of_replica(engine, where),
    }
    if engine.planned_memory is not None:
        measured["predicted_peak_memory_mb"] = round(engine.planned_memory / 1e6, 1)
    return measured


def say_peaks(engine: Engine) -> None:
    """Announces on rank 0 what each rank has needed so far, the fullest first; all ranks call.

    Silent on one process, whose peak is in the logs.
    """
    with engine.supervise("comparing the memory of all ranks", meets=True):
        peaks = engine.world.gather((float(engine.memory.peak), engine.topology.rank))
    if peaks is None or len(peaks) == 1:
        return
    fullest = sorted(peaks, key=lambda one: (-one[0], one[1]))
    said = [f"rank {rank} {peak / 1e6:,.1f}" for peak, rank in fullest[:_SAID]]
    if len(fullest) > _SAID:
        said.append(f"{len(fullest) - _SAID} more from {fullest[_SAID][0] / 1e6:,.1f} to {fullest[-1][0] / 1e6:,.1f}")
    announce(logger, f"peak memory of this training, MB: {', '.join(said)}")


def _highest_of_replica(engine: Engine, value: float) -> float:
    """Returns the highest `value` that a rank of this replica gives; all ranks call."""
    highest = torch.tensor(value, dtype=torch.float64)
    with engine.supervise("comparing the stages", meets=True):
        engine.world.all_reduce_replica(highest, torch.maximum)
    return float(highest)


class Throughput:
    """Counts one replica's tokens and the seconds of its optimizer steps between two readings."""

    def __init__(self) -> None:
        self._tokens = 0
        self.counted = 0
        """Tokens so far."""
        self._seconds = 0.0
        self._started: float | None = None
        self._set_up = 0.0
        self.step_ms = 0.0
        """Milliseconds of the last step, from loading its batches to its end."""

    def start(self, set_up: float) -> None:
        """A step begins: its batches are about to be loaded.

        Args:
            set_up: seconds that the engine has taken so far to build itself; likewise in `stop`.
        """
        self._started, self._set_up = time.perf_counter(), set_up

    def count(self, tokens: int) -> None:
        """The step's batches hold `tokens` input tokens."""
        self._tokens += tokens
        self.counted += tokens

    def stop(self, set_up: float) -> float:
        """The step has ended. Returns for how many seconds of it the engine was set up, which do not count."""
        if self._started is None:
            return 0.0
        within = set_up - self._set_up
        seconds = time.perf_counter() - self._started - within
        self._seconds += seconds
        self._started, self.step_ms = None, 1e3 * seconds
        return within

    def read(self) -> tuple[int, float]:
        """Returns tokens and seconds since the last reading."""
        reading = (self._tokens, self._seconds)
        self._tokens, self._seconds = 0, 0.0
        return reading


class MeasuringTrainer(EvaluatingTrainer):
    """The measuring half of `fold3d.Trainer`."""

    callback_handler: EventHandler
    _throughput: Throughput
    _flops_per_token: float | None
    _whole_sizes: WholeSizes
    _measured: dict[str, float]
    _not_finite_since: Tensor
    _warned_of_loss: bool
    _timeline_written: bool

    def _measure_nothing_yet(self) -> None:
        self._throughput = Throughput()
        self._flops_per_token = None
        self._whole_sizes = WholeSizes()
        self._measured = {}
        self._timeline_written = False
        self._not_finite_since = torch.zeros(())
        self._warned_of_loss = False

    def _sum_as_logged(self, losses: Tensor) -> Tensor:
        """Returns the sum of a step's `losses`, fp64 [micro-batches]. As with the stock Trainer each that is not finite
        counts as the mean of what is to be logged so far; where none is finite, their own sum."""
        finite, logged = torch.isfinite(losses), self._to_log
        if finite.all() or not finite.any() or logged is None:
            return losses.sum()
        before = total = logged.item()
        for loss in losses.tolist():
            total += loss if math.isfinite(loss) else total / self._steps_to_log
        return torch.tensor(total - before, dtype=losses.dtype)

    def _finite(self, loss: Tensor, count: int) -> Tensor:
        """Returns a step's loss, or where none of its `count` micro-batches had a finite one, what the stock Trainer
        counts for them."""
        logged = self._to_log
        if logged is None:
            return loss
        instead = logged.to(loss.device) * ((1 + 1 / self._steps_to_log) ** count - 1)
        return torch.where(torch.isfinite(loss), loss, instead.to(loss.dtype))

    @property
    def _to_log(self) -> Tensor | None:
        """The sum of losses since the last log; None outside of train(), and where the stock Trainer does not tell."""
        return getattr(self, "_tr_loss", None)

    @property
    def _steps_to_log(self) -> int:
        steps: int = 1 + self.state.global_step - self._globalstep_last_logged
        return steps

    def _watch_loss(self, loss: Tensor) -> None:
        """Notes the step of the first loss that is not finite, without waiting for a device."""
        first = torch.where(torch.isfinite(loss.detach()), 0.0, float(self.state.global_step + 1))
        since = self._not_finite_since.to(loss.device)
        self._not_finite_since = torch.where(since > 0, since, first)

    def _warn_of_loss(self, steps: list[int]) -> None:
        """Warns once, on process 0. Args: steps: of the replicas that had such losses, the first of each."""
        if steps and not self._warned_of_loss and self.state.is_world_process_zero:
            logger.warning(
                "the loss is not finite (NaN or infinite) since step %s; logs show averages without it unless "
                "logging_nan_inf_filter=False. Lower learning_rate, set max_grad_norm, or look at that step's data",
                min(steps),
            )
        self._warned_of_loss = self._warned_of_loss or bool(steps)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Returns the micro-batches of one optimizer step and the number of labels in them, over all replicas."""
        self._throughput.start(self.engine.setup_seconds)
        self._collects = self._has_stream
        try:
            samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        finally:
            self._collects = False
        name = getattr(self.model, "main_input_name", "input_ids")
        inputs = [
            batch[name]
            for batch in samples  # whoever runs them says which cannot be
            if isinstance(batch, Mapping)
            and isinstance(batch.get(name), Tensor)
            and not batch[name].is_floating_point()
        ]
        self._throughput.count(sum(tokens.numel() for tokens in inputs))
        if self._flops_per_token is None and inputs:
            batch = next(batch for batch in samples if name in batch)
            self._flops_per_token = self.floating_point_ops(batch) / max(1, inputs[0].numel())
        return samples, count

    def _maybe_log_save_evaluate(self, *args: Any, **named: Any) -> None:
        set_up = self._throughput.stop(self.engine.setup_seconds)
        if set_up >= _TOLD_SECONDS and self.state.is_world_process_zero:
            announce(logger, f"set up in {set_up:.1f} s: recording the model, measuring, planning, placing weights")
        if self.args.timeline == self.state.global_step and not self._timeline_written:
            self._write_timeline()
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._measured = self._measure()
        if self.control.should_log and self.args.world_size > 1:
            # The stock method logs, evaluates and saves. What `on_log` asks for on one process, all must know before.
            self.callback_handler.flags.put_off_all_but_logs(self.control)
            super()._maybe_log_save_evaluate(*args, **named)
            self.callback_handler.compare(self.state, self.control)
        super()._maybe_log_save_evaluate(*args, **named)

    def _tokens_trained(self) -> int:
        """Returns how many input tokens all replicas have had since this Trainer was made; every rank calls."""
        mine = torch.tensor([self._throughput.counted], device=self.args.device)
        return int(self.accelerator.gather(mine).sum())

    def _measure(self) -> dict[str, float]:
        """Returns what a training log says of speed, memory and this rank's last step; every rank calls."""
        tokens, seconds = self._throughput.read()
        bad = float(self._not_finite_since)
        mine = torch.tensor([[tokens, bad, *own_peaks(self.engine)]], dtype=torch.float64, device=self.args.device)
        replicas = self.accelerator.gather(mine)
        total, measured = replicas[:, 0].sum().item(), highest_peaks(self.engine, replicas[:, 2:])
        self._warn_of_loss([int(step) for step in replicas[:, 1].tolist() if step])
        if total > 0 and seconds > 0:
            measured["tokens_per_second"] = round(total / seconds, 1)
            peak = peak_flops(self.args.device, self.accelerator.mixed_precision)
            if peak is not None and self._flops_per_token:
                used = self._flops_per_token * total / seconds
                measured["mfu"] = round(used / (peak * self.args.world_size), 4)
        topology = self.engine.topology
        if (scaler := self.accelerator.scaler) is not None:
            measured |= {"loss_scale": scaler.get_scale(), "skipped_steps": scaler.skipped_steps}
        breakdown = self.engine.breakdown().lasting(self._throughput.step_ms)
        return measured | breakdown.log(dp=topology.dp, pp=topology.pp, tp=topology.tp)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs as the stock Trainer; training logs with the job's speed and memory and this rank's breakdown.

        Callbacks and `state.log_history` get all of it, the console one line.
        """
        self._correct_speed(logs)
        if "loss" not in logs or not self._measured:
            super().log(logs, start_time)
            return
        logs.update(self._measured)
        measured, self._measured = frozenset(self._measured), {}
        with printing_lines(self.callback_handler, measured):
            super().log(logs, start_time)

    def _write_timeline(self) -> None:
        self._timeline_written = True
        step = self.state.global_step
        breakdown = self.engine.breakdown()
        self.engine.record_tp_sync(False)
        records = gather_records(breakdown.records, self.engine.world)
        if records is None:
            return
        path = Path(str(self.args.output_dir)) / "timeline" / f"step-{step}"
        pp, tp, predicted_ms = self.args.pp, self.args.tp, breakdown.predicted_ms
        memory = self.engine.memory.curves()
        write_trace(path.with_suffix(".json"), records, pp=pp, tp=tp, predicted_ms=predicted_ms, memory=memory)
        title = f"optimizer step {step}"
        write_picture(path.with_suffix(".png"), records, pp=pp, tp=tp, title=title, predicted_ms=predicted_ms)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As the stock Trainer's: those of the whole model, also where ranks share its weights."""
        model = self.model
        if self.args.tp > 1:
            self.model = self._whole_sizes.of(model)
        try:
            return int(super().floating_point_ops(inputs))
        finally:
            self.model = model

    def store_flos(self) -> None:
        """Adds the floating-point operations of all replicas; the stages of one compute one model together."""
        flos = torch.tensor(float(self.current_flos), dtype=torch.float64, device=self.args.device)
        self.state.total_flos += self.accelerator.gather(flos).sum().item()
        self.current_flos = 0
