"""Tiny batches of real text: bytes of the interpreter's own help pages; nothing is fetched or random."""

from __future__ import annotations

import functools
import pydoc_data.topics
from collections.abc import Collection

import torch
from torch import Tensor

IGNORED = -100


@functools.cache
def _text() -> bytes:
    return "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).encode()


def byte_ids(count: int, *, vocab: int = 64, start: int = 0) -> Tensor:
    """Returns `count` token ids, int64 in [2, vocab): bytes of the text from `start` on, folded into it.

    Ids 0 and 1 stay free for the begin, end and padding tokens of the tiny configurations.
    """
    text = _text()
    span = bytes(text[(start + i) % len(text)] for i in range(count))
    return torch.tensor(list(span), dtype=torch.int64) % (vocab - 2) + 2


def batch(
    rows: int,
    length: int,
    *,
    vocab: int = 64,
    start: int = 0,
    ragged: bool = False,
    padded: bool = False,
    left: bool = False,
    empty_rows: Collection[int] = (),
) -> dict[str, Tensor]:
    """Returns input_ids, attention_mask and labels, each int64 [rows, length].

    Args:
        start: offset into the text; another start, another batch.
        ragged: each row keeps another number of labels (from 2 to length), the rest is -100.
        padded: as ragged, and the ignored tail is padding: id 1, attention mask 0.
        left: as padded, with the padding in front: its queries see no key at all.
        empty_rows: rows all of whose labels are -100.
    """
    input_ids = byte_ids(rows * length, vocab=vocab, start=start).view(rows, length)
    labels, mask = input_ids.clone(), torch.ones_like(input_ids)
    if ragged or padded or left:
        for row in range(rows):
            kept = 2 + (7 * (row + start) + 3) % (length - 1)
            labels[row, kept:] = IGNORED
            if padded or left:
                mask[row, kept:] = 0
                input_ids[row, kept:] = 1
            if left:
                for tensor in (input_ids, mask, labels):
                    tensor[row] = tensor[row].roll(length - kept)
    for row in empty_rows:
        labels[row] = IGNORED
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


def images(
    rows: int, size: int, classes: int, *, start: int = 0, unlabelled: Collection[int] = (), dtype: torch.dtype
) -> dict[str, Tensor]:
    """Returns pixel_values [rows, 3, size, size] in [-1, 1) of `dtype`, and labels, int64 [rows] in [0, classes).

    Args:
        start: offset into the text that is looked at as pixels.
        unlabelled: rows whose label is -100.
    """
    pixels = byte_ids(rows * 3 * size * size, start=start).view(rows, 3, size, size)
    labels = pixels.flatten(1).sum(1) % classes
    for row in unlabelled:
        labels[row] = IGNORED
    return {"pixel_values": pixels.to(dtype) / 32 - 1, "labels": labels}


def dataset(rows: int, length: int, **options: object) -> list[dict[str, Tensor]]:
    """Returns the rows of `batch(rows, length, **options)` one by one, as a Trainer wants its dataset."""
    whole = batch(rows, length, **options)  # type: ignore[arg-type]
    return [{name: tensor[row] for name, tensor in whole.items()} for row in range(rows)]
