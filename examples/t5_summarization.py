"""Trains a small T5 to say in a few words what a function of Python's standard library does.

As transformers' run_summarization.py does it, on the functions and docstrings that every machine has: in evaluation the
model writes, and is compared with the docstring. The line that differs from the stock script is marked. Start it with
torchrun:

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/t5_summarization.py --pp 2 --output_dir out/t5

On one process it runs without torchrun and --pp. With `--model FOLDER` it begins with a model and a tokenizer that are
there, otherwise with random weights.
"""

import ast
import random
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    T5Config,
    set_seed,
)

from fold3d import Seq2SeqTrainer, Seq2SeqTrainingArguments  # stock: from transformers import ...

WORD = r"[A-Za-z]+|\d|[^\w\s]"
SPECIAL = ["<pad>", "</s>", "<unk>"]


@dataclass
class ScriptArguments:
    """Which model is trained on what; the rest are Seq2SeqTrainingArguments."""

    model: str | None = field(default=None, metadata={"help": "Folder of a model to begin with, with its tokenizer."})
    layers: int = field(default=3, metadata={"help": "Blocks of the encoder, and of the decoder, without --model."})
    hidden: int = field(default=128, metadata={"help": "Width, without --model."})
    dropout: float = field(default=0.1, metadata={"help": "Dropout, also with --model."})
    source_length: int = field(default=96, metadata={"help": "Tokens of a function's code at most."})
    target_length: int = field(default=16, metadata={"help": "Tokens of a summary at most."})
    samples: int = field(default=3000, metadata={"help": "Functions, of files taken at random."})
    eval_samples: int = field(default=64, metadata={"help": "Functions held back for evaluation."})


def make_samples(count: int) -> list[tuple[str, str]]:
    """Returns (code without the docstring, the docstring's first line) of functions of the standard library."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.shuffle(paths)
    found = []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
                summary = ast.get_docstring(node).strip().split("\n")[0]
                node.body = node.body[1:]
                found.append((ast.unparse(node), summary))
        if len(found) >= count:
            break
    random.shuffle(found)
    return found[:count]


def make_tokenizer(texts: list[str], words: int = 4096) -> PreTrainedTokenizerFast:
    """Returns one that knows the commonest words; names are cut at underscores."""
    common = Counter(word for text in texts for word in re.findall(WORD, text.lower())).most_common(words)
    pieces = [*SPECIAL, *(word for word, _ in common)]
    tokenizer = Tokenizer(WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), "removed", invert=True)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def make_model(folder: Path, texts: list[str], script: ScriptArguments) -> None:
    """Writes a model with random weights and its tokenizer, as a download would leave them."""
    tokenizer = make_tokenizer(texts)
    tokenizer.save_pretrained(folder)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=script.hidden,
        d_kv=32,
        d_ff=4 * script.hidden,
        num_layers=script.layers,
        num_heads=max(1, script.hidden // 32),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)


def decode(tokenizer: PreTrainedTokenizerBase, tokens: np.ndarray) -> list[str]:
    """Returns the texts of [samples, tokens]; -100 stands where there is none."""
    tokens = np.where(tokens < 0, tokenizer.pad_token_id, tokens)
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)


def rouge1(guess: str, wanted: str) -> float:
    """Returns the F1 score of the words that two texts share."""
    ours, theirs = Counter(guess.split()), Counter(wanted.split())
    return 2 * (ours & theirs).total() / max(1, ours.total() + theirs.total())


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, Seq2SeqTrainingArguments))
    parser.set_defaults(
        output_dir="out/t5",
        num_train_epochs=5,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=16,
        learning_rate=2e-3,
        warmup_steps=50,
        logging_steps=20,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        predict_with_generate=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    script, args = parser.parse_args_into_dataclasses()
    args.generation_max_length = args.generation_max_length or script.target_length
    set_seed(args.seed)

    samples = make_samples(script.samples)
    folder = Path(script.model or Path(args.output_dir) / "start")
    with args.main_process_first(desc="making the model"):
        if not (folder / "config.json").exists():
            make_model(folder, [text for pair in samples for text in pair], script)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dropout_rate=script.dropout)

    rows = []
    for code, summary in samples:
        row = tokenizer(code, truncation=True, max_length=script.source_length)
        labels = tokenizer(summary, truncation=True, max_length=script.target_length)["input_ids"]
        rows.append({"input_ids": row["input_ids"], "attention_mask": row["attention_mask"], "labels": labels})

    def scores(prediction: EvalPrediction) -> dict[str, float]:
        guesses, wanted = decode(tokenizer, prediction.predictions), decode(tokenizer, prediction.label_ids)
        found = [rouge1(guess, summary) for guess, summary in zip(guesses, wanted, strict=True)]
        return {"rouge1": float(np.mean(found)), "words": float(np.mean([len(guess.split()) for guess in guesses]))}

    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=rows[script.eval_samples :],
        eval_dataset=rows[: script.eval_samples],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=scores,
    )
    trained = trainer.train()
    trainer.log_metrics("train", trained.metrics)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model()
    trainer.save_state()

    written = decode(tokenizer, trainer.predict(rows[:4], metric_key_prefix="test", num_beams=4).predictions)
    if trainer.is_world_process_zero():
        for (code, summary), guess in zip(samples, written, strict=False):
            print(f"\n{code[:300]}\n-> {guess!r} (its docstring: {summary!r})")


if __name__ == "__main__":
    main()
