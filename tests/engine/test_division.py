"""micro_batch_size: micro-batches in parts, and which models and batches cannot be divided."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d import Engine, ParallelConfig
from fold3d.engine.division import number_of_parts
from fold3d.errors import ConfigError, Fold3dError

SGD = functools.partial(torch.optim.SGD, lr=0.1)
WIDTH = 4


class Layers(nn.Module):
    """Linear layers, and a loss of choice over their outputs, fp64 [samples, WIDTH]."""

    def __init__(self, loss: str = "mean", norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.Identity() if norm is None else norm
        self.loss = loss
        seen: list[int] = []
        self.note = seen.append  # a method of Python's: what a comparison's runs put there stays
        self.forwards = 0
        self.double()

    @property
    def seen(self) -> list[int]:
        return self.note.__self__  # type: ignore[attr-defined, no-any-return]

    def forward(self, x: Tensor, scale: Tensor | None = None, **_: Any) -> Tensor:
        if self.training and x.device.type != "meta":
            self.note(x.shape[0])
            self.forwards += 1
        for layer in self.layers:
            x = self.norm(layer(x)).tanh()
        if scale is not None:
            x = x * scale
        if self.loss == "contrast":
            return nn.functional.cross_entropy(x @ x.T, torch.arange(len(x)))
        return x.square().sum() if self.loss == "sum" else x.square().mean()


def gradients(model: Layers, batch: dict[str, Any], **config: Any) -> tuple[Tensor, dict[str, Tensor]]:
    engine = Engine(model, ParallelConfig(blocks="layers", **config))
    loss = engine.run([batch], lambda module, inputs: module(**inputs), reads_gradients=True)
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    engine.close()
    return loss, found


def made(**named: Any) -> Layers:
    torch.manual_seed(0)
    return Layers(**named)


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize(("samples", "parts"), [(6, [2, 2, 2]), (5, [2, 2, 1]), (2, [2]), (1, [1])])
def test_is_the_whole_one(loss: str, samples: int, parts: list[int]) -> None:
    """A batch that does not divide has smaller parts at its end."""
    batch = {"x": torch.randn(samples, WIDTH, dtype=torch.float64), "scale": torch.rand(1, WIDTH, dtype=torch.float64)}
    torch.set_default_dtype(torch.float64)
    expected, wanted = gradients(made(loss=loss), batch, segments=1)
    model = made(loss=loss)
    found, ours = gradients(model, batch, segments=1, micro_batch_size=2, loss_reduction=loss)
    assert model.seen[-len(parts) :] == parts
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert ours.keys() == wanted.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-14)


def test_is_compared_once_in_each_form(caplog: pytest.LogCaptureFixture) -> None:
    model = made()
    config = ParallelConfig(micro_batch_size=2, loss_reduction="mean", blocks="layers")
    engine = Engine(model, config, optimizer=SGD)
    scale = {"scale": torch.rand(1, WIDTH, dtype=torch.float64)}
    for more in ({}, {}, scale, {}, scale):
        engine.step({"x": torch.randn(4, WIDTH, dtype=torch.float64), **more})
    engine.close()
    assert model.seen == [*(4, 2, 2, 2, 2), *(2, 2), *(4, 2, 2, 2, 2), *(2, 2), *(2, 2)]
    assert model.forwards == 10, "a comparison leaves no traces"
    assert "micro_batch_size=2: a forward changes Layers.forwards; that happens once for each part" in caplog.text


class Mixed(nn.Module):
    """Adds a share of the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.share = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.share * x.mean(0)


def test_attributes_that_change_are_compared_anew() -> None:
    """A callback may set a factor that was 0 when parts were compared first."""
    mixed = Mixed()
    config = ParallelConfig(micro_batch_size=2, loss_reduction="mean", blocks="layers")
    engine = Engine(made(norm=mixed), config, optimizer=SGD)
    batch = {"x": torch.randn(4, WIDTH, dtype=torch.float64)}
    for _ in range(3):
        engine.step(batch)
    mixed.share = 0.5
    with pytest.raises(Fold3dError, match="the loss of two parts together is"):
        engine.step(batch)
    engine.close()


class Longest(nn.Module):
    """Divides by the largest element of all samples, [samples, WIDTH]."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.detach().abs().amax()


def test_samples_that_differ_more_are_compared_anew() -> None:
    """As rows of a batch that all have one length, and later not."""
    torch.manual_seed(0)
    model = made()
    model.layers.insert(0, Longest())
    engine = Engine(
        model, ParallelConfig(micro_batch_size=2, loss_reduction="mean", blocks="layers.1", segments=1), optimizer=SGD
    )
    batch = {"x": torch.ones(4, WIDTH, dtype=torch.float64)}
    for _ in range(3):
        engine.step(batch)
    with pytest.raises(Fold3dError, match="the loss of two parts together is"):
        engine.step({"x": batch["x"] * torch.arange(1.0, 5.0, dtype=torch.float64)[:, None]})
    engine.close()


def test_hooks_that_come_are_compared_anew() -> None:
    model = made()
    engine = Engine(model, ParallelConfig(micro_batch_size=2, loss_reduction="mean", blocks="layers"), optimizer=SGD)
    batch = {"x": torch.randn(4, WIDTH, dtype=torch.float64)}
    for _ in range(3):
        engine.step(batch)
    model.norm.register_forward_hook(lambda module, args, output: output - output.mean(0))
    with pytest.raises(Fold3dError, match="the loss of two parts together is"):
        engine.step(batch)
    engine.close()


class Crowded(nn.Module):
    """Of all its samples and tokens, [samples, tokens, WIDTH], the first `room` count."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def forward(self, x: Tensor) -> Tensor:
        place = torch.ones_like(x[..., :1]).flatten().cumsum(0).view_as(x[..., :1])
        return x * (place <= self.room)


def test_larger_micro_batches_are_compared_anew() -> None:
    config = ParallelConfig(micro_batch_size=2, loss_reduction="mean", blocks="layers")
    engine = Engine(made(norm=Crowded(8)), config, optimizer=SGD)
    for tokens in (1, 2, 2):
        engine.step({"x": torch.randn(4, tokens, WIDTH, dtype=torch.float64)})
    with pytest.raises(Fold3dError, match="the loss of two parts together is"):
        engine.step({"x": torch.randn(4, 3, WIDTH, dtype=torch.float64)})
    engine.close()


class Counted(Layers):
    """Looks up rows whose gradients are divided by how often they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH, scale_grad_by_freq=True).double()

    def forward(self, x: Tensor, scale: Tensor | None = None, **_: Any) -> Tensor:
        return super().forward(self.table(x))


def test_gradients_that_count_are_refused() -> None:
    with pytest.raises(Fold3dError, match=r"micro_batch_size=2: this model's .* table has scale_grad_by_freq"):
        gradients(Counted(), {"x": torch.zeros(4, dtype=torch.long)}, micro_batch_size=2, loss_reduction="mean")


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] / gradients[0].norm()


class OwnBackward(Layers):
    def forward(self, x: Tensor, scale: Tensor | None = None, **_: Any) -> Tensor:
        return super().forward(Scaled.apply(x))  # type: ignore[no-untyped-call]


class HooksTensors(Layers):
    def forward(self, x: Tensor, scale: Tensor | None = None, **_: Any) -> Tensor:
        x = self.layers[0](x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / gradient.norm())
        return x.square().mean()


def hooked(model: Layers, what: str) -> Layers:
    if what == "module":
        model.layers[1].register_full_backward_hook(lambda _, into, out: (into[0] / into[0].norm(),))
    elif what == "weight":
        model.layers[1].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return model


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (hooked(Layers(), "module"), "layers.1 has a backward hook"),
        (hooked(Layers(), "weight"), "layers.1.weight has a hook of its gradient"),
        (OwnBackward(), "its code has a backward of its own .Scaled."),
        (HooksTensors(), "its code has hooks of gradients"),
    ],
    ids=["module", "weight", "function", "tensor"],
)
def test_what_changes_gradients_alone_is_refused(model: Layers, why: str) -> None:
    """No value tells of it."""
    with pytest.raises(Fold3dError, match=f"micro_batch_size=2: this model's .*{why}"):
        gradients(model, {"x": torch.randn(4, WIDTH, dtype=torch.float64)}, micro_batch_size=2, loss_reduction="mean")


class Labelled(Layers):
    """Its loss is a mean over labels."""

    def forward(self, x: Tensor, labels: Tensor | None = None, **_: Any) -> Tensor:  # type: ignore[override]
        assert labels is not None
        counts = labels != -100
        return (super().forward(x) * 0 + (self.layers[0](x).square().sum(-1) * counts).sum()) / counts.sum().clamp(
            min=1
        )


@pytest.mark.parametrize("said", ["mean", "tokens"])
def test_what_was_said_is_compared_where_kinds_of_means_differ(said: str) -> None:
    """Of a first micro-batch with as many labels in all parts every kind holds."""
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    even = {"x": x, "labels": torch.zeros(4, 3, dtype=torch.long)[:, 0]}
    uneven = {"x": x, "labels": torch.tensor([0, 0, 0, -100])}
    none = {"x": x, "labels": torch.full((4,), -100)}
    config = ParallelConfig(blocks="layers", micro_batch_size=2, loss_reduction=said)
    model = Labelled()
    engine = Engine(model, config, optimizer=SGD)
    try:
        losses = [engine.run([even], lambda module, inputs: module(**inputs), reads_gradients=True)]
        engine.optimizer.zero_grad()
        if said == "mean":
            with pytest.raises(Fold3dError, match="of which it should be the mean over samples"):
                engine.run([uneven], lambda module, inputs: module(**inputs), reads_gradients=True)
            return
        for batch in (uneven, none):
            losses.append(engine.run([batch], lambda module, inputs: module(**inputs), reads_gradients=True))
            engine.optimizer.zero_grad()
        wanted = [model(**batch).item() for batch in (even, uneven, none)]
        assert [loss.item() for loss in losses] == pytest.approx(wanted)
    finally:
        engine.close()


@pytest.mark.parametrize("said", [None, "sum"])
def test_what_is_not_known_is_refused(said: str | None) -> None:
    """A mean that says nothing of itself, and one that is said to be a sum."""
    batch = {"x": torch.randn(4, WIDTH, dtype=torch.float64)}
    why = "nobody knows what its loss is of its samples' losses" if said is None else "of which it should be the sum"
    with pytest.raises(Fold3dError, match=f"micro_batch_size=2: this model's .*{why}"):
        gradients(made(), batch, micro_batch_size=2, loss_reduction=said)


def test_reductions() -> None:
    with pytest.raises(ConfigError, match="loss_reduction='average': must be one of sum, mean, tokens, or None"):
        ParallelConfig(micro_batch_size=2, loss_reduction="average")
    with pytest.raises(ConfigError, match=r"loss_reduction='mean' has no effect: .* set micro_batch_size"):
        ParallelConfig(loss_reduction="mean")


class Gated(nn.Module):
    """Adds the mean over the batch, behind a gate that begins at zero."""

    gate: Tensor

    def __init__(self, *, trains: bool) -> None:
        super().__init__()
        if trains:
            self.gate = nn.Parameter(torch.zeros(WIDTH))
        else:
            self.register_buffer("gate", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * x.mean(0)


@pytest.mark.parametrize(
    ("coupled", "why"),
    [
        ({"loss": "contrast"}, "of which it should be the mean over samples"),
        ({"norm": nn.BatchNorm1d(WIDTH)}, "its forward changes buffers"),
        ({"norm": nn.BatchNorm1d(WIDTH, track_running_stats=False)}, "of which it should be"),
        ({"norm": Gated(trains=True)}, "of which it should be"),
        ({"norm": Gated(trains=False)}, "of which it should be"),
    ],
    ids=["contrast", "batch norm", "batch norm without statistics", "gate", "buffer"],
)
def test_coupled_samples_are_refused(coupled: dict[str, Any], why: str) -> None:
    model = made(**coupled)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(Fold3dError, match=rf"micro_batch_size=2: this model's .*{why}.* Remove micro_batch_size"):
        gradients(model, {"x": torch.randn(4, WIDTH, dtype=torch.float64)}, micro_batch_size=2, loss_reduction="mean")
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
def test_a_loss_that_balances_experts_is_refused_by_what_the_configuration_says(coefficient: float) -> None:
    model = made()
    model.config = SimpleNamespace(output_router_logits=True, router_aux_loss_coef=coefficient)  # type: ignore[assignment]
    batch = {"x": torch.randn(4, WIDTH, dtype=torch.float64)}
    context = pytest.raises(Fold3dError, match="a term that balances experts") if coefficient else nullcontext()
    with context:
        gradients(model, batch, micro_batch_size=2, loss_reduction="mean")


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ({"x": torch.zeros(4, 2), "y": torch.zeros(8)}, r"batch\['x'\] has shape \[4, 2\], and others have 8 samples"),
        ({"x": torch.zeros(4, 2), "y": [torch.zeros(4)]}, r"batch\['y'\] is a list"),
    ],
)
def test_what_nobody_can_divide(batch: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"micro_batch_size=2: {why}"):
        number_of_parts(batch, 2)


def test_number_of_parts() -> None:
    batch = {"x": torch.zeros(7, 2), "shared": torch.zeros(1, 2), "scalar": torch.zeros(()), "text": "as it is"}
    assert [number_of_parts(batch, size) for size in (1, 2, 3, 7, 9)] == [7, 4, 3, 1, 1]
    assert number_of_parts({"x": torch.zeros(2), "y": [torch.zeros(3)]}, 2) == 1, "nothing is to be divided"


class Counting:
    """A loss of the user's that counts samples and keeps what it has seen, as a trainer's metrics do."""

    def __init__(self) -> None:
        self.samples, self.metrics = 0, {"loss": list[float]()}

    def __call__(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        loss: Tensor = model(**inputs)
        self.samples += len(inputs["x"])
        self.metrics["loss"].append(loss.item())
        return loss


def test_what_a_loss_counts_it_counts_once() -> None:
    """The runs by which parts are compared counted, too."""
    torch.set_default_dtype(torch.float64)
    batch = {"x": torch.randn(4, WIDTH)}
    config = ParallelConfig(blocks="layers", segments=1, micro_batch_size=2, loss_reduction="sum")
    engine, loss = Engine(made(loss="sum"), config), Counting()
    for steps in (1, 2):
        engine.run([batch], loss)
        assert loss.samples == 4 * steps and len(loss.metrics["loss"]) == 2 * steps
    engine.close()
