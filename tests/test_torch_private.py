"""torch_private: what fold3d uses of torch that may change with any release. A failure here says what has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction, checkpoint, detach_variable

from fold3d.torch_private import (
    Depth,
    StorageLabels,
    changing_stores,
    checkpoint_around,
    follows_operations,
    functions_around,
    in_backward,
    is_called_by_detach_variable,
    place_in_backward,
    put_modes_on,
    run_again_within,
    running_modules,
    saving_hook,
    set_place_in_backward,
    set_version_counts,
    storage_key,
    take_modes_off,
    try_latest_code_first,
    unwrap_call,
    wrap_call,
)  # fmt: skip


def test_views_share_memory_and_copies_do_not() -> None:
    x = torch.ones(4, 3)
    assert storage_key(x) == storage_key(x[1:].t()) != storage_key(x.clone())
    sparse = x.to_sparse()
    assert storage_key(sparse) == id(sparse)


def test_a_label_is_that_of_all_tensors_of_a_memory_and_goes_with_it() -> None:
    labels, x = StorageLabels[int](), torch.ones(4, 3)
    labels[x], labels[x.to_sparse()] = 1, 2
    view = x[1:].t()
    del x
    assert labels.get(view) == 1 and labels.get(view.clone()) is None and labels.get(view.to_sparse()) is None
    assert labels.values() == [1]
    del view
    assert labels.values() == []


def test_a_store_is_changed_before_anybody_writes_into_it(tmp_path: Path) -> None:
    found: list[tuple[dist.Store, int, int]] = []

    def change(store: dist.Store, rank: int, ranks: int) -> dist.Store:
        found.append((store, rank, ranks))
        return dist.PrefixStore("own", store)

    with changing_stores(change):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ((_, rank, ranks),) = found
        dist.distributed_c10d._get_default_store().set("key", "value")
        written = (tmp_path / "store").read_bytes()
        assert (rank, ranks) == (0, 1) and written.count(b"/own/default_pg/") == written.count(b"default_pg/") > 1
    finally:
        dist.destroy_process_group()


def test_a_backward_is_told_from_what_lies_around_it() -> None:
    seen, x = [in_backward()], torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: seen.append(in_backward()))
    (2 * x).backward()
    assert [*seen, in_backward()] == [False, True, False]


def test_a_checkpoint_is_the_same_when_backward_runs_it_again() -> None:
    seen: list[Any] = []

    def code(x: Tensor) -> Tensor:
        seen.append(checkpoint_around())
        return x.sin() * x

    x = torch.ones(3, requires_grad=True)
    assert checkpoint_around() is None and saving_hook() is None
    y = checkpoint(code, x, use_reentrant=False) + checkpoint(code, x, use_reentrant=False)
    y.sum().backward()
    one, other, *runs = seen
    assert len(runs) == 2 and not one.again and not other.again and all(run.again for run in runs)
    assert one.frame is not other.frame and {id(run.frame) for run in runs} == {id(one.frame), id(other.frame)}
    assert len({id(run.run) for run in seen}) == 4


def test_a_hook_that_saves_is_one_object_throughout() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        hook = saving_hook()
        torch.ones(1, requires_grad=True).sin()
        assert hook is not None and saving_hook() is hook and checkpoint_around() is None
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            assert saving_hook() is not hook


def test_a_checkpoint_runs_again_within_what_was_asked() -> None:
    within: list[bool] = []
    seen: list[bool] = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        within.append(True)
        try:
            yield
        finally:
            within.pop()

    def code(x: Tensor) -> Tensor:
        here = checkpoint_around()
        assert here is not None
        if not here.again:
            run_again_within(here.frame, around)
        seen.append(bool(within))
        return x.sin() * x

    checkpoint(code, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [False, True] and not within


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[type]) -> Tensor:
        def inside() -> None:
            seen.extend(functions_around())

        inside()
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * gradients[0], None


def test_functions_and_modules_on_the_stack_are_found() -> None:
    seen: list[type] = []
    modules: list[int] = []

    class Holder(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            def inside() -> None:
                modules.extend(running_modules())

            inside()
            y: Tensor = Doubled.apply(x, seen)
            return y

    outer = nn.Sequential(Holder())
    checkpoint(outer, torch.ones(1, requires_grad=True), use_reentrant=True)
    assert seen == [Doubled, CheckpointFunction] and modules == [id(outer[0]), id(outer)]


def test_what_detaches_for_a_reentrant_checkpoint_is_known() -> None:
    seen: list[bool] = []

    class Noting(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.detach:
                seen.append(is_called_by_detach_variable(2))
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(1, requires_grad=True).as_subclass(Noting)
    x.detach()
    detach_variable((x,))
    assert seen == [False, True]


def test_nodes_of_a_graph_run_by_their_numbers() -> None:
    order: list[str] = []

    def chain(name: str) -> tuple[Tensor, Any]:
        x = torch.ones(1, requires_grad=True)
        y = x.sin()
        y.grad_fn.register_prehook(lambda _: order.append(name))
        return y, y.grad_fn

    (one, first), (other, second) = chain("one"), chain("other")
    assert place_in_backward(second) > place_in_backward(first)
    (one + other).backward(retain_graph=True)
    set_place_in_backward(second, place_in_backward(first) - 1)
    (one + other).backward()
    assert order == ["other", "one", "one", "other"]


def test_a_backward_does_not_notice_a_write_whose_count_is_taken_back() -> None:
    weight = torch.ones(2, requires_grad=True)
    result = (weight * weight).sum()
    before = weight._version
    with torch.no_grad():
        weight.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward(retain_graph=True)
    set_version_counts({weight: before})
    result.backward()
    assert weight.grad is not None and weight.grad.tolist() == [6, 6]


class Functions(TorchFunctionMode):
    pass


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_are_taken_off_and_put_on() -> None:
    assert not follows_operations()
    with Functions():
        above = Depth.now()
        with Functions(), Dispatches(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            depth, hook = Depth.now(), saving_hook()
            modes = take_modes_off(above)
            assert [*map(len, modes)] == [1, 1, 1] and Depth.now() == above and saving_hook() is None
            put_modes_on(modes)
            assert Depth.now() == depth and saving_hook() is hook
        assert follows_operations()
    assert not follows_operations()


def test_the_call_of_one_module_is_wrapped_and_unwrapped() -> None:
    calls: list[str] = []

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            calls.append("around")
            return call(*args)

        return called

    module = nn.Identity()
    module.register_forward_hook(lambda *_: calls.append("hook"))
    wrap_call(module, around)
    module(1)
    unwrap_call(module)
    module(1)
    assert calls == ["around", "hook", "hook"]


@pytest.mark.parametrize("on", [False, True])
def test_the_order_of_compiled_code_can_be_set(on: bool) -> None:
    try:
        try_latest_code_first(on)
    finally:
        try_latest_code_first(True)
