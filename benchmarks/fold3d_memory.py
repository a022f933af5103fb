"""Which schedules of Fold3D's Table II fit into 40 GB, by the memory model.

    python -m benchmarks.fold3d_memory [--limit 40]

GPT-3 18B and 39B as in Tables I and II of Fold3D (Li et al., IEEE TPDS 2023): 128 devices, 256 samples a step, 4 of
2,048 tokens a micro-batch, tensor parallelism over 8 ranks with the sequence shared, 4 segments. Mixed precision: bf16
weights, fp32 gradients, fp32 weights and two moments of AdamW in the optimizer. What layers keep is counted on tensors
without values (fold3d/profile/layer_bytes.py) and divided by the ranks that share it. Nothing is trained.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import transformers

from fold3d import _C
from fold3d import schedule as schedules
from fold3d.plan.cluster_model import ClusterCosts, Work, cluster_model
from fold3d.plan.costs import LayerBytes
from fold3d.plan.memory import StagePeak, peaks_of
from fold3d.profile.layer_bytes import layer_bytes
from fold3d.trace import trace
from tests.helpers.layer_sums import activations_of, recomputed, with_head_done

SAMPLES, TOKENS, VOCABULARY, TP, SEGMENTS, BATCH = 4, 2048, 51200, 8, 4, 256
WEIGHT, GRADIENT, STATE = 2, 4, 12  # bytes of a parameter
RECOMPUTE = ("none", "blocks", "full")


@dataclass(frozen=True)
class Model:
    """A line of Table I, and how Table II spreads it over 128 devices."""

    name: str
    layers: int
    width: int
    heads: int
    dp: int
    pp: int

    @property
    def micro_batches(self) -> int:
        """Per step and replica."""
        return BATCH // self.dp // SAMPLES


MODELS = (Model("GPT-3 18B", 40, 6144, 48, 8, 2), Model("GPT-3 39B", 48, 8192, 64, 4, 4))


def layers_of(model: Model) -> tuple[list[LayerBytes], list[int], int]:
    """Returns what a rank's share of every layer needs, the parameters of each, and what a block hands on."""
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=model.width,
        n_head=model.heads,
        vocab_size=VOCABULARY,
        n_positions=TOKENS,
        activation_function="gelu_pytorch_tanh",
        attn_pdrop=0.0,
        tie_word_embeddings=False,
    )
    config.use_cache = False
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.zeros(SAMPLES, TOKENS, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    found = [_share(layer) for layer in layer_bytes(made, trace(made, example=batch), batch)]
    block = sum(p.numel() for p in made.get_submodule("transformer.h.0").parameters()) // TP
    ends = (VOCABULARY + TOKENS) * model.width // TP, VOCABULARY * model.width // TP
    layers = [found[0], *[found[1]] * model.layers, found[-1]]
    return layers, [ends[0], *[block] * model.layers, ends[1]], SAMPLES * TOKENS * model.width * WEIGHT // TP


def _share(layer: LayerBytes) -> LayerBytes:
    return LayerBytes(
        saved=layer.saved // TP,
        outputs=layer.outputs // TP,
        forward=layer.forward // TP,
        backward=layer.backward // TP,
    )


def peaks(model: Model, schedule: str, recompute: str, zero1: bool) -> tuple[StagePeak, ...]:
    """Returns the peak of each stage."""
    segments = 1 if schedule == "1f1b" else SEGMENTS
    made = schedules.generate(schedule, pp=model.pp, segments=segments, micro_batches=model.micro_batches)
    layers, parameters, handed = layers_of(model)
    if recompute == "blocks":
        layers = [layers[0], *(recomputed(layer, handed) for layer in layers[1:-1]), layers[-1]]
    chunks = model.pp * segments
    borders = [0, *accumulate([model.layers // chunks] * chunks)]
    parts, head = [], None
    for number, (first, end) in enumerate(pairwise(borders)):
        mine = slice(first + (number > 0), end + 1 + (number == chunks - 1))
        needs = activations_of(layers[mine], 0 if number == chunks - 1 else handed)
        count = sum(parameters[mine])
        parts.append(
            _C.ChunkBytes(
                weights=WEIGHT * count,
                gradients=GRADIENT * count,
                optimizer=STATE * count // (model.dp if zero1 else 1),
                inputs=handed if number else 0,
                saved=needs.saved,
                forward=needs.forward,
                backward=needs.backward,
            )
        )
        if number == chunks - 1:
            parted = with_head_done(layers[mine], handed)
            head = _C.HeadBytes(
                gradients=GRADIENT * parameters[-1],
                saved=parted.saved,
                forward=parted.forward,
                backward=parted.backward,
            )
    program = schedules.lower(made, reduce=True, recompute=(recompute == "full",) * chunks)
    forward = 6e-3 * model.layers / chunks
    backward = (3 if recompute == "blocks" else 2) * forward
    work = Work(
        forward=(forward,) * chunks,
        backward=(backward,) * chunks,
        activation_bytes=(handed,) * chunks,
        layers=(1,) * chunks,
        gradient_bytes=(0,) * chunks,
    )
    cluster = cluster_model(work, ClusterCosts(dp=model.dp, bandwidth=25e9), pp=model.pp)
    step = _C.simulate_step(program, cluster, breakdown=False, spans=True)
    return peaks_of(_C.memory_curves(program, _C.MemoryModel(parts, head=head), step))


def rows(limit: float, zero1: bool) -> Sequence[str]:
    """Returns the table's lines."""
    lines = [
        "| model | schedule | " + " | ".join(f'recompute="{way}"' for way in RECOMPUTE) + " |",
        "| --- | --- " + "| --- " * len(RECOMPUTE) + "|",
    ]
    for model in MODELS:
        for schedule in ("1f1b", "interleaved", "aiao"):
            cells = []
            for way in RECOMPUTE:
                fullest = max(peaks(model, schedule, way, zero1), key=lambda peak: peak.bytes)
                size = fullest.bytes / 1e9
                cells.append(f"{size:.1f} GB" if size <= limit else f"no ({size:.1f} GB)")
            lines.append(f"| {model.name} | {schedule} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=40.0, metavar="GB", help="of a device, default 40")
    options = parser.parse_args()
    for zero1 in (False, True):
        print(f"\nOptimizer state {'shared out over the replicas (zero1)' if zero1 else 'whole on every replica'}:\n")
        print("\n".join(rows(options.limit, zero1)))


if __name__ == "__main__":
    main()
