"""What the ranks run to show that the Trainer's numbers do not depend on when gradients are summed."""

from __future__ import annotations

import logging
import zlib
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import Parameter

from tests.trainer.jobs import Job, Variant, rows, run_fold3d

CHOSEN = 2
"""The step after which the probe saves, evaluates and predicts."""


def digest_of(tensors: dict[str, torch.Tensor]) -> int:
    """Returns a checksum of names and bits."""
    code = 0
    for name, tensor in sorted(tensors.items()):
        bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        code = zlib.crc32(name.encode() + bits.numpy().tobytes(), code)
    return code


def weights_of(trainer: Any) -> int:
    """Returns a checksum of this rank's weights as they lie in memory now."""
    return digest_of(trainer.engine.owned)


def moments_of(trainer: Any) -> int:
    """Returns a checksum of the optimizer's state of this rank's parameters; all ranks call."""
    optimizer = trainer._plain_optimizer()
    with trainer.engine.whole_optimizer_state():
        names = {id(parameter): name for name, parameter in trainer.engine.owned.items()}
        return digest_of(
            {f"{names[id(p)]} {key}": value for p, state in optimizer.state.items() for key, value in state.items()}
        )


class Sees(transformers.TrainerCallback):  # type: ignore[misc]
    """Reads this rank's weights in four events."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.seen: list[tuple[str, int, int]] = []

    def _see(self, event: str, state: Any) -> None:
        self.seen.append((event, state.global_step, weights_of(self.trainer)))

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._see("step_end", state)

    def on_log(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._see("log", state)

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._see("save", state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._see("evaluate", state)


class Counts(Sees):
    """Reads none, and counts the parameters that wait for their update."""

    def _see(self, event: str, state: Any) -> None:
        waiting = sum(type(parameter) is not Parameter for parameter in self.trainer.model.parameters())
        self.seen.append((event, state.global_step, waiting))


class Warnings(logging.Handler):
    """Keeps what fold3d warns about."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Watched(Variant):
    """Keeps, as extra: what a callback saw, warnings, checksums of what is in each checkpoint, the log's columns."""

    def __init__(self, callback: type[Sees]) -> None:
        self.callback = callback

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"callbacks": [self.callback()]}

    def trainer(self, base: type[Any]) -> type[Any]:
        class Trainer(base):  # type: ignore[misc]
            def __init__(self, *args: Any, **named: Any) -> None:
                super().__init__(*args, **named)
                self.warned = Warnings()
                self.saved: list[tuple[int, int]] = []
                for callback in self.callback_handler.callbacks:
                    if isinstance(callback, Sees):
                        callback.trainer, self.seen = self, callback.seen

            def train(self, *args: Any, **named: Any) -> Any:
                logging.getLogger("fold3d").addHandler(self.warned)
                try:
                    return super().train(*args, **named)
                finally:
                    logging.getLogger("fold3d").removeHandler(self.warned)

            def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
                self.saved.append((weights_of(self), moments_of(self)))
                super()._save_optimizer_and_scheduler(output_dir)

        return Trainer

    def after(self, trainer: Any) -> Any:
        return {
            "seen": trainer.seen,
            "warned": trainer.warned.texts,
            "saved": trainer.saved,
            "final": weights_of(trainer),
            "logs": trainer.state.log_history,
        }


class Uses(transformers.TrainerCallback):  # type: ignore[misc]
    """Saves, evaluates and predicts right after a step, before anybody has waited for its weights."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.found: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step != CHOSEN:
            return
        folder = Path(args.output_dir) / "right after"
        self.trainer.save_model(str(folder))
        weights = (folder / "model.safetensors").read_bytes() if state.is_world_process_zero else b""
        self.found.append(zlib.crc32(weights))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == CHOSEN:
            self.found.append(self.trainer.evaluate()["eval_loss"])
        elif state.global_step == CHOSEN + 1:
            self.found.append(digest_of({"": torch.from_numpy(self.trainer.predict(rows(5, seed=9)).predictions)}))


class UsesAtOnce(Variant):
    """Keeps what `Uses` found as extra."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"callbacks": [Uses()]}

    def trainer(self, base: type[Any]) -> type[Any]:
        class Trainer(base):  # type: ignore[misc]
            def __init__(self, *args: Any, **named: Any) -> None:
                super().__init__(*args, **named)
                for callback in self.callback_handler.callbacks:
                    if isinstance(callback, Uses):
                        callback.trainer, self.found = self, callback.found

        return Trainer

    def after(self, trainer: Any) -> Any:
        return trainer.found


def run(job: Job, layout: dict[str, Any], ways: tuple[str, ...]) -> list[Any]:
    """Runs the job once for every way of DP.sync; returns the outcomes."""
    found = []
    for way in ways:
        arguments = job.arguments | {"output_dir": str(Path(job.folder) / way)}
        found.append(run_fold3d(Job(**{**vars(job), "arguments": arguments}), layout | {"dp_sync": way}))
    return found
