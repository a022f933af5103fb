"""cut_buckets(): which consecutive layers of a chunk have their gradients summed together; one rule for the planner,
the simulator and the runtime."""

from __future__ import annotations

from collections.abc import Sequence

from fold3d.errors import ConfigError


def cut_buckets(layer_bytes: Sequence[int], least_bytes: int) -> list[tuple[int, int]]:
    """Returns the layers [first, end) of each bucket, in forward order; together they cover all layers.

    Layers join from the first one on until a bucket has at least `least_bytes`; what is left at the end and has less
    joins the last bucket. So the bucket with the first layers, whose reduce-scatter comes last and is hidden least, is
    as small as the rule allows.

    Args:
        layer_bytes: gradient bytes of each layer of one chunk, in forward order. 0 for a layer without trainable
            parameters.
        least_bytes: at least 0; with 0 each layer with gradients is a bucket.
    Returns: an empty list if no layer has gradients.
    Raises: ConfigError for a negative number.
    """
    if least_bytes < 0 or any(size < 0 for size in layer_bytes):
        raise ConfigError(f"bucket_bytes={least_bytes}, layers of {list(layer_bytes)} bytes: none may be negative")
    buckets: list[tuple[int, int]] = []
    first, size = 0, 0
    for layer, more in enumerate(layer_bytes):
        size += more
        if size >= max(1, least_bytes):
            buckets.append((first, layer + 1))
            first, size = layer + 1, 0
    if first == len(layer_bytes):
        return buckets
    if buckets:
        buckets[-1] = (buckets[-1][0], len(layer_bytes))
    elif size > 0:
        buckets.append((0, len(layer_bytes)))
    return buckets
