"""Inputs for a model, from its main input's name, its forward's parameters and its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.places import configs_of, further, special_ids, with_places

_SAMPLES = 2
_LENGTH = 12
_PADDED = 3
"""Positions at the end of the first sample."""

Batch = dict[str, Any]


def batches(model: nn.Module) -> Iterator[tuple[str, Callable[[], Batch]]]:
    """Yields what makes a batch of the model, perhaps, and what kind of input that is: what trains most of it first."""
    takes = set(inspect.signature(model.forward).parameters)
    if "past_values" in takes:
        yield from (("series", partial(dict, batch)) for batch in _series(model, takes))
    if "shared_kv_states" in takes:
        yield "states of another model", partial(_of_another_model, model)
    for kind, part in (*_images(model, takes), *_sounds(model, takes)):
        if "input_ids" in takes:
            yield f"text and {kind}", partial(with_places, model, part, _random_ids(model, _LENGTH))
            yield f"text and {kind}", partial(_with_text, model, takes, part)
        else:
            yield kind, partial(_with_decoder, model, takes, part)
    if "input_ids" in takes:
        yield "text", partial(_with_text, model, takes, {})


def labelled(model: nn.Module, batch: Batch) -> Iterator[Batch]:
    """Yields the batch with what may be its labels; without, at last."""
    takes = set(inspect.signature(model.forward).parameters)
    if "labels" in takes or "labels" in _spread(model):
        config: Any = model.config
        classes = torch.arange(_SAMPLES) % max(1, int(getattr(config, "num_labels", 2) or 2))
        if "decoder_input_ids" in batch or not {"input_ids"} & set(batch):
            length = batch["decoder_input_ids"].shape[1] if "decoder_input_ids" in batch else 4
            yield {**batch, "labels": _random_ids(model, length).repeat_interleave(_channels(model) or 1, 0)}
        if "input_ids" in batch:
            labels = batch["input_ids"].clone()
            labels[0, -_PADDED:] = -100
            yield {**batch, "labels": labels if labels.ndim == 2 else labels[..., 0]}
            if len(labels) > _SAMPLES:
                yield {**batch, "labels": labels.reshape(_SAMPLES, -1, labels.shape[1]).transpose(1, 2)}
            yield {**batch, "labels": batch["input_ids"].clone()}
        yield {**batch, "labels": classes}
        yield {**batch, "labels": torch.zeros(_SAMPLES, 32, 32, dtype=torch.long)}
    if "return_loss" in takes:
        yield {**batch, "return_loss": True}
    yield batch


def _spread(model: nn.Module) -> set[str]:
    """Names that a forward takes by **kwargs."""
    kinds = {one.kind for one in inspect.signature(model.forward).parameters.values()}
    return {"labels"} if inspect.Parameter.VAR_KEYWORD in kinds and "CausalLM" in type(model).__name__ else set()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_generator(), dtype=torch.float64)


def _vocabulary(model: nn.Module) -> int:
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    sizes = [getattr(one, "vocab_size", None) for one in (text, config)]
    return next((size for size in sizes if isinstance(size, int) and size > 0), 32)


def _random_ids(model: nn.Module, length: int) -> Tensor:
    """Returns tokens that are none of the special ones, which have the highest numbers and a few of the lowest."""
    vocabulary = _vocabulary(model)
    most = vocabulary - 40 if vocabulary > 80 else vocabulary
    special = special_ids(model.config)
    plain = [token for token in range(min(5, most - 1), most) if token not in special] or [most - 1]
    return torch.tensor(plain)[torch.randint(len(plain), (_SAMPLES, length), generator=_generator())]


def _length(model: nn.Module, part: Batch) -> int:
    """Returns how long the text is: as long as what is made of a sound that is added to it."""
    frames = getattr(model.config, "audio_length_per_tok", None)
    return part["input_features"].shape[-1] // frames if frames and "input_features" in part else _LENGTH


def _text(model: nn.Module, takes: set[str], length: int) -> Batch:
    ids = _random_ids(model, length)
    codebooks = getattr(model.config, "num_codebooks", None)
    if codebooks and "encoder_hidden_states" in takes:  # a row of tokens for each of a sample's codebooks
        ids = ids.repeat_interleave(int(codebooks), 0)
    elif codebooks and hasattr(model.config, "codec_config"):  # a token of the text, and one of each codebook
        ids = torch.stack([ids, *[ids % _first(model, "codebook_vocab_size", default=1)] * int(codebooks)], -1)
    batch: Batch = {"input_ids": ids}
    if "attention_mask" in takes:
        mask = torch.ones(_SAMPLES, length, dtype=torch.long)
        mask[0, -_PADDED:] = 0
        batch["attention_mask"] = mask
    if "lang_ids" in takes:
        batch["lang_ids"] = torch.zeros(_SAMPLES, dtype=torch.long)
    return batch


def _of_another_model(model: nn.Module) -> Batch:
    """Returns what an assistant is given of the model that it assists: embeddings beside hidden states, and keys and
    values for each kind of layer."""
    config: Any = model.config
    text = config.get_text_config()
    states = _random(2, _SAMPLES, text.num_key_value_heads, _LENGTH, text.head_dim).to(torch.get_default_dtype())
    return {
        "inputs_embeds": _random(_SAMPLES, _LENGTH, 2 * config.backbone_hidden_size),
        "shared_kv_states": dict.fromkeys(dict.fromkeys(text.layer_types), (states[0], states[1])),
    }


def _with_text(model: nn.Module, takes: set[str], part: Batch) -> Batch:
    batch = {**_text(model, takes, _length(model, part)), **_with_decoder(model, takes, part)}
    return batch | further(model, takes, batch) if part else batch


def _with_decoder(model: nn.Module, takes: set[str], part: Batch) -> Batch:
    decodes = getattr(model.config, "is_encoder_decoder", False) or hasattr(model.config, "canvas_length")
    if "decoder_input_ids" in takes and decodes:
        ids, channels = _random_ids(model, _LENGTH - 2), _channels(model)
        return {**part, "decoder_input_ids": torch.stack([ids] * channels, -1) if channels else ids}
    return dict(part)


def _channels(model: nn.Module) -> int:
    """Returns how many rows of tokens a decoder makes of each sample of sound, 0 where it is no such one."""
    return int(getattr(getattr(model.config, "decoder_config", None), "num_channels", None) or 0)


def _first(model: nn.Module, *names: str, default: Any) -> Any:
    """Returns the first of the fields that any of the configurations has."""
    for config in reversed(configs_of(model.config)):
        for name in names:
            value = getattr(config, name, None)
            if value is not None and not isinstance(value, dict):
                return value
    return default


def _side(value: Any) -> int:
    return int(value) if isinstance(value, int) else int(value[-1])


def _images(model: nn.Module, takes: set[str]) -> Iterator[tuple[str, Batch]]:
    side = _side(_first(model, "image_size", "input_size", default=32))
    side = 32 if side <= 0 else side
    side = int(side / min(getattr(model.config, "scaled_images_ratios", None) or (1,)))  # the smallest is still one
    channels = int(_first(model, "num_channels", "in_channels", "in_chans", default=3))
    if "pixel_values" in takes:
        if "image_grid_thw" in takes:
            patch = _side(_first(model, "patch_size", default=4))
            grid = torch.tensor([[1, 4, 4]] * _SAMPLES)
            area = patch * patch
            for time in dict.fromkeys((int(_first(model, "temporal_patch_size", default=1)), 1, 2)):
                patches = _random(16 * _SAMPLES, channels * time * area)
                yield "images", {"pixel_values": patches, "image_grid_thw": grid}
            patches = _random(16 * _SAMPLES, channels, patch, patch)
            yield "images", {"pixel_values": patches, "image_grid_thw": grid}
        if "image_token_pooling" in takes:  # patches, and which of them make a place in the text
            patch = _side(_first(model, "patch_size", default=4))
            count = (side // patch) ** 2
            yield (
                "images",
                {
                    "pixel_values": _random(_SAMPLES, count, channels * patch * patch),
                    "image_token_pooling": torch.arange(_SAMPLES * count).reshape(-1, count // 4),
                    "image_grids": torch.tensor([[2, 2, 0, 0]] * _SAMPLES),
                },
            )
        plain = {"pixel_values": _random(_SAMPLES, channels, side, side)}
        sizes = torch.tensor([[side, side]] * _SAMPLES)
        if "bool_masked_pos" in takes:
            patches = (side // max(1, _side(_first(model, "patch_size", default=4)))) ** 2
            masked = torch.zeros(_SAMPLES, patches, dtype=torch.bool)
            masked[:, ::2] = True
            yield "images", {**plain, "bool_masked_pos": masked}
        if "image_sizes" in takes:
            for number in (2, 3, 5):
                tiles = {"pixel_values": _random(_SAMPLES, number, channels, side, side)}
                yield "images", {**tiles, "image_sizes": sizes}
        if "image_sizes" in takes:
            yield "images", {**plain, "image_sizes": sizes}
        if "spatial_shapes" in takes:
            patch = _side(_first(model, "patch_size", default=4))
            yield (
                "images",
                {
                    "pixel_values": _random(_SAMPLES, 16, channels * patch * patch),
                    "pixel_attention_mask": torch.ones(_SAMPLES, 16, dtype=torch.long),
                    "spatial_shapes": torch.tensor([[4, 4]] * _SAMPLES),
                },
            )
        yield "images", plain
        if "input_ids" in takes:
            yield "images", {"pixel_values": _random(_SAMPLES, 1, channels, side, side)}
            tiles = int(_first(model, "max_num_tiles", default=1))
            yield "images", {"pixel_values": _random(_SAMPLES, 1, tiles, channels, side, side)}
        if frames := _first(model, "num_frames", "frames_per_clip", default=0):
            yield "video", {"pixel_values": _random(_SAMPLES, int(frames), channels, side, side)}
    if "flattened_patches" in takes:
        patch = _side(_first(model, "patch_size", default=4))
        places = torch.cartesian_prod(torch.arange(1, 4), torch.arange(1, 4)).double().expand(_SAMPLES, 9, 2)
        depth = int(_first(model, "patch_embed_hidden_size", default=channels * patch * patch))
        yield "images", {"flattened_patches": torch.cat([places, _random(_SAMPLES, 9, depth)], 2)}
    if "pixel_values_videos" in takes and "image_grid_thw" not in takes:
        frames = int(_first(model, "num_frames", "frames_per_clip", default=2))
        yield "video", {"pixel_values_videos": _random(_SAMPLES, frames, channels, side, side)}


def _sounds(model: nn.Module, takes: set[str]) -> Iterator[tuple[str, Batch]]:
    named = ("num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", "feature_projection_input_dim")
    bins = int(_first(model, *named, default=80))
    window = int(_first(model, "n_window", default=0))
    frames = 2 * window if window else int(_first(model, "max_source_positions", default=32))
    for name in ("input_features", "audio_values"):
        if name in takes:
            extra: Batch = {}
            for mask in ("input_features_mask", "feature_attention_mask"):
                if mask in takes:
                    extra[mask] = torch.ones(_SAMPLES, 2 * frames, dtype=torch.long)
            yield "sound", {name: _random(_SAMPLES, bins, 2 * frames), **extra}
            yield "sound", {name: _random(_SAMPLES, 2 * frames, bins), **extra}
            yield "sound", {name: _random(_SAMPLES, bins, 2 * frames)}
            yield "sound", {name: _random(_SAMPLES, 64, 2 * bins)}
            for width in (
                4 * bins,
                *filter(None, (getattr(one, "input_size", None) for one in configs_of(model.config))),
            ):
                mask = {"input_features_mask": torch.ones(_SAMPLES, 64, dtype=torch.long)}
                yield "sound", {name: _random(_SAMPLES, 64, width), **{k: v for k, v in mask.items() if k in takes}}
    if "input_values" in takes:
        length = int(_first(model, "max_length", default=0))
        if length:
            yield "sound", {"input_values": _random(_SAMPLES, length, bins)}
        for samples in (2000, 6000, 3840):
            yield "sound", {"input_values": _random(_SAMPLES, samples)}
            yield "sound", {"input_values": _random(_SAMPLES, 1, samples)}


def _series(model: nn.Module, takes: set[str]) -> Iterator[Batch]:
    config: Any = model.config
    length = int(_first(model, "context_length", default=16) or 16)
    lags = max(getattr(config, "lags_sequence", None) or [0])
    ahead = int(_first(model, "prediction_length", "horizon_length", default=4) or 4)
    features = int(getattr(config, "num_time_features", 0) or 0)
    channels = int(_first(model, "num_input_channels", "input_size", default=1) or 1)
    past = length + lags
    univariate = "past_time_features" in takes
    frequency = {"freq": torch.zeros(_SAMPLES, 1, dtype=torch.long)} if "freq" in takes else {}
    batch: Batch = {"past_values": _random(_SAMPLES, past) if univariate else _random(_SAMPLES, past, channels)}
    if univariate:
        batch["past_time_features"] = _random(_SAMPLES, past, features)
        batch["past_observed_mask"] = torch.ones(_SAMPLES, past)
        batch["future_values"] = _random(_SAMPLES, ahead)
        batch["future_time_features"] = _random(_SAMPLES, ahead, features)
        yield batch
    if "future_values" in takes:
        yield {**batch, "future_values": _random(_SAMPLES, ahead, channels)}
        if channels == 1:
            yield {**frequency, "past_values": _random(_SAMPLES, past), "future_values": _random(_SAMPLES, ahead)}
    if "target_values" in takes:
        classes = int(getattr(config, "num_targets", 0) or 2)
        yield {**batch, "target_values": torch.arange(_SAMPLES) % classes}
        yield {**batch, "target_values": _random(_SAMPLES, classes)}
    if frequency:
        yield {**frequency, "past_values": _random(_SAMPLES, past)}
    yield batch
    yield {"past_values": _random(_SAMPLES, past)}
