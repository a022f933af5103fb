"""Texts with places for what a model makes of images, videos or sound, and the further inputs that belong to them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]

KINDS = ("image", "video", "audio")
_MOST_TRIES = 6


def configs_of(config: Any) -> list[Any]:
    """Returns a configuration and those in it, the outer ones first."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {}]
    return [config, *(inner for part in parts if part is not None for inner in configs_of(part))]


def special_ids(config: Any) -> set[int]:
    """Returns the tokens that have a meaning of their own, as far as the fields of a configuration tell."""
    found: set[int] = set()
    for one in configs_of(config):
        for name, value in vars(one).items():
            if isinstance(value, int) and re.search(r"_(id|index|token)$", name):
                found.add(value)
            elif isinstance(value, dict) and "vocabulary" in name:
                found |= set(value.values())
    return found


def token_of(model: nn.Module, kind: str) -> int | None:
    """Returns the token that stands for one feature of an image, a video or a sound; None where there is none."""
    config: Any = model.config
    names = [f"{kind}_{middle}_{end}" for middle in ("token", "patch", "soft_token") for end in ("id", "index")]
    for one in configs_of(config):
        for name in (*names, f"{kind}_patch_id", f"{kind}_token"):
            value = getattr(one, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def with_places(model: nn.Module, part: Batch, ids: Tensor, kinds: tuple[str, ...] = KINDS) -> Batch:
    """Returns `part`, and a text with as many places as the model makes features of `part`.

    How many there are its `get_..._features` says, or the error with which it refuses another number.

    Args:
        part: images, videos or sounds, each sample the like.
        ids: [samples, length] tokens of the text.
    Raises: what the model raises at last.
    """
    dtype = next(model.parameters()).dtype
    part = {name: value.to(dtype) if value.is_floating_point() else value for name, value in part.items()}
    error: Exception = ValueError("nothing says how many places in the text an image takes")
    for kind in kinds:
        place = token_of(model, kind)
        if place is None or not any(_is_of(name, kind) for name in part):
            continue
        waiting, tried = [*_said(model, kind, part, place, ids), 1, *_of_lengths(part, kind)], set[int]()
        while waiting and len(tried) < _MOST_TRIES:
            count = waiting.pop(0)
            if count in tried or not 0 < count <= 4096:
                continue
            tried.add(count)
            batch = _batch(model, kind, part, place, count, ids)
            try:
                with torch.no_grad():
                    model(**{**batch, **_labels(model, batch)})
                return batch
            except Exception as raised:
                error = raised
                waiting = [*_expected(model, raised, len(ids)), *waiting]
        raise error  # what a kind of its own has a token for is of no other kind
    raise error


def _is_of(name: str, kind: str) -> bool:
    if kind == "audio":
        return bool(re.search(r"input_(features|values)|audio", name))
    return bool(re.search(r"pixel|patches", name)) and (kind == "video" or "video" not in name)


def _of_lengths(part: Batch, kind: str) -> list[int]:
    """Returns how many features encoders of sound make of so many frames: of each second, fourth or eighth."""
    if kind != "audio":
        return []
    return [one.shape[-1] // step for one in part.values() if one.ndim == 3 for step in (4, 2, 8)]


def _said(model: nn.Module, kind: str, part: Batch, place: int, ids: Tensor) -> Iterator[int]:
    """Yields how many features for each sample the model makes, if a function of its own tells."""
    for owner in model.modules():  # the model itself first
        features: Callable[..., Any] | None = getattr(owner, f"get_{kind}_features", None)
        if features is None:
            continue
        known = inspect.signature(features).parameters
        batch = _batch(model, kind, part, place, 1, ids)
        try:
            with torch.no_grad():
                made = features(**{name: value for name, value in batch.items() if name in known})
        except Exception:  # it needs what only its own processor makes; the forward may say it
            continue
        made = getattr(made, "pooler_output", made)
        tensors = [made] if isinstance(made, Tensor) else [one for one in made if isinstance(one, Tensor)]
        yield sum(one.numel() // one.shape[-1] for one in tensors) // len(ids)


def _expected(model: nn.Module, error: Exception, samples: int) -> list[int]:
    """Returns how many features an error says that there are for each sample; some count elements."""
    config: Any = model.config
    found = re.search(r"features:? (\d+)|tensor b \((\d+)\)", str(error))
    if found is None:
        return []
    total = int(found[1] or int(found[2]) * samples)
    width = int(getattr(config.get_text_config(), "hidden_size", 0) or 0)
    rows = [total // width // samples] if width and total % width == 0 else []
    return [*rows, total // samples]


def _batch(model: nn.Module, kind: str, part: Batch, place: int, count: int, ids: Tensor) -> Batch:
    text = torch.cat([torch.full((len(ids), count), place), ids], 1)
    takes = set(inspect.signature(model.forward).parameters)
    batch: Batch = {**part, "input_ids": text, "attention_mask": torch.ones_like(text)}
    if "mm_token_type_ids" in takes:
        batch["mm_token_type_ids"] = (text == place).long() * (KINDS.index(kind) + 1)
    return batch | further(model, takes, batch)


def _labels(model: nn.Module, batch: Batch) -> Batch:
    """Some count and compare only where there are labels."""
    takes = inspect.signature(model.forward).parameters
    return {"labels": batch["input_ids"]} if "labels" in takes and "decoder_input_ids" not in takes else {}


def further(model: nn.Module, takes: set[str], batch: Batch) -> Batch:
    """Returns what the forward takes besides, for each text token, image or sound of the batch."""
    made = {name: rule(model, batch) for name, rule in _FURTHER.items() if name in takes and name not in batch}
    return {name: value for name, value in made.items() if value is not None}


def _text_like(_: nn.Module, batch: Batch) -> Tensor:
    ids: Tensor = batch["input_ids"]
    return ids[:, -8:].clamp(max=15)


def _frames(_: nn.Module, batch: Batch) -> Tensor | None:
    sound = batch.get("input_features")
    return None if sound is None else torch.ones(sound.shape[0], sound.shape[-1], dtype=torch.long)


def _samples(_: nn.Module, batch: Batch) -> Tensor | None:
    sound = batch.get("input_values")
    return None if sound is None else torch.ones(sound.shape[0], sound.shape[-1], dtype=torch.long)


def _latents(model: nn.Module, batch: Batch) -> Tensor | None:
    count = getattr(model.config, "latent_query_num", None)
    if count is None:
        return None
    mask = torch.zeros_like(batch["input_ids"])
    mask[:, 1 : 1 + count] = 1
    return mask


def _boxes(_: nn.Module, batch: Batch) -> Tensor:
    samples, length = batch["input_ids"].shape
    corners = torch.arange(length).remainder(5)[None, :, None] * torch.ones(samples, 1, 4)
    boxes: Tensor = corners.long() + torch.tensor([0, 0, 3, 3])
    return boxes


def _of_images(*shape: int) -> Callable[[nn.Module, Batch], Tensor | None]:
    """Ones for each image of each sample."""

    def made(_: nn.Module, batch: Batch) -> Tensor | None:
        pixels = batch.get("pixel_values")
        return None if pixels is None else torch.ones(batch["input_ids"].shape[0], *shape, dtype=torch.long)

    return made


def _tiles(model: nn.Module, batch: Batch) -> Tensor | None:
    pixels = batch.get("pixel_values")
    return None if pixels is None or pixels.ndim != 6 else torch.ones(*pixels.shape[:3], dtype=torch.long)


def _sight(_: nn.Module, batch: Batch) -> Tensor | None:
    """Each token sees every tile, or image."""
    pixels = batch.get("pixel_values")
    if pixels is None or pixels.ndim < 5:
        return None
    between = pixels.shape[1:3] if pixels.ndim == 6 else pixels.shape[1:2]
    return torch.ones(*batch["input_ids"].shape, *between, dtype=torch.long)


def _wide(name: str, count: str = "") -> Callable[[nn.Module, Batch], Tensor | None]:
    """Numbers of a width that the configuration names, `count` of them for each sample."""

    def made(model: nn.Module, batch: Batch) -> Tensor | None:
        width = getattr(model.config, name, None)
        shape = (len(batch["input_ids"]), *([getattr(model.config, count, 4)] if count else []))
        generator = torch.Generator().manual_seed(3)
        return None if width is None else torch.randn(*shape, width, generator=generator, dtype=torch.float64)

    return made


def _times(model: nn.Module, batch: Batch) -> Tensor | None:
    """How far actions are noise."""
    samples = len(batch["input_ids"])
    return torch.linspace(0.25, 0.75, samples, dtype=torch.float64) if hasattr(model.config, "max_action_dim") else None


def _cameras(model: nn.Module, batch: Batch) -> Tensor | None:
    """All of them are there."""
    pixels = batch.get("pixel_values")
    if pixels is None or pixels.ndim != 5 or not hasattr(model.config, "max_action_dim"):
        return None
    return torch.ones(*pixels.shape[:2], dtype=torch.bool)


def _not(_: nn.Module, __: Batch) -> bool:
    return False


_FURTHER: dict[str, Callable[[nn.Module, Batch], Tensor | bool | None]] = {
    "qformer_input_ids": _text_like,
    "feature_attention_mask": _frames,
    "input_features_mask": _frames,
    "padding_mask": _samples,
    "image_merge_sizes": _of_images(),
    "aspect_ratio_ids": _of_images(1),
    "aspect_ratio_mask": _tiles,
    "cross_attention_mask": _sight,
    "image_attention_mask": _sight,
    "image_embeds_position_mask": _latents,
    "bbox": _boxes,
    "state": _wide("max_state_dim"),
    "actions": _wide("max_action_dim", "chunk_size"),
    "noise": _wide("max_action_dim", "chunk_size"),
    "timestep": _times,
    "pixel_attention_mask": _cameras,
    "sample": _not,
}
