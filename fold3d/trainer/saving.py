"""CheckpointingTrainer: how the Trainer saves and resumes when every rank holds a share of the model."""

from __future__ import annotations

import functools
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import rotate_checkpoints
from transformers.utils import logging as hf_logging

from fold3d.checkpoint import (
    CheckpointFolder,
    HostSink,
    LateGradientsFile,
    LateGradientsSink,
    OptimizerLayout,
    OptimizerSink,
    Stream,
    WeightsSink,
    adapter_files,
    has_adapters,
    load_adapters,
    load_weights,
    manifest,
    remove_stale,
    together,
)
from fold3d.checkpoint import optimizer as optimizer_file
from fold3d.checkpoint.adapters import AdapterFiles
from fold3d.checkpoint.names import converts_weights, persistent_buffers, saved_names, tied_groups
from fold3d.engine.engine import Engine
from fold3d.engine.state import check_late
from fold3d.errors import CheckpointError, ConfigError, MissingWeightsError
from fold3d.sharding.shard import Shard
from fold3d.trainer.arguments import TrainingArguments
from fold3d.trainer.overrides import is_overridden
from fold3d.weights.part_marks import state_of
from fold3d.weights.pretrained import PretrainedFolder
from fold3d.weights.release import is_released

logger = logging.getLogger(__name__)

SCHEDULER = "scheduler.pt"
SCALER = "scaler.pt"
TRAINER_STATE = "trainer_state.json"


class CheckpointingTrainer(transformers.Trainer):
    """The saving and loading half of `fold3d.Trainer`.

    Rank 0 writes; the other ranks of replica 0 send it what they hold, one tensor at a time. Every rank must call
    `save_model`, as with other trainers that shard the model.
    """

    args: TrainingArguments
    model: Module
    optimizer: Any
    lr_scheduler: Any
    state: Any
    engine: Engine
    layout: OptimizerLayout | None
    _pushes = False
    """Under way to the hub, which gets what `save_model` writes."""
    _handed: dict[str, Tensor] | None = None
    """What a `_save` of the user's was given, while it runs."""
    _to_load: list[Callable[[], None]]
    """What waits for the model to be cut."""

    # Saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves weights, configuration and processing class so that `from_pretrained` loads them; all ranks call."""
        output_dir = output_dir or str(self.args.output_dir)
        if not _internal_call:
            self.engine.meet("trainer.save_model()")
        self.engine.flush()
        with self.engine.supervise("saving the model"), self._together(f"saving the model to {output_dir}"):
            # A checkpoint keeps the tensors as they are in memory: any run can resume from it, and from_pretrained
            # loads both forms.
            if self.args.world_size > 1 and is_overridden(self, "_save"):
                self._save_as_the_user_does(output_dir)
            elif converts_weights(self.model) and (self._pushes or not _internal_call):
                self._save_converted(output_dir)
            else:
                self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def push_to_hub(self, *args: Any, **named: Any) -> Any:
        """Uploads what `save_model` writes; arguments and result as the stock Trainer's. Every process calls."""
        self.engine.meet("trainer.push_to_hub()")
        self.engine.flush()  # for on_push_begin
        self._pushes = True
        try:
            return super().push_to_hub(*args, **named)
        finally:
            self._pushes = False

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        state_dict = self._handed if state_dict is None else state_dict
        if state_dict is not None:
            super()._save(str(folder), state_dict=state_dict)
            return
        if has_adapters(self.model):
            self._save_adapters(folder)
            return
        sink = WeightsSink(folder, prepare=lambda: self._save_all_but_weights(folder))
        own, spread = self._own_state()
        self._stream.send(own, None, sink, spread)

    def _save_as_the_user_does(self, output_dir: str) -> None:
        """Calls an overridden `_save` where the stock Trainer would, on rank 0, with the whole state_dict, which its
        `super()._save(output_dir)` need not be given."""
        host = HostSink()
        own = {**{name: self.engine.owned[name] for name in self.engine.primary}, **self.engine.buffers}
        self._stream.send(own, None, host, self.engine.parts.spread(own))
        if not self.args.should_save:
            return
        canonical = {name: group[0] for group in tied_groups(self.model) for name in group}
        self._handed = {name: host.tensors[canonical.get(name, name)] for name in state_of(self.model)}
        try:
            self._save(output_dir, state_dict=self._handed)
        except MissingWeightsError as error:
            raise MissingWeightsError(
                f"{type(self).__name__}._save reads weights of the model: {error}. Here take them from its argument "
                "state_dict, which holds all of them by name"
            ) from error
        finally:
            self._handed = None

    def _save_converted(self, output_dir: str) -> None:
        """Saves a model whose files hold other tensors than its memory (split experts); rank 0 needs all of them."""
        host = HostSink()
        own, spread = self._own_state()
        self._stream.send(own, None, host, spread)
        super()._save(output_dir, state_dict=host.tensors)

    def _save_adapters(self, folder: Path) -> None:
        """Saves the adapters of a PeftModel; rank 0 has all of them for a moment, they are small."""
        names = {name for file in self._adapter_files().values() for name in file.values()}
        host = HostSink()
        own, spread = self._own_state()
        self._stream.send(
            {name: tensor for name, tensor in own.items() if name in names},
            None,
            host,
            {name: shard for name, shard in spread.items() if name in names},
        )
        aliases = {alias: group[0] for group in tied_groups(self.model) for alias in group if group[0] in names}
        super()._save(
            str(folder), state_dict=host.tensors | {a: host.tensors[n] for a, n in aliases.items() if n in host.tensors}
        )

    def _adapter_files(self) -> AdapterFiles:
        """Returns what rank 0 finds; every rank calls."""
        return self.engine.world.decide(None, lambda _: adapter_files(self.model), timeout=self.args.ddp_timeout)

    def _own_state(self) -> tuple[dict[str, Tensor], dict[str, Shard]]:
        """Returns what this rank contributes to the file, by name there, and how what it has in parts is spread."""
        held = {**{name: self.engine.owned[name] for name in self.engine.primary}, **self.engine.buffers}
        names = {name: saved for name, saved in saved_names(self.model).items() if name in held}
        spread = self.engine.parts.spread(names)
        return {saved: held[name] for name, saved in names.items()}, {names[n]: shard for n, shard in spread.items()}

    def _save_all_but_weights(self, folder: Path) -> None:
        with _no_progress_bar():  # of the stock code, which is given no weights to write
            super()._save(str(folder), state_dict={})

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run_dir = Path(self._get_output_dir(trial))
        folder = CheckpointFolder(run_dir / f"checkpoint-{self.state.global_step}")
        self.store_flos()
        with self._together(f"saving {folder.final}"):
            if self.args.should_save:
                folder.begin()
        try:
            with self.engine.supervise(f"saving {folder.final}"):
                self._fill_checkpoint(folder)
        except Exception:
            if self.args.should_save:
                folder.discard()
            raise
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder.final))
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _fill_checkpoint(self, folder: CheckpointFolder) -> None:
        temporary = str(folder.temporary)
        self.save_model(temporary, _internal_call=True)
        if self.state.best_global_step:
            best = folder.final.with_name(f"checkpoint-{self.state.best_global_step}")
            if best == folder.final or best.exists():
                self.state.best_model_checkpoint = str(best)
        late_settings = None
        if not self.args.save_only_model:
            with self._together(f"saving {folder.final}"):
                self._save_optimizer_and_scheduler(temporary)
                late_settings = self._save_late_gradients(folder.temporary)
            self._save_rng_state(temporary)
        with self._together(f"saving {folder.final}"):
            if self.args.should_save:
                self._save_trainer_state(folder.temporary)
                manifest.write(folder.temporary, step_index=self.engine.step_index, late_settings=late_settings)
                folder.commit()

    def _save_trainer_state(self, folder: Path) -> None:
        callbacks = [*self.callback_handler.callbacks, self.control]
        for callback in (c for c in callbacks if isinstance(c, ExportableState)):
            stored, name = self.state.stateful_callbacks, type(callback).__name__
            if isinstance(stored[name], list):
                stored[name].append(callback.state())
            else:
                stored[name] = callback.state()
        self.state.save_to_json(str(folder / TRAINER_STATE))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.layout is not None
        optimizer = self._plain_optimizer()
        path = Path(output_dir) / optimizer_file.FILE
        with self.engine.whole_optimizer_state():
            with self._together(f"reading the state for {path}"):  # the others would wait for what this rank sends
                tensors, rest = self.layout.state_tensors(optimizer, self.engine.owned, self.engine.primary)
                groups = optimizer.state_dict()["param_groups"]
                spread = self.layout.spread(tensors, self.engine.owned, self.engine.parts)
            self._stream.send(tensors, rest, OptimizerSink(path, self.layout, groups), spread)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)
            if (scaler := self.accelerator.scaler) is not None:
                torch.save(scaler.state_dict(), Path(output_dir) / SCALER)

    def _save_late_gradients(self, folder: Path) -> list[dict[str, Any]] | None:
        """Saves what gradient_delay=1 keeps for the next step; returns the settings it will be taken with."""
        gradients, settings = self.engine.late_gradients()
        if settings is not None:
            own = {name: gradient for name, gradient in gradients.items() if name in self.engine.primary}
            self._stream.send(own, None, LateGradientsSink(folder), self.engine.parts.spread(own))
        return settings

    def _save_rng_state(self, output_dir: str) -> None:
        # Rank 0 writes all files: other hosts may not see its folder.
        what = f"saving the random state in {output_dir}"
        with self._together(what), tempfile.TemporaryDirectory() as private:
            super()._save_rng_state(private)
            files = {path.name: path.read_bytes() for path in Path(private).iterdir()}
        shares = self.engine.world.gather(files, timeout=self.args.ddp_timeout)
        with self._together(what):
            if shares is not None:
                for name, content in ((n, c) for share in shares for n, c in share.items()):
                    (Path(output_dir) / name).write_bytes(content)

    # Loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        with self._together(f"loading {folder}"):
            manifest.check(folder)
            check_late(manifest.late_settings(folder), self.engine.config)
        if not self.engine.is_built:
            self._to_load.append(functools.partial(self._load_from_checkpoint, resume_from_checkpoint))
            self.engine.resume_at(manifest.step_index(folder))  # the first micro-batch draws before the model is cut
            return
        self._load_weights(folder)
        self.engine.resume_at(manifest.step_index(folder))

    def _load_best_model(self) -> None:
        logger.info("loading the best model, %s", self.state.best_model_checkpoint)
        self._load_weights(Path(self.state.best_model_checkpoint))

    def _load_weights(self, folder: Path) -> None:
        with self._together(f"loading {folder}"):
            manifest.check(folder)
            self.engine.flush()
            self.engine.load_late_gradients()  # what was made of other weights goes with them
            targets = {name: p.data for name, p in self.engine.owned.items()} | persistent_buffers(self.model)
            if has_adapters(self.model):
                load_adapters(self._adapter_files(), targets, folder, self.engine.parts)
                return
            if type(self.model).load_state_dict is not Module.load_state_dict:
                self._load_as_the_model_does(folder)
                return
            load_weights(self.model, targets, folder, self.engine.parts)

    def _load_as_the_model_does(self, folder: Path) -> None:
        """Loads by the model's own `load_state_dict`, as the stock Trainer does."""
        elsewhere = [name for name, parameter in self.model.named_parameters() if is_released(parameter)]
        elsewhere += self.engine.parts.spread(self.engine.owned)
        if elsewhere:
            raise CheckpointError(
                f"{type(self.model).__name__} overrides load_state_dict, which takes the whole model, and this process "
                f"has a part of it ({elsewhere[0]} lies in another); resume with pp=1 and tp=1, or remove the override"
            )
        source = PretrainedFolder(folder)
        self._issue_warnings_after_load(self.model.load_state_dict(dict(source.read(source.keys())), strict=False))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not self.engine.is_built:
            self._to_load.append(functools.partial(self._load_optimizer_and_scheduler, checkpoint))
            return
        with self._together(f"loading the optimizer of {checkpoint}"):
            state, schedule = Path(checkpoint) / optimizer_file.FILE, Path(checkpoint) / SCHEDULER
            if not state.is_file() or not schedule.is_file():
                logger.warning("%s has no optimizer state: the optimizer starts anew", checkpoint)
                return
            assert self.layout is not None
            on_host = self.engine.config.offload_optimizer and self.engine.optimizer is not None
            self.layout.load(state, self._plain_optimizer(), self.engine.owned, self.engine.parts, on_host=on_host)
            self.lr_scheduler.load_state_dict(torch.load(schedule, map_location="cpu", weights_only=True))
            late_settings = manifest.late_settings(Path(checkpoint))
            if late_settings is not None:
                file = LateGradientsFile(Path(checkpoint), self.engine.parts)
                self.engine.load_late_gradients(late_settings, file.fill)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        wanted = "rng_state.pth"
        if self.args.world_size > 1:
            wanted = f"rng_state_{self.args.process_index}.pth"
        saved = sorted(path.name for path in Path(checkpoint).glob("rng_state*.pth"))
        same_world = len(saved) == self.args.world_size and wanted in saved
        if same_world or not saved:
            super()._load_rng_state(checkpoint)
            return
        # Written by another number of processes. All of them draw the same numbers, rank 0's will do for everyone.
        with tempfile.TemporaryDirectory() as private:
            shutil.copy(Path(checkpoint) / saved[0], Path(private) / wanted)
            super()._load_rng_state(private)

    # Parts

    def _clean_output_dir(self) -> None:
        """Removes what interrupted saves left in output_dir."""
        with self._together(f"cleaning {self.args.output_dir}"):
            if self.args.should_save:
                remove_stale(str(self.args.output_dir))

    @property
    def _world(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if self.args.world_size > 1 else None

    def _together(self, what: str) -> AbstractContextManager[None]:
        return together(what, self.engine.world, self.args.ddp_timeout)

    @property
    def _stream(self) -> Stream[Any]:
        return Stream(self.engine.world, self.args.ddp_timeout)

    def _plain_optimizer(self) -> Optimizer:
        """Returns the optimizer without accelerate's wrapper."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} is no torch.optim.Optimizer: its state cannot be saved; set "
                "save_only_model=True"
            )
        return optimizer


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if enabled:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
