"""csrc/kernels: the CPU's half against torch, and what both halves promise."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fold3d import _C

OPS = torch.ops.fold3d
FLOATS = (torch.float32, torch.float64, torch.bfloat16)


def test_the_cpu_has_them() -> None:
    assert _C.has_kernels(torch.device("cpu"))
    assert _C.has_kernels(torch.device("cuda")) == (_C.built_with()["nvcc"] is not None)
    assert _C.built_with()["torch"] == torch.__version__.split("+")[0]


def squares_of(flat: Tensor) -> tuple[float, float]:
    result = torch.zeros(2, dtype=torch.float64)
    OPS.squares(flat, result)
    return float(result[0]), float(result[1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [0, 1, 255, 257, 64 * 256, 64 * 256 + 1, 300_000])
def test_squares(dtype: torch.dtype, count: int) -> None:
    flat = torch.randn(count, dtype=torch.float64).to(dtype)
    total, broken = squares_of(flat)
    assert total == pytest.approx(float(flat.double().square().sum()), rel=1e-12) and broken == 0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 299, 70_000])
def test_squares_find_what_is_not_finite(dtype: torch.dtype, value: float, place: int) -> None:
    flat = torch.ones(70_001, dtype=dtype)
    flat[place] = value
    total, broken = squares_of(flat)
    assert broken == 1 and not torch.isfinite(torch.tensor(total))


def test_squares_of_fp32_do_not_overflow() -> None:
    assert squares_of(torch.full((1000,), 3e38)) == (pytest.approx(1000 * float(torch.tensor(3e38)) ** 2), 0)


def test_squares_are_added_in_the_order_that_the_header_says() -> None:
    """CUDA's half adds in this order, too: lanes of 256, pairwise, by blocks of 64 rows, and the blocks alike."""
    flat = torch.randn(5 * 64 * 256 + 777)
    padded = torch.zeros(6 * 64 * 256, dtype=torch.float64)
    padded[: flat.numel()] = flat.double()

    def pairwise(lanes: Tensor) -> Tensor:
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        return lanes[0]

    def in_rows(rows: Tensor) -> Tensor:
        total = torch.zeros(256, dtype=torch.float64)
        for row in rows:
            total = total + row
        return pairwise(total)

    blocks = torch.zeros(256, dtype=torch.float64)
    for number, block in enumerate(padded.view(6, 64, 256)):
        blocks[number] = in_rows(block.square())
    assert squares_of(flat)[0] == float(pairwise(blocks))


def test_squares_add_to_what_is_there() -> None:
    result = torch.tensor([2.0, 1.0], dtype=torch.float64)
    OPS.squares(torch.ones(3), result)
    assert result.tolist() == [5.0, 1.0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: OPS.squares(torch.ones(3, dtype=torch.float16), torch.zeros(2, dtype=torch.float64)), "float16|Half"),
        (lambda: OPS.squares(torch.ones(4, 4)[:, :2], torch.zeros(2, dtype=torch.float64)), "lie together"),
        (lambda: OPS.squares(torch.ones(3), torch.zeros(2)), "two numbers of float64"),
        (lambda: OPS.pack([torch.ones(3)], [0, 1], torch.zeros(12, dtype=torch.uint8)), "1 parts, but 2 offsets"),
        (lambda: OPS.pack([torch.ones(3)], [4], torch.zeros(12, dtype=torch.uint8)), "12 bytes at 4 is not within"),
        (lambda: OPS.pack([torch.ones(3)], [0], torch.zeros(12)), "flat bytes"),
        (lambda: OPS.unpack(torch.zeros(12, dtype=torch.uint8), [-1], [torch.ones(2)]), "at -1 is not within"),
        (lambda: OPS.pack([torch.ones(4, 4).t()], [0], torch.zeros(64, dtype=torch.uint8)), "must be contiguous"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], None], text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        call()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 5)), max_size=40), st.randoms())
def test_parts_go_into_a_buffer_and_back(sizes: list[tuple[int, int]], random: object) -> None:
    parts = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size, _ in sizes]
    ends = list(itertools.accumulate(size + gap for size, gap in sizes))
    offsets = [end - size for end, (size, _) in zip(ends, sizes, strict=True)]
    buffer = torch.full((ends[-1] if ends else 0,), 7, dtype=torch.uint8)
    OPS.pack(parts, offsets, buffer)
    for part, offset in zip(parts, offsets, strict=True):
        assert torch.equal(buffer[offset : offset + len(part)], part)
    back = [torch.zeros_like(part) for part in parts]
    OPS.unpack(buffer, offsets, back)
    assert all(torch.equal(one, part) for one, part in zip(back, parts, strict=True))


def test_parts_are_bytes_of_any_type() -> None:
    parts = [torch.randn(3, 5), torch.arange(7), torch.randn(2).to(torch.bfloat16)]
    offsets = [0, 64, 128]
    buffer = torch.zeros(132, dtype=torch.uint8)
    OPS.pack(parts, offsets, buffer)
    back = [torch.empty_like(part) for part in parts]
    OPS.unpack(buffer, offsets, back)
    assert all(torch.equal(one, part) for one, part in zip(back, parts, strict=True))
