"""Everything that a user can set and that may not change a number: each setting's values, and which do not go together.

To add a setting or a value:

1. Give it a line in SETTINGS. Where it is a setting of ParallelConfig, the line has its name.
2. If the tests' cases do not know it yet, give `tests.dist.parity_cases.Case` a field, and `planned` a line.
3. Where it does not go with another setting, add a rule. Its parameters are the settings that it looks at, its
   docstring is the reason. A rule says what fold3d refuses, or what has no meaning. It never hides a wrong number.
4. Run `python -m tests.parity --write` (some minutes). It finds new cases, which `cases.csv` keeps.

`test_array.py` fails where step 1 or step 4 was forgotten: each setting of ParallelConfig stands here or in ELSEWHERE,
and each pair of values that the rules allow stands in a case. `python -m tests.parity` prints all of this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fold3d.schedule import registry
from tests.dist import parity_cases
from tests.dist.parity_cases import BUCKET_BYTES, Case
from tests.dist.parity_jobs import IN_A_LOOP

Row = dict[str, Any]
"""One value of each setting."""

MOST_RANKS = 4
MOST_CHUNKS = 8
LAYERS = {"t5": 4}
"""Family -> layers, 3 of the others; as many as there are chunks where that is more. Each stack of T5 has two: with one
nobody takes what its block returns as it is, and the sequence is not shared."""
SCHEDULES = {info.name: info for info in registry() if info.name not in parity_cases.ELSEWHERE}

SETTINGS: dict[str, tuple[Any, ...]] = {
    # the layout
    "dp": (1, 2, 3),
    "tp": (1, 2, 4),
    "pp": (1, 2, 4),
    "segments": (1, 2, 3),
    "partition": ("blocks", "graph"),
    # the order
    "schedule": tuple(SCHEDULES),
    "group_size": ("auto", "half"),  # of the micro-batches, rounded up
    "micro_batches": ("1", "2", "pp", "2pp+1"),
    "micro_batch_size": (None, 1),  # of 2 rows
    # memory
    "recompute": ("none", "full", "blocks", "modules", "checkpoints"),  # modules: MODULES; checkpoints: the model's own
    "offload": ("none", "boundaries", "activations"),
    "offload_disk": (False, True),
    "offload_optimizer": (False, True),
    # communication
    "dp_sync": ("auto", "early", "zero1", "serial"),
    "dp_sync_dtype": ("float32", "bfloat16"),
    "gradient_delay": (0, 1),
    "bucket_bytes": (BUCKET_BYTES, 0, 1 << 20),  # some layers, each layer, all of a rank's
    "preempt": (True, False),
    "tp_overlap": ("auto", "sub", "fused", "none"),
    "sequence_parallel": ("auto", True, False),
    "transport": ("auto", "c10d"),
    "kernels": ("torch", "fold3d"),
    # what is trained
    "family": ("plain", "gpt2-4", "llama", "opt-4", "mixture", "t5"),
    "tied": (True, False),
    "dtype": ("float64", "float32"),
    "dropout": (0.0, 0.1),
    "labels": ("full", "ragged", "padded", "empty"),
    "clip": (True, False),
    "frozen": (False, True),
    # how
    "through": ("engine", "trainer"),
    "resume": ("no", "again", "moved"),  # after two steps: in the same layout; from one process
    "looks": (True, False),  # whether the weights are read after every step
}
"""Setting -> values, the cheapest first."""
COSTLY = ("partition", "dp_sync_dtype", "resume")
"""Settings whose further values take seconds: a search for cuts, another run. They stand where a pair needs them."""

ELSEWHERE = {
    "parallel": "decides about dp, tp and pp; tests/engine/test_mesh.py, tests/trainer/test_parallel_auto.py",
    "global_batch_size": "decides about the micro-batches; where parallel is tested",
    "strategy": "says the settings here; tests/plan/test_resolve.py and tests/dist/test_parity_micro_batch_size.py",
    "retune": "lets the settings here change between steps; tests/engine/test_retuning.py, where micro_batch_size is",
    "tp_plan": "names modules of one model; tests/tensor_parallel, tests/dist/test_pretrained_tp.py",
    "blocks": "names modules of one model; tests/trace",
    "memory_limit": "lets the planner choose among the settings here; tests/dist/test_memory_limit.py",
    "loss_reduction": "says what a family's loss is; with micro_batch_size here, and tests/engine/test_division.py",
    "chunked_loss": "needs a language model's own loss; tests/tensor_parallel/test_chunked_loss.py",
    "offload_pool": "a size; tests/dist/test_offload.py",
    "flush": "for one schedule, and losses come a step later; tests/engine and tests/dist/test_without_flush.py",
    "weight_versions": "another recursion, with an update per micro-batch; tests/dist/test_weight_versions.py",
    "delay_correction": "another recursion; tests/engine and tests/dist/test_delay_correction.py",
    "seed": "says which masks and weights are drawn, and so changes numbers; tests/dist/test_parity_dropout.py",
    "comm_timeout": "seconds; tests/dist/test_failure*.py",
    "patience": "seconds; tests/dist/test_failure*.py",
}
"""Setting of ParallelConfig that is not varied here -> why, and where its tests are."""

MODULES = {
    "gpt2-4": "attn",
    "llama": "self_attn,mlp",
    "opt-4": "fc*",
    "mixture": "mlp",
    "t5": "*SelfAttention",
    "plain": "up",
}
"""Family -> the modules inside of a block that are computed again."""


@dataclass(frozen=True)
class Rule:
    """Says of some settings' values whether they go together."""

    name: str
    reason: str
    settings: tuple[str, ...]
    holds: Callable[..., bool]

    def allows(self, row: Row) -> bool:
        """Whether it holds of the row, which may lack settings: what it does not know it allows."""
        return any(name not in row for name in self.settings) or self.holds(*(row[name] for name in self.settings))


RULES: list[Rule] = []


def rule(holds: Callable[..., bool]) -> Callable[..., bool]:
    """Adds a predicate whose parameters are settings, and whose docstring is the reason."""
    reason = " ".join((holds.__doc__ or "").split())
    RULES.append(Rule(holds.__name__, reason, tuple(inspect.signature(holds).parameters), holds))
    return holds


# What fits on the machine


@rule
def few_ranks(dp: int, tp: int, pp: int) -> bool:
    """A case has four processes at most."""
    return dp * tp * pp <= MOST_RANKS


@rule
def few_chunks(pp: int, segments: int) -> bool:
    """A model has eight layers at most, so it is cut into eight chunks at most."""
    return pp * segments <= MOST_CHUNKS


# What fold3d refuses


@rule
def schedule_folds(schedule: str, segments: int) -> bool:
    """Refused: segments have no effect on this schedule."""
    return SCHEDULES[schedule].allows(int(segments))


@rule
def schedule_has_groups(schedule: str, group_size: str) -> bool:
    """Refused: group_size has no effect on this schedule."""
    return group_size == "auto" or SCHEDULES[schedule].uses_group_size


@rule
def graph_has_no_shards(partition: str, tp: int) -> bool:
    """Refused: tp divides equal blocks, which partition="graph" does not look for."""
    return partition == "blocks" or tp == 1


@rule
def graph_is_cut(partition: str, pp: int, segments: int) -> bool:
    """Refused by TrainingArguments: partition has no effect on a model that is not cut."""
    return partition == "blocks" or pp * segments > 1


@rule
def sync_of_replicas(dp: int, dp_sync: str) -> bool:
    """Refused: dp_sync has no effect on one replica. With several the way is said, so that no clock chooses it."""
    return (dp == 1) == (dp_sync == "auto")


@rule
def rounded_sync_of_replicas(dp: int, dp_sync_dtype: str) -> bool:
    """Refused: dp_sync_dtype has no effect on one replica."""
    return dp > 1 or dp_sync_dtype == "float32"


@rule
def late_sums_are_hidden(dp_sync: str, gradient_delay: int) -> bool:
    """Refused: gradient_delay hides sums, and dp_sync="serial" hides nothing."""
    return dp_sync != "serial" or gradient_delay == 0


@rule
def buckets_of_replicas(dp: int, bucket_bytes: int) -> bool:
    """Refused: bucket_bytes has no effect on one replica."""
    return dp > 1 or bucket_bytes == BUCKET_BYTES


@rule
def turns_of_replicas(dp: int, preempt: bool) -> bool:
    """Refused: preempt has no effect on one replica."""
    return dp > 1 or preempt


@rule
def narrow_gradients_are_rounded(dtype: str, dp_sync_dtype: str) -> bool:
    """Refused: only gradients of float32 travel as bfloat16."""
    return dtype == "float32" or dp_sync_dtype == "float32"


@rule
def overlap_of_shards(tp: int, tp_overlap: str) -> bool:
    """Refused: tp_overlap has no effect on one shard. With several the way is said, so that no clock chooses it."""
    return (tp == 1) == (tp_overlap == "auto")


@rule
def sequence_of_shards(tp: int, sequence_parallel: str | bool) -> bool:
    """Refused: sequence_parallel=True has no effect on one shard. With several it is said: both ways are run."""
    return (tp == 1) == (sequence_parallel == "auto")


@rule
def sequence_of_families(family: str, sequence_parallel: str | bool) -> bool:
    """Refused: blocks of the plain model mix tokens in their own code, so they need the whole sequence."""
    return family != "plain" or sequence_parallel is not True


@rule
def stacks_are_whole(family: str, tp: int, pp: int, segments: int) -> bool:
    """Refused: with tp only models with one stack of blocks are cut, and an encoder-decoder has two."""
    return family != "t5" or tp == 1 or pp * segments == 1


@rule
def boundaries_of_chunks(offload: str, recompute: str) -> bool:
    """Refused: offload="boundaries" has no effect where neither chunks nor blocks are computed again by fold3d."""
    return offload != "boundaries" or recompute in ("full", "blocks")


@rule
def disk_of_offload(offload: str, offload_disk: bool) -> bool:
    """Refused: offload_disk has no effect where nothing leaves."""
    return offload != "none" or not offload_disk


# What has no meaning


@rule
def transport_between_ranks(dp: int, tp: int, pp: int, transport: str) -> bool:
    """One process sends nothing."""
    return dp * tp * pp > 1 or transport == "auto"


@rule
def transport_of_engines(through: str, transport: str) -> bool:
    """TrainingArguments have no transport."""
    return through == "engine" or transport == "auto"


@rule
def turns_of_engines(through: str, preempt: bool) -> bool:
    """TrainingArguments have no preempt."""
    return through == "engine" or preempt


@rule
def looks_of_engines(through: str, looks: bool) -> bool:
    """A Trainer's loop has nobody who reads the weights between its steps."""
    return through == "engine" or not looks


@rule
def checkpoints_of_trainers(through: str, recompute: str) -> bool:
    """The model's own checkpoints are asked for by a Trainer: activation_checkpointing=True."""
    return through == "trainer" or recompute != "checkpoints"


@rule
def trainers_know_the_loss(family: str, through: str) -> bool:
    """The stock Trainer divides a loss that is a mean over the micro-batch by the label tokens: it is no reference."""
    return through == "engine" or family not in IN_A_LOOP


@rule
def means_have_labels(family: str, labels: str) -> bool:
    """The mean over no label is not a number, in one process as well."""
    return family not in IN_A_LOOP or labels != "empty"


@dataclass(frozen=True)
class Planned:
    """A case, and what is done with it."""

    case: Case
    resume: str
    looks: bool

    @property
    def name(self) -> str:
        """Short text for the test's name."""
        words = [self.case.name]
        words += ["dropout"] if self.case.dropout else []
        words += [self.resume] if self.resume != "no" else []
        words += ["looks"] if self.looks else []
        return "-".join(words)


def planned(row: Row) -> Planned:
    """Returns the case that has a row's values."""
    named = dict(row)
    resume, looks = named.pop("resume"), named.pop("looks")
    pp = row["pp"]
    m = {"1": 1, "2": 2, "pp": pp, "2pp+1": 2 * pp + 1}[named.pop("micro_batches")]
    named["m"] = m
    named["group_size"] = (m + 1) // 2 if row["group_size"] == "half" else None
    named["recompute"] = {"modules": MODULES[row["family"]], "checkpoints": True}.get(
        row["recompute"], row["recompute"]
    )
    layers = max(LAYERS.get(row["family"], 3), pp * row["segments"])
    return Planned(Case(**named, layers=layers), resume, looks)
