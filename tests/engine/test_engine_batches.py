"""What a batch may hold beside tensors."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d import Engine, ParallelConfig
from fold3d.errors import ConfigError, RankError

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Powers(nn.Module):
    """Needs values that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, *, power: int, names: list[str]) -> Tensor:
        for _, layer in zip(names, self.layers, strict=True):
            x = layer(x).tanh()
        return (x**power).mean()


@pytest.mark.parametrize("call", ["run", "step", "evaluate", "forward"])
def test_a_batch_without_names_is_refused(call: str) -> None:
    engine = Engine(Powers(), ParallelConfig(micro_batches=1), optimizer=SGD)
    batch: Any = (torch.ones(2, 4), torch.ones(2))
    calls = {
        "run": lambda: engine.run([batch], lambda model, batch: model(*batch)),
        "step": lambda: engine.step(batch),
        "evaluate": lambda: engine.evaluate(batch),
        "forward": lambda: engine.forward(batch, lambda model, batch: model(*batch)),
    }
    with pytest.raises(ConfigError, match=r"a batch is a tuple: it must be a dictionary .* Let the data collator"):
        calls[call]()


@pytest.mark.parametrize("as_example", [False, True])
def test_values_that_are_no_tensors(as_example: bool) -> None:
    """They go to every micro-batch, and to the recording."""
    batch: dict[str, Any] = {"x": torch.ones(4, 4), "power": 2, "names": list("abcd")}
    torch.manual_seed(0)
    model = Powers()
    expected = model(**batch).item()
    config = ParallelConfig(segments=2, micro_batches=2, blocks="layers")
    engine = Engine(model, config, optimizer=SGD, example=batch if as_example else None)
    assert engine.step(batch).loss.item() == pytest.approx(expected)
    engine.close()


@pytest.mark.parametrize("segments", [1, 2])
def test_the_loss_of_a_model_in_double_is_double(segments: int) -> None:
    """Under torch's default dtype, fp32, too."""
    torch.manual_seed(0)
    model = Powers().double()
    batch: dict[str, Any] = {"x": torch.rand(4, 4, dtype=torch.float64), "power": 2, "names": list("abcd")}
    expected = model(**batch).detach()
    engine = Engine(model, ParallelConfig(segments=segments, micro_batches=2, blocks="layers"), optimizer=SGD)
    torch.testing.assert_close(engine.evaluate(batch), expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(engine.step(batch).loss, expected, rtol=1e-14, atol=0)
    engine.close()


@pytest.mark.parametrize("how", ["assigned", "new module"])
@pytest.mark.parametrize("segments", [1, 2])
def test_a_parameter_that_was_replaced_is_refused(segments: int, how: str) -> None:
    """The model would compute with one that nobody trains."""
    model = Powers()
    batch: dict[str, Any] = {"x": torch.ones(4, 4), "power": 2, "names": list("abcd")}
    engine = Engine(
        model, ParallelConfig(segments=segments, micro_batches=2, blocks="layers"), optimizer=SGD, example=batch
    )
    model.load_state_dict({name: torch.zeros_like(one) for name, one in model.state_dict().items()})
    engine.step(batch)
    if how == "assigned":
        model.load_state_dict({name: torch.zeros_like(one) for name, one in model.state_dict().items()}, assign=True)
        named = "layers.0.weight' is another Parameter"
    else:
        model.layers[2] = nn.Linear(4, 4)
        named = "layers.2' is another module"
    with pytest.raises(RankError, match=named):
        engine.step(batch)
    engine.close()
