"""Programs with one mistake each, and the same without it: what the detector must report, and what it must not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from simdevice import sim

DEVICE = "sim"
Program = Callable[[bool], None]
"""Takes whether the mistake is made."""
PROGRAMS: dict[str, tuple[Program, str]] = {}
"""By name; with each the two accesses that the report of the mistake must name, the later one first, as a regex."""


def program(later: str, earlier: str) -> Callable[[Program], Program]:
    def register(function: Program) -> Program:
        PROGRAMS[function.__name__] = (function, f"{later} .*is not ordered after {earlier} ")
        return function

    return register


def check(name: str) -> tuple[list[str], list[str], str]:
    """Returns the races found without the mistake and with it, and the regex that the latter must match."""
    function, want = PROGRAMS[name]
    found = []
    for broken in (False, True):
        torch.accelerator.synchronize()
        with sim.recorded() as reports:
            function(broken)
        found.append(reports)
    return found[0], found[1], want


def _main() -> torch.Stream:
    return torch.accelerator.current_stream()


def _ones() -> Tensor:
    return torch.ones(4096, device=DEVICE)


# Waits between streams


@program(r"aten::mul\.Tensor at races.py:\d+", r"aten::fill_\.Scalar at races.py:\d+")
def a_consumer_does_not_wait(broken: bool) -> None:
    side, x = torch.Stream(DEVICE), _ones()
    if not broken:
        side.wait_stream(_main())
    with side:
        x * 2


@program(r"aten::add\.Tensor", r"aten::mul\.Tensor")
def a_result_is_used_before_it_is_there(broken: bool) -> None:
    side, x = torch.Stream(DEVICE), _ones()
    side.wait_stream(_main())
    with side:
        y = x * 2
    y.record_stream(_main())
    if not broken:
        _main().wait_stream(side)
    y + 1


@program(r"aten::zero_|aten::fill_\.Scalar", r"aten::mul\.Tensor")
def a_source_is_overwritten_while_it_is_read(broken: bool) -> None:
    side, x = torch.Stream(DEVICE), _ones()
    side.wait_stream(_main())
    with side:
        y = x * 2
    if not broken:
        _main().wait_stream(side)
    x.zero_()
    del y


@program(r"aten::add_\.Tensor", r"aten::add_\.Tensor")
def two_streams_add_to_one_sum(broken: bool) -> None:
    first, second, total = torch.Stream(DEVICE), torch.Stream(DEVICE), _ones()
    for stream in (first, second):
        stream.wait_stream(_main())
    with first:
        total.add_(1)
    if not broken:
        second.wait_stream(first)
    with second:
        total.add_(1)


@program(r"aten::mul\.Tensor", r"aten::add_\.Tensor")
def an_event_is_recorded_too_early(broken: bool) -> None:
    side, event, x = torch.Stream(DEVICE), torch.Event(DEVICE), _ones()
    event.record()
    x.add_(1)
    if not broken:
        event.record()
    side.wait_event(event)
    with side:
        x * 2


@program(r"aten::mul\.Tensor", r"aten::add_\.Tensor")
def an_event_is_waited_for_before_it_is_recorded(broken: bool) -> None:
    side, event, x = torch.Stream(DEVICE), torch.Event(DEVICE), _ones()
    torch.accelerator.synchronize()
    x.add_(1)
    if not broken:
        event.record()
    side.wait_event(event)  # one that was never recorded orders nothing
    event.record()
    with side:
        x * 2


@program(r"aten::mul\.Tensor", r"aten::add_\.Tensor")
def the_wrong_stream_waits(broken: bool) -> None:
    first, second, x = torch.Stream(DEVICE), torch.Stream(DEVICE), _ones()
    x.add_(1)
    (first if broken else second).wait_stream(_main())
    with second:
        x * 2


@program(r"aten::mul\.Tensor", r"aten::add_\.Tensor")
def the_event_is_of_another_stream(broken: bool) -> None:
    first, second, event, x = torch.Stream(DEVICE), torch.Stream(DEVICE), torch.Event(DEVICE), _ones()
    first.wait_stream(_main())
    with first:
        x.add_(1)
    event.record(_main() if broken else first)
    second.wait_event(event)
    with second:
        x * 2


@program(r"aten::mul\.Tensor", r"aten::add_\.Tensor")
def a_chain_of_three_streams_is_broken(broken: bool) -> None:
    first, second, third = (torch.Stream(DEVICE) for _ in range(3))
    x = _ones()
    first.wait_stream(_main())
    with first:
        x.add_(1)
    second.wait_stream(first)
    third.wait_stream(_main() if broken else second)
    with third:
        x * 2


# Memory


@program(r"aten::fill_\.Scalar", r"aten::mul\.Tensor")
def record_stream_is_missing(broken: bool) -> None:
    side, x = torch.Stream(DEVICE), _ones()
    side.wait_stream(_main())
    with side:
        y = x * 2
    if not broken:
        x.record_stream(side)
    del x
    _ones()
    del y


@program(r"aten::mul\.Tensor", r"aten::fill_\.Scalar")
def memory_is_freed_to_a_stream_that_still_writes_it(broken: bool) -> None:
    """A result of the side stream that the main stream still reads when the side stream takes the memory again."""
    side, source = torch.Stream(DEVICE), _ones()
    source.record_stream(side)
    side.wait_stream(_main())
    with side:
        y = _ones()
    _main().wait_stream(side)
    y.fill_(3)
    if not broken:
        y.record_stream(_main())
    del y
    with side:
        source * 2


@program(r"aten::add_\.Tensor", r"aten::mul\.Tensor")
def record_stream_names_another_stream(broken: bool) -> None:
    side, other, x = torch.Stream(DEVICE), torch.Stream(DEVICE), torch.full((777,), 1.0, device=DEVICE)
    side.wait_stream(_main())
    with side:
        y = x * 2
    x.record_stream(other if broken else side)
    del x
    other.synchronize()  # has passed the end of x, and says nothing of the stream that reads it
    torch.empty(777, device=DEVICE).add_(1)
    del y


# Copies and pinned memory


@program(r"read by the host at races.py:\d+", r"copy to the host at races.py:\d+")
def the_host_reads_before_the_copy_has_come(broken: bool) -> None:
    x, pinned = _ones(), torch.empty(4096, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    if not broken:
        torch.accelerator.synchronize()
    sim.use_on_host(pinned, writes=False, what="read by the host")


@program(r"written by the host", r"copy to the device")
def the_host_overwrites_what_is_being_copied(broken: bool) -> None:
    pinned, event = torch.ones(4096).pin_memory(), torch.Event(DEVICE)
    x = pinned.to(DEVICE, non_blocking=True)
    event.record()
    if not broken:
        event.synchronize()
    sim.use_on_host(pinned, writes=True, what="written by the host")
    del x


@program(r"copy to the device", r"copy to the host")
def pinned_memory_comes_back_before_it_has_left(broken: bool) -> None:
    out, back, x = torch.Stream(DEVICE), torch.Stream(DEVICE), _ones()
    pinned, y = torch.empty(4096, pin_memory=True), _ones()
    out.wait_stream(_main())
    back.wait_stream(_main())
    with out:
        pinned.copy_(x, non_blocking=True)
    if not broken:
        back.wait_stream(out)
    with back:
        y.copy_(pinned, non_blocking=True)


@program(r"aten::add_\.Tensor", r"copy to another device")
def the_target_is_used_on_another_stream_of_its_device(broken: bool) -> None:
    x, side = _ones(), torch.Stream("sim:1")
    y = x.to("sim:1")
    if not broken:
        side.wait_stream(torch.accelerator.current_stream(1))
    with side:
        y.add_(1)


# Parts of memory, and models


@program(r"aten::add_\.Tensor", r"aten::mul_\.Tensor")
def columns_overlap(broken: bool) -> None:
    """Columns of one matrix: next to each other they may be written at once."""
    side, x = torch.Stream(DEVICE), torch.ones(16, 32, device=DEVICE)
    side.wait_stream(_main())
    with side:
        x[:, :16].mul_(2)
    x[:, 15 if broken else 16 :].add_(1)


@program(r"aten::add_\.Tensor", r"aten::mul_\.Tensor")
def slices_overlap(broken: bool) -> None:
    side, x = torch.Stream(DEVICE), torch.ones(16, 32, device=DEVICE)
    side.wait_stream(_main())
    with side:
        x[:8].mul_(2)
    x[7 if broken else 8 :].add_(1)


@program(r"aten::\w+(\.\w+)?", r"aten::\w+(\.\w+)?")
def a_gradient_is_read_beside_backward(broken: bool) -> None:
    """Gradients are sent on a side stream, which must wait for the backward that writes them."""
    side = torch.Stream(DEVICE)
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64).to(DEVICE), torch.randn(8, 64, device=DEVICE)
    model(x).square().sum().backward()
    if not broken:
        side.wait_stream(_main())
    with side:
        flat = torch.cat([parameter.grad.view(-1) for parameter in model.parameters() if parameter.grad is not None])
    _main().wait_stream(side)
    del flat


@program(r"aten::\w+(\.\w+)?", r"aten::add_\.Tensor")
def weights_are_used_beside_the_optimizer(broken: bool) -> None:
    side = torch.Stream(DEVICE)
    model, x = nn.Linear(64, 64).to(DEVICE), torch.ones(8, 64, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    model(x).square().sum().backward()
    side.wait_stream(_main())
    optimizer.step()
    if not broken:
        side.wait_stream(_main())
    with side, torch.no_grad():
        model(x)
    _main().wait_stream(side)


def clean_programs() -> list[str]:
    """Returns the races found in a training that keeps its activations in pinned memory, and uses two streams."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    side = torch.Stream(DEVICE)
    with sim.recorded() as reports, sim.jitter(200):
        for step in range(4):
            with torch.autograd.graph.save_on_cpu(pin_memory=True) if step % 2 else nullcontext():
                x = torch.randn(8, 32, device=DEVICE)
                side.wait_stream(_main())
                with side:
                    branch = model(x)
                branch.record_stream(_main())
                x.record_stream(side)
                loss = model(x).square().mean()
                _main().wait_stream(side)
                (loss + branch.square().mean()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return reports
