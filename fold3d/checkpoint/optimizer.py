"""OptimizerLayout: the optimizer over the whole model, of which each rank steps a part.

optimizer.pt has the stock Trainer's format, {"state": {index: ...}, "param_groups": [{..., "params": [index]}]}, with
indices in the order of the whole model's groups. A rank's optimizer numbers only what it holds; names join both.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.serialization import skip_data
from torch.utils._pytree import tree_leaves

from fold3d.checkpoint.delivery import Location
from fold3d.checkpoint.regions import Box, Entry, regions_of, regions_of_piece
from fold3d.checkpoint.torch_file import TorchFile, without_values
from fold3d.data_parallel.bucket import Piece, laid_out
from fold3d.data_parallel.optimizer.bucket_optimizer import loads_by_itself
from fold3d.data_parallel.optimizer.bucketwise_optimizer import BucketwiseOptimizer
from fold3d.data_parallel.optimizer.host_memory import OnHost, host_memory
from fold3d.data_parallel.optimizer.parameter_state import cut_state, like_parameter, shard_of_state
from fold3d.data_parallel.optimizer.state import is_split
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
            group.update(_of_parameters(group, optimizer, [name in owned for name in groups[-1]]))
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

    def state_regions(
        self,
        optimizer: Optimizer,
        owned: Mapping[str, Parameter],
        primary: set[str],
        parts: Parts,
        pieces: Sequence[tuple[Piece, Mapping[str, Any]]] = (),
    ) -> tuple[list[Box[StateKey]], list[Box[StateKey]], dict[str, dict[str, Any]]]:
        """Returns this rank's share of the state: what other replicas at its place have, too; what only this one has;
        and per parameter everything that is no tensor.

        Args:
            primary: names of what this rank is responsible for.
            parts: which part of each parameter it has.
            pieces: of which its replica alone keeps the state.
        Raises: CheckpointError for a state that cannot be put together.
        """
        content = optimizer.state_dict()
        if more := content.keys() - {"state", "param_groups"}:
            raise ConfigError(
                f"the state_dict of {type(optimizer).__name__} has {sorted(more)} beside 'state' and 'param_groups', "
                "which fold3d would not save: keep it in a group (param_groups) or in the state of parameters"
            )
        state = content["state"]
        everywhere: list[Box[StateKey]] = []
        own: list[Box[StateKey]] = []
        rest: dict[str, dict[str, Any]] = {}

        def of_whole(name: str, values: Mapping[str, Any], into: list[Box[StateKey]]) -> None:
            numbers = rest.setdefault(name, {})
            for key, value in values.items():
                if not isinstance(value, Tensor):
                    if parts.shard_of(name) is not None:
                        _refuse_tensors(name, key, value, "tp=1")
                    numbers[key] = value
                    continue
                shard = shard_of_state(name, key, value, owned[name].shape, parts)
                if shard is not None or _is_first(parts.shard_of(name), parts.rank):
                    into += regions_of((name, key), value, shard, parts.rank)

        for index, name in enumerate(self.local(owned)):
            if name in primary and index in state:
                of_whole(name, state[index], everywhere)
        for piece, values in pieces:
            if piece.name not in primary:
                continue
            for key, value in values.items():
                _refuse_tensors(piece.name, key, value, 'dp_sync="early"')
            split = {key: value for key, value in values.items() if is_split(value, piece)}
            shard = parts.shard_of(piece.name)
            for key, value in split.items():
                own += regions_of_piece((piece.name, key), piece, value, shard, parts.rank, once=True)
            if piece.offset == 0:  # the first of the replicas that have pieces of it
                of_whole(piece.name, {k: v for k, v in values.items() if k not in split}, own)
        return everywhere, own, rest

    def load(
        self,
        path: Path,
        optimizer: Optimizer,
        owned: Mapping[str, Parameter],
        parts: Parts | None = None,
        *,
        on_host: bool = False,
        keep: BucketwiseOptimizer | None = None,
    ) -> None:
        """Gives this rank's optimizer its part of the state in `path`, ours or the stock Trainer's.

        Args:
            parts: which part of each parameter this rank has; None: all of it. Nothing else is read.
            on_host: the state lies in host memory; whoever steps the optimizer there unwraps it (`OnHost`).
            keep: those of which each replica keeps a part of the state: this one's is read.
        Raises: CheckpointError when the file is damaged, has other groups than this run's optimizer, or a state that
            cannot be divided.
        """
        file, parts = TorchFile(path), parts or Parts.whole()
        found = file.content if isinstance(file.content, dict) else {}
        saved, state = found.get("param_groups"), found.get("state")
        if not isinstance(saved, list) or not isinstance(state, dict):
            raise CheckpointError(
                f"{path} holds no state of an optimizer (a dictionary with 'state' and 'param_groups', as "
                "optimizer.state_dict() returns it); remove it for an optimizer that starts anew"
            )
        sizes, expected = [len(group["params"]) for group in saved], [len(names) for names in self.groups]
        if sizes != expected:
            raise CheckpointError(
                f"{path} belongs to another model or optimizer: its groups hold {sizes} parameters, "
                f"this run's {expected}"
            )
        indices = itertools.chain.from_iterable(group["params"] for group in saved)
        index_of = dict(zip(itertools.chain.from_iterable(self.groups), indices, strict=True))

        def read(piece: Piece) -> dict[str, Any] | None:
            values = state.get(index_of[piece.name])
            if values is None:
                return None
            return {key: _read(file, piece, key, value, parts)[0] for key, value in values.items()}

        with file.opened():
            groups = file.read_all(saved)
            if type(optimizer) in _ELEMENTWISE:
                _check_shapes(path, {name: state.get(index, {}) for name, index in index_of.items()}, owned, parts)
            on_host = on_host and not loads_by_itself(optimizer)  # that one takes tensors, which go to the host later
            local = [name for name in self.local(owned) if keep is None or name not in keep.names]
            own = {
                name: {
                    key: _beside(
                        key, _read(file, Piece.whole(name, owned[name]), key, value, parts), owned[name], on_host
                    )
                    for key, value in state[index_of[name]].items()
                }
                for name in local
                if index_of[name] in state
            }
            numbers = {name: number for number, name in enumerate(self.local(owned))}
            mine = [
                group
                | _of_parameters(group, optimizer, [name in owned for name in names])
                | {"params": [numbers[name] for name in names if name in owned]}
                for names, group in zip(self.groups, groups, strict=True)
            ]
            optimizer.load_state_dict({"state": {numbers[n]: one for n, one in own.items()}, "param_groups": mine})
            if keep is not None:
                keep.load_held(read)


_ELEMENTWISE = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop),
    *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta, torch.optim.ASGD),
)
"""torch's, whose tensors for a parameter have its shape, or are numbers; their kernels believe it."""


def _check_shapes(
    path: Path, states: Mapping[str, Mapping[str, Any]], owned: Mapping[str, Parameter], parts: Parts
) -> None:
    """Raises CheckpointError for a state of parameters of other shapes than this run's."""
    for name in (one for one in owned if one in states):
        whole = parts.whole_shape(name, owned[name].shape)
        for key, value in states[name].items():
            if isinstance(value, Tensor) and value.ndim and tuple(value.shape) != tuple(whole):
                raise CheckpointError(
                    f"{path} belongs to another model: {key!r} of {name} has shape {tuple(value.shape)}, and the "
                    f"parameter {tuple(whole)}; remove it for an optimizer that starts anew"
                )


def _of_parameters(group: Mapping[str, Any], optimizer: Optimizer, keeps: Sequence[bool]) -> dict[str, Any]:
    """Returns the lists of a group that have an entry for each parameter ("param_names"), with some of them. A list
    that has a default (betas) is one setting."""
    lists = {key: value for key, value in group.items() if isinstance(value, list) and len(value) == len(keeps)}
    settings = {"params", *optimizer.defaults}
    return {key: list(itertools.compress(value, keeps)) for key, value in lists.items() if key not in settings}


def _refuse_tensors(name: str, key: str, value: Any, instead: str) -> None:
    if not isinstance(value, Tensor) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
        raise ConfigError(
            f"the optimizer keeps tensors of {name} in a {type(value).__name__} ({key!r}), of which ranks would have "
            f"parts that nobody puts together: keep each under a name of its own, or set {instead}"
        )


def _read(file: TorchFile, piece: Piece, key: str, value: Any, parts: Parts) -> tuple[Any, bool]:
    """Returns a value of the state of a piece's parameter, and whether it is the piece's, flat: of what has the
    parameter's shape only the piece is read."""
    whole = parts.whole_shape(piece.name, piece.parameter.shape)
    shard = shard_of_state(piece.name, key, value, whole, parts)
    if not isinstance(value, Tensor) or not value.ndim or tuple(value.shape) != whole:
        return file.read_all(value), False
    data = torch.empty(piece.stop - piece.start, dtype=value.dtype)
    for region in regions_of_piece(key, piece, data, shard, parts.rank, once=False):
        file.read_box(value, region.starts, region.data)
    return data, True


def _beside(key: str, read: tuple[Any, bool], parameter: Parameter, on_host: bool) -> Any:
    """Returns what was read for a whole parameter as `load_state_dict` takes it."""
    value, is_flat = read
    value = laid_out(value, parameter) if is_flat else value
    if not on_host:
        # It has just been read: a copy would leave a hole in the heap for every tensor.
        return like_parameter(key, value, parameter, copy=not isinstance(value, Tensor))
    with host_memory():
        made = like_parameter(key, value, parameter, on_host=True)
        if not isinstance(made, Tensor) or key == "step" or not made.ndim:
            return made
        # The dtype that torch's optimizers give a state that they load.
        return OnHost(made.to(parameter.dtype) if parameter.is_floating_point() else made)


def _is_first(shard: Shard | None, rank: int) -> bool:
    """Whether this rank of a tensor-parallel group writes what of a parameter's state all of them have."""
    return shard is None or next(place for place in range(shard.ranks) if shard.length(place)) == rank


class OptimizerFiles:
    """optimizer.pt of one save, see `Files`. It is laid out with empty tensors, which are filled where they lie."""

    def __init__(self, folder: Path, layout: OptimizerLayout, groups: Sequence[Mapping[str, Any]]) -> None:
        """Args:
        groups: param_groups of rank 0's optimizer; their settings are those of the whole model's groups.
        """
        self.folder, self._layout, self._groups = folder, layout, groups

    def make(
        self, entries: Mapping[StateKey, Entry], notes: list[dict[str, dict[str, Any]]]
    ) -> dict[StateKey, Location]:
        """Makes the file; notes: what is no tensor, by rank and parameter."""
        index = {name: i for i, name in enumerate(n for names in self._layout.groups for n in names)}
        state: dict[int, dict[str, Any]] = {}
        for note in reversed(notes):  # of what several ranks say the first one counts
            for name, values in note.items():
                state.setdefault(index[name], {}).update(values)
        with without_values():
            for (name, key), entry in entries.items():
                state[index[name]][key] = torch.empty(entry.shape, dtype=entry.dtype)
        start, groups = 0, []
        for names, group in zip(self._layout.groups, self._groups, strict=True):
            more = {"param_names": list(names)} if "param_names" in group else {}
            groups.append({**group, **more, "params": list(range(start, start + len(names)))})
            start += len(names)
        content = {"state": dict(sorted(state.items())), "param_groups": groups}
        with skip_data(materialize_fake_tensors=True):
            torch.save(content, self.folder / FILE)
        file = TorchFile(self.folder / FILE)
        self._write_others(content, file)
        made = file.content["state"]
        return {
            (name, key): Location(FILE, file.place(made[index[name]][key]) if entry.bytes else 0)
            for (name, key), entry in entries.items()
        }

    def _write_others(self, content: Any, file: TorchFile) -> None:
        """Writes the tensors that nobody else does: in groups, such as a learning rate, and in containers."""
        with open(self.folder / FILE, "r+b") as written:
            for mine, its in zip(tree_leaves(content), tree_leaves(file.content), strict=True):
                if isinstance(mine, Tensor) and not isinstance(mine, FakeTensor) and mine.numel():
                    data = torch.empty_strided(its.shape, its.stride(), dtype=its.dtype).copy_(mine.detach())
                    flat = data.as_strided((data.untyped_storage().nbytes() // data.element_size(),), (1,))
                    written.seek(file.place(its))
                    written.write(flat.view(torch.uint8).numpy().tobytes())

    def finish(self) -> None:
        """It has its name: the folder has none yet."""
