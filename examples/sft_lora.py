"""Fine-tunes a language model with TRL and LoRA on the help pages of Python: what may follow a page's name.

As TRL's sft.py does it, on what every machine has; the two lines that differ from the stock script are marked. Needs
TRL (`pip install --no-build-isolation ".[trl]"` in a clone). Start it with torchrun:

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 examples/sft_lora.py --dp 2 --pp 2 --output_dir out/sft

On one process it runs without torchrun, --dp and --pp. With `--model FOLDER` it begins with a model and a tokenizer
that are there, otherwise with random weights. With `--load_in_4bit` the model is quantised (QLoRA; needs bitsandbytes),
with `--packing` rows hold several samples. The adapter is saved in PEFT's files.
"""

import pydoc_data.topics
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedTokenizerFast,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

import fold3d

Arguments = fold3d.arguments_class(SFTConfig)  # stock: Arguments = SFTConfig
Trainer = fold3d.trainer_class(SFTTrainer)  # stock: Trainer = SFTTrainer

WORD = r"\w+|[^\w\s]"
SPECIAL = ["<pad>", "<eos>", "<unk>"]


@dataclass
class ScriptArguments:
    """Which model is trained, and how its adapter looks; the rest is TRL's SFTConfig."""

    model: str | None = field(default=None, metadata={"help": "Folder of a model to begin with, with its tokenizer."})
    layers: int = field(default=4, metadata={"help": "Transformer blocks, without --model."})
    hidden: int = field(default=128, metadata={"help": "Width, without --model."})
    load_in_4bit: bool = field(default=False, metadata={"help": "Whether the model's weights are quantised (nf4)."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapter's matrices."})
    lora_alpha: int = field(default=32, metadata={"help": "What the adapter is scaled by, times its rank."})
    samples: int = field(default=2000, metadata={"help": "Sentences to train on at most."})
    eval_samples: int = field(default=32, metadata={"help": "Sentences held back for evaluation."})


def make_samples() -> list[dict[str, str]]:
    """Returns sentences of the help pages: the page's name is the prompt, the sentence what shall follow."""
    found = []
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        for sentence in re.split(r"(?<=[.:])\s+", text):
            words = sentence.split()
            if 5 <= len(words) <= 30:
                found.append({"prompt": f"Help on {topic} :", "completion": " " + " ".join(words)})
    return found


def make_model(folder: Path, samples: list[dict[str, str]], script: ScriptArguments) -> None:
    """Writes a model with random weights and its tokenizer, as a download would leave them."""
    words = Counter(word for row in samples for text in row.values() for word in re.findall(WORD, text))
    pieces = [*SPECIAL, *(word for word, _ in words.most_common(4096))]
    words_of = Tokenizer(WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="<unk>"))
    words_of.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), "removed", invert=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words_of, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=256
    )
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=script.hidden,
        intermediate_size=4 * script.hidden,
        num_hidden_layers=script.layers,
        num_attention_heads=max(1, script.hidden // 32),
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        use_cache=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, Arguments))
    parser.set_defaults(
        output_dir="out/sft",
        num_train_epochs=3,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        max_length=128,
        logging_steps=10,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        bf16=torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    script, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)

    samples = make_samples()
    folder = Path(script.model or Path(args.output_dir) / "start")
    with args.main_process_first(desc="making the model"):
        if not (folder / "config.json").exists():
            make_model(folder, samples, script)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    quantisation = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4") if script.load_in_4bit else None
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantisation)

    rows = Dataset.from_list(samples).shuffle(seed=args.seed)
    count = min(script.eval_samples + script.samples, len(rows))
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows.select(range(script.eval_samples, count)),
        eval_dataset=rows.select(range(script.eval_samples)),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=script.lora_r,
            lora_alpha=script.lora_alpha,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
    )
    trained = trainer.train()
    trainer.log_metrics("train", trained.metrics)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model()
    trainer.save_state()

    if trainer.is_world_process_zero():
        saved = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), args.output_dir)
        for row in rows.select(range(3)):
            given = tokenizer(row["prompt"], return_tensors="pt")
            said = saved.generate(**given, max_new_tokens=16, do_sample=False)
            print(tokenizer.decode(said[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
