"""MeasuringTrainer: what the Trainer logs of its steps: speed, memory, where the time went, the timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fold3d.observe.step_breakdown import gather_records
from fold3d.observe.timeline import write_trace
from fold3d.observe.timeline_picture import write_picture
from fold3d.trainer.evaluation.evaluating import EvaluatingTrainer
from fold3d.trainer.flushing import FlushingHandler
from fold3d.trainer.logs.console import printing_lines
from fold3d.trainer.logs.device_flops import peak_flops
from fold3d.trainer.logs.parameter_count import WholeSizes
from fold3d.trainer.logs.peak_memory import highest_peaks, own_peaks
from fold3d.trainer.logs.throughput import Throughput


class MeasuringTrainer(EvaluatingTrainer):
    """The measuring half of `fold3d.Trainer`."""

    callback_handler: FlushingHandler
    _throughput: Throughput
    _flops_per_token: float | None
    _whole_sizes: WholeSizes
    _measured: dict[str, float]
    _timeline_written: bool

    def _measure_nothing_yet(self) -> None:
        self._throughput = Throughput()
        self._flops_per_token = None
        self._whole_sizes = WholeSizes()
        self._measured = {}
        self._timeline_written = False

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Returns the micro-batches of one optimizer step and the number of labels in them, over all replicas."""
        self._throughput.start()
        samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        name = getattr(self.model, "main_input_name", "input_ids")
        inputs = [batch[name] for batch in samples if name in batch and not batch[name].is_floating_point()]
        self._throughput.count(sum(tokens.numel() for tokens in inputs))
        if self._flops_per_token is None and inputs:
            batch = next(batch for batch in samples if name in batch)
            self._flops_per_token = self.floating_point_ops(batch) / max(1, inputs[0].numel())
        return samples, count

    def _maybe_log_save_evaluate(self, *args: Any, **named: Any) -> None:
        self._throughput.stop()
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

    def _measure(self) -> dict[str, float]:
        """Returns what a training log says of speed, memory and this rank's last step; every rank calls."""
        tokens, seconds = self._throughput.read()
        mine = torch.tensor([[tokens, *own_peaks(self.engine)]], dtype=torch.float64, device=self.args.device)
        replicas = self.accelerator.gather(mine)
        total, measured = replicas[:, 0].sum().item(), highest_peaks(self.engine, replicas[:, 1:])
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
        self._measured = {}
        with printing_lines(self.callback_handler):
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
