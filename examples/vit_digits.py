"""Trains a small vision transformer to read digits that are drawn on the spot, shifted, scaled and noisy.

As transformers' run_image_classification.py does it; the line that differs from the stock script is marked. Start it
with torchrun:

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 examples/vit_digits.py --dp 2 --pp 2 --output_dir out/vit

On one process it runs without torchrun, --dp and --pp. With `--model FOLDER` it begins with a model that is there,
otherwise with random weights.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from transformers import (
    AutoModelForImageClassification,
    EvalPrediction,
    HfArgumentParser,
    ViTConfig,
    default_data_collator,
    set_seed,
)

from fold3d import Trainer, TrainingArguments  # stock: from transformers import Trainer, TrainingArguments

DIGITS = "0123456789"


@dataclass
class ScriptArguments:
    """Which model is trained on what; the rest are TrainingArguments."""

    model: str | None = field(default=None, metadata={"help": "Folder of a model to begin with."})
    layers: int = field(default=4, metadata={"help": "Transformer blocks, without --model."})
    hidden: int = field(default=96, metadata={"help": "Width, without --model."})
    size: int = field(default=16, metadata={"help": "Pixels of a side of a picture."})
    patch: int = field(default=4, metadata={"help": "Pixels of a side of a patch, without --model."})
    noise: float = field(default=0.1, metadata={"help": "Standard deviation of the noise; ink is 1 and paper 0."})
    samples: int = field(default=3000, metadata={"help": "Pictures to train on."})
    eval_samples: int = field(default=256, metadata={"help": "Further pictures to evaluate on."})


class Digits(torch.utils.data.Dataset):
    """Pictures [1, size, size] of digits, drawn when they are asked for: the same for the same number."""

    def __init__(self, numbers: range, script: ScriptArguments) -> None:
        self._numbers, self._size, self._noise = numbers, script.size, script.noise

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = np.random.default_rng(self._numbers[index])
        digit, size = int(random.integers(len(DIGITS))), self._size
        font = ImageFont.load_default(size=size * random.uniform(0.8, 1.1))
        picture = Image.new("L", (size, size))
        place = size / 2 + random.uniform(-size / 16, size / 16, 2)
        ImageDraw.Draw(picture).text(tuple(place), DIGITS[digit], fill=255, font=font, anchor="mm")
        pixels = np.asarray(picture) / 255 + self._noise * random.standard_normal((size, size))
        normal = torch.tensor(((pixels - 0.5) / 0.5).tolist())
        return {"pixel_values": normal[None], "labels": torch.tensor(digit)}


def make_model(script: ScriptArguments) -> torch.nn.Module:
    """Returns a vision transformer with random weights."""
    config = ViTConfig(
        image_size=script.size,
        patch_size=script.patch,
        num_channels=1,
        hidden_size=script.hidden,
        intermediate_size=4 * script.hidden,
        num_hidden_layers=script.layers,
        num_attention_heads=max(1, script.hidden // 32),
        id2label=dict(enumerate(DIGITS)),
        label2id={digit: number for number, digit in enumerate(DIGITS)},
    )
    return AutoModelForImageClassification.from_config(config)


def scores(prediction: EvalPrediction) -> dict[str, float]:
    """Returns the share of digits that were read right."""
    return {"accuracy": float(np.mean(np.argmax(prediction.predictions, axis=-1) == prediction.label_ids))}


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="out/vit",
        num_train_epochs=6,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=32,
        learning_rate=1e-3,
        warmup_steps=40,
        logging_steps=20,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    script, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)

    model = AutoModelForImageClassification.from_pretrained(script.model) if script.model else make_model(script)
    last = script.samples + script.eval_samples
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Digits(range(script.samples), script),
        eval_dataset=Digits(range(script.samples, last), script),
        data_collator=default_data_collator,
        compute_metrics=scores,
    )
    trained = trainer.train()
    trainer.log_metrics("train", trained.metrics)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model()
    trainer.save_state()

    test = Digits(range(last, last + 6), script)
    found = trainer.predict(test, metric_key_prefix="test")
    if trainer.is_world_process_zero():
        read = "".join(DIGITS[number] for number in np.argmax(found.predictions, axis=-1))
        print(f"Drawn: {''.join(DIGITS[number] for number in found.label_ids)}  read: {read}")


if __name__ == "__main__":
    main()
