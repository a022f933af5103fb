"""Loops of one's own on two replicas, whose layers are updated late: what hooks, modes and writes between steps do is
what they do in one process, or is refused by name."""

from __future__ import annotations

import copy
import functools
import logging
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from fold3d import Engine, ParallelConfig
from fold3d.errors import Fold3dError
from tests.helpers.ranks import RankPool

STEPS = 3
BFLOAT16: Callable[[], AbstractContextManager[Any]] = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)


class Net(nn.Module):
    """Three layers with a batch norm that is left alone; [rows, 4] -> [rows, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        out: Tensor = self.norm(x)
        return out


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    model = Net().to(dtype)
    model.norm.eval()
    return model


def batches(step: int, dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    """Returns a micro-batch for each of two replicas."""
    generator = torch.Generator().manual_seed(step)
    return [{"x": torch.randn(2, 4, generator=generator, dtype=torch.float64).to(dtype)} for _ in range(2)]


def loss_of(model: nn.Module, batch: dict[str, Tensor], mode: Callable[[], AbstractContextManager[Any]]) -> Tensor:
    with mode():
        out = model(**batch)
    return out.float().square().mean() if mode is BFLOAT16 else out.square().mean()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def alone(
    optimizer: Callable[..., Optimizer],
    prepare: Callable[[nn.Module], None] = lambda model: None,
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
    dtype: torch.dtype = torch.float64,
    between: Callable[[Any], None] = lambda loop: None,
) -> list[Tensor]:
    """Returns the weights that a plain loop trains.

    Args:
        between: is given what has the optimizer, between steps.
    """
    model = net(dtype)
    prepare(model)
    made = optimizer(model.parameters())
    for step in range(STEPS):
        for batch in batches(step, dtype):
            (loss_of(model, batch, mode) / 2).backward()
        made.step()
        made.zero_grad()
        between(SimpleNamespace(optimizer=made))
    return weights(model)


def on_two(
    dp_sync: str,
    optimizer: Callable[..., Optimizer],
    prepare: Callable[[nn.Module], None] = lambda model: None,
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
    dtype: torch.dtype = torch.float64,
    between: Callable[[Engine], None] = lambda engine: None,
) -> list[Tensor] | str:
    """Returns the weights that two replicas train, or the error."""
    model = net(dtype)
    prepare(model)
    config = ParallelConfig(dp=2, segments=1, micro_batches=1, blocks="layers", bucket_bytes=1, dp_sync=dp_sync)
    engine = None
    try:
        engine = Engine(model, config, optimizer=optimizer, example=batches(0, dtype)[0])
        for step in range(STEPS):
            mine = batches(step, dtype)[engine.topology.dp_rank]
            engine.run([mine], lambda module, batch: loss_of(module, batch, mode))
            assert engine.optimizer is not None
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            between(engine)
        engine.flush()
        assert not model.norm.training
        return weights(model)
    except Fold3dError as error:
        return str(error)
    finally:
        if engine is not None:
            engine.close()


def replaces(model: nn.Module) -> None:
    """Hooks that set another gradient, and drop one."""

    def halve(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 1.0

    def drop(parameter: nn.Parameter) -> None:
        parameter.grad = None

    model.layers[0].weight.register_post_accumulate_grad_hook(halve)
    model.layers[1].weight.register_post_accumulate_grad_hook(drop)


def evaluates(engine: Engine) -> None:
    with torch.inference_mode():
        engine.evaluate(batches(9)[0])
    engine.model.norm.eval()


def clamps(engine: Engine) -> None:
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.clamp_(-0.2, 0.2)


def clamps_data(engine: Engine) -> None:
    for parameter in engine.model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


class Average:
    """Of weights over steps, of parameters that are held in a list, as libraries of such averages do."""

    def __init__(self, *, flushes: bool) -> None:
        self.flushes = flushes
        self.held: list[nn.Parameter] = []
        self.values: list[Tensor] = []

    def __call__(self, engine: Engine) -> None:
        if self.flushes:
            engine.flush()
        if not self.held:
            self.held = list(engine.model.parameters())
            self.values = [torch.zeros_like(one) for one in self.held]
        assert all(isinstance(one, nn.Parameter) and one.dtype == torch.float64 for one in self.held)
        with torch.no_grad():
            torch._foreach_lerp_(self.values, self.held, 0.5)

    def run(self, dp_sync: str, prepare: Callable[[nn.Module], Any] = lambda model: None) -> list[Tensor] | str:
        found = on_two(dp_sync, sgd, prepare, between=self)
        return found if isinstance(found, str) else self.values


class Moments:
    """Reads the optimizer's state, and changes it."""

    def __init__(self, *, flushes: bool) -> None:
        self.flushes = flushes
        self.read: list[float] = []

    def __call__(self, engine: Engine) -> None:
        if self.flushes:
            engine.flush()
        assert engine.optimizer is not None
        for state in engine.optimizer.state.values():
            self.read.append(state["momentum_buffer"].sum().item())
            state["momentum_buffer"].mul_(0.5)

    def run(self, dp_sync: str) -> list[Tensor] | str:
        found = on_two(dp_sync, sgd, between=self)
        return found if isinstance(found, str) else [*found, torch.tensor(self.read)]


class Other(nn.Parameter):
    """A class of somebody else's."""


def has_another_class(model: nn.Module) -> None:
    model.layers[1].weight = Other(model.layers[1].weight.detach().clone())


class Copies:
    """Makes parameters of the model's, in the ways that look at their class."""

    def __init__(self, *, flushes: bool) -> None:
        self.flushes = flushes
        self.made: list[Tensor] = []

    def __call__(self, engine: Engine) -> None:
        for way in (nn.Parameter, copy.deepcopy, copy.copy):
            if self.flushes:
                engine.flush()
            made = [way(parameter) for parameter in engine.model.parameters()]
            assert all(type(one) is nn.Parameter for one in made), [type(one) for one in made]
            self.made += [one.detach().clone() for one in made]
            engine.run([batches(7)[0]], lambda module, batch: loss_of(module, batch, nullcontext))
            assert engine.optimizer is not None
            engine.optimizer.step()

    def run(self, dp_sync: str) -> list[Tensor] | str:
        found = on_two(dp_sync, sgd, between=self)
        return found if isinstance(found, str) else self.made


def writes_to_views(engine: Engine) -> None:
    """To memory of the weights that it has kept from before."""
    if "kept" not in vars(engine.model):
        vars(engine.model)["kept"] = [one.detach() for one in engine.model.parameters()]
    for view in vars(engine.model)["kept"]:
        view.clamp_(-0.2, 0.2)


class Around(Optimizer):
    """Has another optimizer step, as Lookahead does."""

    def __init__(self, parameters: Any) -> None:
        self.base = SGD(parameters, lr=0.1)
        super().__init__(self.base.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class Decays(SGD):
    """Decays weights behind the step of the class that it extends.

    Args:
        all_of_them: those without gradients, too.
    """

    def __init__(self, parameters: Any, *, all_of_them: bool) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.all_of_them = all_of_them
        self.factor: float | None = 0.99

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.all_of_them or parameter.grad is not None:
                    parameter.mul_(1.0 if self.factor is None else self.factor)


class Keeps(SGD):
    """Steps parameters that it keeps in a list."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.flat = [one for group in self.param_groups for one in group["params"]]


def with_another(parameters: Any) -> Optimizer:
    """Of the model's weights and one of a loss function."""
    return SGD([*parameters, nn.Parameter(torch.ones(3, dtype=torch.float64))], lr=0.1)


def forgets(loop: Any) -> None:
    loop.optimizer.state = defaultdict(dict)


def sets_the_factor(loop: Any) -> None:
    loop.optimizer.factor = 0.5 if loop.optimizer.factor != 0.5 else None


sgd = functools.partial(SGD, lr=0.1, momentum=0.9)
decays = functools.partial(Decays, all_of_them=False)
adamw = functools.partial(AdamW, lr=0.01)
adafactor = functools.partial(Adafactor, lr=0.01)


def together(dp_sync: str) -> dict[str, list[Tensor] | str]:
    """Returns what becomes of all of it."""
    ways: dict[str, Callable[[], list[Tensor] | str]] = {
        "hooks": lambda: on_two(dp_sync, sgd, replaces),
        "inference": lambda: on_two(dp_sync, adamw, between=evaluates),
        "clamps": lambda: on_two(dp_sync, sgd, between=clamps),
        "clamps data": lambda: on_two(dp_sync, sgd, between=clamps_data),
        "flushes": lambda: on_two(dp_sync, sgd, between=lambda engine: (engine.flush(), clamps(engine))[1]),
        "average": lambda: Average(flushes=False).run(dp_sync),
        "average of flushed": lambda: Average(flushes=True).run(dp_sync),
        "average of others": lambda: Average(flushes=False).run(dp_sync, has_another_class),
        "copies": lambda: Copies(flushes=False).run(dp_sync),
        "copies of flushed": lambda: Copies(flushes=True).run(dp_sync),
        "views": lambda: on_two(dp_sync, sgd, between=writes_to_views),
        "another": lambda: on_two(dp_sync, Around),
        "decays": lambda: on_two(dp_sync, decays),
        "decays all": lambda: on_two(dp_sync, functools.partial(Decays, all_of_them=True)),
        "keeps": lambda: on_two(dp_sync, Keeps),
        "of others": lambda: on_two(dp_sync, with_another),
        "forgets": lambda: on_two(dp_sync, sgd, between=forgets),
        "sets": lambda: on_two(dp_sync, decays, between=sets_the_factor),
        "complex": lambda: on_two(dp_sync, sgd, lambda model: model.register_parameter("z", _complex())),
    }
    if dp_sync == "early":
        ways["moments"] = lambda: Moments(flushes=False).run(dp_sync)
        ways["moments of flushed"] = lambda: Moments(flushes=True).run(dp_sync)
        ways["autocast"] = lambda: on_two(dp_sync, adafactor, mode=BFLOAT16, dtype=torch.float32)
        ways["serial"] = lambda: on_two("serial", adafactor, mode=BFLOAT16, dtype=torch.float32)
    return {name: run() for name, run in ways.items()}


def _complex() -> nn.Parameter:
    return nn.Parameter(torch.ones(2, dtype=torch.complex128))


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("dp_sync", ["early", "zero1"])
def test_on_two_replicas(ranks: RankPool, dp_sync: str) -> None:
    SGD([nn.Parameter(torch.ones(1))])  # from now on steps of its own have hooks, also within those of others
    wanted = {"hooks": alone(sgd, replaces), "inference": alone(adamw), "decays": alone(decays)}
    wanted["sets"] = alone(decays, between=sets_the_factor)
    if dp_sync == "early":
        wanted["forgets"] = alone(sgd, between=forgets)
    refused = {
        "views": "was written to behind optimizer.step()",
        "another": "Around has another optimizer do it ('base')",
        "complex": "z is torch.complex128, and replicas",
        "decays all": "Decays changes parameters, or keeps something of them, also in a step in which they have no",
        "keeps": "Keeps keeps parameters in 'flat'",
        "of others": "has a parameter of shape [3] that is not the model's",
    } | ({"forgets": "the optimizer's `state` was replaced"} if dp_sync == "zero1" else {})
    for found in ranks.run(together, 2, dp_sync):
        for name, expected in wanted.items():
            got = found[name]
            assert isinstance(got, list), got
            for mine, its in zip(got, expected, strict=True):
                assert torch.allclose(mine, its, rtol=0, atol=1e-12), name
        pairs = [("clamps", "flushes"), ("clamps data", "flushes"), ("average", "average of flushed")]
        pairs += [("copies", "copies of flushed"), ("average of others", "average of flushed")]
        pairs += [("moments", "moments of flushed"), ("autocast", "serial")] if dp_sync == "early" else []
        for name, same in pairs:
            assert isinstance(found[name], list), found[name]
            assert all(torch.equal(*pair) for pair in zip(found[name], found[same], strict=True)), name
        for name, why in refused.items():
            assert why in found[name], found[name]


def clipped_by_torch(layout: dict[str, int]) -> tuple[list[list[Tensor]], str]:
    """Returns the weights of each step of a loop that clips by torch's function, and what is said of some gradients."""
    model = net()
    optimizer = sgd(model.parameters())  # before stages have let go of each other's
    config = ParallelConfig(segments=1, micro_batches=2, blocks="layers", **layout)  # type: ignore[arg-type]
    engine = Engine(model, config, example=batches(0)[0])
    engine.attach(optimizer)
    found, said = [], ""
    for step in range(STEPS):
        engine.run(batches(step), lambda module, batch: loss_of(module, batch, nullcontext) / 2)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert engine.optimizer is not None
        engine.optimizer.step()
        found.append([engine.state_dict()["model"][name].clone() for name, _ in net().named_parameters()])
        engine.optimizer.zero_grad()
    engine.run(batches(0), lambda module, batch: loss_of(module, batch, nullcontext) / 2)
    try:
        nn.utils.clip_grad_norm_(model.layers.parameters(), 0.05)
    except Fold3dError as error:
        said = str(error)
    engine.close()
    return found, said


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("layout", [{"pp": 2}])
def test_torchs_clipping_is_of_all_stages(ranks: RankPool, layout: dict[str, int]) -> None:
    model = net()
    optimizer = sgd(model.parameters())
    wanted = []
    for step in range(STEPS):
        for batch in batches(step):
            (loss_of(model, batch, nullcontext) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(weights(model))
    for found, said in ranks.run(clipped_by_torch, 2, layout):
        for of_step, its in zip(found, wanted, strict=True):
            assert all(torch.allclose(*pair, rtol=0, atol=1e-12) for pair in zip(of_step, its, strict=True))
        assert "a norm (norm_type=2) of gradients of which this process has a part" in said, said


def test_sparse_gradients_in_one_process() -> None:
    def trained(make: Callable[[nn.Module], Callable[[], None]]) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 4)).double()
        step = make(model)
        for _ in range(STEPS):
            step()
        return model[0].weight.detach().clone()

    ids = torch.tensor([1, 5, 5])

    def plain(model: nn.Module) -> Callable[[], None]:
        optimizer = SGD(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            optimizer.step()

        return step

    def ours(model: nn.Module) -> Callable[[], None]:
        engine = Engine(model, ParallelConfig(segments=1), optimizer=functools.partial(SGD, lr=0.1))

        def step() -> None:
            engine.run([{"input": ids}], lambda module, batch: module(**batch).square().mean(), reads_gradients=True)
            engine.grad_norm()
            assert engine.optimizer is not None
            engine.optimizer.step()
            engine.optimizer.zero_grad()

        return step

    assert torch.equal(trained(ours), trained(plain))


def test_an_evaluation_leaves_each_modules_mode() -> None:
    model = net()
    engine = Engine(model, ParallelConfig(segments=1, blocks="layers"), example=batches(0)[0])
    engine.evaluate(batches(0)[0])
    assert model.training and not model.norm.training
    engine.close()


def odd_buffers() -> dict[str, str]:
    """Returns what becomes of buffers that are not plain memory, or that torch has few operators for, by kind."""
    rank = dist.get_rank()
    with torch.inference_mode():
        made, other = torch.ones(3), torch.ones(3) + rank
    kinds = {
        "expanded": torch.ones(1, 3).expand(2, 3),
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
        "inference": made,
        "inference, another": other,
        "float8": torch.full((3,), 1.0 + rank).to(torch.float8_e4m3fn),
    }
    found = {}
    for kind, buffer in kinds.items():
        model = net(torch.float32)
        model.register_buffer("odd", buffer)
        try:
            config = ParallelConfig(dp=2, segments=1, micro_batches=1, blocks="layers")
            engine = Engine(model, config, optimizer=sgd, example=batches(0, torch.float32)[0])
            mine = batches(0, torch.float32)[engine.topology.dp_rank]
            engine.run([mine], lambda module, batch: loss_of(module, batch, nullcontext))
            found[kind] = str(model.odd[0].item())
            engine.close()
        except Fold3dError as error:
            found[kind] = str(error)
    return found


@pytest.mark.gate
def test_buffers_that_are_not_plain_memory(ranks: RankPool) -> None:
    for found in ranks.run(odd_buffers, 2):
        for kind in ("expanded", "sparse", "conjugate"):
            assert f"the buffer odd is {kind}" in found[kind], found[kind]
        of_replica_0 = [found[kind] for kind in ("inference", "inference, another", "float8")]
        assert of_replica_0 == ["1.0"] * 3, found


def with_weights_of_its_own(trained: bool) -> list[str]:
    """Returns what is said of a loss function that has a weight."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("fold3d.stage.model_chunk")
    log.addHandler(handler)
    temperature = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=trained)
    engine = Engine(net(), ParallelConfig(dp=2, segments=1, blocks="layers"), optimizer=sgd, example=batches(0)[0])
    for _ in range(2):
        engine.run([batches(0)[0]], lambda module, batch: module(**batch).square().mean() * temperature)
        assert engine.optimizer is not None
        engine.optimizer.step()
    engine.close()
    log.removeHandler(handler)
    return said


@pytest.mark.gate
def test_weights_of_a_loss_function_are_told_of(ranks: RankPool) -> None:
    for said in ranks.run(with_weights_of_its_own, 2, True):
        assert len(said) == 1 and "1 weights that are not the model's, the first of shape []" in said[0], said
    assert ranks.run(with_weights_of_its_own, 2, False) == [[], []]


def stepping_in_hooks(layout: dict[str, int], attached: bool) -> str:
    """Returns the error of a step whose gradients' hooks step: the attached optimizer, or one of each weight."""
    model = net()
    config = ParallelConfig(blocks="layers", **layout)  # type: ignore[arg-type]
    engine = Engine(model, config, example=batches(0)[0])
    if attached:
        engine.attach(sgd(model.parameters()))
    own = {one: sgd([one]) for one in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizer = engine.optimizer if attached else own[parameter]
        assert optimizer is not None
        optimizer.step()

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(step)
    try:
        engine.run(batches(0), lambda module, batch: loss_of(module, batch, nullcontext) / 2)
    except Fold3dError as error:
        return str(error)
    finally:
        engine.close()
    return ""


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("attached", [False, True])
def test_steps_in_hooks_of_gradients_are_refused(ranks: RankPool, attached: bool) -> None:
    assert stepping_in_hooks({"segments": 1}, False) == ""  # as without an engine
    for said in (
        stepping_in_hooks({"segments": 2}, attached),
        *ranks.run(stepping_in_hooks, 2, {"dp": 2, "segments": 1}, attached),
    ):
        assert "steps while the backwards of a step run" in said
