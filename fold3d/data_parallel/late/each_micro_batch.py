"""EachMicroBatch: an update after each micro-batch, in a pipeline that does not drain (PipeDream, Narayanan 2019).

A step has one micro-batch. Its list on a rank (`_C.by_micro_batch`) has the forward of micro-batch t and, with p stages
of which this is number s from 0, the backward of micro-batch u = t - (p - 1 - s), if there is one:

    begin_slice      micro-batch t gets the version that it takes in both passes
    F(t), B(u)       each on its own version
    end_slice        loss and norm of u are sent beside what follows
    update           W(u) = W(u-1) - update(g(u)), with the optimizer's settings of step u

A stage has n versions, of which micro-batch t takes that with the updates up to t - n: the newest which the stage has
before the forward (weight stashing, n = p - s), or the newest of the first stage on all of them (vertical sync, n = p).
The memory of update t - n is where update t goes, once the backward of t is over. So a version follows from the number
of its micro-batch, whatever has been updated meanwhile, and a drain, which runs backwards and updates early, changes no
bit.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fold3d.comms.groups import Groups
from fold3d.config import CLIPPED_EACH_MICRO_BATCH, ParallelConfig
from fold3d.data_parallel import gradients
from fold3d.data_parallel.gradient_states import Event
from fold3d.data_parallel.late.exchange import Exchange
from fold3d.data_parallel.late.versioned import Versioned
from fold3d.data_parallel.optimizer.bucket_optimizer import Settings
from fold3d.errors import ConfigError
from fold3d.stage.rank_model import RankModel


class EachMicroBatch(Versioned):
    """Of one rank with one chunk, of one replica; all ranks make the same calls. See `DpSync` for what is not here."""

    keeps_versions = True

    def __init__(
        self,
        cut: RankModel,
        groups: Groups,
        config: ParallelConfig,
        *rest: Any,
        versions: int,
    ) -> None:
        """All ranks of the job call.

        Args:
            rest: as DpSync takes them.
            versions: that this stage has.
        """
        super().__init__(cut, groups, config, *rest, versions=versions)
        life = groups.world.progress.life
        self._exchange = Exchange[Tensor](groups.topology, config.timeout_seconds, life)  # of losses and norms
        self._begun = 0  # micro-batches
        self._version_of: dict[int, int] = {}  # by the number of a micro-batch that is in the pipeline
        self._settings: deque[Settings] = deque()  # of micro-batches whose updates are to come
        self._is_run = False  # and the optimizer's step is to come
        self._told_norm = torch.zeros((), dtype=self._norm_dtype)

    def attach(self, optimizer: Optimizer, *, parts: bool) -> None:
        """See `Versioned.attach`. Raises: ConfigError for weights that several stages hold."""
        # Stages between them do not hold them.
        tied = self._groups.world.decide(list(self._tied_parameters), lambda shares: [n for one in shares for n in one])
        if tied:
            raise ConfigError(
                f"{min(tied)} lies on several stages, which PipeDream's weight_versions update at "
                'different times: set tie_word_embeddings=False in the model\'s configuration, or weight_versions="2bw"'
            )
        super().attach(optimizer, parts=parts)

    def begin_slice(self, number: int | None, *, brings: bool) -> None:
        """A step, or a part of a drain, begins.

        Args:
            number: of the micro-batch whose forward comes; None: none does.
            brings: whether a backward comes.
        """
        if self._optimizer is None:
            raise ConfigError(
                "weight_versions needs an optimizer that Engine.attach was given; attach one, or set flush=True"
            )
        if self._is_run:
            raise ConfigError(
                "with weight_versions each run is followed by optimizer.step(), before anything else: its gradients "
                "are part of those to come, so that it cannot be left out"
            )
        versions = self.versions
        assert versions is not None
        if number is not None:
            self._begun += 1
            self._version_of[number] = self._begun % versions.count
            self._is_run = True
        versions.begin(None if number is None else self._version_of[number])
        if brings:
            self.begin(1, (self._cut.stage,))
        else:
            self.check_trainable()

    def turn_to(self, number: int, step_before: bool) -> None:
        """The next action is of this micro-batch: parameters have its weights."""
        assert self._versions is not None
        self._versions.turn_to(self._version_of[number])

    def end_slice(self, values: Tensor) -> None:
        """The backward is over.

        Args:
            values: fp64, of its micro-batch, of which all ranks will have the sums; see `told`.
        """
        assert self._versions is not None
        self._versions.end()
        self.end()
        self._transfers.wait_reduced()
        self._states.on(Event.MEASURE)
        flats = [bucket.gradients for bucket in self.buckets]
        squares = gradients.sum_of_squares(flats, device=self._device, kernel=self._kernels)
        mine, world = torch.cat([values, squares.reshape(1)]), self._exchange.world

        def tell() -> Tensor:
            world.all_reduce_replica(mine)
            return mine

        self._exchange.begin(tell)

    @property
    def untold(self) -> int:
        """Of how many micro-batches the backward is over here, and `told` has not told."""
        return self._exchange.begun

    def told(self) -> Tensor:
        """Waits for the sums of the first of them, and returns them; its gradient norm is `norm` from now on."""
        sums = self._exchange.wait()
        self._told_norm = sums[-1].sqrt().to(self._norm_dtype)
        return sums[:-1]

    def norm(self) -> Tensor:
        """Returns the global norm of the newest micro-batch of which all ranks have been told; 0 before that."""
        return self._told_norm

    def scale(self, coefficient: gradients.Factor) -> None:
        """Raises ConfigError: the last stage updates before anybody knows the norm."""
        raise ConfigError(CLIPPED_EACH_MICRO_BATCH)

    def update(self, *, keeps: bool = True) -> None:
        """See `DpSync.update`; the settings of now are those of the micro-batch that was begun last."""
        assert self._optimizer is not None and self._versions is not None
        if self._is_run:
            self._settings.append(self._optimizer.settings(1.0))
        self._is_run = False
        self._versions.note_writes()
        if not self._states.has_gradients:
            for bucket in self.buckets:
                bucket.detach()  # what was taken before is not for the optimizer's own step
            return
        self._optimizer.check_unchanged()
        self._make_room()
        super().update(keeps=keeps)

    def _taken_with(self, settings: Settings) -> Settings:
        return self._settings.popleft()

    def close(self) -> None:
        """See `DpSync.close`."""
        super().close()
        self._exchange.close()
