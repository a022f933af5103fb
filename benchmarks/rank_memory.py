"""How much memory a rank needs of a model that several processes share: loading, training, saving and resuming.

    python -m benchmarks.rank_memory [--megabytes 1024] [--layouts tp=4 pp=4 pp=2,tp=2 pp=4,segments=2] [--initialised]
                                     [--length 64] [--whole-sequences] [--repetitions 3] [--json FILE]

A Llama of about that many bytes (fp32) is written to a folder as safetensors. For each layout (dp=1) fresh processes
build it on the meta device, read their shares of it (or draw initial values, --initialised), take two steps of
AdamW and save a checkpoint; others resume from that. Of each phase the highest resident memory of any rank counts, less
what a process had before that had imported everything, joined the others and built the model without values. Phases:

    load     until the model is cut and each rank has its weights
    start    until the first optimizer step: weights, gradients and activations
    train    until the last one, with AdamW's two moments
    save     writing a checkpoint, which rank 0 puts together
    resume   reading it on fresh processes, and a step

All of that is done --repetitions times; the table has the median of each phase, as what the heap of a process holds
differs by a tenth from run to run. Each is followed by its share of the weights' bytes. With long sequences training
shows the activations, which --whole-sequences has whole on every rank where no weights are shared
(sequence_parallel=False).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.local.ranks import run_ranks
from fold3d import Trainer, TrainingArguments

MB = 1 << 20
VOCABULARY, STEPS = 4096, 2
LAYOUTS = ("tp=4", "pp=4", "pp=2,tp=2", "pp=4,segments=2")
PHASES = ("load", "start", "train", "save", "resume")


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained."""

    megabytes: int
    length: int
    whole_sequences: bool
    initialised: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """How the ranks share the model."""

    pp: int = 1
    tp: int = 1
    segments: int = 1

    @classmethod
    def of(cls, text: str) -> Layout:
        """Returns the layout of a text such as "pp=2,tp=2"."""
        return cls(**{name: int(number) for name, number in (part.split("=") for part in text.split(","))})

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.pp * self.tp

    def __str__(self) -> str:
        values = {"pp": self.pp, "tp": self.tp, "segments": self.segments}
        return ",".join(f"{name}={value}" for name, value in values.items() if value > 1) or "alone"


def config_of(megabytes: int, length: int) -> transformers.LlamaConfig:
    """Returns a Llama whose parameters take about so much memory in fp32, none of them more than 16 MiB."""
    layer, ends = 4 * (4 * 1024**2 + 3 * 1024 * 4096), 8 * 1024 * VOCABULARY
    return transformers.LlamaConfig(
        num_hidden_layers=max(1, round((megabytes * MB - ends) / layer)),
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=length,
        use_cache=False,
    )


class Tokens(Dataset[dict[str, Tensor]]):
    """Random ones."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCABULARY, (self._length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def status(key: str) -> int:
    """Returns an entry of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


class Phases(transformers.TrainerCallback):
    """The highest resident memory of each phase, above that at the beginning."""

    reads_gradients = False

    def __init__(self) -> None:
        self._base = status("VmRSS")
        self.peaks: dict[str, int] = {}
        self.forget()

    def forget(self) -> None:
        """The highest so far does not count."""
        Path("/proc/self/clear_refs").write_text("5")

    def ends(self, phase: str) -> None:
        """What has been highest until now was so in `phase`, if that has not ended before."""
        self.peaks.setdefault(phase, status("VmHWM") - self._base)
        self.forget()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The first time there is no optimizer state yet."""
        if not state.global_step:
            self.ends("start")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before the checkpoint is written."""
        if state.global_step == STEPS:
            self.ends("train")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """It is written."""
        self.ends("save")


def work(layout: Layout, case: Case, folder: str, out: str, resumes: bool) -> dict[str, int]:
    """One rank: trains and saves, or resumes; returns the bytes of each phase."""
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    arguments = TrainingArguments(
        output_dir=out,
        pp=layout.pp,
        tp=layout.tp,
        segments=layout.segments,
        schedule="1f1b" if layout.segments == 1 else "auto",
        sequence_parallel=False if case.whole_sequences else "auto",
        weights=None if case.initialised else folder,
        per_device_train_batch_size=1,
        max_steps=STEPS + resumes,
        save_steps=STEPS,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config_of(case.megabytes, case.length))
    phases = Phases()
    trainer = Trainer(model, arguments, train_dataset=Tokens(case.length), callbacks=[phases])
    trainer.engine.on_build.append(lambda: phases.ends("load"))
    if trainer.engine.is_built:
        phases.ends("load")
    trainer.train(resume_from_checkpoint=str(Path(out) / f"checkpoint-{STEPS}") if resumes else None)
    if resumes:
        phases.ends("resume")
    if dist.is_initialized():
        dist.destroy_process_group()
    return phases.peaks


def measured(layout: Layout, case: Case, folder: str) -> dict[str, int]:
    """Returns the bytes of each phase of the fullest rank."""
    found: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as out:
        for resumes in (False, True):
            shares = run_ranks(work, layout.ranks, layout, case, folder, out, resumes, timeout=3600)
            new = {phase: max(share[phase] for share in shares) for phase in shares[0]}
            found |= {phase: new[phase] for phase in PHASES if phase in new and phase not in found}
    return found


def medians(runs: Sequence[dict[str, int]]) -> dict[str, int]:
    """Returns the median of each phase over several runs."""
    return {phase: int(statistics.median(run[phase] for run in runs)) for phase in PHASES}


def write(case: Case, folder: str) -> None:
    """Writes the model."""
    transformers.LlamaForCausalLM(config_of(case.megabytes, case.length)).save_pretrained(folder)


def report(results: Sequence[tuple[Layout, dict[str, int]]], total: int, repetitions: int) -> None:
    """Prints a table: MiB of each phase, and their share of the weights."""
    print(
        f"weights: {total / MB:.0f} MiB; MiB of the fullest rank above an idle process, median of {repetitions}, and "
        "the share of the weights"
    )
    print(f"{'layout':<16}" + "".join(f"{phase:>16}" for phase in PHASES))
    for layout, peaks in results:
        print(f"{layout!s:<16}" + "".join(f"{peaks[phase] / MB:10.0f} {peaks[phase] / total:5.2f}" for phase in PHASES))


def main() -> None:
    """Prints a table; the same as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024, help="of the weights, about")
    parser.add_argument(
        "--layouts", type=Layout.of, nargs="+", default=list(map(Layout.of, LAYOUTS)), help="such as pp=2,tp=2"
    )
    parser.add_argument("--initialised", action="store_true", help="draw initial values instead of reading a folder")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--whole-sequences", action="store_true", help="sequence_parallel=False")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each, of which the median counts")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    case = Case(options.megabytes, options.length, options.whole_sequences, options.initialised)
    with torch.device("meta"):
        parameters = transformers.LlamaForCausalLM(config_of(case.megabytes, case.length)).parameters()
        total = 4 * sum(parameter.numel() for parameter in parameters)
    with tempfile.TemporaryDirectory() as folder:
        if not case.initialised:
            run_ranks(write, 1, case, folder)
        runs = {
            layout: [measured(layout, case, folder) for _ in range(options.repetitions)] for layout in options.layouts
        }
    results = [(layout, medians(found)) for layout, found in runs.items()]
    report(results, total, options.repetitions)
    if options.json:
        figures = [{"layout": str(layout), **peaks, "runs": runs[layout]} for layout, peaks in results]
        options.json.write_text(json.dumps({"weights": total, "results": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
