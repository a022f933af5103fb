"""Sleepers: a model whose blocks take as long as they are told to, whatever else the machine does."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn


class Sleeper(nn.Module):
    """Takes `seconds` forward, for one sample as for many; its backward takes next to nothing."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        end = time.perf_counter() + self.seconds
        y = x * self.weight
        time.sleep(max(0.0, end - time.perf_counter()))
        return y


class Sleepers(nn.Module):
    """Takes x, [..., 8]. `seconds`: of each block."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sleeper(one) for one in seconds)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()
