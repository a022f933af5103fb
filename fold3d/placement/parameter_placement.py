"""ParameterPlacement: which chunk and stage needs, holds, sums and saves which parameter. Names and numbers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fold3d.placement.layers import Ranges, chunk_parameters, unread_in
from fold3d.sharding.plan import ShardingPlan
from fold3d.topology import LOOP, Submesh, chunks_of, stage_of
from fold3d.trace import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterPlacement:
    """Where a model's parameters are.

    A parameter that several chunks need (tied weights, parameters held by the parents of the blocks) has a copy on
    each of their stages; the stage of its first chunk is responsible for it: it counts it in the norm and saves it.
    Of the ranks of a tensor-parallel group that hold the same part of it, that is the first. Where parts overlap, each
    rank is responsible for its own, and what several hold counts in the norm with one over their number.
    """

    pp: int
    needed: tuple[tuple[str, ...], ...]
    """Per chunk, the names of the parameters that it needs, in the model's order; of a tied parameter all."""
    readers: Mapping[str, tuple[int, ...]]
    """Canonical parameter name -> chunks that need it, ascending."""
    modules: Mapping[str, int]
    """Name of a block, or of a module around the blocks -> stage that runs it, or would, if no forward has yet; of a
    buffer that is changed behind the blocks -> the last stage."""
    sharding: ShardingPlan = field(default_factory=lambda: ShardingPlan(tp=1))
    """How parameters are spread over the ranks of a tensor-parallel group."""
    style: str = LOOP
    """On which stages the chunks live."""

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        trace: Trace | None,
        ranges: Ranges,
        pp: int,
        tied: Sequence[Sequence[str]],
        style: str = LOOP,
    ) -> ParameterPlacement:
        """Returns the placement of a model that is cut into `ranges`.

        Args:
            names: all names of its parameters, in its order.
            trace: None for a model that is not cut.
            tied: groups of names of one tensor.
        """
        if trace is None:
            return cls.from_needed([list(names)], tied, pp, style=style)
        trace.check_ranges(list(ranges))
        modules: dict[str, int] = {}
        for chunk, (first, end) in enumerate(ranges):
            stage = stage_of(chunk, pp, style)
            for region in range(first, end + (end == len(trace.blocks))):
                modules.update(dict.fromkeys(trace.around[region], stage))
            modules.update(dict.fromkeys(trace.blocks[first:end], stage))
            for region in range(first, end + (end == len(trace.blocks))):
                modules.update(dict.fromkeys(_unread_modules(names, trace, region), stage))
        modules.update(dict.fromkeys(trace.behind, stage_of(len(ranges) - 1, pp, style)))
        needed = [set(chunk_parameters(names, trace, ranges, chunk)) for chunk in range(len(ranges))]
        for chunk in range(len(ranges)):  # what nobody has read may be read by any chunk of its stage
            for other in chunks_of(stage_of(chunk, pp, style), len(ranges), pp, style):
                needed[other].update(unread_in(trace, ranges, chunk))
        ordered = [[name for name in names if name in of_chunk] for of_chunk in needed]
        return cls.from_needed(ordered, tied, pp, modules, style)

    @classmethod
    def from_needed(
        cls,
        needed: Sequence[Sequence[str]],
        tied: Sequence[Sequence[str]],
        pp: int,
        modules: Mapping[str, int] | None = None,
        style: str = LOOP,
    ) -> ParameterPlacement:
        """Returns the placement when chunk v needs `needed[v]` and each group in `tied` is one tensor."""
        canonical = {name: group[0] for group in tied for name in group}
        readers: dict[str, dict[int, None]] = {}
        for chunk, names in enumerate(needed):
            for name in names:
                readers.setdefault(canonical.get(name, name), {})[chunk] = None
        return cls(
            pp=pp,
            needed=tuple(tuple(names) for names in needed),
            readers={name: tuple(chunks) for name, chunks in readers.items()},
            modules=modules or {},
            style=style,
        )

    def sharded(self, plan: ShardingPlan) -> ParameterPlacement:
        """Returns the same over tensor-parallel groups that hold the parts of `plan`."""
        return replace(self, sharding=plan)

    def stage_of(self, chunk: int) -> int:
        """Returns the stage that a chunk lives on."""
        return stage_of(chunk, self.pp, self.style)

    def held_by(self, stage: int) -> set[str]:
        """Returns the names of the parameters that a stage holds."""
        chunks = chunks_of(stage, len(self.needed), self.pp, self.style)
        return {name for chunk in chunks for name in self.needed[chunk]}

    def readers_on(self, name: str, stage: int) -> tuple[int, ...]:
        """Returns the chunks of one stage that need parameter `name`, ascending."""
        return tuple(chunk for chunk in self.readers[name] if self.stage_of(chunk) == stage)

    def home(self, name: str) -> int:
        """Returns the stage that is responsible for parameter `name`."""
        return self.stage_of(self.readers[name][0])

    def is_responsible(self, name: str, stage: int, tp_rank: int = 0) -> bool:
        """Whether the rank at a place of a replica is responsible for what it holds of parameter `name`."""
        if self.home(name) != stage:
            return False
        shard = self.sharding.shard_of(name)
        if shard is None:
            return tp_rank == 0
        return shard.overlaps or shard.holders(tp_rank)[0] == tp_rank

    def summed_over(self, name: str, tp_rank: int = 0) -> Submesh:
        """Returns the places of a replica over which the gradient of what the place `tp_rank` on the axis tp holds of
        parameter `name` is summed: all that hold a copy, unless its gradient is the same on each already."""
        shard = self.sharding.shard_of(name)
        return Submesh(
            pp=tuple(sorted({self.stage_of(chunk) for chunk in self.readers[name]})),
            tp=shard.holders(tp_rank) if shard is not None and shard.summed else (tp_rank,),
        )

    def shared(self, tp_rank: int = 0) -> dict[str, Submesh]:
        """Returns the parameters whose gradient is summed over more than one place of a replica, with these places, as
        seen from the place `tp_rank` on the axis tp."""
        return {name: places for name in self.readers if (places := self.summed_over(name, tp_rank)).is_shared}

    def submeshes(self) -> list[Submesh]:
        """Returns all places of a replica over which gradients are summed, more than one each, ascending."""
        return sorted({places for tp_rank in range(self.sharding.tp) for places in self.shared(tp_rank).values()})

    def stage_of_module(self, name: str) -> int:
        """Returns the stage that runs the module a parameter or buffer name lies in; 0 for what all stages run."""
        parts = name.split(".")
        prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((self.modules[prefix] for prefix in prefixes if prefix in self.modules), 0)


def _unread_modules(names: Sequence[str], trace: Trace, region: int) -> list[str]:
    """Returns the names of the modules in a region with parameters of which no forward has read any."""
    unread = set(trace.unread)
    mine = unread.intersection(trace.uses[region])
    if not mine:
        return []
    read = {module for name in names if name not in unread for module in _modules_around(name)}
    return [module for name in names if name in mine for module in _modules_around(name) if module not in read]


def _modules_around(parameter: str) -> list[str]:
    return [parameter[:i] for i, letter in enumerate(parameter) if letter == "."]
