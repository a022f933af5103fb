"""ReplicaAccelerator: accelerate's Accelerator with replicas in the place of processes; ReplicaStream: how samples of a
stream are dealt to them.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import accelerate.data_loader
import torch
import transformers.trainer
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import concatenate, find_batch_size, send_to_device, slice_tensors
from accelerate.utils.dataclasses import DynamoBackend
from accelerate.utils.operations import recursively_apply, reduce
from torch import Tensor
from torch.nn import Module
from torch.utils.data import DataLoader, IterableDataset

from fold3d.comms.tree_group import TreeGroup
from fold3d.engine.arguments import PREPARED
from fold3d.errors import ConfigError
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


class ReplicaAccelerator(Accelerator):  # type: ignore[misc]
    """What the Trainer asks to shard data and gather results: `num_processes` is dp, `process_index` the replica.

    All stages of a replica get the same batches, and gathering goes over one rank of each replica. Which process
    writes and logs is still decided by the rank in the job.
    """

    topology: Topology
    flag_tensor: Tensor | None
    replicas: TreeGroup | None
    spread: weakref.ref[Module] | None
    clip: Callable[[float], Tensor]

    def use_replicas(self, replicas: TreeGroup, spread: Module, clip: Callable[[float], Tensor]) -> None:
        """What is gathered comes from these from now on.

        Args:
            spread: the model that they train.
            clip: scales all of its gradients to a norm of at most so much, and returns what the norm was.
        """
        self.replicas, self.spread, self.clip = replicas, weakref.ref(spread), clip

    @classmethod
    def adopt(cls, accelerator: Accelerator, topology: Topology) -> ReplicaAccelerator:
        """Turns `accelerator`, made by the stock Trainer, into one that counts replicas.

        Raises: ConfigError for data loading that deals batches out by process.
        """
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        accelerator.topology = topology
        accelerator.replicas = accelerator.spread = None
        config = accelerator.dataloader_config
        if topology.world > 1 and config.dispatch_batches:
            raise ConfigError(
                "accelerator_config.dispatch_batches=True deals batches out by process, but the stages of a "
                "replica need the same batch; remove it"
            )
        if topology.dp > 1 and not accelerator.even_batches:
            raise ConfigError(
                f"accelerator_config.even_batches=False gives {topology.dp} replicas different numbers of batches, and "
                "they run and evaluate each one together; remove it (the last batch is filled up, and what fills it up "
                "is left out of metrics)"
            )
        return accelerator

    @property
    def num_processes(self) -> int:
        """Number of replicas."""
        return self.topology.dp

    @property
    def process_index(self) -> int:
        """This rank's replica."""
        return self.topology.dp_rank

    def prepare_data_loader(self, data_loader: Any, *args: Any, **named: Any) -> Any:
        """Returns `data_loader` for this replica; one without an index deals samples out as it would to processes."""
        is_prepared = getattr(data_loader, "_is_accelerate_prepared", False)
        if self.topology.world == 1 or is_prepared or self.dispatch_batches is not None or not is_stream(data_loader):
            return super().prepare_data_loader(data_loader, *args, **named)
        settings = {"device": self.device, "non_blocking": self.non_blocking, "split_batches": self.split_batches}
        stream = ReplicaStream(data_loader, self.topology, **settings)
        self._dataloaders.append(stream)
        return stream

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Returns `model` itself, with autocast around its forward if asked for, never wrapped.

        The model that is spread over processes is not moved, either; any other one (a reference model) is whole in each
        process, on its device.
        """
        if self.spread is not None and self.spread() is not model:
            return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        plugin = self.state.dynamo_plugin
        backend, plugin.backend = plugin.backend, DynamoBackend.NO  # the engine compiles it, block by block
        try:
            PREPARED.add(model)
            return super().prepare_model(model, device_placement=False, evaluation_mode=True)
        finally:
            plugin.backend = backend

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: int | float = 2) -> Any:
        """Scales the gradients of the model that is trained to a norm of at most `max_norm`, wherever they are; returns
        the norm before. Every rank calls. Gradients of other parameters are scaled as accelerate does.

        Raises: ConfigError for some of the model's parameters only, and for another norm than L2.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        given = set(map(id, parameters))
        model = None if self.spread is None else self.spread()
        trained = [] if model is None else [one for one in model.parameters() if one.requires_grad]
        if self.topology.world == 1 or given.isdisjoint(map(id, trained)):
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if norm_type != 2 or not given.issuperset(map(id, trained)):
            raise ConfigError(
                f"accelerator.clip_grad_norm_(norm_type={norm_type}) of {len(given)} parameters: gradients lie in "
                "several processes, and the L2 norm of all of the model's is what they compute together. Call it with "
                "model.parameters() and norm_type=2, or leave it to max_grad_norm"
            )
        return self.clip(max_norm)

    def gather(self, tensor: Any) -> Any:
        """Returns the tensors of all replicas, concatenated along dimension 0; every rank calls."""
        if self.topology.dp == 1:
            return tensor
        return recursively_apply(self._gather_one, tensor, error_on_other_type=True)

    def _gather_one(self, tensor: Tensor) -> Tensor:
        mine = tensor[None] if tensor.ndim == 0 else tensor
        assert self.replicas is not None
        return torch.cat(self.replicas.all_gather(mine))

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Returns `tensor` padded along `dim` to the longest of all replicas; every rank calls."""
        if self.topology.dp == 1:
            return tensor
        arguments = {"dim": dim, "pad_index": pad_index, "pad_first": pad_first}
        return recursively_apply(self._pad_one, tensor, error_on_other_type=True, **arguments)

    def _pad_one(self, tensor: Tensor, dim: int, pad_index: int, pad_first: bool) -> Tensor:
        if not -tensor.ndim <= dim < tensor.ndim:
            return tensor
        longest = int(self._gather_one(torch.tensor(tensor.shape[dim])).max())
        if longest == tensor.shape[dim]:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = longest
        padded = tensor.new_full(shape, pad_index)
        padded.narrow(dim, longest - tensor.shape[dim] if pad_first else 0, tensor.shape[dim]).copy_(tensor)
        return padded

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Returns the "sum", "mean" or "max" of the replicas' tensors, in any nesting, or copies of one's own ("none");
        every rank calls. Each replica counts once, however many processes it has; `scale` is for TPUs."""
        return recursively_apply(self._reduce_one, tensor, error_on_other_type=True, reduction=reduction)

    def _reduce_one(self, tensor: Tensor, reduction: str) -> Tensor:
        total = tensor.detach().clone()
        if self.topology.dp > 1 and reduction != "none":
            assert self.replicas is not None
            self.replicas.all_reduce(total, torch.maximum if reduction == "max" else torch.add)
            if reduction == "mean":
                total /= self.topology.dp
        return total

    def check_trigger(self) -> bool:
        """Returns whether any process has called `set_trigger` since the last check; every rank calls."""
        mine: Tensor | None = self.flag_tensor
        mine = torch.tensor(0, device=self.device) if mine is None else mine
        is_set = bool(reduce(mine, "max") >= 1)  # over all processes: a stage may be the only one to see the reason
        self.flag_tensor = torch.tensor(0, device=self.device)
        return is_set

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Returns `gather(input_data)` without the samples that only filled up the last batch; every rank calls."""
        try:
            recursively_apply(_same, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if not use_gather_object:
            return self._without_filling(self.gather(input_data), tensors=True)
        gathered = input_data
        if self.topology.dp > 1:
            assert self.replicas is not None
            shares = self.replicas.share(self.replicas.gather(input_data))
            gathered = [item for share in shares for item in share]
        return self._without_filling(gathered, tensors=False)

    def _without_filling(self, data: Any, tensors: bool) -> Any:
        state = self.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return data
        count: int = state.remainder
        cut: Callable[[Any], Any] = lambda piece: piece[:count]  # noqa: E731
        try:
            return recursively_apply(cut, data) if tensors else cut(data)
        except (IndexError, TypeError, KeyError):
            return data  # as accelerate has it where one of them is a single number, or no sequence of samples


def _same(tensor: Tensor) -> Tensor:
    return tensor
