"""Trainings that are tried several times: with other hyperparameters (SearchingTrainer), with smaller batches."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.memory import should_reduce_batch_size
from transformers.hyperparameter_search import default_hp_search_backend
from transformers.trainer_utils import HPSearchBackend

from fold3d.engine.engine import Engine
from fold3d.errors import ConfigError, Fold3dError, MemoryLimitError, RankError
from fold3d.observe.memory import is_out_of_memory
from fold3d.trainer.measuring import MeasuringTrainer

_KINDS = (MemoryError.__name__, torch.OutOfMemoryError.__name__)
"""What a rank tells the others of running out of memory."""


def needs_smaller_batch(error: BaseException) -> bool:
    """Returns whether `error`, which this rank raises, says that memory ran out on some rank; the same on every rank
    of a failure that all of them raise."""
    if isinstance(error, RankError):
        return any(f": {kind}: " in str(error) for kind in _KINDS)
    if isinstance(error, MemoryLimitError) or is_out_of_memory(error):
        return True
    return isinstance(error, Exception) and should_reduce_batch_size(error)


def try_again(engine: Engine, told: str, batch_size: int, has_stepped: bool, timeout: float) -> RuntimeError:
    """Makes the engine usable again after memory ran out on some rank; all ranks call.

    Args:
        told: the error.
        has_stepped: whether this rank's optimizer has been asked to step in this training.
        timeout: seconds to wait for the other ranks.
    Returns: what makes accelerate's `find_executable_batch_size` go on with a smaller size.
    Raises: ConfigError on every rank of several when some rank's optimizer has stepped.
    """
    gc.collect()  # what the failed step had kept
    engine.recover()
    stepped = torch.tensor(has_stepped)
    engine.world.all_reduce(stepped, torch.logical_or, timeout=timeout)
    if stepped and engine.topology.world > 1:
        raise ConfigError(
            f"auto_find_batch_size={batch_size} fitted at first and does not any more, when weights had been updated: "
            "a step that ends in the middle leaves them different on each rank. Set per_device_train_batch_size to "
            f"less and resume from the last checkpoint. {told}"
        )
    return RuntimeError(f"batch size {batch_size} needs more memory than there is: out of memory. {told}")


class PrunedError(Fold3dError):
    """The trial is not worth going on with; raised on every rank."""


class SearchingTrainer(MeasuringTrainer):
    """The searching half of `fold3d.Trainer`.

    As in the stock Trainer process 0 has the study and sends each trial's parameters to the others, which run
    `trials` trials. So they are told of what only it would know: that a trial is pruned, that there are no more.
    """

    objective: float | None
    hp_search_backend: Any
    _trials_begun: int | None = None
    """Of a search that is going on."""

    def hyperparameter_search(
        self,
        hp_space: Any = None,
        compute_objective: Any = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: Any = None,
        hp_name: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Searches for hyperparameters; arguments are those of the stock Trainer, and so is the result on process 0.

        Every process calls, and all run each trial together. A trial may change any argument, also the layout (`pp`,
        `segments` ...).

        Raises: ConfigError for the backend "ray", and with several processes for `n_jobs` and `catch`.
        """
        found = backend or default_hp_search_backend()
        if found is not None and HPSearchBackend(found) == HPSearchBackend.RAY:
            raise ConfigError(
                'backend="ray" runs trials in processes of its own, which are not those of this job; use "optuna"'
            )
        if self.args.world_size > 1:
            for name in ("n_jobs", "catch"):
                if kwargs.get(name) not in (None, 1, ()):
                    why = "one trial runs at a time" if name == "n_jobs" else "a trial that fails ends the job"
                    raise ConfigError(
                        f"{name}={kwargs[name]!r}: all processes run a trial together, so {why}; remove it"
                    )
        self._trials_begun = 0
        try:
            best = super().hyperparameter_search(
                hp_space, compute_objective, n_trials, direction, backend, hp_name, **kwargs
            )
        except Exception:
            if self._trials_begun is not None:  # the study failed, not a trial
                self._end_search(n_trials)
            raise
        self._end_search(n_trials)
        return best

    def _end_search(self, trials: int) -> None:
        """Process 0 is through with the study, perhaps early: the others stop waiting for trials."""
        begun, self._trials_begun = self._trials_begun, None
        assert begun is not None
        if self.args.world_size > 1 and self.args.process_index == 0:
            for _ in range(trials - begun):
                dist.broadcast_object_list([None], src=0)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, *args: Any, **named: Any
    ) -> Any:
        """Trains; arguments and result are those of the stock Trainer. Every process calls and gets the same result.

        Raises: ConfigError before the first step for what cannot work; CheckpointError for a checkpoint that cannot be
            resumed; with several processes RankError on every process when one fails.
        """
        begun = self._trials_begun
        if begun is None:
            return self._train(resume_from_checkpoint, trial, *args, **named)
        if trial is None:  # there are no more
            self.objective = 0.0
            return None
        self._trials_begun = None
        try:
            result = self._train(resume_from_checkpoint, trial, *args, **named)
        except PrunedError:
            self._trials_begun = begun + 1
            if self.args.process_index == 0:
                import optuna

                raise optuna.TrialPruned from None
            self.objective = 0.0
            return None
        self._trials_begun = begun + 1
        return result

    def _train(self, *args: Any, **named: Any) -> Any:
        return super().train(*args, **named)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Tells the study how the trial is doing; on every rank. Raises: PrunedError on every rank."""
        if self.hp_search_backend != HPSearchBackend.OPTUNA or trial is None:
            super()._report_to_hp_search(trial, step, metrics)
            return
        import optuna

        pruned = torch.tensor(False)
        try:
            super()._report_to_hp_search(trial, step, metrics)
        except optuna.TrialPruned:
            pruned.fill_(True)
        self.engine.world.all_reduce(pruned, torch.logical_or, timeout=self.args.ddp_timeout)
        if pruned:
            raise PrunedError("the trial was pruned")
