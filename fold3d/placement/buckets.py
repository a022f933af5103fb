"""cut_buckets(): which consecutive layers of a chunk have their gradients summed together; one rule for the planner,
the simulator and the runtime."""

from __future__ import annotations

from collections.abc import Sequence

from fold3d import _C
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
    try:
        return _C.cut_buckets(list(layer_bytes), least_bytes)
    except ValueError as error:
        raise ConfigError(str(error)) from None
