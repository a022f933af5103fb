"""Trains a small Whisper to write down melodies: made-up audio in which every letter has a tone.

As transformers' run_speech_recognition_seq2seq.py does it; with `--ctc` as run_speech_recognition_ctc.py: a wav2vec 2
that hears the wave itself and says at each moment which letter it is. The line that differs from the stock script is
marked. Start it with torchrun:

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/whisper_ctc_or_seq2seq.py \
        --pp 2 --output_dir out/whisper

On one process it runs without torchrun and --pp. Whisper has a `generate` of its own, which needs the whole model: what
was saved writes in the end.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from transformers import (
    EvalPrediction,
    HfArgumentParser,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    set_seed,
)

from fold3d import Seq2SeqTrainer, Seq2SeqTrainingArguments  # stock: from transformers import ...

LETTERS = "abcdefgh"
START, END, PAD = len(LETTERS), len(LETTERS) + 1, len(LETTERS) + 2
SILENCE = len(LETTERS)  # what CTC calls the blank
Extractor = WhisperFeatureExtractor | Wav2Vec2FeatureExtractor
RATE = 16000


@dataclass
class ScriptArguments:
    """Which model is trained on what; the rest are Seq2SeqTrainingArguments."""

    ctc: bool = field(default=False, metadata={"help": "A wav2vec 2 with a CTC head in the place of Whisper."})
    layers: int = field(default=2, metadata={"help": "Blocks of the encoder, and of the decoder."})
    hidden: int = field(default=96, metadata={"help": "Width of the model."})
    seconds: int = field(default=2, metadata={"help": "Length of the recordings."})
    letters: int = field(default=5, metadata={"help": "Letters in a recording at most."})
    samples: int = field(default=1500, metadata={"help": "Recordings to train on."})
    eval_samples: int = field(default=64, metadata={"help": "Further recordings to evaluate on."})


class Melodies(torch.utils.data.Dataset):
    """Recordings, and their letters: the same for the same number.

    As log-mel spectra [mels, frames] (`input_features`), with `--ctc` as waves [samples] (`input_values`).
    """

    def __init__(self, numbers: range, extract: Extractor, script: ScriptArguments) -> None:
        self._numbers, self._extract, self._script = numbers, extract, script

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = np.random.default_rng(self._numbers[index])
        letters = random.integers(len(LETTERS), size=random.integers(2, self._script.letters + 1))
        wave = self.sing(letters, random)
        labels = letters.tolist()
        if not self._script.ctc:
            labels.append(END)
        labels += [-100] * (self._script.letters + 1 - len(labels))
        length = self._script.seconds * RATE
        extracted = self._extract(wave, sampling_rate=RATE, padding="max_length", max_length=length, truncation=True)
        name = self._extract.model_input_names[0]
        return {name: torch.tensor(extracted[name][0].tolist()), "labels": torch.tensor(labels)}

    def sing(self, letters: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Returns the samples of a recording in which the letters sound one after the other, in noise."""
        length = self._script.seconds * RATE // self._script.letters
        time = np.arange(length) / RATE
        envelope = np.minimum(1, 20 * np.minimum(time, time[::-1]))
        tones = [envelope * np.sin(2 * np.pi * 300 * 1.25**letter * time + random.uniform(0, 6)) for letter in letters]
        wave = np.concatenate(tones)
        return (wave + 0.1 * random.standard_normal(len(wave))).astype(np.float32)


def make_wav2vec2(script: ScriptArguments) -> tuple[Wav2Vec2FeatureExtractor, Wav2Vec2ForCTC]:
    """Returns a wav2vec 2 with random weights, which hears 50 frames a second, and what prepares its waves."""
    config = Wav2Vec2Config(
        vocab_size=SILENCE + 1,
        pad_token_id=SILENCE,
        hidden_size=script.hidden,
        num_hidden_layers=script.layers,
        num_attention_heads=max(1, script.hidden // 32),
        intermediate_size=4 * script.hidden,
        conv_dim=[script.hidden] * 7,
        num_conv_pos_embedding_groups=4,
        num_conv_pos_embeddings=16,
        hidden_dropout=0.0,
        activation_dropout=0.0,
        attention_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=False,
        ctc_loss_reduction="mean",
    )
    return Wav2Vec2FeatureExtractor(sampling_rate=RATE), Wav2Vec2ForCTC(config)


def make_whisper(script: ScriptArguments) -> tuple[WhisperFeatureExtractor, WhisperForConditionalGeneration]:
    """Returns a Whisper with random weights for recordings of this length, and what makes their spectra."""
    extract = WhisperFeatureExtractor(chunk_length=script.seconds, sampling_rate=RATE)
    config = WhisperConfig(
        vocab_size=PAD + 1,
        num_mel_bins=extract.feature_size,
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
    return extract, WhisperForConditionalGeneration(config)


def likeliest(logits: tuple[Tensor, ...] | Tensor, labels: Tensor) -> Tensor:
    """Returns the likeliest token at each place, instead of all logits."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def scores_of_ctc(prediction: EvalPrediction) -> dict[str, float]:
    """Returns the share of recordings without error."""
    heard, sung = prediction.predictions, prediction.label_ids
    return {
        "recordings": float(
            np.mean([spoken(ours) == written(theirs) for ours, theirs in zip(heard, sung, strict=True)])
        )
    }


def scores(prediction: EvalPrediction) -> dict[str, float]:
    """Returns the share of letters that were expected right, given the ones before, and of recordings without error."""
    said = prediction.label_ids != -100
    right = prediction.predictions == prediction.label_ids
    return {"letters": float(right[said].mean()), "recordings": float((right | ~said).all(-1).mean())}


def written(tokens: Iterable[int]) -> str:
    """Returns the letters among the tokens."""
    return "".join(LETTERS[token] for token in tokens if 0 <= token < len(LETTERS))


def spoken(tokens: Iterable[int]) -> str:
    """Returns the letters of CTC's tokens, one for each moment: what lasts is one letter."""
    return written(token for token, _ in groupby(tokens))


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

    extract, model = make_wav2vec2(script) if script.ctc else make_whisper(script)
    last = script.samples + script.eval_samples
    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=Melodies(range(script.samples), extract, script),
        eval_dataset=Melodies(range(script.samples, last), extract, script),
        processing_class=extract,
        compute_metrics=scores_of_ctc if script.ctc else scores,
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
        saved = type(model).from_pretrained(args.output_dir)
        for row in Melodies(range(last, last + 4), extract, script):
            sound, sung = row[extract.model_input_names[0]][None], written(row["labels"].tolist())
            with torch.no_grad():
                text = (
                    spoken(saved(sound).logits[0].argmax(-1).tolist())
                    if script.ctc
                    else written(saved.generate(sound)[0].tolist())
                )
            print(f"Sung: {sung:10} written: {text}")


if __name__ == "__main__":
    main()
