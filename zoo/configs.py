"""Tiny configurations, derived from the fields of a configuration class: by what a field is called and holds.

No model is named here: what the rules cannot know of one is in `particular`. Where the rules of one `Size` do not fit a
model, the next is tried; the last leaves widths as they are and only has fewer layers.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zoo.particular import PARTICULAR, PARTS

VOCABULARY = 128
_LAYERS = 4
_CODES = 16
_LAYER_COUNT = re.compile(r"^(num_hidden_layers|num_layers|n_layers?)$")
_RANDOM = re.compile(r"drop|jitter|noise|mask_\w+_prob|_mask_prob")


@dataclass(frozen=True, slots=True)
class Size:
    """Widths of a tiny model. `width` 0: as the class has them."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    fills: bool = False
    """Whether fields that hold None get a number as well."""
    inner: int = 2
    """Times the width: inside of feed-forward modules."""
    outer: int = 1
    """Times the width: what an encoder of images returns."""
    image: int = 32
    window: int = 8
    layers: int = _LAYERS
    sees: bool = False
    """Whether text shares its positions with images."""
    optional: bool = True
    """Whether there are parts that the class has not by itself, and need not have."""


SIZES = (
    Size(64, 4, 2, 16), Size(64, 4, 2, 16, fills=True), Size(64, 4, 4, 16, fills=True), Size(64, 4, 4, 16),
    Size(64, 4, 4, 16, inner=4, outer=4), Size(64, 4, 4, 16, image=64, window=2), Size(64, 8, 8, 16),
    Size(64, 4, 4, 32), Size(0, 0, 0, 0, image=64), Size(64, 4, 4, 16, optional=False),
)  # fmt: skip


class _Tokens:
    """Gives each special token of a model a number of its own, from the end of the vocabulary."""

    def __init__(self) -> None:
        self._next = VOCABULARY - 1

    def one(self) -> int:
        self._next -= 1
        return self._next + 1


def tiny_config(config_class: Any, size: Size, *, causal: bool = False) -> Any:
    """Returns a small configuration without dropout. Raises: whatever the class raises of it."""
    parts = getattr(config_class, "sub_configs", None) or {}
    size = dataclasses.replace(size, sees=any("vision" in name or "thinker" in name for name in parts))
    fields = _fields(config_class, size, _Tokens())
    if causal and "is_decoder" in (field.name for field in dataclasses.fields(config_class)):
        fields["is_decoder"] = True
    config = config_class(**fields)
    if size.sees and hasattr(config, "image_token_id") and not hasattr(config, "vision_start_token_id"):
        config.vision_start_token_id = VOCABULARY - 41  # as files of checkpoints have it, which no class declares
    return config


def _fields(config_class: Any, size: Size, tokens: _Tokens) -> dict[str, Any]:
    default = _default(config_class)
    names = {field.name for field in dataclasses.fields(config_class)} & {"out_indices", "backbone_out_indices"}
    if any(_held(default, name) or size.fills for name in names):  # results of four of the layers are taken
        size = dataclasses.replace(size, layers=_LAYERS + 1)
    made: dict[str, Any] = _known(config_class, default, size, tokens)
    layers = next((one for name, one in _values(config_class, default, size) if _LAYER_COUNT.search(name)), None)
    for name, value in _values(config_class, default, size):
        if name in made:
            continue
        if isinstance(value, (list, tuple)) and len(value) == layers and layers > size.layers:
            made[name] = type(value)(_some(list(value), size.layers))
            continue
        instead = _repeated(value, layers, size) or _smaller(name, value, size, tokens)
        if instead is not None and instead != value:
            made[name] = instead
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        inside = _held(default, name) if default is not None else None
        if inside is None and not size.optional and getattr(_defaults_of(config_class, name), "optional", False):
            continue
        actual = type(inside) if dataclasses.is_dataclass(inside) else _class_of(config_class, name, part)
        if not dataclasses.is_dataclass(actual) or not hasattr(actual, "model_type"):
            continue
        fields = _fields(actual, size, tokens)
        if actual.model_type:
            fields["model_type"] = actual.model_type
        fields |= _said_of_part(config_class, name, actual)
        made[name] = fields | PARTS.get(config_class.__name__, {}).get(name, {})
    return made | PARTICULAR.get(config_class.__name__, {})


def _class_of(config_class: Any, name: str, part: Any) -> Any:
    """Returns the class of a part of a configuration that cannot be made without it."""
    from transformers import CONFIG_MAPPING

    said = getattr(_defaults_of(config_class, name), "model_type", None)
    return CONFIG_MAPPING[said] if said else part


def _said_of_part(config_class: Any, name: str, part: Any) -> dict[str, Any]:
    """Returns what the whole turns on or off in a part, such as a decoder's attention to an encoder, and what it sets
    that the part's own class leaves open."""
    default = _default(part)
    given = getattr(_defaults_of(config_class, name), "init_kwargs", None) or {}
    return {
        field: value
        for field, value in given.items()
        if isinstance(value, bool) or (isinstance(value, int) and default is not None and _held(default, field) is None)
    }


def _defaults_of(config_class: Any, name: str) -> Any:
    """Returns what a configuration says of a part that is not given."""
    return (getattr(config_class, "sub_configs_defaults", None) or {}).get(name)


def _known(config_class: Any, default: Any, size: Size, tokens: _Tokens) -> dict[str, Any]:
    """Returns fields that hold None in the class, or what is too much for a tiny model, and cannot be told by sizes."""
    found: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(config_class)):
        value = _held(default, name)
        if name == "vocabulary_map":
            found[name] = _words(tokens)
        elif "pinpoints" in name:
            found[name] = [[size.image, size.image], [size.image, 2 * size.image]]
        elif re.search(r"feature_layers?$|layers?_ind\w+$|cross_attention_layers$", name) and value is not None:
            places = value if isinstance(value, (list, tuple)) else [value]
            near = [max(one, -size.layers) if one < 0 else min(one, size.layers - 1) for one in places]
            found[name] = list(dict.fromkeys(near)) if isinstance(value, (list, tuple)) else near[0]
        elif value is None and re.search(r"^(image|video|audio)_token_(id|index)$", name):
            found[name] = tokens.one()
        elif value is None and name == "vocab_size":
            found[name] = VOCABULARY
        elif value is None and name in ("mask_token_id", "pad_token_id") and _held(default, "vocab_size") is None:
            found[name] = 1 if name.startswith("pad") else tokens.one()  # they come with the vocabulary
        elif value is None and name == "default_language":
            found[name] = next(iter(_held(default, "languages") or ()), None)
        elif name == "mlp_layer_types" and value is None:
            found[name] = ["dense", *["sparse"] * (size.layers - 1)]
        elif re.search(r"^use_\w+_text_input$", name):
            found[name] = size.fills
        elif name == "downsample_rate" and value is None:
            found[name] = "4/8"
        elif name == "deepstack_layer_map":
            found[name] = [[-2, 1]]
        elif name == "spatial_target_layers":
            found[name] = [2]
    return found


def _words(tokens: _Tokens) -> dict[str, int]:
    """Returns the part of a vocabulary in which codes of images have words, as tokenizers for such models have it."""
    words = {word: tokens.one() for word in ("<image>", "<|extra_200|>")}
    first = VOCABULARY - 40 - 2 * _CODES
    for code in range(_CODES):
        letters = "".join(chr(ord("A") + int(digit)) for digit in str(code))
        words[f"IMGIMG{letters}Z"] = first + code
        words[f"<|visual token {code:06d}|>"] = first + _CODES + code
    return words


def _some(value: list[Any], layers: int) -> list[Any]:
    """Returns as many of a list with an entry for each layer as there are layers, with one of each kind."""
    kinds = [one for number, one in enumerate(value) if one not in value[:number]][:layers]
    return [*value[: layers - len(kinds)], *kinds] if set(value[:layers]) != set(kinds) else value[:layers]


def _repeated(value: Any, layers: int | None, size: Size) -> list[Any] | None:
    """Returns what stands for the layers in the place of [[kinds, how often]], if that is what is there."""
    match value:
        case [[[*kinds], int(count)]] if layers and kinds and len(kinds) * count == layers:
            return [[kinds, max(1, size.layers // len(kinds))]]
    return None


def _default(config_class: Any) -> Any:
    try:
        return config_class()
    except Exception:  # parts without which it cannot be: the fields' own defaults do
        return None


def _values(config_class: Any, default: Any, size: Size) -> Iterator[tuple[str, Any]]:
    """Yields the fields that tell a class's size, with what they hold; those that stay None are derived of others."""
    for field in dataclasses.fields(config_class):
        value = field.default
        if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        held = _held(default, field.name)
        if value is None and size.fills and _of_words(held) and len(held) > size.layers:
            yield field.name, held  # an entry for each layer, as a rule
        elif value is None and isinstance(held, (list, tuple)) and held and isinstance(held[0], (list, tuple)):
            yield field.name, held  # kinds of layers, and how often they are repeated
        elif value is None and size.fills and field.name == "out_indices":
            yield field.name, [1 << 20] * 4
        elif value is None and size.fills and field.name == "layer_types" and held is None:
            yield field.name, ["full_attention"] * (1 << 10)
        elif value is None and size.fills and _takes_number(field):
            found = _number(field.name, 1 << 20, size, _Tokens())
            if found is not None and found < 1 << 20:
                yield field.name, 1 << 20  # whatever it is made of that
        elif isinstance(value, dict) or (value is None and field.name.startswith("rope_")):
            value = getattr(default, field.name, value)  # what the class writes into it
            if isinstance(value, dict):
                yield field.name, value
        elif value is not None and value is not dataclasses.MISSING:
            yield field.name, value


def _held(default: Any, name: str) -> Any:
    try:
        return getattr(default, name, None)
    except Exception:  # one for each layer
        return None


def _of_words(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)


def _takes_number(field: Any) -> bool:
    kind = str(getattr(field.type, "__name__", field.type)) if isinstance(field.type, type) else str(field.type)
    return kind.startswith(("int", "typing.Optional[int]")) and not field.name.endswith("_id")


def _smaller(name: str, value: Any, size: Size, tokens: _Tokens) -> Any:
    """Returns what a field should hold, None where it stays."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return 0.0 if _RANDOM.search(name) else None
    if isinstance(value, (list, tuple)) and value and all(type(one) is float for one in value):
        return [0.0] * len(value) if _RANDOM.search(name) else None
    if isinstance(value, int):
        return _number(name, value, size, tokens)
    if name == "layer_types" and isinstance(value, list) and len(value) == 1 << 10:
        return value[: size.layers]
    if isinstance(value, (list, tuple)) and value and all(type(one) is int for one in value):
        return _numbers(name, list(value), size, tokens)
    if isinstance(value, dict) and size.width and (size.sees or "mrope_section" in value) and "rope_theta" in value:
        half = int(size.head_dim * (value.get("partial_rotary_factor") or 1.0)) // 2
        return {**value, "mrope_section": _sections(list(value.get("mrope_section") or (3, 3, 2)), half)}
    return None


def _sections(value: list[int], total: int) -> list[int]:
    small = [max(1, total * one // sum(value)) for one in value]
    small[0] += total - sum(small)
    return small


def _number(name: str, value: int, size: Size, tokens: _Tokens) -> int | None:
    if re.search(r"token_(id|index)$", name) or name.endswith(("_token", "image_index")):
        return value if 0 <= value < VOCABULARY - 40 else tokens.one() if value > 0 else None
    if "vocab" in name:
        return min(value, VOCABULARY)
    if "shared_layers" in name:
        return min(value, 1)
    if re.search(r"(^|_)(layers?|blocks?|depth)$", name) and re.search(r"num|^n_|^depth|^(en|de)coder_layers", name):
        return size.layers if _LAYER_COUNT.search(name) and value > 1 else min(value, size.layers)
    if re.search(r"first_k_dense|max_window_layers|moe_layer_start|mtp|nextn", name):
        return min(value, 1)
    if "image_size" in name:
        return min(value, size.image)
    if not size.width:
        return None
    for pattern, small in _rules(size):
        if re.search(pattern, name):
            return min(value, small)
    return None


def _rules(size: Size) -> list[tuple[str, int]]:
    return [
        (r"kpool$|compress_ratio$", 2),
        (r"budget$", 8),
        (r"downsample_rate$", 4),
        (r"base_channels$", 32),
        (r"num_embeddings$|codebook_size$", _CODES),
        (r"^context_length$", 512),
        (r"^horizon_length$", 8),
        (r"^output_quantile_len$", 64),
        (r"tokens_per_image$", 16),
        (r"out_hidden_size$", size.outer * size.width),
        (r"vision_output_dim$", 2 * size.width),
        (r"n_group|group_size|topk_group|expert_group", 1),
        (r"rotary_dim|rope_dim", size.head_dim),
        (r"experts?_per|top_?k|topk|moe_k$", 2),
        (r"experts$", 4),
        (r"(kv|key_value|query_group)\w*heads|heads_kv|num_kv", size.kv_heads),
        (r"heads?$", size.heads),
        (r"head_dim|head_size|d_kv|kv_channels|key_value_proj_dim|dim_head", size.head_dim),
        (r"lora_rank|_rank$", 16),
        (r"num_frames|frames_per", 4),
        (r"temporal_patch|tubelet", 2),
        (r"patch_size", 4),
        (r"positions?$|position_embeddings|max_\w*(len|length|seqlen|size)$|n_ctx|seq_length|n_positions", 64),
        (r"sliding_window|attention_window|chunk_size|window_size|local_attention", size.window),
        (r"state_size|d_state|conv_kernel|d_conv|kernel|stride|channels$|groups?$|mel|labels|buckets", 1 << 30),
        (r"intermediate|ffn|d_ff|d_inner|mlp_dim|feedforward|feed_forward", size.inner * size.width),
        (r"hidden|d_model|d_latents|embd|embed|dim$|dim_|width|_size$|projection|channels", size.width),
        (r"num_(query|latents)|query_num|query_tokens|codevectors|negatives", 8),
    ]


def _numbers(name: str, value: list[int], size: Size, tokens: _Tokens) -> list[int] | None:
    if re.search(r"_pos_shape$", name) and len(value) == 2:  # its product is the length of the text
        return [3, 4]
    if re.search(r"_embds_dim$", name) and size.width:  # together they are the width
        return _sections(value, size.width)
    if re.search(r"(^|_)out_indices$", name) and len(value) < size.layers:
        return list(range(1, len(value) + 1))
    if re.search(r"token_id", name):
        return [_number("token_id", one, size, tokens) or one for one in value]
    if re.search(r"depths|num_\w*(layers|blocks)", name):
        return [min(one, 2) for one in value]
    if "image_size" in name:
        return [min(one, size.image) for one in value]
    if not size.width:
        return None
    if re.search(r"heads", name):
        return [_power(one) for one in value]
    if re.search(r"hidden_sizes|embed_dims?|conv_dim|widths|dims$|channels|neck_hidden", name):
        return [min(one, max(16, _power(one) // 4)) for one in value]
    return None


def _power(value: int) -> int:
    return 1 << max(0, int(math.log2(max(1, value))))
