"""Trains a small Whisper to write down melodies: made-up audio in which every letter has a tone.

As transformers' run_speech_recognition_seq2seq.py does it; the line that differs from the stock script is marked. Start
it with torchrun:

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/whisper_seq2seq.py \
        --pp 2 --output_dir out/whisper

On one process it runs without torchrun and --pp. Whisper has a `generate` of its own, which needs the whole model: what
was saved writes in the end.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import (
    EvalPrediction,
    HfArgumentParser,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    set_seed,
)

from fold3d import Seq2SeqTrainer, Seq2SeqTrainingArguments  # stock: from transformers import ...

LETTERS = "abcdefgh"
START, END, PAD = len(LETTERS), len(LETTERS) + 1, len(LETTERS) + 2
RATE = 16000


@dataclass
class ScriptArguments:
    """Which model is trained on what; the rest are Seq2SeqTrainingArguments."""

    layers: int = field(default=2, metadata={"help": "Blocks of the encoder, and of the decoder."})
    hidden: int = field(default=96, metadata={"help": "Width of the model."})
    seconds: int = field(default=2, metadata={"help": "Length of the recordings."})
    letters: int = field(default=5, metadata={"help": "Letters in a recording at most."})
    samples: int = field(default=1500, metadata={"help": "Recordings to train on."})
    eval_samples: int = field(default=64, metadata={"help": "Further recordings to evaluate on."})


class Melodies(torch.utils.data.Dataset):
    """Recordings as log-mel spectra [mels, frames], and their letters: the same for the same number."""

    def __init__(self, numbers: range, extract: WhisperFeatureExtractor, script: ScriptArguments) -> None:
        self._numbers, self._extract, self._script = numbers, extract, script

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = np.random.default_rng(self._numbers[index])
        letters = random.integers(len(LETTERS), size=random.integers(2, self._script.letters + 1))
        wave = self.sing(letters, random)
        features = self._extract(wave, sampling_rate=RATE).input_features[0]
        labels = [*letters.tolist(), END]
        labels += [-100] * (self._script.letters + 1 - len(labels))
        return {"input_features": torch.tensor(features.tolist()), "labels": torch.tensor(labels)}

    def sing(self, letters: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Returns the samples of a recording in which the letters sound one after the other, in noise."""
        length = self._script.seconds * RATE // self._script.letters
        time = np.arange(length) / RATE
        envelope = np.minimum(1, 20 * np.minimum(time, time[::-1]))
        tones = [envelope * np.sin(2 * np.pi * 300 * 1.25**letter * time + random.uniform(0, 6)) for letter in letters]
        wave = np.concatenate(tones)
        return (wave + 0.1 * random.standard_normal(len(wave))).astype(np.float32)


def make_model(script: ScriptArguments, mels: int) -> WhisperForConditionalGeneration:
    """Returns a Whisper with random weights for recordings and transcripts of this length."""
    config = WhisperConfig(
        vocab_size=PAD + 1,
        num_mel_bins=mels,
        d_model=script.hidden,
        encoder_layers=script.layers,
        decoder_layers=script.layers,
        encoder_attention_heads=max(1, script.hidden // 32),
        decoder_attention_heads=max(1, script.hidden // 32),
        encoder_ffn_dim=4 * script.hidden,
        decoder_ffn_dim=4 * script.hidden,
        max_source_positions=50 * script.seconds,
        max_target_positions=script.letters + 2,
        decoder_start_token_id=START,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=PAD,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        max_length=script.letters + 2,
    )
    return WhisperForConditionalGeneration(config)


def likeliest(logits: tuple[Tensor, ...] | Tensor, labels: Tensor) -> Tensor:
    """Returns the likeliest token at each place, instead of all logits."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def scores(prediction: EvalPrediction) -> dict[str, float]:
    """Returns the share of letters that were expected right, given the ones before, and of recordings without error."""
    said = prediction.label_ids != -100
    right = prediction.predictions == prediction.label_ids
    return {"letters": float(right[said].mean()), "recordings": float((right | ~said).all(-1).mean())}


def written(tokens: list[int]) -> str:
    """Returns the letters among the tokens."""
    return "".join(LETTERS[token] for token in tokens if 0 <= token < len(LETTERS))


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, Seq2SeqTrainingArguments))
    parser.set_defaults(
        output_dir="out/whisper",
        num_train_epochs=8,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=16,
        learning_rate=1e-3,
        warmup_steps=50,
        logging_steps=20,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    script, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)

    extract = WhisperFeatureExtractor(chunk_length=script.seconds, sampling_rate=RATE)
    model = make_model(script, extract.feature_size)
    last = script.samples + script.eval_samples
    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=Melodies(range(script.samples), extract, script),
        eval_dataset=Melodies(range(script.samples, last), extract, script),
        processing_class=extract,
        compute_metrics=scores,
        preprocess_logits_for_metrics=likeliest,
    )
    trained = trainer.train()
    trainer.log_metrics("train", trained.metrics)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model()
    trainer.save_state()

    if trainer.is_world_process_zero():
        saved = WhisperForConditionalGeneration.from_pretrained(args.output_dir)
        for row in Melodies(range(last, last + 4), extract, script):
            tokens = saved.generate(row["input_features"][None])[0]
            print(f"Sung: {written(row['labels'].tolist()):10} written: {written(tokens.tolist())}")


if __name__ == "__main__":
    main()
