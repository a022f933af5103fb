"""What the planner counts with: Profile, the costs of a model's layers, and NetworkCosts. Measured by
`fold3d.profile`, made up by tests and the command line."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from fold3d import _C


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """What a layer needs for one micro-batch, parameters and their gradients aside."""

    saved: int
    """Kept from its forward to its backward."""
    outputs: int = 0
    """Those of `saved` that it hands on to the next layer."""
    forward: int
    """Most at any moment of its forward, beside what was there when it began; what it keeps included."""
    backward: int
    """Most at any moment of its backward, beside what the layers before it keep."""


def as_tuple(layer: LayerBytes) -> tuple[int, int, int, int]:
    """Returns the numbers as csrc/core/plan takes them."""
    return layer.saved, layer.outputs, layer.forward, layer.backward


def estimated(saved: int, handed_on: int) -> LayerBytes:
    """Returns what a layer needs of which only this is known: what its backward needs, and what it returns."""
    return LayerBytes(
        saved=saved, outputs=min(saved, handed_on), forward=saved + handed_on, backward=saved + 2 * handed_on
    )


ACTION_SECONDS = 7e-4
"""What an action costs beside the layers: executor, skipped blocks, hooks, waking up. benchmarks/cluster measures 0.45
ms with 32 blocks and four ranks on two cores (A), 0.7 to 0.8 with 64 blocks and eight ranks (B)."""
BUCKET_SECONDS = 5e-4
"""What a collective costs beside its bytes."""
_FASTEST = 1e13  # bytes per second, where there is no network


@dataclass(frozen=True, slots=True)
class TpExchange:
    """One TP.sync: what the ranks that share a layer do with a tensor of a micro-batch."""

    bytes: int
    """Of the whole tensor, the same on every rank."""
    trips: int = 2
    """Round the ring: 2 of an all-reduce; 1 of a reduce-scatter or an all-gather, its halves."""
    follows: bool = False
    """It stands right behind the exchange before it, with no more than a norm between them."""


Exchanges = tuple[tuple[TpExchange, ...], ...]
"""Per layer, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inside:
    """What layers cost where modules inside of blocks compute again what their backward needs."""

    patterns: tuple[str, ...]
    layers: tuple[LayerBytes, ...]
    seconds: tuple[float, ...]
    """Per layer: what runs again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Costs of one micro-batch and one update. "Per layer" has blocks + 2 entries: prologue, blocks, epilogue."""

    forward: tuple[float, ...]
    """Seconds per layer."""
    backward: tuple[float, ...]
    """Seconds per layer; nothing is computed again."""
    layers: tuple[LayerBytes, ...]
    """Per layer: what it needs in memory."""
    activation_bytes: tuple[int, ...]
    """Per block (no entries for prologue and epilogue): what it hands to the next one."""
    gradient_bytes: Mapping[str, int]
    """Canonical parameter name -> bytes of its fp32 gradient; 0 if it is frozen."""
    parameter_bytes: Mapping[str, int]
    """Canonical parameter name -> bytes of the parameter itself, frozen ones, too."""
    update_seconds: float
    """Optimizer, per byte of gradients."""
    host_update_seconds: float
    """The same in host memory, copies aside."""
    optimizer_bytes: float
    """State that the optimizer keeps, per byte of gradients."""
    update_bytes: float
    """What an update needs beside it, per byte of gradients that are stepped at once."""
    updates_together: bool
    """Whether a call of the optimizer steps all its parameters at once; else one after the other."""
    measured: bool
    """False: no layer could be run alone; forward and backward are shares of FLOPs."""
    tp_forward: Exchanges = ()
    """Per layer: TP.sync of its forward; empty without tensor parallelism."""
    tp_backward: Exchanges = ()
    halves_factor: float | None = None
    """What computing a micro-batch in sub-micro-batches takes, relative to computing it whole; None: it cannot be
    divided."""
    sub_micro_batches: int = 2
    """So many take turns (`tp_overlap="sub"`)."""
    exposed_forward: tuple[float, ...] = ()
    """Seconds per layer, part of `forward`: waiting for TP.sync, once it is decided how that is hidden
    (`space.tp_overlap`); empty before, and where nothing is waited for."""
    exposed_backward: tuple[float, ...] = ()
    inside: tuple[Inside, ...] = ()
    """Of the patterns that were asked for."""
    busy: float = 1.0
    """Part of forward and backward in which they have a core, or wait for one: what takes cores delays so much."""

    @staticmethod
    def agreed(profiles: Sequence[Profile], layers: Sequence[Sequence[Hashable]] = ()) -> Profile:
        """Returns the medians of the ranks' measurements, layer by layer: the same on every rank that passes the same.

        Args:
            layers: of each profile what its layers are called, where not all have the same: there are those of the
                first one, each with the times of all ranks whose micro-batch ran it.
        """
        named = layers or [range(len(profile.forward)) for profile in profiles]

        def middle(name: str) -> tuple[float, ...]:
            of = [dict(zip(names, getattr(p, name), strict=True)) for names, p in zip(named, profiles, strict=True)]
            return tuple(median(times[layer] for times in of if layer in times) for layer in named[0])

        factors = [profile.halves_factor for profile in profiles]
        return replace(
            profiles[0],
            forward=middle("forward"),
            backward=middle("backward"),
            update_seconds=median(profile.update_seconds for profile in profiles),
            host_update_seconds=median(profile.host_update_seconds for profile in profiles),
            measured=all(profile.measured for profile in profiles),
            busy=median(profile.busy for profile in profiles),
            halves_factor=None if None in factors else median(factor for factor in factors if factor is not None),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkCosts:
    """Of one rank while all others communicate, too: what ranks of one host share is shared out already."""

    pp_latency: float
    """Seconds for a small message to a neighbouring stage."""
    pp_bandwidth: float
    """Bytes per second, each way."""
    dp_bandwidth: float
    """Bytes per second that a rank sends while gradients are summed."""
    hop_latency: float
    """Seconds for a hop of the ring of replicas."""
    tp_bandwidth: float = math.inf
    """Bytes per second that a rank sends in its tensor-parallel group."""
    tp_latency: float = 0.0
    """Seconds for a hop in the group."""
    tp_toll: float = 0.0
    """Seconds that a rank computes longer for each byte that it sends in its group meanwhile: where there are no cores
    to spare, the links' threads take their time from those that compute."""

    toll: float = 0.0
    """The same for what it sends to other replicas and stages."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a network card in the simulator: DP.sync's, or PP.sync's if there is only that."""
        found = self.dp_bandwidth if math.isfinite(self.dp_bandwidth) else self.pp_bandwidth
        return min(found, _FASTEST)


def pause_bytes(bandwidth: float) -> int:
    """Returns what DP.sync sends before a waiting message of PP.sync: a chunk, and what lies in the system's buffers.

    Both follow the bandwidth (bytes per second), as csrc/comm/ring/credits.h says.

    Raises:
        ValueError: for a bandwidth that is not positive and finite.
    """
    return _C.pause_bytes(bandwidth)
