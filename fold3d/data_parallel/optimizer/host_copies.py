"""HostCopies: weights and gradients are copied to host memory for the optimizer's step there, and weights back (Ren et
al., ZeRO-Offload, 2021, section 4).

Two slots of host memory, pinned beside an accelerator, take turns: while the optimizer works in one, gradients come to
the other and weights leave it. Copies have streams of their own, one for each direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fold3d import _C
from fold3d.config import text_of_bytes
from fold3d.data_parallel.bucket import Piece, laid_out
from fold3d.data_parallel.optimizer.host_memory import host_memory
from fold3d.device import is_accelerator, processes_of_host
from fold3d.errors import ConfigError

_ALIGN = 64
"""Bytes: tensors in a slot begin at multiples."""
Tensors = Sequence[tuple[Piece, Tensor]]
"""Tensors on the device, each with what it is of its parameter."""


class Lane:
    """Copies of one direction, in order. On the CPU they are done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device) if is_accelerator(device) else None

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: torch.Event | None) -> torch.Event | None:
        """Begins copies, after what the device has been told to do so far.

        Args:
            pairs: (to, from).
            after: what else must have happened.
        Returns: when they are done; None: they are.
        """
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        if after is not None:
            self._stream.wait_event(after)
        with self._stream:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()


class Slot:
    """Host memory for one part at a time."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Args:
        size: in bytes.
        Raises: ConfigError when there is no such memory.
        """
        try:
            with host_memory():
                self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=is_accelerator(device))
        except RuntimeError as error:
            raise ConfigError(
                f"offload_optimizer=True: reserving {text_of_bytes(size)} of host memory for gradients and weights on "
                f"their way failed ({error}); lower bucket_bytes, raise the limit of locked memory (ulimit -l), or set "
                "offload_optimizer=False"
            ) from error
        self.left: torch.Event | None = None

    def leaving(self, event: torch.Event | None) -> None:
        """What lies here is on its way until `event`."""
        self.left = event


class HostCopies:
    """Of one part of a rank's parameters."""

    def __init__(self, tensors: Tensors, slot: Slot, down: Lane, up: Lane, device: torch.device) -> None:
        """Args:
        slot: nobody else's between `bring` and `send`.
        down: to the host.
        up: back.
        """
        self._targets = [tensor for _, tensor in tensors]
        self._slot, self._down, self._up, self._device = slot, down, up, device
        self._arrived: torch.Event | None = None
        self._sources: list[Tensor] = []
        self.weights: list[tuple[Piece, Tensor]] = []
        """What the optimizer steps, laid out as on the device."""
        self._gradients: list[Tensor] = []
        place = 0
        for piece, tensor in tensors:
            for made in (0, 1):
                size = tensor.numel() * tensor.element_size()
                view = laid_out(slot.memory[place : place + size].view(tensor.dtype), tensor)
                if made == 0:
                    self.weights.append((piece, view))
                else:
                    self._gradients.append(view)
                place += _round_up(size)

    def bring(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Begins to copy the weights and their gradients to the host.

        Args:
            gradients: index of the parameter in its bucket -> gradient of the tensor, of its dtype.
        Returns: the same in host memory, once they have arrived.
        """
        found: dict[int, Tensor] = {}
        pairs: list[tuple[Tensor, Tensor]] = []
        for (piece, weight), target, copy in zip(self.weights, self._targets, self._gradients, strict=True):
            gradient = gradients.get(piece.index)
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                raise ConfigError(
                    f"offload_optimizer=True: {piece.name} has a gradient of layout {gradient.layout}, which the host "
                    "cannot step; make the layer with sparse=False, or set offload_optimizer=False"
                )
            pairs += [(weight, target.detach()), (copy, gradient)]
            found[piece.index] = copy
        self._sources = [source for _, source in pairs]  # their memory is not given away meanwhile
        self._arrived = self._down.copy(pairs, self._slot.left)
        return found

    def arrive(self) -> None:
        """Waits for what `bring` has begun."""
        if self._arrived is not None:
            self._arrived.synchronize()
        self._sources = []

    def send(self, stepped: Mapping[int, Tensor]) -> None:
        """Begins to copy weights back; what the device is told to do from now on finds them there.

        Args:
            stepped: of which parameters, by index.
        """
        pairs = [
            (target.detach(), weight)
            for (piece, weight), target in zip(self.weights, self._targets, strict=True)
            if piece.index in stepped
        ]
        left = self._up.copy(pairs, self._arrived)
        self._slot.leaving(left)
        if left is not None:
            torch.accelerator.current_stream(self._device).wait_event(left)


def host_copies(parts: Sequence[Tensors], turns: Sequence[int]) -> list[HostCopies]:
    """Returns the copies of every part.

    Args:
        turns: per part 0 or 1, which slot it uses: between `bring` and `send` of one no other may use it.
    Raises: ConfigError when there is no memory for the slots.
    """
    device = next((tensor.device for tensors in parts for _, tensor in tensors), torch.device("cpu"))
    sizes = [sum(2 * _round_up(t.numel() * t.element_size()) for _, t in tensors) for tensors in parts]
    slots = [
        Slot(max((size for size, turn in zip(sizes, turns, strict=True) if turn == k), default=0), device)
        for k in (0, 1)
    ]
    down, up = Lane(device), Lane(device)
    return [HostCopies(tensors, slots[turn], down, up, device) for tensors, turn in zip(parts, turns, strict=True)]


def check_room(needed: int) -> None:
    """Raises ConfigError when this host has not so many bytes left for each of its processes."""
    ranks = processes_of_host()
    there = _C.available_host_bytes()
    if needed * ranks <= there:
        return
    each = f"each of the {ranks} processes of this host" if ranks > 1 else "this process"
    raise ConfigError(
        f"offload_optimizer=True: {each} needs about {text_of_bytes(needed)} of host memory for the optimizer's state, "
        f'and {text_of_bytes(there)} are left; use more replicas with dp_sync="zero1", or more stages, or set '
        "offload_optimizer=False"
    )


def _round_up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
