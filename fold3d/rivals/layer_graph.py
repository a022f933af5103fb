"""LayerGraph: a profile in the text form of PipeDream's profiler, read and written.

A node is a line, `id -- description -- forward_compute_time=.., backward_compute_time=.., activation_size=..,
parameter_size=..`, with ` -- stage_id=..` at its end where the graph has been cut. Times are milliseconds, sizes bytes;
of a node with several outputs `activation_size` is a list, `[a; b]`. An edge is a line that begins with a tab,
`id -- id`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fold3d.errors import ConfigError
from fold3d.rivals.pipedream import LayerRow, Stage

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphNode:
    """A layer."""

    name: str
    description: str
    forward_ms: float
    """Of one input."""
    backward_ms: float
    activation_bytes: tuple[float, ...]
    """Of each output."""
    parameter_bytes: float
    stage: int | None = None
    """That it is in; None: the graph has not been cut."""

    def __str__(self) -> str:
        """Returns its line."""
        sizes = "; ".join(f"{size:.1f}" for size in self.activation_bytes)
        activation = f"[{sizes}]" if len(self.activation_bytes) > 1 else f"{self.activation_bytes[0]:.3f}"
        numbers = (f"{self.forward_ms:.3f}", f"{self.backward_ms:.3f}", activation, f"{self.parameter_bytes:.3f}")
        costs = ", ".join(f"{name}={text}" for name, text in zip(_FIELDS, numbers, strict=True))
        stage = "" if self.stage is None else f" -- stage_id={self.stage}"
        return f"{self.name} -- {self.description} -- {costs}{stage}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGraph:
    """A model as its profiler saw it."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[tuple[str, str], ...] = ()
    """(from, to), by names."""

    def __post_init__(self) -> None:
        names = {node.name for node in self.nodes}
        if len(names) < len(self.nodes):
            raise ConfigError("a graph names two layers alike")
        unknown = [end for edge in self.edges for end in edge if end not in names]
        if unknown:
            raise ConfigError(f"a graph has an edge of {unknown[0]!r}, which is none of its layers")

    @classmethod
    def parse(cls, text: str) -> LayerGraph:
        """Returns the graph with this text form. Raises: ConfigError naming the line that is wrong."""
        nodes: list[GraphNode] = []
        edges: list[tuple[str, str]] = []
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            try:
                if line.startswith("\t"):
                    source, target = line.strip().split(" -- ")
                    edges.append((source, target))
                else:
                    nodes.append(_parse_node(line))
            except (ValueError, KeyError, IndexError) as error:
                raise ConfigError(
                    f"line {number} of a graph, {line.strip()!r}, is no layer and no edge: {error}"
                ) from None
        return cls(nodes=tuple(nodes), edges=tuple(edges))

    def __str__(self) -> str:
        """Returns the text form."""
        lines = [str(node) for node in self.nodes] + [f"\t{source} -- {target}" for source, target in self.edges]
        return "\n".join(lines) + "\n"

    def cut(self, stages: Sequence[Stage]) -> LayerGraph:
        """Returns the graph with the stage of each layer of its row; what is in no row goes to the first."""
        stage_of = {node.name: 0 for node in self.nodes}
        row = self._in_order()
        for number, stage in enumerate(stages):
            stage_of.update(dict.fromkeys((node.name for node in row[stage.first : stage.end]), number))
        return replace(self, nodes=tuple(replace(node, stage=stage_of[node.name]) for node in self.nodes))

    def row(self) -> LayerRow:
        """Returns the layers one after the other, as the model runs them, with all that crosses the cut behind each.

        Inputs of the model and outputs that nobody takes are left out: they are no work. Where ways run side by side a
        cut goes through all of them, and what crosses it is everything that a layer behind it needs.

        Raises: ConfigError for a graph with a circle.
        """
        order = self._in_order()
        place = {node.name: number for number, node in enumerate(order)}
        crossing = [0.0] * len(order)
        last_use = dict(place)
        for source, target in self.edges:
            if source in place and target in place:
                last_use[source] = max(last_use[source], place[target])
        for node in order:
            for number in range(place[node.name], last_use[node.name]):
                crossing[number] += sum(node.activation_bytes)
        return LayerRow(
            names=tuple(node.description for node in order),
            seconds=tuple((node.forward_ms + node.backward_ms) / 1e3 for node in order),
            sent_bytes=tuple(crossing),
            parameter_bytes=tuple(node.parameter_bytes for node in order),
        )

    def _in_order(self) -> list[GraphNode]:
        """Returns the layers that do some work, each behind what it needs, else in the order of their numbers."""
        needs = {node.name: 0 for node in self.nodes}
        users: dict[str, list[str]] = {node.name: [] for node in self.nodes}
        for source, target in self.edges:
            needs[target] += 1
            users[source].append(target)
        nodes = {node.name: node for node in self.nodes}
        ready = [(_number(name), name) for name, count in needs.items() if count == 0]
        heapq.heapify(ready)
        order: list[GraphNode] = []
        while ready:
            _, name = heapq.heappop(ready)
            order.append(nodes[name])
            for user in users[name]:
                needs[user] -= 1
                if needs[user] == 0:
                    heapq.heappush(ready, (_number(user), user))
        if len(order) < len(nodes):
            raise ConfigError("a graph of layers runs in a circle")
        return [node for node in order if not _is_idle(node, has_users=bool(users[node.name]))]


def _parse_node(line: str) -> GraphNode:
    name, description, *rest = line.strip().split(" -- ")
    fields = dict(part.split("=", 1) for part in rest[0].split(", "))
    sizes = fields["activation_size"].strip("[]").split(";")
    stage = int(rest[1].removeprefix("stage_id=")) if len(rest) > 1 else None
    return GraphNode(
        name=name,
        description=description,
        forward_ms=float(fields["forward_compute_time"]),
        backward_ms=float(fields["backward_compute_time"]),
        activation_bytes=tuple(float(size) for size in sizes),
        parameter_bytes=float(fields["parameter_size"]),
        stage=stage,
    )


def _number(name: str) -> tuple[int, str]:
    """Returns by what layers are ordered: the profiler numbers them as the model runs them."""
    digits = "".join(letter for letter in name if letter.isdigit())
    return int(digits or 0), name


def _is_idle(node: GraphNode, *, has_users: bool) -> bool:
    costs = node.forward_ms + node.backward_ms + node.parameter_bytes
    return costs == 0 and (
        node.description.startswith("Input") or ("__getitem__" in node.description and not has_users)
    )
