"""PartHooks: says when a hook of the user's sees parts of what it would see of a model that is not cut."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain

from torch.nn import Module, Parameter

from fold3d.trace.wrappers import is_users, users_hooks, whole_shape

logger = logging.getLogger(__name__)


class PartHooks:
    """Looks at the parameters that several chunks use, at the modules that chunks replace, and at those that compute
    with parts of their weights.

    Backward reaches such a parameter once for each chunk: a hook that logs or draws the gradient sees several parts of
    it, and one that changes it, by clipping say, changes each part, which in general is not what it does to their sum.
    Hooks of a module run in every chunk, also where something stands in for the module or for what it returned. In a
    tensor-parallel group, they see some of the channels of what it is given and returns, and hooks of its parameters
    some of the gradient.

    Args:
        parameters: canonical name -> parameter with storage on this rank.
        owners: canonical name -> chunks that need it.
        modules: name -> blocks and modules around them; empty for a model that is not cut.
        divided: name -> modules that compute with parts of weights.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        owners: Mapping[str, Sequence[int]],
        modules: Mapping[str, Module],
        divided: Mapping[str, Module],
    ) -> None:
        self._modules, self._divided = modules, divided
        self._parts = {name: one for name, one in parameters.items() if whole_shape(one) != one.shape}
        self._shared = {
            name: (parameter, len(owners[name]))
            for name, parameter in parameters.items()
            if len(owners.get(name, ())) > 1
        }
        self._said: set[str] = set()

    def look(self) -> None:
        """Warns, once per parameter and module, of hooks that have been registered."""
        hooked = [name for name, one in self._modules.items() if name not in self._said and any(users_hooks(one))]
        if hooked:
            self._said.update(hooked)
            logger.warning(
                "hooks of %s run in every chunk of the model, also in those that do not run the module: what they "
                "see, and log, may be a stand-in. Hook a module inside of a block, or set pp=1 and segments=1",
                ", ".join(hooked),
            )
        self._look_at_parts()
        for name, (parameter, chunks) in self._shared.items():
            if name not in self._said and _is_hooked(parameter):
                self._said.add(name)
                logger.warning(
                    "a hook of %s sees its gradient in %d parts, one for each chunk of the model that uses it, and in "
                    "no call their sum: look at .grad in on_pre_optimizer_step, or set pp=1 and segments=1",
                    name,
                    chunks,
                )

    def _look_at_parts(self) -> None:
        hooked = [f"module {name}" for name, one in self._divided.items() if any(users_hooks(one))]
        hooked += [f"weight {name}" for name, parameter in self._parts.items() if _is_hooked(parameter)]
        new = [name for name in hooked if name not in self._said]
        if new:
            self._said.update(new)
            logger.warning(
                "hooks of %s see what this rank of the tensor-parallel group computes: some of the channels, of the "
                "sequence or of the gradient. What works on each element by itself is right; for a norm, a maximum or "
                "anything else over all of them, leave the layer whole with tp_plan={NAME: 'replicate'}, or set tp=1",
                ", ".join(new),
            )


def _is_hooked(parameter: Parameter) -> bool:
    post_accumulate = getattr(parameter, "_post_accumulate_grad_hooks", None)
    found = chain.from_iterable((one or {}).values() for one in (parameter._backward_hooks, post_accumulate))
    return any(is_users(hook, ("fold3d.",)) for hook in found)
