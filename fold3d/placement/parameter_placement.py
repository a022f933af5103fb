"""ParameterPlacement: which parameters of the model live on which chunk and stage. Pure arithmetic on names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterPlacement:
    """Ownership of a model's parameters.

    A parameter that several chunks need (tied weights, parameters held by the parents of the blocks) has a copy on
    each of their stages; the stage of its first chunk is responsible for it: it counts it in the norm and saves it.
    """

    pp: int
    owners: Mapping[str, tuple[int, ...]]
    """Canonical parameter name -> chunks that need it, ascending."""

    @classmethod
    def from_chunks(
        cls, pp: int, names_of_chunk: Sequence[Sequence[str]], tied: Sequence[Sequence[str]]
    ) -> ParameterPlacement:
        """Returns the ownership when chunk v needs `names_of_chunk[v]` and each group in `tied` is one tensor."""
        canonical = {name: group[0] for group in tied for name in group}
        owners: dict[str, list[int]] = {}
        for chunk, names in enumerate(names_of_chunk):
            for name in names:
                chunks = owners.setdefault(canonical.get(name, name), [])
                if chunk not in chunks:
                    chunks.append(chunk)
        return cls(pp=pp, owners={name: tuple(sorted(chunks)) for name, chunks in owners.items()})

    def stages(self, name: str) -> tuple[int, ...]:
        """Returns the stages with a copy of parameter `name`, ascending."""
        return tuple(sorted({chunk % self.pp for chunk in self.owners[name]}))

    def home(self, name: str) -> int:
        """Returns the stage that is responsible for parameter `name`."""
        return self.owners[name][0] % self.pp

    def shared_stages(self) -> dict[str, tuple[int, ...]]:
        """Returns the parameters that more than one stage holds, with their stages."""
        return {name: stages for name in self.owners if len(stages := self.stages(name)) > 1}
