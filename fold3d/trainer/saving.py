"""CheckpointingTrainer: how the Trainer saves and resumes when every rank holds a share of the model."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy, rotate_checkpoints
from transformers.utils import logging as hf_logging

from fold3d.checkpoint import (
    LATE_GRADIENTS,
    Background,
    CheckpointFolder,
    Delivery,
    OptimizerFiles,
    OptimizerLayout,
    Part,
    WeightsFiles,
    adapter_files,
    filling_late,
    has_adapters,
    last_committed,
    load_adapters,
    load_weights,
    manifest,
    reading,
    regions_of,
    remove_stale,
    remove_unfinished,
    sees_folder,
    together,
)
from fold3d.checkpoint import optimizer as optimizer_file
from fold3d.checkpoint.names import (
    AdapterFiles,
    converts_weights,
    first_names,
    persistent_buffers,
    saved_names,
)
from fold3d.checkpoint.regions import Box
from fold3d.comms.consistency import compare
from fold3d.comms.world_group import WorldGroup
from fold3d.data_parallel.late.weight_versions import parameter_of
from fold3d.engine.engine import Engine
from fold3d.engine.state import check_late
from fold3d.errors import CheckpointError, ConfigError, MissingWeightsError, NotRecordedError
from fold3d.faults.progress import Progress
from fold3d.observe.announce import announce
from fold3d.trainer.arguments import TrainingArguments
from fold3d.trainer.events import EventHandler
from fold3d.trainer.overrides import is_overridden
from fold3d.trainer.preemption import remove_mark
from fold3d.trainer.refused import refuse_own_state
from fold3d.weights.part_marks import state_of
from fold3d.weights.pretrained import PretrainedFolder
from fold3d.weights.release import is_released

logger = logging.getLogger(__name__)

SCHEDULER = "scheduler.pt"
SCALER = "scaler.pt"


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveUnderWay:
    """A checkpoint that is being written, and what this rank brings into it besides tensors."""

    folder: CheckpointFolder
    at: tuple[int, float | None]
    """Steps that were done, and the epoch."""
    best: str | None
    """The folder of the best step then."""
    step_index: int
    """Steps that the engine had begun."""
    batch: int
    """Samples of an optimizer step, over all replicas."""
    is_async: bool
    """Whether training goes on meanwhile."""
    begun: float
    random_state: dict[str, bytes]
    """By name of the file."""
    late_settings: list[dict[str, Any]] | None
    error: Exception | None
    """Why there is not all of it."""


class CheckpointingTrainer(transformers.Trainer):
    """The saving and loading half of `fold3d.Trainer`.

    Every rank writes what it has (`Delivery`), so every rank must call `save_model`, as with other trainers that shard
    the model. A checkpoint is collected on each rank, which meets nobody, and then written by all together: with
    `async_save` copies of it, in a thread, while training goes on. Callbacks hear of it at the end of the first step at
    which all ranks are done.
    """

    args: TrainingArguments
    model: Module
    optimizer: Any
    lr_scheduler: Any
    state: Any
    control: Any
    callback_handler: EventHandler
    engine: Engine
    layout: OptimizerLayout | None
    _pushes = False
    """Under way to the hub, which gets what `save_model` writes."""
    _handed: dict[str, Tensor] | None = None
    """What a `_save` of the user's was given, while it runs."""
    _delivery: Delivery | None = None
    """Of the save whose files are being filled."""
    _collects = False
    """Whether what is saved now is only noted, in `_background`."""
    _writers: tuple[WorldGroup, WorldGroup] | None = None
    """The ranks as the threads that write meet, and the group of the engine that they belong to."""
    _kept_files: tuple[tuple[Any, ...], dict[str, bytes]] = (), {}
    """What `_save_all_but_weights` has written, and of what."""
    _save_under_way: SaveUnderWay | None = None
    _told_of_folder = _told_of_copies = False
    _saved_step: int | None = None
    """Of the newest checkpoint of this training."""
    _seconds_of_save = 0.0
    """How long the last checkpoint took until it was complete."""
    _to_load: list[Callable[[], None]]
    """What waits for the model to be cut."""

    # Saving

    def _check_saves(self, resume: Any) -> None:
        """Raises ConfigError, before a training begins, for what its checkpoints would not be, or could not be used
        for; every process calls.

        Args:
            resume: what it goes on from, if anything.
        """
        args = self.args
        if args.save_strategy != SaveStrategy.NO or resume:
            refuse_own_state(self.model)
        needs = [name for name in ("async_save", "load_best_model_at_end") if getattr(args, name)]
        if args.save_strategy == SaveStrategy.NO or not needs or args.world_size == 1:
            return
        with self._together(f"looking for {args.output_dir} on all hosts"):
            is_shared = sees_folder(Path(str(args.output_dir)), self.engine.world, args.ddp_timeout)
        if not is_shared:
            raise ConfigError(
                f"{needs[0]}=True needs an output_dir that all hosts see, and {args.output_dir} is on the host of "
                f"process 0 only: mount one on all hosts, or remove {needs[0]}"
            )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves weights, configuration and processing class so that `from_pretrained` loads them; every process calls.

        Each process writes its part of the weights, under the model's own names, whatever the layout.

        Args:
            output_dir: None: the one of `args`.
        Raises: when a process cannot write, its own error there, and on the others CheckpointError, which names it;
            RankError when a process does not call.
        """
        output_dir = output_dir or str(self.args.output_dir)
        if self.model is self.engine.model:
            refuse_own_state(self.model)
        if not _internal_call:
            self.engine.meet("trainer.save_model()")
        self.engine.drain()
        self.engine.flush()
        what = f"saving the model to {output_dir}"
        with contextlib.ExitStack() as stack:
            if not self._collects:  # else they meet when it is written
                stack.enter_context(self.engine.supervise("saving the model"))
                stack.enter_context(self._delivering(Path(output_dir)))
                stack.enter_context(self._together(what))
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
        """Uploads what `save_model` writes; arguments and result are those of the stock Trainer. Every process calls,
        and process 0 uploads."""
        self.engine.meet("trainer.push_to_hub()")
        self.engine.flush()  # for on_push_begin
        self._pushes = True
        try:
            return super().push_to_hub(*args, **named)
        finally:
            self._pushes = False

    @contextmanager
    def _delivering(self, folder: Path) -> Iterator[Delivery]:
        """Yields how tensors come into the files of `folder`, which have their names at the end; every rank runs it."""
        if self._delivery is not None:
            yield self._delivery
            return
        with self._together(f"making {folder}"):
            if self.args.should_save:
                folder.mkdir(parents=True, exist_ok=True)
        self._delivery = self._new_delivery(folder, self.engine.world)
        try:
            yield self._delivery
            with self._together(f"saving {folder}"):
                if self.args.should_save:
                    self._delivery.finish()
        except Exception:
            if self.args.should_save:
                remove_unfinished(folder)
            raise
        finally:
            self._delivery = None

    def _new_delivery(self, folder: Path, world: WorldGroup, *, is_async: bool = False) -> Delivery:
        with together(f"looking for {folder} on all hosts", world, self.args.ddp_timeout):
            is_shared = sees_folder(folder, world, self.args.ddp_timeout)
        if not is_shared and is_async:
            raise CheckpointError(
                f"async_save=True needs a folder that all hosts see, and {folder} is on the host of process 0 only: "
                "mount output_dir on all hosts, or remove async_save"
            )
        if not is_shared and not self._told_of_folder:
            self._told_of_folder = True
            logger.warning(
                "%s is not seen by all hosts: process 0 writes, and the others send it what they have; with a folder "
                "that all hosts mount each process writes its own part",
                folder,
            )
        return Delivery(world, self.args.ddp_timeout, is_shared=is_shared)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        state_dict = self._handed if state_dict is None else state_dict
        if state_dict is not None:
            super()._save(str(folder), state_dict=state_dict)
            return
        if self.model is not self.engine.model:
            self._save_another(folder)
            return
        if has_adapters(self.model):
            self._save_adapters(folder)
            return
        everywhere, own = self._own_weights(saved_names(self.model))
        if self._collects:
            if self.args.should_save:
                self._keep_all_but_weights(folder)
            buffers = [Box(one.key, one.whole, one.starts, one.data.clone()) for one in own]  # forwards change them
            self._background.to_files(everywhere, None, WeightsFiles(folder), buffers)
            return
        with self._delivering(folder) as delivery:
            files = WeightsFiles(folder, prepare=lambda: self._save_all_but_weights(folder))
            delivery.to_files(everywhere, None, files, own)

    def _save_another(self, folder: Path) -> None:
        """Saves what the user has set as the Trainer's model since it trained, such as merged adapters, on process 0.

        Raises: ConfigError where other processes have some of its weights.
        """
        self._check_whole("save")
        if self.args.should_save:
            super()._save(str(folder), state_dict=self.model.state_dict())

    def _check_whole(self, verb: str) -> None:
        """Raises: ConfigError where the user has set another model as the Trainer's, of which processes have parts."""
        missing = next((name for name, one in self.model.named_parameters() if one.is_meta or is_released(one)), None)
        if missing is not None or self.engine.config.tp > 1:
            raise ConfigError(
                "trainer.model is another model than was trained, and processes have parts of "
                f"{missing or 'its weights'}: {verb} the trained one, or save it, load it in one process, and go on "
                "there"
            )

    def _save_as_the_user_does(self, output_dir: str) -> None:
        """Calls an overridden `_save` where the stock Trainer would, on rank 0, with the whole state_dict, which its
        `super()._save(output_dir)` need not be given."""
        tensors = self._on_rank_0({name: name for name in (*self.engine.owned, *self.engine.buffers)})
        if not self.args.should_save:
            return
        canonical = first_names(self.model)
        self._handed = {name: tensors[canonical[name]] for name in state_of(self.model)}
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
        tensors = self._on_rank_0(saved_names(self.model))
        with _as_it_was(self.model):
            super()._save(output_dir, state_dict=tensors)

    def _save_adapters(self, folder: Path) -> None:
        """Saves the adapters of a PeftModel; rank 0 has all of them for a moment, they are small."""
        names = {name for file in self._adapter_files().values() for name in file.values()}
        tensors = self._on_rank_0({name: saved for name, saved in saved_names(self.model).items() if saved in names})
        aliases = {alias: first for alias, first in first_names(self.model).items() if first in names}
        with _as_it_was(self.model):
            super()._save(str(folder), state_dict=tensors | {a: tensors[n] for a, n in aliases.items() if n in tensors})

    def _adapter_files(self) -> AdapterFiles:
        """Returns what rank 0 finds; every rank calls."""
        return self.engine.world.decide(None, lambda _: adapter_files(self.model), timeout=self.args.ddp_timeout)

    def _on_rank_0(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Returns the whole tensors of `names`, by the names they map to, on rank 0; nothing elsewhere."""
        everywhere, own = self._own_weights(names)
        with self._delivering(Path(str(self.args.output_dir))) as delivery:
            return delivery.to_rank_0([*everywhere, *own])

    def _own_weights(self, names: Mapping[str, str]) -> tuple[list[Box[str]], list[Box[str]]]:
        """Returns what this rank is responsible for of the tensors of `names`, by the names they map to: what it has in
        common with other replicas, and what it alone has."""
        owned, parts, buffers = self.engine.owned, self.engine.parts, self.engine.buffers
        primary = self.engine.primary
        weights = [
            region
            for name, saved in names.items()
            if name in primary
            for region in regions_of(saved, owned[name].detach(), parts.shard_of(name), parts.rank)
        ]
        # Buffers are equal on all shards; those of replicas may differ between steps, and replica 0's count.
        writes = self.engine.topology.dp_rank == 0 and parts.rank == 0
        mine = [
            region
            for name, saved in names.items()
            if writes and name in buffers
            for region in regions_of(saved, buffers[name], None, 0)
        ]
        return weights, mine

    def _save_all_but_weights(self, folder: Path) -> None:
        """By the stock code, which is given no weights, and would write, or remove, files of such at once: what an
        earlier save has left in the folder stays until all of this one is there."""
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as private:
            with _no_progress_bar(), _as_it_was(self.model):
                super()._save(private, state_dict={})
            for path in (one for one in Path(private).iterdir() if not one.match("model*.safetensors*")):
                if path.is_dir():
                    shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
                else:
                    path.replace(folder / path.name)

    def _keep_all_but_weights(self, folder: Path) -> None:
        """As `_save_all_but_weights`; files of a tokenizer take long, and are those of the save before."""
        describing: Any = [self.args, *(getattr(self.model, name, None) for name in ("config", "generation_config"))]
        words = len(self.processing_class) if isinstance(self.processing_class, Sized) else None
        try:
            made_of: tuple[Any, ...] = words, *(one and one.to_json_string() for one in describing)
        except (AttributeError, TypeError, ValueError):  # objects of the user's: they may have changed
            made_of = (object(),)
        before = set(folder.iterdir())
        if made_of == self._kept_files[0]:
            for name, content in self._kept_files[1].items():
                (folder / name).write_bytes(content)
            return
        self._save_all_but_weights(folder)
        made = set(folder.iterdir()) - before
        if all(path.is_file() for path in made):
            self._kept_files = made_of, {path.name: path.read_bytes() for path in made}

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._save_now(trial, is_async=self.args.async_save)

    def _save_now(self, trial: Any, *, is_async: bool) -> None:
        """Saves a checkpoint; with `is_async` it is a complete folder when `_commit` has been called, by the next save
        or once all ranks have written their part. Every rank calls."""
        self._commit()  # one is under way at a time
        folder = CheckpointFolder(Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}")
        self.store_flos()
        with self.engine.supervise(f"saving {folder.final}"):
            save = self._collect(folder, is_async)
            if is_async:
                self._write_meanwhile(save)
            else:
                self._write(save, self.engine.world, self._background.take())
        self._save_under_way = save
        if not is_async:
            self._commit()

    def _collect(self, folder: CheckpointFolder, is_async: bool) -> SaveUnderWay:
        """Notes in `_background` which tensors this rank brings, and returns the rest. Process 0 makes the folder, with
        its small files. What goes wrong is told when the ranks meet."""
        begun, temporary = time.monotonic(), str(folder.temporary)
        known, self._collects = self.state.best_model_checkpoint, True
        best = self._best_checkpoint(folder.final)
        random_state: dict[str, bytes] = {}
        late_settings, error = None, None
        try:
            if self.args.should_save:
                folder.begin()
            if not self.args.save_only_model:  # before anything that one rank alone may fail in: here all meet
                late_settings = self._collect_late_gradients(folder.temporary)
            self.save_model(temporary, _internal_call=True)
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(temporary)
                with tempfile.TemporaryDirectory() as private:
                    self._save_rng_state(private)
                    random_state = {path.name: path.read_bytes() for path in Path(private).iterdir()}
            if self.args.should_save:
                self.state.best_model_checkpoint = best
                self._save_trainer_state(folder.temporary)
        except Exception as failure:
            error = failure
        finally:
            self._collects, self.state.best_model_checkpoint = False, known
        return SaveUnderWay(
            folder=folder,
            at=(self.state.global_step, self.state.epoch),
            best=best,
            step_index=self.engine.step_index,
            batch=self.get_total_train_batch_size(self.args),
            is_async=is_async,
            begun=begun,
            random_state=random_state,
            late_settings=late_settings,
            error=error,
        )

    def _write_meanwhile(self, save: SaveUnderWay) -> None:
        """Begins to copy what was collected, and to write the copies; every rank calls."""
        engine = self.engine
        if self._writers is None or self._writers[1] is not engine.world:
            progress = Progress(engine.world.progress.life)
            made = WorldGroup(engine.topology, engine.config.timeout_seconds, progress)
            self._writers = made, engine.world
        world = self._writers[0]

        def write(parts: list[Part]) -> None:
            self._say_copies(world)
            self._write(save, world, parts)
            world.progress.take_met()  # which nobody asks for

        self._background.start(engine.topology, write)
        if save.late_settings is not None:  # backwards go on in the same memory
            self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        """Returns when weights and the optimizer's state may change."""
        self._background.wait_for_copies(self.args.ddp_timeout)

    def _write(self, save: SaveUnderWay, world: WorldGroup, parts: list[Part]) -> None:
        """Writes a checkpoint, and gives its folder its name. Every rank calls; with a save under way, in a thread.

        Raises: on all ranks, when it fails on one; there is no such folder then.
        """
        folder, what, patience = save.folder, f"saving {save.folder.final}", self.args.ddp_timeout
        try:
            with together(what, world, patience):
                if save.error is not None:
                    raise save.error
            delivery = self._new_delivery(folder.temporary, world, is_async=save.is_async)
            for part in parts:
                with together(what, world, patience):
                    part.deliver(delivery)
            shares = world.gather(save.random_state, timeout=patience)
            with together(what, world, patience):
                if shares is not None:  # rank 0 writes all files: other hosts may not see its folder
                    for name, content in ((n, c) for share in shares for n, c in share.items()):
                        (folder.temporary / name).write_bytes(content)
                    delivery.finish()
                    folder.check()
                    manifest.write(
                        folder.temporary,
                        step_index=save.step_index,
                        batch=save.batch,
                        late_settings=save.late_settings,
                        mesh=None if self.args.mesh is None else self.args.mesh.to_dict(),
                    )
                    folder.commit()
        except Exception:
            with contextlib.suppress(OSError):  # the first one counts
                if self.args.should_save:
                    folder.discard()
            raise
        self._seconds_of_save = time.monotonic() - save.begun

    def _commit(self) -> None:
        """Waits for the save that is under way, if there is one, and tells who wants to know; every rank calls."""
        save, self._save_under_way = self._save_under_way, None
        if save is None:
            return
        what = f"saving {save.folder.final}"
        with self.engine.supervise(what), self._together(what):
            self._background.finish(self.args.ddp_timeout)
        self._saved_step = save.at[0]
        self.state.best_model_checkpoint = save.best
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(save.folder.final))
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(save.folder.final.parent),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        if save.is_async:  # callbacks are told now, with the state of then
            now = self.state.global_step, self.state.epoch, self.control.should_save
            self.state.global_step, self.state.epoch = save.at
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
            self.state.global_step, self.state.epoch, self.control.should_save = now

    def _best_checkpoint(self, saved: Path) -> str | None:
        """Returns the folder of the best step so far, if it is `saved`, or there."""
        best = saved.with_name(f"checkpoint-{self.state.best_global_step}")
        is_there = self.state.best_global_step and (best == saved or best.exists())
        known: str | None = self.state.best_model_checkpoint
        return str(best) if is_there else known

    def _say_copies(self, world: WorldGroup) -> None:
        """Says once how much host memory the copies take; every rank calls."""
        if self._told_of_copies:
            return
        self._told_of_copies = True
        shares = world.gather(self._background.bytes, timeout=self.args.ddp_timeout)
        if shares is not None:
            announce(
                logger,
                f"async_save keeps copies of what is saved in host memory: {max(shares) / 1e6:,.1f} MB on rank "
                f"{shares.index(max(shares))}, which has the most, {sum(shares) / 1e6:,.1f} MB on all ranks",
            )

    def _finalize_training(self, *args: Any, **named: Any) -> Any:
        self._commit()  # for what is looked for among the checkpoints
        self._load_all()  # no step was left, but the model and the gradients that wait are those of the checkpoint
        return super()._finalize_training(*args, **named)  # type: ignore[no-untyped-call]

    def _save_trainer_state(self, folder: Path) -> None:
        callbacks = [*self.callback_handler.callbacks, self.control]
        for callback in (c for c in callbacks if isinstance(c, ExportableState)):
            stored, name = self.state.stateful_callbacks, type(callback).__name__
            if isinstance(stored[name], list):
                stored[name].append(callback.state())
            else:
                stored[name] = callback.state()
        self.state.save_to_json(str(folder / manifest.TRAINER_STATE))

    def _follow_groups(self) -> None:
        """The optimizer's groups are others than when training began: they count from now on.

        Raises: ConfigError where other processes have parameters of the model, which nobody can add to groups here.
        """
        if self.args.pp * self.args.tp > 1:
            raise ConfigError(
                "the optimizer has got other parameter groups since training began, and with pp or tp a process has a "
                "part of the parameters only: make all groups before training, with lr=0 for those that come later"
            )
        names = {id(parameter): name for name, parameter in self.engine.owned.items()}
        groups = (group["params"] for group in self._plain_optimizer().param_groups)
        self.layout = OptimizerLayout(tuple(tuple(names[id(one)] for one in group) for group in groups))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.layout is not None
        optimizer, folder, engine = self._plain_optimizer(), Path(output_dir), self.engine
        with engine.own_optimizer_state() as pieces:
            everywhere, own, rest = self.layout.state_regions(
                optimizer, engine.owned, engine.primary, engine.parts, pieces
            )
            groups = copy.deepcopy(optimizer.state_dict()["param_groups"])  # schedules change them
        self._background.to_files(everywhere, rest, OptimizerFiles(folder, self.layout, groups), own)
        if self.args.should_save:
            small = {SCHEDULER: self.lr_scheduler, SCALER: self.accelerator.scaler}
            for name, one in ((name, one) for name, one in small.items() if one is not None):
                with open(folder / name, "wb") as file:  # given a path, torch says of any error that there is no folder
                    torch.save(one.state_dict(), file)

    def _collect_late_gradients(self, folder: Path) -> list[dict[str, Any]] | None:
        """Notes what gradient_delay=1 keeps for later steps; returns the settings it will be taken with."""
        self.engine.drain()
        self.engine.flush()
        gradients, settings = self.engine.late_gradients()
        if settings is not None:
            primary, parts = self.engine.primary, self.engine.parts
            own = [
                region
                for name, gradient in gradients.items()
                if parameter_of(name) in primary
                for region in regions_of(name, gradient, parts.shard_of(parameter_of(name)), parts.rank)
            ]
            self._background.to_files(own, None, WeightsFiles(folder, LATE_GRADIENTS))
        return settings

    # Loading

    def _load_all(self) -> None:
        """What waits for the model to be cut is loaded now; every process calls."""
        if self._to_load:
            self.engine.build()

    def _load_early(self, asked: bool) -> None:
        """Callbacks are told that the training begins, and find what it goes on from, if the model can be cut without
        the first micro-batch; every process calls.

        Args:
            asked: whether this process has such callbacks; another one may be the only one.
        """
        if not self._to_load:
            return
        found = torch.tensor(asked)
        self.engine.world.all_reduce(found, torch.logical_or, timeout=self.args.ddp_timeout)
        if not found:
            return
        try:
            self._load_all()
        except NotRecordedError as error:
            logger.warning(
                "on_train_begin comes before the checkpoint is loaded: weights, optimizer and schedule are those from "
                "before, and what callbacks write there is lost (%s)",
                error,
            )

    @contextmanager
    def _loading_this_time(self) -> Iterator[None]:
        """Around a training: what it was to load, and has not because it failed before, no other one loads."""
        step_index = self.engine.step_index
        try:
            yield
        finally:
            if self._to_load:
                self.engine.resume_at(step_index)
                self._to_load.clear()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        with self._together(f"loading {folder}"):
            manifest.check(folder)
            check_late(manifest.said(folder, "late_settings"), self.engine.config)
            found = f"{folder.name}, step {manifest.step_index(folder)} ({manifest.digest(folder)})"
        compare(self.engine.world, {"checkpoint to go on from": found})
        if not self.engine.is_built:
            self._to_load.append(functools.partial(self._load_from_checkpoint, resume_from_checkpoint))
            self.engine.resume_at(manifest.step_index(folder))  # the first micro-batch draws before the model is cut
            return
        self._load_weights(folder)
        self.engine.resume_at(manifest.step_index(folder))

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint)
        is_there = torch.tensor(folder.is_dir())
        self.engine.world.all_reduce(is_there, torch.logical_or, timeout=self.args.ddp_timeout)
        if not is_there:
            logger.warning("the best model, %s, is gone from all processes' hosts: the weights of now stay", folder)
            return
        logger.info("loading the best model, %s", folder)
        self._load_weights(folder)

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
            self.layout.load(
                *(state, self._plain_optimizer(), self.engine.owned, self.engine.parts),
                on_host=on_host,
                keep=self.engine.keeps_pieces,
            )
            with reading(schedule):
                self.lr_scheduler.load_state_dict(torch.load(schedule, map_location="cpu", weights_only=True))
            late_settings = manifest.said(Path(checkpoint), "late_settings")
            if late_settings is not None:
                self.engine.load_late_gradients(late_settings, filling_late(Path(checkpoint), self.engine.parts))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        wanted = "rng_state.pth"
        if self.args.world_size > 1:
            wanted = f"rng_state_{self.args.process_index}.pth"
        saved = sorted(path.name for path in Path(checkpoint).glob("rng_state*.pth"))
        # A replica's ranks draw the same numbers, as its first one did, whatever the mesh was. Of another number of
        # processes rank 0's will do for everyone.
        topology = self.engine.topology
        first = f"rng_state_{topology.dp_rank * (self.args.world_size // topology.dp)}.pth"
        source = first if len(saved) == self.args.world_size and first in saved else next(iter(saved), wanted)
        if source == wanted:
            with reading(Path(checkpoint) / wanted):
                super()._load_rng_state(checkpoint)
            return
        with tempfile.TemporaryDirectory() as private:
            shutil.copy(Path(checkpoint) / source, Path(private) / wanted)
            with reading(Path(checkpoint) / source):
                super()._load_rng_state(private)

    # Parts

    def _last_checkpoint(self) -> str | None:
        """Returns the newest whole checkpoint that rank 0 sees in output_dir; every rank calls."""
        found: str | None = None
        with self._together(f"looking for checkpoints in {self.args.output_dir}"):
            if self.args.should_save:
                last = last_committed(str(self.args.output_dir))
                found = None if last is None else str(last)
        found = self.engine.world.share(found, timeout=self.args.ddp_timeout)
        if self.args.should_save:
            announce(logger, f"resume='auto': {'training begins anew' if found is None else f'going on from {found}'}")
        return found

    def _clean_output_dir(self) -> None:
        """Removes what interrupted saves, and an earlier end, left in output_dir."""
        with contextlib.suppress(Exception):  # of a training that failed
            self._background.finish(self.args.ddp_timeout)
        self._save_under_way = None
        with self._together(f"cleaning {self.args.output_dir}"):
            if self.args.should_save:
                remove_stale(str(self.args.output_dir))
                remove_mark(Path(str(self.args.output_dir)))
                if self.args.save_strategy != SaveStrategy.NO or self.args.enable_jit_checkpoint:
                    Path(str(self.args.output_dir)).mkdir(parents=True, exist_ok=True)
                    tempfile.TemporaryFile(dir=self.args.output_dir).close()  # raises where nothing can be written

    @property
    def _world(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if self.args.world_size > 1 else None

    def _together(self, what: str) -> AbstractContextManager[None]:
        return together(what, self.engine.world, self.args.ddp_timeout)

    @functools.cached_property
    def _background(self) -> Background:
        return Background(self.args.device)

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
def _as_it_was(model: Module) -> Iterator[None]:
    """What the stock code notes in the model's configuration when it saves (architectures, dtype), which it does on
    one process only, is gone behind the body: processes would call the model in another form."""
    found = (getattr(model, name, None) for name in ("config", "generation_config"))
    before = [(one, dict(vars(one))) for one in found if hasattr(one, "__dict__")]
    try:
        yield
    finally:
        for one, held in before:
            vars(one).clear()
            vars(one).update(held)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if enabled:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
