"""PartHooks: says when a hook of the user's sees the gradient of a tied weight in parts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain

from torch.nn import Parameter

logger = logging.getLogger(__name__)


class PartHooks:
    """Looks at the parameters that several chunks use: backward reaches them once for each chunk.

    A hook that logs or draws the gradient sees several parts of it, and one that changes it, by clipping say, changes
    each part, which in general is not what it does to their sum.

    Args:
        parameters: canonical name -> parameter with storage on this rank.
        owners: canonical name -> chunks that need it.
    """

    def __init__(self, parameters: Mapping[str, Parameter], owners: Mapping[str, Sequence[int]]) -> None:
        self._shared = {
            name: (parameter, len(owners[name]))
            for name, parameter in parameters.items()
            if len(owners.get(name, ())) > 1
        }
        self._said: set[str] = set()

    def look(self) -> None:
        """Warns, once per parameter, of hooks that have been registered."""
        for name, (parameter, chunks) in self._shared.items():
            if name not in self._said and _is_hooked(parameter):
                self._said.add(name)
                logger.warning(
                    "a hook of %s sees its gradient in %d parts, one for each chunk of the model that uses it, and in "
                    "no call their sum: look at .grad in on_pre_optimizer_step, or set pp=1 and segments=1",
                    name,
                    chunks,
                )


def _is_hooked(parameter: Parameter) -> bool:
    hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    found = chain.from_iterable((one or {}).values() for one in hooks)
    return any(not str(getattr(hook, "__module__", "")).startswith("fold3d.") for hook in found)
