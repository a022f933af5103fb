"""Fine-tunes a small BERT to tell from a few lines of Python which package of the standard library they are from.

As transformers' run_glue.py does it, on data that every machine has; the line that differs from the stock script is
marked. Start it with torchrun:

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 examples/finetune_bert_classification.py \
        --dp 2 --pp 2 --output_dir out/bert

On one process it runs without torchrun, --dp and --pp. With `--model FOLDER` it begins with a model and a tokenizer
that are there, otherwise with random weights.
"""

import random
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    set_seed,
)

from fold3d import Trainer, TrainingArguments  # stock: from transformers import Trainer, TrainingArguments

PACKAGES = ("asyncio", "email", "json", "multiprocessing", "xml")


@dataclass
class ScriptArguments:
    """Which model is trained on what; the rest are TrainingArguments."""

    model: str | None = field(default=None, metadata={"help": "Folder of a model to begin with, with its tokenizer."})
    layers: int = field(default=4, metadata={"help": "Transformer blocks, without --model."})
    hidden: int = field(default=128, metadata={"help": "Width, without --model."})
    dropout: float = field(default=0.1, metadata={"help": "Dropout, also with --model."})
    lines: int = field(default=6, metadata={"help": "Lines of code in a sample."})
    length: int = field(default=96, metadata={"help": "Tokens of a sample at most."})
    samples: int = field(default=400, metadata={"help": "Samples of each package."})
    eval_samples: int = field(default=128, metadata={"help": "Samples held back for evaluation."})


def make_samples(lines: int, per_package: int) -> list[tuple[str, int]]:
    """Returns pieces of code with the number of their package, in random order."""
    found = []
    for label, package in enumerate(PACKAGES):
        paths = sorted((Path(sysconfig.get_paths()["stdlib"]) / package).rglob("*.py"))
        code = [
            line.strip()
            for path in paths
            for line in path.read_text(encoding="utf-8", errors="ignore").splitlines()
            if line.strip()
        ]
        pieces = ["\n".join(code[start : start + lines]) for start in range(0, len(code) - lines + 1, lines)]
        found += [(piece, label) for piece in random.sample(pieces, min(per_package, len(pieces)))]
    random.shuffle(found)
    return found


def make_tokenizer(texts: list[str], words: int = 4096) -> BertTokenizer:
    """Returns one that knows the commonest words, and pieces of a character each for the others."""
    found = Counter(word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower()))
    characters = sorted({character for word in found for character in word})
    pieces = [*characters, *(f"##{character}" for character in characters)]
    pieces += [word for word, _ in found.most_common(words) if len(word) > 1]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return BertTokenizer(vocab={piece: number for number, piece in enumerate([*special, *pieces])})


def make_model(folder: Path, texts: list[str], script: ScriptArguments) -> None:
    """Writes a model with random weights and its tokenizer, as a download would leave them."""
    tokenizer = make_tokenizer(texts)
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=script.hidden,
        intermediate_size=4 * script.hidden,
        num_hidden_layers=script.layers,
        num_attention_heads=max(1, script.hidden // 32),
        max_position_embeddings=script.length,
        pad_token_id=tokenizer.pad_token_id,
        id2label=dict(enumerate(PACKAGES)),
        label2id={name: number for number, name in enumerate(PACKAGES)},
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


def scores(prediction: EvalPrediction) -> dict[str, float]:
    """Returns the share of samples that were told right, and the mean over the packages of the F1 score."""
    guesses, labels = np.argmax(prediction.predictions, axis=-1), prediction.label_ids
    f1 = []
    for label in range(len(PACKAGES)):
        right = np.sum((guesses == label) & (labels == label))
        f1.append(2 * right / max(1, np.sum(guesses == label) + np.sum(labels == label)))
    return {"accuracy": float(np.mean(guesses == labels)), "f1": float(np.mean(f1))}


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="out/bert",
        num_train_epochs=3,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=16,
        learning_rate=5e-4,
        warmup_steps=20,
        weight_decay=0.01,
        logging_steps=20,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    script, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)

    samples = make_samples(script.lines, script.samples)
    folder = Path(script.model or Path(args.output_dir) / "start")
    with args.main_process_first(desc="making the model"):
        if not (folder / "config.json").exists():
            make_model(folder, [text for text, _ in samples], script)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dropout = {"hidden_dropout_prob": script.dropout, "attention_probs_dropout_prob": script.dropout}
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(PACKAGES), **dropout)

    rows = [{**tokenizer(text, truncation=True, max_length=script.length), "label": label} for text, label in samples]
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows[script.eval_samples :],
        eval_dataset=rows[: script.eval_samples],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=scores,
    )
    trained = trainer.train()
    trainer.log_metrics("train", trained.metrics)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model()
    trainer.save_state()

    texts = [rows[number] for number in range(3)]
    guesses = np.argmax(trainer.predict(texts, metric_key_prefix="test").predictions, axis=-1)
    if trainer.is_world_process_zero():
        for (text, label), guess in zip(samples, guesses, strict=False):
            print(f"\n{text}\n-> {PACKAGES[guess]} (it is from {PACKAGES[label]})")


if __name__ == "__main__":
    main()
