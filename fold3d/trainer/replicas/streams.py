"""ReplicaStream: samples without a length, dealt out to the replicas as accelerate deals them out to processes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import accelerate.data_loader
import torch
import transformers.trainer
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import concatenate, find_batch_size, recursively_apply, send_to_device, slice_tensors
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fold3d.topology import Topology


class ReplicaStream(DataLoaderDispatcher):  # type: ignore[misc]
    """Gives each replica the batches that `DataLoaderDispatcher` would send to a process, without sending any: every
    process reads the whole stream, as the stages of a replica need the same samples.

    Batches are read in groups of one for each replica. The last group may hold fewer samples: they are divided evenly,
    and filled up with the first of the stream, and `remainder` says how many are no filling. Batches that cannot be
    divided, because they are padded to different lengths, are given as they are, with the first batch as the filling,
    and one with fewer samples than another is filled up with its own.

    Args:
        loader: what the Trainer made: the stream and how it is collated.
        topology: of this rank.
        settings: `device`, `non_blocking` and `split_batches` of the accelerator.
    """

    def __init__(self, loader: DataLoader[Any], topology: Topology, *, skip_batches: int = 0, **settings: Any) -> None:
        defaults: dict[str, Any] = accelerate.data_loader._PYTORCH_DATALOADER_KWARGS
        unwanted = ("shuffle", "sampler", "batch_sampler", "generator")
        named = {name: getattr(loader, name, value) for name, value in defaults.items() if name not in unwanted}
        super().__init__(
            loader.dataset,
            split_batches=settings["split_batches"],
            skip_batches=skip_batches,
            _drop_last=loader.drop_last,
            _non_blocking=settings["non_blocking"],
            **named,
        )
        self.topology, self.settings = topology, settings
        self._group = 1 if self.split_batches else topology.dp

    def skip_first(self, count: int) -> ReplicaStream:
        """Returns one that begins after `count` batches of each replica."""
        skipping = ReplicaStream(self.base_dataloader, self.topology, skip_batches=count, **self.settings)
        skipping.iteration = self.iteration
        return skipping

    def __len__(self) -> int:
        groups = len(self.base_dataloader) / self._group
        return math.floor(groups) if self._drop_last else math.ceil(groups)

    @property
    def total_batch_size(self) -> int:
        """Samples of all replicas' batches."""
        assert self.batch_size is not None
        return int(self.batch_size) * self._group

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        self.set_epoch(self.iteration)
        groups = self._groups()
        group = next(groups, None)
        first = group
        for number in itertools.count():
            if group is None:
                break
            assert first is not None
            following = next(groups, None)  # who takes the last batch is told that it is the last
            if following is None:
                self.end_of_dataloader = True
                self.remainder = sum(find_batch_size(batch) or 0 for batch in group)
            if number >= self.skip_batches:
                batch = self._share_of(group, first)
                yield send_to_device(batch, self.settings["device"], non_blocking=self._non_blocking)
            group = following
        self.iteration += 1
        self.end()

    def _groups(self) -> Iterator[list[Any]]:
        group: list[Any] = []
        for batch in self.base_dataloader:
            group.append(batch)
            if len(group) == self._group:
                yield group
                group = []
        if group and not self._drop_last:
            yield group

    def _share_of(self, group: list[Any], first: list[Any]) -> Any:
        """Returns this replica's part of `group`; what is missing comes from the stream's `first` group."""
        count, mine = self.topology.dp, self.topology.dp_rank
        sizes = [find_batch_size(batch) for batch in group]
        if len(set(sizes)) == 1 and len(group) == count:
            return group[mine]
        try:
            whole, filling = concatenate(group), concatenate(first)
            observed = find_batch_size(whole)
            if observed % count and not self._drop_last:
                whole = concatenate([whole, slice_tensors(filling, slice(0, count))])
        except (RuntimeError, TypeError):  # of different lengths, or with more than tensors
            size = max(find_batch_size(batch) or 0 for batch in (*group, first[0]))
            return _filled(group[mine] if mine < len(group) else first[0], size)
        size = observed // count if self._drop_last else math.ceil(observed / count)
        return slice_tensors(whole, slice(mine * size, (mine + 1) * size))


def _filled(batch: Any, size: int) -> Any:
    """Returns `batch` with so many samples, its own over and over: replicas gather tensors of one size."""
    found = find_batch_size(batch) or size

    def filled(tensor: Tensor) -> Tensor:
        return tensor[torch.arange(size) % found] if tensor.ndim and len(tensor) == found else tensor

    return recursively_apply(filled, batch) if found < size else batch


def is_stream(loader: Any) -> bool:
    """Whether the Trainer made `loader` over samples without an index."""
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


@functools.wraps(accelerate.data_loader.skip_first_batches)
def _skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    if type(dataloader) is ReplicaStream:  # accelerate would make one of its own class
        return dataloader.skip_first(num_batches)
    return accelerate.data_loader.skip_first_batches(dataloader, num_batches)


# The Trainer calls it by this name when training goes on in the middle of an epoch.
vars(transformers.trainer)["skip_first_batches"] = _skip_first_batches
