"""Trains a small GPT-2 from scratch on text that every machine has: the sources and help pages of Python itself.

An ordinary transformers script; the two lines that differ from the stock one are marked. Start it with torchrun:

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 examples/pretrain_gpt.py \
        --dp 2 --pp 2 --gradient_accumulation_steps 8 --output_dir out/demo

`make demo` does so. On one process it runs without torchrun and without --dp and --pp.
"""

import pydoc_data.topics
import statistics
import sysconfig
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


def sample(folder: str, prompt: str) -> str:
    """What the saved model makes of the prompt, read back with plain transformers."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(
        **ids, max_length=model.config.n_positions, do_sample=True, top_k=20, pad_token_id=tokenizer.eos_token_id
    )
    return tokenizer.decode(out[0])


def account(history: list[dict]) -> str:
    """Where the time of a step went, on the process that logs; medians over the logged steps."""
    steps = [entry for entry in history if "step_ms" in entry]
    if not steps:
        return "No step was logged with an account of its time."

    def typical(name: str) -> float:
        return statistics.median(entry[name] for entry in steps if name in entry)

    text = (
        f"A step took {typical('step_ms'):.0f} ms: compute {typical('compute_ms'):.0f}, bubble "
        f"{typical('bubble_ms'):.0f}, waiting for activations {typical('pp_exposed_ms'):.1f}, waiting for DP.sync "
        f"{typical('dp_exposed_ms'):.1f}.\nDP.sync: {typical('dp_hidden_ms'):.0f} ms were hidden under computation."
    )
    predicted = any("predicted_step_ms" in entry for entry in steps)
    return text + (f" The simulator predicted {typical('predicted_step_ms'):.0f} ms a step." if predicted else "")


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
    trained = trainer.train()
    trainer.log_metrics("train", trained.metrics)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model()
    if first:
        print(f"\n{account(trainer.state.log_history)}")
        print(f"\nA sample of the trained model:\n{sample(args.output_dir, script.prompt)}\n")
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


if __name__ == "__main__":
    main()
