"""fold3d's Engine on the simulated device."""

from __future__ import annotations

import copy
import functools

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import fold3d
from simdevice import sim


def one_process() -> int:
    """Trains on the device and on the CPU, whose numbers the former must have; returns how many kernels that took.

    Races raise. Eager attention, because torch has a kernel of its own for the CPU's.
    """
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(64, (4, 16))
    want = _train(copy.deepcopy(model), tokens, torch.device("cpu"))
    before = sim.launches()
    sim.take_reports()
    with sim.jitter(100):
        got = _train(model, tokens, torch.device("sim", 0))
    assert not sim.take_reports()
    assert got[0] == want[0]
    for name, weight in want[1].items():
        assert torch.equal(weight, got[1][name]), name
    return sim.launches() - before


def _train(model: nn.Module, tokens: Tensor, device: torch.device) -> tuple[list[float], dict[str, Tensor]]:
    engine = fold3d.Engine(
        model,
        fold3d.ParallelConfig(dp=1, pp=1, segments=1, schedule="aiao", micro_batches=2, transport="c10d"),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
        max_grad_norm=1.0,
        device=device,
    )
    batch = {"input_ids": tokens.to(device), "labels": tokens.to(device)}
    losses = [float(engine.step(batch).loss) for _ in range(3)]
    weights = {name: value.cpu() for name, value in engine.state_dict()["model"].items()}
    engine.close()
    return losses, weights
