"""Parameters that an optimizer steps on the host, in parts, end as those that it steps where they are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fold3d.data_parallel.optimizer.host_copies import Slot, check_room
from fold3d.data_parallel.optimizer.host_memory import settings_on_host
from fold3d.data_parallel.optimizer.host_steps import HostSteps
from fold3d.errors import ConfigError
from fold3d.profile.optimizer import has_fused_step
from tests.data_parallel.test_bucket_optimizer import OPTIMIZERS


def parameters(dtype: torch.dtype) -> dict[str, Parameter]:
    """Returns some of all kinds: matrices, one that lies otherwise in memory, a number, an empty one, an unused one."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    image = draw(2, 3, 4, 5).to(memory_format=torch.channels_last)
    made = {"a": draw(33, 7), "b": draw(129), "image": image, "one": draw(), "none": draw(0), "unused": draw(5)}
    return {name: Parameter(value) for name, value in made.items()}


def give_gradients(of: dict[str, Parameter], step: int) -> None:
    """Sets `.grad` of all but the unused one, and of one only in odd steps; laid out as autograd does."""
    generator = torch.Generator().manual_seed(step)
    for name, parameter in of.items():
        gradient = torch.empty_like(parameter.detach()).copy_(torch.randn(parameter.shape, generator=generator))
        parameter.grad = None if name == "unused" or (name == "b" and step % 2 == 0) else gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_to_the_bit(name: str, dtype: torch.dtype) -> None:
    plain, ours = parameters(dtype), parameters(dtype)
    optimizers = [
        OPTIMIZERS[name]([{"params": list(of.values())[:2], "weight_decay": 0.3}, {"params": list(of.values())[2:]}])
        for of in (plain, ours)
    ]
    schedules = [torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 4) for optimizer in optimizers]
    host = HostSteps(optimizers[1], ours, part_bytes=64)
    for step in range(4):
        for of in (plain, ours):
            give_gradients(of, step)
        optimizers[0].step()
        taken = host.step()
        assert len(taken) == sum(p.grad is not None for p in plain.values())
        assert all(parameter.grad is None for parameter in ours.values())
        optimizers[1].step()  # finds no gradients
        for schedule in schedules:
            schedule.step()
    assert all(torch.equal(ours[key], plain[key]) for key in plain)
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert states[0].keys() == states[1].keys()
    for index, state in states[0].items():
        for key, value in state.items():
            assert torch.equal(states[1][index][key], value) and value.stride() == states[1][index][key].stride()


def test_what_changes_between_steps_counts() -> None:
    """Weights that somebody sets, and a state that is loaded."""
    plain, ours = parameters(torch.float32), parameters(torch.float32)
    optimizers = [torch.optim.AdamW(of.values(), lr=0.1) for of in (plain, ours)]
    host = HostSteps(optimizers[1], ours, part_bytes=64)
    for step in range(3):
        for of in (plain, ours):
            give_gradients(of, step)
            of["a"].data.mul_(0.5)
        optimizers[0].step()
        host.step()
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        host.own_state()
    assert all(torch.equal(ours[key], plain[key]) for key in plain)
    optimizers[1].add_param_group({"params": [Parameter(torch.ones(2))]})
    with pytest.raises(ConfigError, match="a parameter group was added"):
        host.step()
    optimizers[1].param_groups.pop()
    optimizers[1].param_groups[0]["params"].pop()
    with pytest.raises(ConfigError, match="parameter group 0 has other parameters"):
        host.step()


def test_memory_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"reserving .* of host memory .* failed .*ulimit -l"):
        Slot(1 << 60, torch.device("cpu"))
    with pytest.raises(ConfigError, match="this process needs about 1000000 GB of host memory"):
        check_room(10**15)


def test_a_sparse_gradient_is_refused() -> None:
    weight = Parameter(torch.ones(4, 3))
    host = HostSteps(torch.optim.SGD([weight], lr=0.1), {"weight": weight})
    weight.grad = torch.ones(4, 3).to_sparse()
    with pytest.raises(ConfigError, match=r"weight has a gradient of layout torch.sparse_coo"):
        host.step()


def test_settings_of_a_step_beside_a_gpu() -> None:
    group = {"lr": torch.tensor(0.1), "capturable": True, "fused": None, "foreach": None, "params": []}
    made = settings_on_host(group, fused=True)
    assert made["fused"] is True and made["capturable"] is False and "params" not in made
    assert settings_on_host(group | {"foreach": True}, fused=True)["fused"] is None
    assert settings_on_host(group, fused=False)["fused"] is None
    parameter = [Parameter(torch.ones(2))]
    assert has_fused_step(torch.optim.AdamW(parameter), torch.float32)
    assert not has_fused_step(torch.optim.RMSprop(parameter), torch.float32)
