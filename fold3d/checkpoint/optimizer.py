"""OptimizerLayout: the optimizer over the whole model, of which each rank steps a part.

optimizer.pt has the stock Trainer's format, {"state": {index: ...}, "param_groups": [{..., "params": [index]}]}, with
indices in the order of the whole model's groups. A rank's optimizer numbers only what it holds; names join both.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.serialization import skip_data

from fold3d.checkpoint.arrivals import Entry
from fold3d.checkpoint.torch_file import TorchFile
from fold3d.data_parallel.optimizer.host_memory import OnHost, host_memory
from fold3d.data_parallel.optimizer.parameter_state import cut_state, like_parameter, shard_of_state
from fold3d.errors import CheckpointError, ConfigError
from fold3d.sharding.shard import Shard
from fold3d.weights.parts import Parts

FILE = "optimizer.pt"
StateKey = tuple[str, str]
"""(canonical parameter name, name of the state tensor, e.g. "exp_avg")."""


@dataclass(frozen=True, slots=True)
class OptimizerLayout:
    """Names of the parameters in every group of the whole model's optimizer, in the stock order."""

    groups: tuple[tuple[str, ...], ...]

    @classmethod
    def restrict(
        cls,
        optimizer: Optimizer,
        names: Mapping[int, str],
        owned: Mapping[str, Parameter],
        parts: Parts | None = None,
    ) -> OptimizerLayout:
        """Cuts an optimizer over the whole model down to this rank's parameters and returns the whole layout.

        Args:
            names: id(parameter) -> canonical name, of all parameters the optimizer may have been made with.
            owned: the parameters with storage on this rank.
            parts: which part of each of them this rank has; None: all of it.
        Raises: ConfigError for a parameter that is not the model's; as `cut_state`.
        """
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            unknown = [tuple(p.shape) for p in group["params"] if id(p) not in names]
            if unknown:
                raise ConfigError(
                    f"group {number} of the optimizer holds {len(unknown)} parameter(s) that are not the "
                    f"model's (the first has shape {unknown[0]}). What shall be trained must be in the model: register "
                    "it there (model.weights = torch.nn.Parameter(...)), and make the optimizer over model.parameters()"
                )
            groups.append(tuple(names[id(p)] for p in group["params"]))
            old = {names[id(p)]: p for p in group["params"]}
            group["params"] = [owned[name] for name in groups[-1] if name in owned]
            for name, parameter in old.items():
                state = optimizer.state.pop(parameter, None)
                if state is not None and name in owned:
                    optimizer.state[owned[name]] = state
        cut_state(optimizer, owned, parts or Parts.whole())
        return cls(tuple(groups))

    def local(self, owned: Mapping[str, Parameter]) -> list[str]:
        """Returns the names behind the indices 0, 1, ... of this rank's optimizer."""
        return [name for group in self.groups for name in group if name in owned]

    def state_tensors(
        self, optimizer: Optimizer, owned: Mapping[str, Parameter], primary: set[str]
    ) -> tuple[dict[StateKey, Tensor], dict[str, dict[str, Any]]]:
        """Returns this rank's share of the state: tensors, and per parameter everything that is no tensor."""
        state = optimizer.state_dict()["state"]
        tensors: dict[StateKey, Tensor] = {}
        rest: dict[str, dict[str, Any]] = {}
        for index, name in enumerate(self.local(owned)):
            if name not in primary or index not in state:
                continue
            rest[name] = {}
            for key, value in state[index].items():
                if isinstance(value, Tensor):
                    tensors[name, key] = value
                else:
                    rest[name][key] = value
        return tensors, rest

    def spread(
        self, tensors: Mapping[StateKey, Tensor], owned: Mapping[str, Parameter], parts: Parts
    ) -> dict[StateKey, Shard]:
        """Returns which of the tensors of `state_tensors` are parts, and how they are spread.

        Raises: CheckpointError for a state that cannot be put together.
        """
        shards = {
            (name, key): shard_of_state(name, key, tensor, owned[name].shape, parts)
            for (name, key), tensor in tensors.items()
        }
        return {name: shard for name, shard in shards.items() if shard is not None}

    def load(
        self,
        path: Path,
        optimizer: Optimizer,
        owned: Mapping[str, Parameter],
        parts: Parts | None = None,
        *,
        on_host: bool = False,
    ) -> None:
        """Gives this rank's optimizer its part of the state in `path`, ours or the stock Trainer's.

        Args:
            parts: which part of each parameter this rank has; None: all of it. Nothing else is read.
            on_host: the state lies in host memory; whoever steps the optimizer there unwraps it (`OnHost`).
        Raises: CheckpointError when the file is damaged, has other groups than this run's optimizer, or a state that
            cannot be divided.
        """
        file = TorchFile(path)
        with file.opened():
            optimizer.load_state_dict(self._own_part(file, path, owned, parts or Parts.whole(), on_host))

    def _own_part(
        self, file: TorchFile, path: Path, owned: Mapping[str, Parameter], parts: Parts, on_host: bool
    ) -> dict[str, Any]:
        """Returns what this rank's optimizer loads."""
        whole = file.content
        saved = file.read_all(whole["param_groups"])
        sizes, expected = [len(group["params"]) for group in saved], [len(names) for names in self.groups]
        if sizes != expected:
            raise CheckpointError(
                f"{path} belongs to another model or optimizer: its groups hold {sizes} parameters, "
                f"this run's {expected}"
            )
        index_of = {
            name: index
            for names, group in zip(self.groups, saved, strict=True)
            for name, index in zip(names, group["params"], strict=True)
        }

        def read(name: str, key: str, value: Any) -> Any:
            shape = parts.whole_shape(name, owned[name].shape)
            shard = shard_of_state(name, key, value, shape, parts)
            if isinstance(value, Tensor):
                value = file.read(value, shard, parts.rank)
            if not on_host:
                # It has just been read: a copy would leave a hole in the heap for every tensor.
                return like_parameter(key, value, owned[name], copy=not isinstance(value, Tensor))
            with host_memory():
                made = like_parameter(key, value, owned[name], on_host=True)
                if not isinstance(made, Tensor) or key == "step":
                    return made
                # The dtype that torch's optimizers give a state that they load.
                return OnHost(made.to(owned[name].dtype) if owned[name].is_floating_point() else made)

        state = {
            number: {key: read(name, key, value) for key, value in whole["state"][index_of[name]].items()}
            for number, name in enumerate(self.local(owned))
            if index_of[name] in whole["state"]
        }
        groups, start = [], 0
        for names, group in zip(self.groups, saved, strict=True):
            count = sum(name in owned for name in names)
            groups.append({**group, "params": list(range(start, start + count))})
            start += count
        return {"state": state, "param_groups": groups}


class OptimizerSink:
    """Writes optimizer.pt from a `Stream`, on rank 0, without holding the state in memory.

    The file is laid out with empty tensors first, then filled as they arrive.
    """

    def __init__(self, path: Path, layout: OptimizerLayout, groups: Sequence[Mapping[str, Any]]) -> None:
        """Args:
        groups: param_groups of rank 0's optimizer; their settings are those of the whole model's groups.
        """
        self._path, self._layout, self._groups = path, layout, groups
        self._index = {name: i for i, name in enumerate(n for names in layout.groups for n in names)}
        self._file: TorchFile | None = None
        self._open = contextlib.ExitStack()

    def open(self, entries: Mapping[StateKey, Entry], notes: list[dict[str, dict[str, Any]]]) -> None:
        """Writes the file with the right structure; notes: what is no tensor, by rank and parameter."""
        state: dict[int, dict[str, Any]] = {}
        for note in reversed(notes):  # of what several ranks say the first one counts
            for name, values in note.items():
                state.setdefault(self._index[name], {}).update(values)
        with FakeTensorMode():
            for (name, key), entry in entries.items():
                state[self._index[name]][key] = torch.empty(entry.shape, dtype=entry.dtype)
        start, groups = 0, []
        for names, group in zip(self._layout.groups, self._groups, strict=True):
            groups.append({**group, "params": list(range(start, start + len(names)))})
            start += len(names)
        whole = {"state": dict(sorted(state.items())), "param_groups": groups}
        with skip_data(materialize_fake_tensors=True):
            torch.save(whole, self._path)
        with self._path.open("r+b") as file:
            # Skipped data are holes: better no room on the disk now than halfway.
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        self._file = TorchFile(self._path)
        self._open.enter_context(self._file.opened(writes=True))

    def write(self, name: StateKey, tensor: Tensor) -> None:
        """Stores one tensor of the state of one parameter."""
        parameter, key = name
        assert self._file is not None
        self._file.write(self._file.content["state"][self._index[parameter]][key], tensor)

    def close(self) -> None:
        """Closes the file."""
        self._open.close()
