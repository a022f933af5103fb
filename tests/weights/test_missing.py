"""A weight of another rank: its shape may be asked for, its values may not."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import greenlet
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from fold3d.errors import MissingWeightsError
from fold3d.weights.release import MissingWeight, at_home, is_released, release
from tests.helpers import models
from tests.trace.zoo import tokens

NAME = "transformer.h.2.mlp.c_fc.weight"


@pytest.fixture
def model() -> nn.Module:
    """GPT-2, of which this process has all but two layers."""
    model = models.build(models.gpt2_config())
    release(model, {name for name, _ in model.named_parameters() if not name.startswith(("transformer.h.2", "x"))})
    return model


def weight(model: nn.Module) -> Any:
    return model.get_parameter(NAME)


@pytest.mark.parametrize(
    "read",
    [
        copy.deepcopy,
        pickle.dumps,
        lambda model: torch.save(model, io.BytesIO()),
        lambda model: torch.save(model.state_dict(), io.BytesIO()),
        lambda model: torch.save({"epoch": 1, "weights": [*model.state_dict().values()]}, io.BytesIO()),
        AveragedModel,
        lambda model: model.generate(tokens()["input_ids"], max_new_tokens=2),
        lambda model: model(**tokens()),
        lambda model: sum(p.norm() for p in model.parameters()).item(),
        lambda model: sum(p.detach().pow(2).sum() for p in model.parameters()).item(),
        lambda model: float(weight(model).abs().max()),
        lambda model: weight(model).tolist(),
        lambda model: weight(model).data.numpy(),
        lambda model: weight(model).cpu(),
        lambda model: weight(model).clone().cpu(),
        lambda model: bool((weight(model) > 0).all()),
        lambda model: torch.zeros(weight(model).shape) + weight(model),
        lambda model: torch.zeros(weight(model).shape).copy_(weight(model)),
        lambda model: torch.nn.utils.parameters_to_vector(model.parameters()),
        lambda model: torch.zeros(16, 64).mul_(0.9).add_(weight(model).detach(), alpha=0.1),
        lambda model: torch.tensor(1.0).add_(weight(model).pow(2).sum()),
        lambda model: torch.zeros(16, 64).addcmul_(weight(model), weight(model)),
        lambda model: torch.zeros(16, 64).masked_fill(weight(model) > 0, 1.0),
        lambda model: torch.zeros(16, 64).index_put_((torch.tensor([0]),), weight(model)[:1]),
        lambda model: torch._foreach_add_([torch.zeros(16, 64)], [weight(model)], alpha=0.1),
    ],
)
def test_values_are_refused(model: nn.Module, read: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(
        MissingWeightsError, match=r"transformer\.h\.2.*in another process.*trainer\.save_model.*engine"
    ):
        read(model)


def test_save_pretrained_is_refused_before_a_weight_is_written(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(MissingWeightsError, match="every process must call"):
        model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert not list(tmp_path.glob("*.safetensors"))


def test_what_needs_no_values_works(model: nn.Module) -> None:
    parameter = weight(model)
    assert isinstance(parameter, MissingWeight) and isinstance(parameter, nn.Parameter) and is_released(parameter)
    assert parameter.shape == (16, 64) and parameter.dtype == torch.float32 and parameter.is_meta
    own = torch.ones(2)
    torch._foreach_mul_([own, parameter], 0.5)  # each process does its own
    assert own.tolist() == [0.5, 0.5]
    assert torch.zeros(1).expand_as(parameter).shape == parameter.shape
    assert torch.zeros_like(parameter, device="cpu").abs().sum() == 0
    assert parameter.numel() == 1024 and parameter.grad is None and not parameter.requires_grad and parameter.trainable
    assert parameter.weight == NAME and parameter in set(model.parameters())
    assert "MissingWeight" in repr(parameter)
    assert model.num_parameters() > 1024  # type: ignore[operator]
    assert torch.empty_like(parameter).shape == parameter.shape
    model.double()
    assert weight(model).dtype == torch.float64
    with pytest.raises(MissingWeightsError):
        weight(model).sum().item()


@pytest.mark.filterwarnings("ignore:for transformer")
def test_loading_the_whole_model_fills_what_is_here(model: nn.Module) -> None:
    whole = models.build(models.gpt2_config(), seed=1).state_dict()
    model.load_state_dict(whole)
    here = model.get_parameter("transformer.h.1.mlp.c_fc.weight")
    assert torch.equal(here, whole["transformer.h.1.mlp.c_fc.weight"]) and is_released(weight(model))


def test_errors_that_are_not_about_values_stay_what_they_are(model: nn.Module) -> None:
    with pytest.raises(RuntimeError) as error:
        weight(model).reshape(3)
    assert not isinstance(error.value, MissingWeightsError)
    with pytest.raises(TypeError):
        weight(model).sum(nonsense=1)


def test_it_says_where_it_would_lie_while_a_forward_runs(model: nn.Module) -> None:
    """Models move their inputs to where a weight is."""
    with at_home(torch.device("cpu")):
        assert weight(model).device.type == "cpu"
        assert torch.zeros(1).to(weight(model).device).tolist() == [0.0]
        assert weight(model).is_meta and is_released(weight(model))
        with pytest.raises(MissingWeightsError):
            weight(model).tolist()
    assert weight(model).device.type == "meta"


def test_halves_that_take_turns_leave_it_as_it_was(model: nn.Module) -> None:
    """Each has begun before the other one ends."""
    main = greenlet.getcurrent()
    seen: list[str] = []

    def half() -> None:
        with at_home(torch.device("cpu")):
            main.switch()
            seen.append(weight(model).device.type)

    halves = [greenlet.greenlet(half) for _ in range(2)]
    for one in [*halves, *halves]:
        one.switch()
    assert seen == ["cpu", "cpu"] and weight(model).device.type == "meta"
