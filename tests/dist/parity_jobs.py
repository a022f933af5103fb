"""One parity case, trained by the stock Trainer in this process or by fold3d on the ranks of a pool."""

from __future__ import annotations

import functools
import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import fold3d
from fold3d.engine.loss import loss_of
from fold3d.splitting.torch_modes import DoubleMode
from tests.dist.late_adamw import LateAdamW, late_norms
from tests.dist.parity_cases import LENGTH, ROWS, STEPS, Case
from tests.helpers import data, models
from tests.helpers import device as test_device

Batch = dict[str, Tensor]

FAMILIES = models.MODELS | {
    "bert": models.bert_config,
    "deberta": models.deberta_config,
    "gpt_neox": models.gpt_neox_config,
    "bloom": models.bloom_config,
    "mixture": models.mixture_config,
    "t5": models.t5_config,
    "vit": models.vit_config,
    "beit": models.beit_config,
    "gpt2-4": functools.partial(models.gpt2_config, heads=4),
    "gpt2-8": functools.partial(models.gpt2_config, heads=8),
    "opt-4": functools.partial(models.opt_config, heads=4),
    "gpt2-96": functools.partial(models.gpt2_config, hidden=96),
    "llama-96": functools.partial(models.llama_config, hidden=96),
}
"""Name -> configuration builder; also of what other tests do not run: an encoder, more heads to share out, width."""
IMAGES = ("vit", "beit")
"""Families that look at images."""
KINDS = (
    dict.fromkeys(("bert", "deberta"), transformers.AutoModelForMaskedLM)
    | {"t5": transformers.AutoModelForSeq2SeqLM}
    | dict.fromkeys(IMAGES, transformers.AutoModelForImageClassification)
)
"""Family -> kind of model; the others are causal language models."""
SINGLE_INSIDE = ("bloom", "mixture", "t5", "beit")
"""Families that compute in float32 in places (softmax, routing) whatever they are given: run under DoubleMode."""
IN_A_LOOP = ("plain", "bert", "deberta", "t5", "beit")
"""Families whose loss is a mean over a micro-batch, whatever the stock Trainer believes: their reference is a loop."""
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 0.1
EPSILON = 1e-4
"""AdamW's. Far above the default, so that an update depends on the size of the gradient (a wrong clipping factor
shows in the parameters), and rounding noise in gradients that are zero on paper (attention's key biases) is not blown
up to a whole learning rate in fp32."""
MAX_NORM = 0.05
"""Every gradient of these models is larger, so clipping always happens."""
COMM_TIMEOUT_S = 150.0
"""A rank waits so long for another: on a busy machine that may be long."""


@dataclass(kw_only=True)
class Result:
    """What a run produced; tensors on the CPU."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    digests: list[dict[str, str]] = field(default_factory=list)
    """Per step: parameter name -> hash of this rank's parameter and optimizer state."""
    state: Any = None
    """`Engine.state_dict()` at the end."""


# Models


def causal_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **others: Any
) -> Tensor:
    """transformers' ForCausalLMLoss without its cast of the logits to float32, for models in float64.

    With the cast two runs that differ by 1e-16 in a logit now and then round to different float32 numbers, and their
    gradients differ by 1e-8: a bound of 1e-10 would hold by luck only.
    """
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    total = nn.functional.cross_entropy(logits.view(-1, vocab_size), shifted, reduction="sum")
    return total / ((shifted != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def build(case: Case) -> nn.Module:
    """Returns the case's model, the same in every process; the weights are drawn in float32 and then cast."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return _build(case)
    finally:
        torch.set_default_dtype(before)


def _build(case: Case) -> nn.Module:
    dtype = DTYPES[case.dtype]
    if case.family == "plain":
        plain = models.build_plain(layers=case.layers, dropout=case.dropout, tied=case.tied, dtype=dtype)
        if case.frozen:
            _freeze(plain, plain.embedding, plain.layers)
        return plain
    config = FAMILIES[case.family](layers=case.layers, dropout=case.dropout, tied=case.tied)
    kind = KINDS.get(case.family, transformers.AutoModelForCausalLM)
    model = models.build(config, dtype=dtype, kind=kind)
    if case.dtype == "float64":
        if case.family not in IMAGES:  # its loss has no cast
            model.loss_function = causal_loss
        _norms_in_float64(model)
    if case.frozen:
        _freeze(model, model.get_input_embeddings(), next(m for m in model.modules() if isinstance(m, nn.ModuleList)))
    return model


def _norms_in_float64(model: nn.Module) -> None:
    """Puts torch's RMSNorm in the place of Llama's, which computes in float32 whatever the model's dtype is."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=child.weight.dtype)
                norm.weight = child.weight
                setattr(parent, name, norm)


def _freeze(model: nn.Module, embedding: nn.Module, blocks: nn.ModuleList) -> None:
    """Freezes the embedding and the first half of the blocks, as fine-tuning scripts do."""
    for module in (embedding, *blocks[: len(blocks) // 2]):
        module.requires_grad_(False)


# Data


def global_batch(case: Case, step: int) -> Batch:
    """Returns the rows of one step over all replicas, micro-batch after micro-batch: int64 [total * ROWS, LENGTH], or
    images of the model's type and int64 [total * ROWS]."""
    empty: list[int] = []
    if case.labels == "empty":  # a whole micro-batch without label, or a row of the only one
        empty = [0] if case.total == 1 else [ROWS, ROWS + 1]
    rows = case.total * ROWS
    if case.family in IMAGES:
        return images(case, rows, step * rows * LENGTH)
    return data.batch(
        rows,
        LENGTH,
        start=step * rows * LENGTH,
        ragged=case.labels in ("ragged", "empty"),
        padded=case.labels == "padded",
        left=case.labels == "left",
        empty_rows=empty,
    )


def images(case: Case, rows: int, start: int) -> Batch:
    """Returns `rows` images; a third have no label unless the case's labels are full."""
    unlabelled = () if case.labels == "full" else range(1, rows, 3)
    return data.images(rows, models.IMAGE, models.CLASSES, start=start, unlabelled=unlabelled, dtype=DTYPES[case.dtype])


def micro_batches_of(case: Case, whole: Batch, replica: int) -> list[Batch]:
    """Returns replica's micro-batches: its number i is number i * dp + replica of the global batch."""
    parts = {name: tensor.split(ROWS) for name, tensor in whole.items()}
    return [{name: part[i * case.dp + replica] for name, part in parts.items()} for i in range(case.m)]


def replica_batch(case: Case, step: int, replica: int) -> Batch:
    """Returns what `Engine.step` gets: the replica's micro-batches one after the other."""
    parts = micro_batches_of(case, global_batch(case, step), replica)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def batch_of(engine: fold3d.Engine, case: Case, step: int) -> Batch:
    """Returns the replica's batch where the engine computes."""
    return on(engine.device, replica_batch(case, step, engine.topology.dp_rank))


def on(device: torch.device, batch: Batch) -> Batch:
    """Returns the batch on a device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


def dataset(case: Case, steps: int = STEPS) -> list[Batch]:
    """Returns the rows of all steps in order, for a Trainer that does not shuffle."""
    wholes = [global_batch(case, step) for step in range(steps)]
    return [
        {name: tensor[row] for name, tensor in whole.items()} for whole in wholes for row in range(case.total * ROWS)
    ]


def collate(rows: Sequence[Batch]) -> Batch:
    """Stacks rows and cuts off columns that are padding in all of them: micro-batches get different shapes."""
    stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    if "attention_mask" not in stacked:
        return stacked
    width = int(stacked["attention_mask"].any(0).sum())
    return {name: tensor[:, :width] for name, tensor in stacked.items()}


# Optimizer


def optimizer_of(model: nn.Module, kind: type[AdamW] = AdamW) -> Callable[[list[nn.Parameter]], Optimizer]:
    """Returns a maker of AdamW with the stock Trainer's two groups: no decay for biases and norms."""
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        given = {id(parameter) for parameter in parameters}
        decaying = [p for name, p in model.named_parameters() if id(p) in given and name in decayed]
        others = given - {id(p) for p in decaying}
        return adamw(decaying, [p for p in parameters if id(p) in others], kind)

    return make


def adamw(decayed: Iterable[nn.Parameter], others: Iterable[nn.Parameter], kind: type[AdamW] = AdamW) -> Optimizer:
    """Returns AdamW with a group that decays and one that does not; either may be empty."""
    groups = [
        {"params": list(decayed), "weight_decay": WEIGHT_DECAY},
        {"params": list(others), "weight_decay": 0.0},
    ]
    return kind(groups, lr=LEARNING_RATE, eps=EPSILON)


# The reference: one process


def train_alone(case: Case, **arguments: Any) -> Result:
    """Trains `case.alone()` in this process, HuggingFace models with transformers.Trainer, plain ones in a loop."""
    with precision(case):
        return _loop_alone(case) if case.family in IN_A_LOOP else _stock_trainer(case, **arguments)


def _stock_trainer(case: Case, *, rows: list[Batch] | None = None, **arguments: Any) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        named = trainer_arguments(case, folder) | {"gradient_accumulation_steps": case.total} | arguments
        model = build(case)
        optimizer = _reference_optimizer(case, model)
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(**named),
            train_dataset=dataset(case) if rows is None else rows,
            data_collator=collate,
            optimizers=(optimizer if case.gradient_delay else None, None),
        )
        trainer.train()
        if isinstance(optimizer, LateAdamW):
            optimizer.finish()
    result = _result_of(trainer.state.log_history, trainer.model.state_dict())
    return replace(result, norms=late_norms(result.norms, case.gradient_delay))


def _reference_optimizer(case: Case, model: nn.Module) -> Optimizer:
    kind = LateAdamW if case.gradient_delay else AdamW
    return optimizer_of(model, kind)([p for p in model.parameters() if p.requires_grad])


def trainer_arguments(case: Case, folder: str) -> dict[str, Any]:
    """Returns what both kinds of TrainingArguments understand."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return {
        "output_dir": folder,
        "use_cpu": True,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": ROWS,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": WEIGHT_DECAY,
        "adam_epsilon": EPSILON,
        "max_grad_norm": MAX_NORM if case.clip else 0.0,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
    }


def _result_of(logs: list[dict[str, Any]], weights: dict[str, Tensor]) -> Result:
    steps = [entry for entry in logs if "loss" in entry]
    return Result(
        losses=[entry["loss"] for entry in steps],
        norms=[entry["grad_norm"] for entry in steps],
        weights={name: tensor.detach().clone() for name, tensor in weights.items()},
    )


def _loop_alone(case: Case) -> Result:
    model = build(case)
    optimizer = _reference_optimizer(case, model)
    result = Result()
    for step in range(STEPS):
        losses = []
        for micro_batch in micro_batches_of(case.alone(), global_batch(case, step), 0):
            loss = loss_of(model(**micro_batch)) / case.total
            loss.backward()
            losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM if case.clip else float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(sum(losses))
        result.norms.append(norm.item())
    if isinstance(optimizer, LateAdamW):
        optimizer.finish()
    result.norms = late_norms(result.norms, case.gradient_delay)
    result.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return result


@contextmanager
def precision(case: Case) -> Iterator[None]:
    """Makes losses and norms that are kept by torch's default dtype as precise as the model."""
    before = torch.get_default_dtype()
    double = case.dtype == "float64"
    torch.set_default_dtype(torch.float64 if double else torch.float32)
    try:
        with DoubleMode() if double and case.family in SINGLE_INSIDE else nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


MEAN_LOSSES = ("plain", "t5")
"""Families whose own loss is a mean over the labels of a batch, whatever num_items_in_batch is."""

# fold3d: called on every rank


def layout_of(case: Case) -> dict[str, Any]:
    """Returns what ParallelConfig and TrainingArguments are both told."""
    named: dict[str, Any] = {"dp": case.dp, "tp": case.tp, "pp": case.pp, "segments": case.segments}
    named |= {"schedule": case.schedule, "group_size": case.group_size or "auto", "partition": case.partition}
    named |= {"offload": case.offload, "offload_disk": tempfile.gettempdir() if case.offload_disk else None}
    named |= {"offload_optimizer": case.offload_optimizer, "kernels": case.kernels}
    named |= {"gradient_delay": case.gradient_delay, "flush": case.flush}
    named |= {"weight_versions": case.weight_versions, "delay_correction": case.delay_correction}
    named |= {"micro_batch_size": case.micro_batch_size, "comm_timeout": COMM_TIMEOUT_S}
    if case.micro_batch_size is not None and case.family in MEAN_LOSSES:
        named |= {"loss_reduction": "tokens"}
    if case.dp > 1:
        named |= {"dp_sync": case.dp_sync, "bucket_bytes": case.bucket_bytes, "dp_sync_dtype": case.dp_sync_dtype}
    if case.tp > 1:
        named |= {"tp_overlap": case.tp_overlap, "sequence_parallel": case.sequence_parallel}
    return named


def config_of(case: Case, **changes: Any) -> fold3d.ParallelConfig:
    """Returns the case's layout."""
    named = layout_of(case) | {"micro_batches": case.m, "recompute": case.recompute}
    return fold3d.ParallelConfig(**(named | {"transport": case.transport, "preempt": case.preempt} | changes))


def engine_of(
    case: Case,
    model: nn.Module | None = None,
    *,
    device: torch.device | None = None,
    example: Batch | None = None,
    **changes: Any,
) -> fold3d.Engine:
    """Returns the engine of the case over `model`, else over the case's own model."""
    model = build(case) if model is None else model
    return fold3d.Engine(
        model,
        config_of(case, **changes),
        optimizer=optimizer_of(model),
        max_grad_norm=MAX_NORM if case.clip else None,
        device=device,
        example=example,
    )


def train(case: Case, **others: Any) -> Result:
    """Trains the case with fold3d on the tests' device; further arguments as `train_engine` and `train_trainer` take
    them."""
    with precision(case), test_device.watched() if others.get("device") is None else nullcontext():
        return (train_trainer if case.through == "trainer" else train_engine)(case, **others)


def train_engine(
    case: Case,
    *,
    start: Any = None,
    steps: Sequence[int] = range(STEPS),
    looks: bool = True,
    device: torch.device | None = None,
) -> Result:
    """Trains with Engine.step.

    Args:
        start: a state_dict to begin with.
        steps: which batches to train on.
        looks: whether all weights are read after every step, not only after the last.
    """
    engine = engine_of(case, device=device)
    result = Result()
    for step in steps:
        batch = batch_of(engine, case, step)
        if start is not None:
            if case.family == "plain" or case.micro_batch_size is not None:
                engine.evaluate(batch)  # it is recorded with its first batch
            engine.load_state_dict(start)
            start = None
        out = engine.step(batch)
        result.losses.append(out.loss.item())
        result.norms.append(out.grad_norm.item())
        if looks or step == steps[-1]:
            result.digests.append(digests(engine))
    result.state = engine.state_dict()
    if steps[-1] == STEPS - 1:  # the training is over
        engine.finish_updates()
    result.weights = engine.state_dict()["model"]
    engine.close()
    return result


def train_trainer(
    case: Case,
    *,
    rows: list[Batch] | None = None,
    folder: str | None = None,
    resume: str | None = None,
    **arguments: Any,
) -> Result:
    """Trains with fold3d.Trainer.

    Args:
        rows: to train on, else those of the case.
        folder: where to save checkpoints; None: one that is removed.
        resume: a checkpoint to go on from. The result has the numbers of the steps before it, too.
    """
    with tempfile.TemporaryDirectory() if folder is None else nullcontext(folder) as out:
        named = trainer_arguments(case, out) | {"gradient_accumulation_steps": case.m}
        named |= {"use_cpu": test_device.chosen() == "cpu"}
        kind = "recompute" if isinstance(case.recompute, str) else "activation_checkpointing"
        trainer = fold3d.Trainer(
            model=build(case),
            args=fold3d.TrainingArguments(**(named | layout_of(case) | {kind: case.recompute} | arguments)),
            train_dataset=dataset(case) if rows is None else rows,
            data_collator=collate,
        )
        trainer.train(resume_from_checkpoint=resume)
        result = _result_of(trainer.state.log_history, trainer.engine.state_dict()["model"])
        trainer.engine.close()
    return result


def digests(engine: fold3d.Engine) -> dict[str, str]:
    """Returns a hash per parameter of this rank, or part of one: its bytes and those of its optimizer state."""
    found = {}
    engine.flush()
    parts = engine._built().cut.parts
    for name, parameter in engine.owned.items():
        assert engine.optimizer is not None
        state = dict.get(engine.optimizer.state, parameter, {})  # what is here of it
        tensors = [parameter.detach(), *(state[key] for key in sorted(state))]
        text = b"".join(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
        shard = parts.shard_of(name)
        part = "" if shard is None else f" {shard.parts[parts.rank]}"
        found[name + part] = hashlib.sha256(text).hexdigest()
    return found
