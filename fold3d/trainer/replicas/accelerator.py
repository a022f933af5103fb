"""ReplicaAccelerator: accelerate's Accelerator with replicas in the place of processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.dataclasses import DynamoBackend
from accelerate.utils.operations import recursively_apply, reduce
from torch import Tensor
from torch.nn import Module

from fold3d.comms.tree_group import TreeGroup
from fold3d.engine.arguments import PREPARED
from fold3d.errors import ConfigError
from fold3d.topology import Topology
from fold3d.trainer.replicas.streams import ReplicaStream, is_stream


class ReplicaAccelerator(Accelerator):  # type: ignore[misc]
    """What the Trainer asks to shard data and gather results: `num_processes` is dp, `process_index` the replica.

    All stages of a replica get the same batches, and gathering goes over one rank of each replica. Which process
    writes and logs is still decided by the rank in the job.
    """

    topology: Topology
    flag_tensor: Tensor | None
    replicas: TreeGroup | None
    spread: weakref.ref[Module] | None

    def use_replicas(self, replicas: TreeGroup, spread: Module) -> None:
        """What is gathered comes from these from now on; `spread` is the model that they train."""
        self.replicas, self.spread = replicas, weakref.ref(spread)

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
