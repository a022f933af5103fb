"""split_ranges(): cuts the blocks of a model into chunks of about equal cost."""

from __future__ import annotations

from fold3d.errors import ConfigError
from fold3d.trace import BlockCost, Trace

_PARAMETER_WEIGHT = 0.1
"""Weight of the parameters' share beside the FLOPs' share of a block: a chunk with more parameters has more
gradients to
reduce and more to update, which matters less than computing."""


def split_ranges(trace: Trace, num_chunks: int) -> list[tuple[int, int]]:
    """Returns the [first, end) block of each of `num_chunks` consecutive chunks, so that the costliest is as
    cheap as can be.

    The cost of a block is its share of all forward FLOPs plus a small multiple of its share of all
    parameters. What runs before the first block counts for the first chunk, what runs after the last block
    for the last chunk. Borders at which the model cannot be cut (`Trace.borders`) are left out.

    Raises: ConfigError if there are fewer places to cut than needed.
    """
    if num_chunks < 1:
        raise ConfigError(f"num_chunks={num_chunks}: must be at least 1")
    units = [k for k, reason in enumerate(trace.borders) if not reason or k == 0]
    total = len(trace.blocks)
    if num_chunks > len(units):
        reasons = [reason for reason in trace.borders if reason]
        why = f", and it can be cut at {len(units) - 1} of {total - 1} borders only ({reasons[0]})" if reasons else ""
        raise ConfigError(
            f"{num_chunks} chunks (pp * segments) are asked for, but the model has {total} blocks{why}; "
            "lower segments or pp (with 1 and 1 nothing is cut), or name smaller modules with the setting `blocks` or "
            '`partition` ("graph" looks for them in the whole model)'
        )
    ends = [*units[1:], total]
    costs = _shares(trace)
    unit_costs = [sum(costs[lo:hi]) for lo, hi in zip(units, ends, strict=True)]
    # Imported here: the recording above works without the extension.
    from fold3d._C import partition

    firsts = [units[first] for first in partition(unit_costs, num_chunks)]
    return list(zip(firsts, [*firsts[1:], total], strict=True))


def _shares(trace: Trace) -> list[float]:
    everything = [trace.prologue_cost, *trace.costs, trace.epilogue_cost]
    flops = max(1, sum(cost.flops for cost in everything))
    parameters = max(1, sum(cost.parameters for cost in everything))

    def share(cost: BlockCost) -> float:
        return cost.flops / flops + _PARAMETER_WEIGHT * cost.parameters / parameters

    shares = [share(cost) for cost in trace.costs]
    shares[0] += share(trace.prologue_cost)
    shares[-1] += share(trace.epilogue_cost)
    return shares
