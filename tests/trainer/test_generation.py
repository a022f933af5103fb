"""Tokens that a model generates where it is cut are those of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from fold3d import ConfigError, Engine, ParallelConfig
from fold3d.trainer.evaluation import generate
from tests.helpers import data, models
from tests.helpers.ranks import RankPool
from tests.trace import stacks

PROMPTS = torch.tensor([[0, 0, 5, 9], [7, 3, 12, 4]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
CONFIGS = {"gpt2": models.gpt2_config, "llama": models.llama_config}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.5, "top_k": 20},
    "beams": {"num_beams": 3, "repetition_penalty": 1.3},
}
SGD = functools.partial(torch.optim.SGD, lr=0.5)


def built(kind: str, seed: int = 0) -> Any:
    """Returns a model; of "lora" one with adapters that compute something."""
    if kind != "lora":
        return models.build(CONFIGS[kind](), dtype=torch.float64, seed=seed)
    base = models.build(CONFIGS["llama"](), dtype=torch.float64)
    torch.manual_seed(seed)
    adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(base, adapters)


def trained(kind: str, layout: dict[str, Any]) -> Engine:
    """Returns an engine after one step, so that weights count that came to their layers by an update."""
    model = built(kind)
    engine = Engine(model, ParallelConfig(micro_batches=2, **layout), optimizer=SGD)
    rows = data.batch(8, 8)
    share = 8 // engine.topology.dp
    first = engine.topology.dp_rank * share
    engine.step({name: value[first : first + share] for name, value in rows.items()})
    return engine


def tokens(kind: str, layout: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what is generated in each way, and what stock generates with those weights, and with its cache."""
    engine = trained(kind, layout)
    stock = built(kind, seed=1).eval()
    stock.load_state_dict(engine.state_dict()["model"], strict=False)
    topology = engine.topology
    made, expected = {}, {}
    for way, options in WAYS.items():
        options = {"attention_mask": MASK, "max_new_tokens": 6, "pad_token_id": 0, **options}
        torch.manual_seed(3)
        expected[way] = stock.generate(PROMPTS, use_cache=True, **options).tolist()
        torch.manual_seed(3 + list(topology.replica(topology.dp_rank)).index(topology.rank))  # ranks differ
        made[way] = generate(engine, PROMPTS, **options).tolist()
    assert engine.model.training
    engine.step(data.batch(8 // engine.topology.dp, 8))  # goes on training
    engine.close()
    return made, expected


def translated(kind: str, layout: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `tokens`, of an encoder-decoder."""
    model, batch = stacks.build(kind)
    engine = Engine(model, ParallelConfig(micro_batches=1, **layout), optimizer=SGD)
    engine.step(batch)
    stock, _ = stacks.build(kind)
    stock.load_state_dict(engine.state_dict()["model"], strict=False)
    stock.eval()
    prompt = {name: batch[name] for name in ("input_ids", "attention_mask")}
    made, expected = {}, {}
    for way, options in WAYS.items():
        options = {**prompt, "max_new_tokens": 6, **options}
        torch.manual_seed(3)
        expected[way] = stock.generate(**options).tolist()
        torch.manual_seed(3)
        made[way] = generate(engine, **options).tolist()
    engine.step(batch)
    with pytest.raises(ConfigError, match="output_attentions"):
        generate(engine, **prompt, output_attentions=True)
    engine.close()
    return made, expected


@pytest.mark.full
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_encoder_decoders_in_one_process(kind: str) -> None:
    """Cut."""
    made, expected = translated(kind, {"segments": 2})
    assert made == expected
    assert len(made) == len(WAYS) and made["greedy"] != made["sampled"]


@pytest.mark.parametrize("kind", ["t5", "bart"])
@pytest.mark.parametrize("layout", [{"pp": 2, "segments": 1}, {"tp": 2, "segments": 1}], ids=str)
def test_encoder_decoders_over_processes(ranks: RankPool, kind: str, layout: dict[str, Any]) -> None:
    for made, expected in ranks.run(translated, 2, kind, {"dp": 1, **layout}):
        assert made == expected


def speech_to_text() -> Any:
    """Returns a model whose parts are models with names of their own for what they take."""
    from transformers import BertConfig, SpeechEncoderDecoderConfig, SpeechEncoderDecoderModel, Wav2Vec2Config

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40}
    sound = Wav2Vec2Config(
        **sizes, num_hidden_layers=2, conv_dim=(8, 8), conv_kernel=(10, 3), conv_stride=(5, 2), layerdrop=0.0,
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0,
    )  # fmt: skip
    text = BertConfig(**sizes, num_hidden_layers=2, is_decoder=True, add_cross_attention=True)
    torch.manual_seed(0)
    model = SpeechEncoderDecoderModel(SpeechEncoderDecoderConfig.from_encoder_decoder_configs(sound, text)).double()
    model.config.pad_token_id, model.config.decoder_start_token_id = 0, 1
    model.generation_config.update(pad_token_id=0, decoder_start_token_id=1, eos_token_id=2)
    return model


def test_an_encoder_with_another_main_input() -> None:
    """The whole calls its input `inputs`, its encoder `input_values`; two sounds of different lengths."""
    generator = torch.Generator().manual_seed(1)
    sound = torch.randn(2, 200, dtype=torch.double, generator=generator)
    mask = torch.ones(2, 200, dtype=torch.long)
    mask[1, 140:] = 0
    given = {"attention_mask": mask, "max_new_tokens": 6, "num_beams": 2}
    expected = speech_to_text().eval().generate(sound, **given)
    batch = {"input_values": sound, "attention_mask": mask, "labels": torch.tensor([[5, 6, 7], [8, 9, 10]])}
    engine = Engine(speech_to_text(), ParallelConfig(micro_batches=1, segments=2), optimizer=SGD, example=batch)
    assert torch.equal(generate(engine, sound, **given), expected)
    assert torch.equal(generate(engine, input_values=sound, **given), expected)
    engine.close()


def test_a_generate_of_ones_own_is_refused() -> None:
    """It may call parts of the model."""
    model, batch = stacks.build("whisper")
    engine = Engine(model, ParallelConfig(micro_batches=1, segments=2), optimizer=SGD, example=batch)
    with pytest.raises(ConfigError, match="WhisperForConditionalGeneration has a generate"):
        generate(engine, **batch)
    engine.close()


LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2, "segments": 2},
    {"tp": 2, "segments": 1},
    {"dp": 2, "pp": 2, "segments": 1},
]


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tokens_over_processes(ranks: RankPool, kind: str, layout: dict[str, Any]) -> None:
    """Greedy, sampled and by beams, with prompts of several lengths, on every rank."""
    size = layout.get("dp", 1) * layout.get("pp", 1) * layout.get("tp", 1)
    for made, expected in ranks.run(tokens, size, kind, {"dp": 1, **layout}):
        assert made == expected


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2}], ids=str)
def test_tokens_with_adapters_over_processes(ranks: RankPool, layout: dict[str, Any]) -> None:
    """PEFT's generate() is transformers' of the model inside."""
    for made, expected in ranks.run(tokens, 2, "lora", {"dp": 1, "segments": 1, **layout}):
        assert made == expected


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("kind", ["llama", "lora"])
@pytest.mark.parametrize("layout", [{"segments": 2}, {"segments": 1}], ids=str)
def test_tokens_in_one_process(layout: dict[str, Any], kind: str) -> None:
    """Cut, and whole."""
    made, expected = tokens(kind, layout)
    assert made == expected


def test_ways_that_need_a_cache_are_refused() -> None:
    """Where the model is cut."""
    engine = trained("llama", {"segments": 2})
    with pytest.raises(ConfigError, match="use_cache"):
        generate(engine, PROMPTS, use_cache=True)
    with pytest.raises(ConfigError, match="assisted"):
        generate(engine, PROMPTS, prompt_lookup_num_tokens=2)
    engine.close()


def test_a_model_without_generate_is_refused() -> None:
    """It says which."""
    engine = Engine(torch.nn.Linear(2, 2), ParallelConfig(segments=1))
    with pytest.raises(ConfigError, match="Linear has no generate"):
        generate(engine)
    engine.close()
