"""Trains a small GPT-2 from scratch on text that every machine has: the sources and help pages of Python itself.

An ordinary transformers script; the two lines that differ from the stock one are marked. Start it with torchrun:

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 examples/pretrain_gpt.py \
        --dp 2 --pp 2 --weights random --gradient_accumulation_steps 8 --output_dir out/demo

`make demo` does so. On one process it runs without torchrun and without --dp and --pp. --weights random says that the
model on the meta device is to train from random values.
"""

import math
import pydoc_data.topics
import statistics
import sysconfig
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    default_data_collator,
    set_seed,
)

from fold3d import Trainer, TrainingArguments  # stock: from transformers import Trainer, TrainingArguments

END = "<|endoftext|>"


@dataclass
class ScriptArguments:
    """What is trained on what; the rest are TrainingArguments."""

    layers: int = field(default=7, metadata={"help": "Transformer blocks."})
    hidden: int = field(default=320, metadata={"help": "Width of the model."})
    heads: int = field(default=5, metadata={"help": "Attention heads."})
    dropout: float = field(default=0.0, metadata={"help": "Dropout everywhere GPT-2 has it."})
    vocabulary: int = field(default=4096, metadata={"help": "Tokens of the byte-level BPE trained on the text."})
    length: int = field(default=128, metadata={"help": "Tokens per sequence."})
    megabytes: float = field(default=0.5, metadata={"help": "MB of source code to train on besides the help pages."})
    eval_sequences: int = field(default=64, metadata={"help": "Sequences held back for evaluation."})
    prompt: str = field(default="The value of the", metadata={"help": "What the sample continues."})


def documents(megabytes: float) -> list[str]:
    """The help pages of the interpreter, then the standard library file by file until the size is reached."""
    texts = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    left = megabytes * 1e6
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if left <= 0:
            break
        texts.append(path.read_text(encoding="utf-8", errors="ignore"))
        left -= len(texts[-1])
    return texts


def make_tokenizer(folder: Path, texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer for these texts, trained unless `folder` has one already."""
    if not (folder / "tokenizer_config.json").exists():
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(texts, vocab_size=vocabulary, special_tokens=[END], show_progress=False)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=END, eos_token=END)
        tokenizer.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def make_sequences(tokenizer: PreTrainedTokenizerFast, texts: list[str], length: int) -> list[dict]:
    """The texts end to end, cut into sequences of equal length; each token predicts the next one."""
    ids = torch.tensor([token for text in tokenizer(texts)["input_ids"] for token in [*text, tokenizer.eos_token_id]])
    rows = ids[: len(ids) // length * length].view(-1, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def read_back(folder: str, prompts: list[str]) -> str:
    """What the saved model expects after each prompt, and a sample, with plain transformers."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    lines = ["What it expects next:"]
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            likely = model(**ids).logits[0, -1].softmax(0).topk(4)
        words = [f"{tokenizer.decode(k)!r} {p:.0%}" for p, k in zip(likely.values, likely.indices, strict=True)]
        lines.append(f"  {prompt!r:28} {', '.join(words)}")
    out = model.generate(
        **tokenizer(prompts[0], return_tensors="pt"),
        max_length=model.config.n_positions,
        do_sample=True,
        temperature=0.7,
        top_k=20,
        repetition_penalty=1.15,
        pad_token_id=tokenizer.eos_token_id,
    )
    return "\n".join([*lines, "A sample of the trained model:", *textwrap.wrap(tokenizer.decode(out[0]), 110)])


def breakdown(history: list[dict]) -> str:
    """Where the time of a step went, on the process that logs; of the logged step in the middle by length."""
    steps = sorted((entry for entry in history if "step_ms" in entry), key=lambda entry: entry["step_ms"])
    if not steps:
        return "No step was logged with a breakdown of its time."
    # A step whose sums ran under the next one has none in its own breakdown.
    summed = [entry for entry in steps if entry.get("dp_hidden_ms", 0) + entry.get("dp_exposed_ms", 0) > 0] or steps
    step = summed[len(summed) // 2]
    parts = {"compute": "compute_ms", "TP.sync": "tp_exposed_ms", "bubble": "bubble_ms", "PP.sync": "pp_exposed_ms"}
    parts |= {"DP.sync": "dp_exposed_ms", "other": "other_ms"}
    sums = " + ".join(f"{name} {step[key]:.0f}" for name, key in parts.items() if key in step)
    lines = [f"A step took {step['step_ms']:.0f} ms: {sums}."]
    if step.get("dp_hidden_ms", 0) + step.get("dp_exposed_ms", 0) > 0:
        hidden, exposed = step["dp_hidden_ms"], step["dp_exposed_ms"]
        lines.append(
            f"Summing the gradients over the replicas took {hidden + exposed:.0f} ms of network time; {hidden:.0f} ms "
            f"({hidden / (hidden + exposed):.0%}) were hidden under computation."
        )
    if step.get("tp_hidden_ms", 0) + step.get("tp_exposed_ms", 0) > 0:
        lines.append(
            f"Summing activations over the tensor-parallel ranks made it wait for {step['tp_exposed_ms']:.0f} ms; "
            f"{step['tp_hidden_ms']:.0f} ms were hidden under computation."
        )
    said = [entry for entry in steps if "predicted_step_ms" in entry]
    if said:
        off = statistics.median(entry["step_ms"] / entry["predicted_step_ms"] - 1 for entry in said)
        predicted = said[len(said) // 2]["predicted_step_ms"]
        lines.append(f"The simulator predicted {predicted:.0f} ms a step; measured steps were {off:+.0%} off.")
    return "\n".join(lines)


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="out/demo",
        max_steps=100,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=4,
        learning_rate=1.2e-3,
        adam_beta2=0.95,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        weight_decay=0.1,
        logging_steps=5,
        save_steps=100,
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    script, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)

    folder = Path(args.output_dir)
    texts = documents(script.megabytes)
    with args.main_process_first(desc="training the tokenizer"):
        tokenizer = make_tokenizer(folder / "tokenizer", texts, script.vocabulary)
    sequences = make_sequences(tokenizer, texts, script.length)

    config = GPT2Config(
        n_layer=script.layers,
        n_embd=script.hidden,
        n_head=script.heads,
        vocab_size=len(tokenizer),
        n_positions=script.length,
        resid_pdrop=script.dropout,
        embd_pdrop=script.dropout,
        attn_pdrop=script.dropout,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        use_cache=False,
    )
    with torch.device("meta"):  # stock: with torch.device("cpu"):   Here no rank ever holds the whole model.
        model = AutoModelForCausalLM.from_config(config)
    model.loss_type = "ForCausalLM"  # what it is anyway; transformers warns when GPT-2 does not say so

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=sequences[script.eval_sequences :],
        eval_dataset=sequences[: script.eval_sequences],
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    first = trainer.is_world_process_zero()
    if first:
        print(f"{model.num_parameters() / 1e6:.1f} M parameters, {len(sequences)} sequences of {script.length} tokens")
    before = trainer.evaluate()["eval_loss"]
    trained = trainer.train()
    trainer.log_metrics("train", trained.metrics)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model()
    if first:
        after, steps = metrics["eval_loss"], trainer.state.global_step
        print(
            f"\nLoss on text that was held back: {before:.2f} before, {after:.2f} after {steps} steps. "
            f"As if each token were one of {math.exp(after):.0f} instead of {math.exp(before):.0f}."
        )
        print(f"\n{breakdown(trainer.state.log_history)}")
        print(f"\n{read_back(args.output_dir, [script.prompt, 'If the', 'import', 'def __'])}\n")
        print("Where things lie:")
        for name, what in (
            ("model.safetensors", "the trained model, for AutoModelForCausalLM.from_pretrained"),
            ("checkpoint-*", "everything needed to resume (--resume_from_checkpoint)"),
            ("timeline/*.png", "one step of all ranks as a picture"),
            ("timeline/*.json", "the same for https://ui.perfetto.dev"),
            ("eval_results.json", "the evaluation"),
        ):
            for path in sorted(folder.glob(name)):
                print(f"  {path!s:36} {what}")
        print("Try next:")
        for line in (
            "sudo make demo-network                # the same idea on a network that is slow, against other orders",
            ".venv/bin/fold3d simulate aiao -p 4 -m 16 -s 4 --png out/step.png   # a step on a cluster of yours",
        ):
            print(f"  {line}")


if __name__ == "__main__":
    main()
