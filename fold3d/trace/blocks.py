"""Finding the blocks of a model: the modules that run one after the other and between which it may be cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from fold3d.config import BLOCKS, Partition
from fold3d.errors import TraceError

ROOT = "."


@dataclass(frozen=True, slots=True)
class Container:
    """A module whose children may be the blocks; its text names it in error messages."""

    name: str
    blocks: tuple[str, ...]
    kinds: tuple[str, ...]
    parameters: int

    def __str__(self) -> str:
        kinds = " + ".join(dict.fromkeys(self.kinds))
        return f"'{self.name or ROOT}' ({len(self.blocks)} x {kinds}, {self.parameters:,} parameters)"


def find_blocks(model: nn.Module, blocks: str = "auto", partition: Partition = BLOCKS) -> list[str]:
    """Returns the names of the blocks of `model` in the order in which they are registered, or named.

    Args:
        model: any module; nothing is run, parameters may be on the meta device.
        blocks: "auto" takes the outermost `GradientCheckpointingLayer`s of a transformers model, in whichever lists,
            else the largest ModuleList or Sequential (by parameters) whose modules are all of one class, else the
            largest that holds a single module, which may run several times. Otherwise the
            names of containers, such as "model.layers" or "encoder.layers,decoder.layers", or "." for the model
            itself: their children are the blocks.
        partition: names of modules that are to be the blocks; BLOCKS: as `blocks` says. Not GRAPH, which is found by
            running the model: see `trace`.
    Raises: TraceError with the candidates if there is no container of that name, or none or no single best
        one.
    """
    if not isinstance(partition, str):
        return named_blocks(model, partition)
    assert partition == BLOCKS, partition
    if blocks != "auto":
        return list(
            dict.fromkeys(b for name in blocks.split(",") for b in _named_container(model, name.strip()).blocks)
        )
    layers = _checkpointing_layers(model)
    if layers:
        return [block for container in layers for block in container.blocks]
    candidates = [c for c in _outermost(model) if len(set(c.kinds)) == 1 and len(c.blocks) > 1]
    candidates.sort(key=lambda c: -c.parameters)
    if not candidates:
        single = _single_block(model)
        if single is None:
            raise no_blocks(model)
        return [single]
    if len(candidates) > 1 and candidates[0].parameters == candidates[1].parameters:
        raise TraceError(
            f"{type(model).__name__} has several equally large lists of blocks: {_listing(candidates)}. "
            "Name the one to cut, or all of them, separated by commas, with the setting `blocks`."
        )
    return list(candidates[0].blocks)


def is_alone(model: nn.Module, ran: Sequence[str]) -> bool:
    """Whether what ran as blocks is one module, once, that only its running several times would have made blocks."""
    return len(ran) == 1 and not _checkpointing_layers(model) and ran[0] == _single_block(model)


def _single_block(model: nn.Module) -> str | None:
    """Returns the module that lies alone in the largest of the lists that hold one; None where there is none, or no
    single best one."""
    alone = sorted((c for c in _containers(model) if len(c.blocks) == 1), key=lambda c: -c.parameters)
    # Of lists in each other the outermost, which comes first, counts.
    best = [c for c in alone if c.parameters and c.parameters == alone[0].parameters]
    within = all(one.name.startswith(f"{best[0].blocks[0]}.") for one in best[1:])
    return best[0].blocks[0] if best and within else None


def no_blocks(model: nn.Module) -> TraceError:
    """Returns the error that a model has nothing to be cut between."""
    others = [c for c in _containers(model) if c.blocks]
    hint = f"Containers in it: {_listing(others)}." if others else "It has no ModuleList and no Sequential."
    return TraceError(
        f"no blocks found in {type(model).__name__}: looked for a ModuleList or Sequential with at "
        f"least two modules of one class, or with one that runs several times. {hint} Name one with the setting "
        '`blocks`, or let the model be cut between any modules, partition="graph".'
    )


def named_blocks(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Returns `names`, of modules that are to be the blocks. Raises: TraceError for what cannot be any."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        if name not in modules or not name:
            near = [one for one in modules if one.rpartition(".")[2] == name.rpartition(".")[2]] or list(modules)[1:]
            raise TraceError(
                f"partition names '{name}', and {type(model).__name__} has no module of that name; it has "
                f"{', '.join(near[:8])}{', ...' if len(near) > 8 else ''}"
            )
        outer = next((one for one in names if name.startswith(f"{one}.")), None)
        if outer is not None:
            raise TraceError(
                f"partition names both '{outer}' and '{name}', which lies in it: the modules must run one after the "
                "other; name either the outer one or those inside of it"
            )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise TraceError(f"partition names '{twice}' twice; name each module once")
    return list(names)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _container(name: str, module: nn.Module) -> Container:
    children = list(module.named_children())
    return Container(
        name=name,
        blocks=tuple(_join(name, child) for child, _ in children),
        kinds=tuple(type(child).__name__ for _, child in children),
        parameters=sum(p.numel() for p in module.parameters()),
    )


def _containers(model: nn.Module) -> list[Container]:
    return [
        _container(name, module)
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
    ]


def _outermost(model: nn.Module) -> list[Container]:
    """Candidate containers that do not lie inside a block of another candidate."""
    found: list[Container] = []
    for container in map(partial(_flat, model), _containers(model)):  # pre-order: outer containers come first
        inside = any(container.name.startswith(f"{block}.") or container.name == block
                     for outer in found for block in outer.blocks)  # fmt: skip
        if not inside and len(set(container.kinds)) == 1 and len(container.blocks) > 1:
            found.append(container)
    return found


def _flat(model: nn.Module, container: Container) -> Container:
    """Returns the container with the modules in its lists in the place of these: no list runs by itself."""
    if container.kinds and set(container.kinds) == {nn.ModuleList.__name__}:
        inner = [_flat(model, _container(name, model.get_submodule(name))) for name in container.blocks]
        return replace(
            container,
            blocks=tuple(block for one in inner for block in one.blocks),
            kinds=tuple(kind for one in inner for kind in one.kinds),
        )
    return container


def _named_container(model: nn.Module, name: str) -> Container:
    path = "" if name == ROOT else name
    try:
        module = model.get_submodule(path)
    except AttributeError:
        candidates = [c for c in _containers(model) if c.blocks]
        raise TraceError(
            f"blocks='{name}': {type(model).__name__} has no module of that name. Candidates: {_listing(candidates)}."
        ) from None
    container = _container(path, module)
    if not container.blocks:
        candidates = [c for c in _containers(model) if c.blocks]
        raise TraceError(
            f"blocks='{name}': {type(module).__name__} has no children to cut between. Candidates: "
            f"{_listing(candidates)}."
        )
    return container


def _checkpointing_layers(model: nn.Module) -> list[Container]:
    """Outermost GradientCheckpointingLayers, grouped by the list that holds them."""
    try:
        from transformers.modeling_layers import GradientCheckpointingLayer
    except ImportError:  # transformers is optional for models that are plain modules
        return []
    groups: dict[str, list[tuple[str, nn.Module]]] = {}

    def walk(module: nn.Module, name: str) -> None:
        for child_name, child in module.named_children():
            full = _join(name, child_name)
            if isinstance(child, GradientCheckpointingLayer):
                if isinstance(module, (nn.ModuleList, nn.Sequential)):
                    groups.setdefault(name, []).append((full, child))
            else:
                walk(child, full)

    walk(model, "")
    return [
        Container(
            name=name,
            blocks=tuple(full for full, _ in members),
            kinds=tuple(type(member).__name__ for _, member in members),
            parameters=sum(p.numel() for _, member in members for p in member.parameters()),
        )
        for name, members in groups.items()
    ]


def _listing(containers: list[Container]) -> str:
    return ", ".join(str(c) for c in containers[:8]) + (", ..." if len(containers) > 8 else "") or "none"


def modules_around(model: nn.Module, blocks: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """Returns (name, module) of every module that is neither a block nor in one."""
    inside = tuple(f"{name}." for name in blocks)
    return [(name, module) for name, module in model.named_modules() if not f"{name}.".startswith(inside)]


def outer_modules(model: nn.Module, blocks: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """Returns (name, module) of every module that is neither a block, nor in one, nor an ancestor of one."""
    names = list(blocks)
    ancestors = {""} | {name[:i] for name in names for i, letter in enumerate(name) if letter == "."}
    return [(name, module) for name, module in modules_around(model, names) if name not in ancestors]
