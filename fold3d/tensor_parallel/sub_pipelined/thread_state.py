"""ThreadState: what torch keeps per thread and code enters with context managers; each of two forwards that take turns
on one thread needs its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C import _autograd


class ThreadState:
    """The modes of this thread as they are now: grad mode, inference mode, autocast, hooks for saved tensors, function
    modes, and the states of random generators.

    Without the hooks a checkpoint that another forward has begun would take this one's tensors; without the generators
    it would draw other masks when it runs again.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        """Takes the modes off: hooks and function modes are gone from the thread until `restore`."""
        self._grad = torch.is_grad_enabled()
        kinds = dict.fromkeys(("cpu", *(generator.device.type for generator in generators)))
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self._cached = torch.is_autocast_cache_enabled()
        self._generators = [(generator, generator.get_state()) for generator in generators]
        self._hooks: list[Any] = []
        while _autograd._top_saved_tensors_default_hooks(True) is not None:
            self._hooks.append(_autograd._top_saved_tensors_default_hooks(True))
            _autograd._pop_saved_tensors_default_hooks()
        self._modes: list[Any] = []
        while torch._C._len_torch_function_stack():
            self._modes.append(torch._C._pop_torch_function_stack())

    def restore(self) -> None:
        """Makes the thread's modes what they were; what others have left on the thread is taken off."""
        while _autograd._top_saved_tensors_default_hooks(True) is not None:
            _autograd._pop_saved_tensors_default_hooks()
        for hooks in reversed(self._hooks):
            _autograd._push_saved_tensors_default_hooks(*hooks)
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        for mode in reversed(self._modes):
            torch._C._push_on_torch_function_stack(mode)
        torch._C._set_grad_enabled(self._grad)
        for kind, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._cached)
        for generator, state in self._generators:
            generator.set_state(state)
