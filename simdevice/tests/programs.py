"""What the tests run in processes that have the simulated device: each function checks, or returns what was found."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from simdevice import sim

DEVICE = "sim"


def streams_and_events() -> None:
    """The host goes on at once, a stream works in order, events order streams and tell the time."""
    side = torch.Stream(DEVICE)
    first, second = torch.Event(DEVICE, enable_timing=True), torch.Event(DEVICE, enable_timing=True)
    x = torch.zeros(4, device=DEVICE)
    x + 1  # the first of its sizes: torch imports its meta kernels, which takes seconds
    torch.accelerator.synchronize()
    begin = time.perf_counter()
    first.record()
    for _ in range(20):
        sim.sleep(10)
        x.add_(1)
    sim.sleep(600)  # longer than a busy machine takes to launch all this
    second.record()
    side.wait_event(second)
    with side:
        y = x + 1
    assert not second.query() and not side.query()
    side.synchronize()
    assert second.query() and time.perf_counter() - begin >= 0.8
    assert 800 <= first.elapsed_time(second) < 8000
    assert y.tolist() == [21.0] * 4


def two_devices() -> None:
    """Copies between devices are ordered by both current streams; operators on tensors of both are refused."""
    a = torch.ones(1000, device="sim:0")
    sim.sleep(5)
    b = a.mul_(3).to("sim:1")
    a.fill_(7)
    assert (b + 1).sum().item() == 4000 and b.device.index == 1
    with pytest.raises(RuntimeError, match="same device"):
        a + b
    with pytest.raises(RuntimeError, match="same device"):
        a + torch.ones(1000)
    with torch.sim.device(1):  # type: ignore[attr-defined]
        assert torch.empty(1, device=DEVICE).device.index == 1
    with pytest.raises(RuntimeError, match="indices 0 to 1"):
        torch.empty(1, device="sim:5")


def copies() -> None:
    """Pageable memory is read at the call; pinned memory when the copy runs; the host waits as it does on CUDA."""
    torch.accelerator.synchronize()
    host, pinned = torch.ones(1000), torch.ones(1000).pin_memory()
    assert pinned.is_pinned() and pinned[10:].is_pinned() and not host.is_pinned()
    event = torch.Event(DEVICE)
    sim.sleep(150)
    a, b = host.to(DEVICE, non_blocking=True), pinned.to(DEVICE, non_blocking=True)
    event.record()
    host.fill_(2)
    assert not event.query()
    event.synchronize()
    assert a.sum().item() == b.sum().item() == 1000
    sim.sleep(150)
    event.record()
    back = torch.empty(1000, pin_memory=True).copy_(b.mul_(2), non_blocking=True)
    assert not event.query()
    torch.accelerator.synchronize()
    assert back.sum().item() == 2000
    sim.sleep(150)
    event.record()
    host.copy_(b, non_blocking=True)  # to memory that is not pinned: the host waits
    assert event.query()


def memory_of_streams() -> None:
    """Freed memory goes to the next allocation of its stream, of another one only when record_stream's work is done."""
    x = torch.empty(5000, device=DEVICE)
    address = x.data_ptr()
    del x
    with torch.Stream(DEVICE):
        assert torch.empty(5000, device=DEVICE).data_ptr() != address
    x = torch.empty(5000, device=DEVICE)
    assert x.data_ptr() == address
    side = torch.Stream(DEVICE)
    with side:
        sim.sleep(150)
    x.record_stream(side)
    del x
    assert torch.empty(5000, device=DEVICE).data_ptr() != address
    side.synchronize()
    assert torch.empty(5000, device=DEVICE).data_ptr() == address
    before = torch.accelerator.memory_allocated()
    y = torch.empty(1 << 20, device=DEVICE)
    assert torch.accelerator.memory_allocated() - before == y.nbytes
    pinned = torch.ones(5000).pin_memory()
    address = pinned.data_ptr()
    sim.sleep(150)
    z = pinned.to(DEVICE, non_blocking=True)
    del pinned
    assert torch.empty(5000, pin_memory=True).data_ptr() != address
    assert z.sum().item() == 5000


def memory_that_nobody_wrote() -> None:
    with sim.poison():
        x = torch.ones(100, device=DEVICE)
        del x
        assert torch.empty(100, device=DEVICE).isnan().all().item()


def errors() -> None:
    """Wrong sizes are found at the launch; a kernel's own error by the host's next wait, once."""
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        torch.ones(3, 4, device=DEVICE) @ torch.ones(3, 4, device=DEVICE)
    torch.embedding(torch.ones(3, 4, device=DEVICE), torch.tensor([5], device=DEVICE))
    with pytest.raises(RuntimeError, match="earlier kernel"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


def random_numbers() -> None:
    """They repeat with the seed, differ between devices' generators, and checkpoint puts the state back."""
    torch.manual_seed(3)
    first = torch.rand(100, device=DEVICE)
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(100, device=DEVICE))
    assert not torch.equal(first, torch.rand(100, device=DEVICE))
    generator = torch.Generator("sim:1")
    generator.manual_seed(5)
    twin = torch.Generator("sim:1")
    twin.set_state(generator.get_state())
    with torch.sim.device(1):  # type: ignore[attr-defined]
        a, b = (torch.randn(50, device="sim:1", generator=one) for one in (generator, twin))
    assert torch.equal(a, b) and generator.device == torch.device("sim:1")
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)).to(DEVICE)
    x = torch.randn(4, 16, device=DEVICE)
    grads = []
    for forward in (lambda: model(x), lambda: checkpoint(model, x, use_reentrant=False)):
        torch.manual_seed(7)
        model.zero_grad()
        forward().square().sum().backward()
        grads.append(_grads(model))
    _assert_same(*grads)


def tied_weights_stay_tied() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(5, 4), "b": nn.Linear(4, 5, bias=False)})
    model["b"].weight = model["a"].weight
    model.to(DEVICE)
    assert model["b"].weight is model["a"].weight and model["a"].weight.device.type == DEVICE


def default_dtypes() -> None:
    """Results have the default dtype of now, not that of the first call."""
    count = torch.tensor(3, device=DEVICE)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert (count / count).dtype == (1 / count).dtype == dtype
    finally:
        torch.set_default_dtype(before)


def autocast() -> None:
    x = torch.randn(4, 16, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert (x @ x.T).dtype == torch.bfloat16
        assert torch.softmax(x, 0).dtype == torch.float32


def backward_on_the_streams_of_forward() -> None:
    """Autograd runs each backward on the stream of its forward, puts the waits in, and adds up gradients in order."""
    torch.manual_seed(0)
    first = torch.randn(64, 64, device=DEVICE, requires_grad=True)
    second = torch.randn(64, 64, device=DEVICE, requires_grad=True)
    x = torch.randn(8, 64, device=DEVICE)

    def gradients(side: torch.Stream | None) -> list[Tensor]:
        first.grad = second.grad = None
        main = torch.accelerator.current_stream()
        hidden = x @ first
        if side is not None:
            side.wait_stream(main)
        with side if side is not None else nullcontext():
            branch = torch.tanh(hidden @ second)
        if side is not None:
            main.wait_stream(side)
        (branch * hidden).sum().backward()
        assert first.grad is not None and second.grad is not None
        return [first.grad.cpu(), second.grad.cpu()]

    want = gradients(None)
    with sim.jitter(300):
        for _ in range(5):
            _assert_same(gradients(torch.Stream(DEVICE)), want)


def training_as_on_the_cpu(jittered: bool) -> None:
    """A GPT-2 of transformers has the CPU's bits after three steps of AdamW, as have its saved activations."""
    from transformers import GPT2Config, GPT2LMHeadModel

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
        attn_implementation="eager",
    )
    want = GPT2LMHeadModel(config)
    got = copy.deepcopy(want).to(DEVICE)
    saved = copy.deepcopy(got)
    tokens = torch.randint(64, (2, 16))
    with sim.jitter(200) if jittered else nullcontext():
        losses = [_train(want, tokens), _train(got, tokens.to(DEVICE))]
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            losses.append(_train(saved, tokens.to(DEVICE)))
    assert losses[0] == losses[1] == losses[2]
    for name, weight in want.state_dict().items():
        assert torch.equal(weight, got.state_dict()[name].cpu()), name
        assert torch.equal(weight, saved.state_dict()[name].cpu()), name


def _train(model: nn.Module, tokens: Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _grads(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def _assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


CHECKS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        streams_and_events,
        two_devices,
        copies,
        memory_of_streams,
        memory_that_nobody_wrote,
        errors,
        random_numbers,
        tied_weights_stay_tied,
        default_dtypes,
        autocast,
        backward_on_the_streams_of_forward,
    )
}


def run(name: str) -> None:
    """Runs one of CHECKS; no race may be found that it does not expect."""
    sim.take_reports()
    CHECKS[name]()
    assert not sim.take_reports()


def change_device() -> int:
    """Makes the second device the current one, and leaves it; returns which one was."""
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(1)
    return before
