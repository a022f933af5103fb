"""Training jobs of TRL's trainers, on fold3d's on the ranks of a pool or as they are in this process."""

from __future__ import annotations

import copy
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import fold3d
from tests.helpers import models
from tests.trainer.jobs import Outcome, clean

SPECIAL = ["<pad>", "<eos>", "<unk>"]
WORDS = [f"w{number}" for number in range(models.VOCABULARY - len(SPECIAL))]


@dataclass
class TrlJob:
    """What to train: `method` is "SFT" or "DPO"."""

    folder: str
    method: str
    arguments: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    samples: int = 24
    reference: bool = False
    """Whether DPO gets a reference model; else it is the model itself without its adapter."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns one whose tokens are words."""
    found = Tokenizer(WordLevel({word: n for n, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=32
    )


def dataset(folder: str, method: str, count: int, seed: int) -> Any:
    """Returns `count` samples of different lengths, in a file that all processes share."""
    import datasets

    random = torch.Generator().manual_seed(seed)

    def text(words: int) -> str:
        return " ".join(WORDS[number] for number in torch.randint(len(WORDS), (words,), generator=random).tolist())

    def sample(number: int) -> dict[str, str]:
        if method == "SFT":
            return {"prompt": text(2), "completion": " " + text(3 + number % 4)}
        return {"prompt": text(3), "chosen": " " + text(3 + number % 3), "rejected": " " + text(2 + number % 4)}

    path = Path(folder) / f"{method}-{count}-{seed}"
    if int(os.environ.get("RANK", "0")) == 0:
        datasets.Dataset.from_list([sample(number) for number in range(count)]).save_to_disk(path)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return datasets.load_from_disk(path)


def reference_of(model: torch.nn.Module) -> Any:
    """Returns a model of the same kind with slightly other weights."""
    found: Any = copy.deepcopy(model)
    random = torch.Generator().manual_seed(3)
    for parameter in found.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=random)
    return found


def run(job: TrlJob, layout: dict[str, Any] | None, replicas: int = 1) -> Outcome:
    """Trains on this layout, every rank calls; None: with TRL's trainer, `replicas`' micro-batches in each step."""
    import trl

    for name in ("transformers", "datasets", "trl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    trainer_class, arguments_class = getattr(trl, f"{job.method}Trainer"), getattr(trl, f"{job.method}Config")
    if layout is not None:
        trainer_class, arguments_class = fold3d.trainer_class(trainer_class), fold3d.arguments_class(arguments_class)
    model = models.build(models.MODELS["llama"](layers=4), dtype=torch.float64)
    named: dict[str, Any] = {}
    if job.reference:
        named["ref_model"] = reference_of(model)
    if job.lora:
        named["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    arguments = {
        "output_dir": job.folder,
        "use_cpu": True,
        "bf16": False,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2 * (replicas if layout is None else 1),
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "max_length": 32,
        **job.arguments,
    }
    torch.manual_seed(5)  # of the adapters' first values
    trainer = trainer_class(
        model=model,
        args=arguments_class(**arguments, **(layout or {})),
        train_dataset=dataset(job.folder, job.method, job.samples, 4),
        eval_dataset=dataset(job.folder, job.method, 4, 6),
        processing_class=tokenizer(),
        **named,
    )
    trainer.train()
    sent = None if layout is None else trainer.engine.breakdown().dp_bytes
    logs, metrics = clean(trainer.state.log_history), clean([trainer.evaluate()])[0]
    if layout is None:
        weights = trainer.model.state_dict()
        return Outcome(logs, {name: value.detach().clone() for name, value in weights.items()}, metrics)
    trainer.save_model()
    frozen = [p for p in trainer.model.parameters() if not p.requires_grad]
    extra = {
        "gradients": sum(p.grad is not None for p in frozen),
        "state": sum(p in trainer.optimizer.optimizer.state for p in frozen),
        "dp_bytes": sent,
    }
    outcome = Outcome(logs, trainer.engine.state_dict()["model"], metrics, extra)
    trainer.engine.close()
    return outcome
