"""How much memory a rank needs under tensor parallelism: loading, training, saving and resuming.

    python benchmarks/tp_memory.py [--megabytes 1024] [--tp 1 4] [--length 64] [--whole-sequences] [--repetitions 3]
                                   [--json FILE]

A Llama of about that many bytes (fp32) is written to a folder as safetensors. For each number of shards fresh processes
build it on the meta device, read their parts from the folder, take two steps of AdamW and save a checkpoint; others
resume from that. Of each phase the highest resident memory of any rank counts, less what a process had before that had
imported everything, joined the others and built the model without values. All of that is done --repetitions times; the
table has the median of each phase, as what the heap of a process holds differs by a tenth from run to run. With more
shards it should shrink as the weights do, also where whole tensors are read, drawn or written. With long sequences
training shows the activations, which --whole-sequences has whole on every rank where no weights are shared
(sequence_parallel=False).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
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

from fold3d import Trainer, TrainingArguments

MB = 1 << 20
VOCABULARY, STEPS = 4096, 2
PHASES = ("load", "train", "save", "resume")


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained."""

    megabytes: int
    length: int
    whole_sequences: bool


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

    reads_weights = False

    def __init__(self) -> None:
        self._base = status("VmRSS")
        self.peaks: dict[str, int] = {}
        self.forget()

    def forget(self) -> None:
        """The highest so far does not count."""
        Path("/proc/self/clear_refs").write_text("5")

    def ends(self, phase: str) -> None:
        """What has been highest until now was so in `phase`."""
        self.peaks[phase] = status("VmHWM") - self._base
        self.forget()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before the checkpoint is written."""
        if state.global_step == STEPS:
            self.ends("train")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """It is written."""
        self.ends("save")


def work(rank: int, tp: int, port: int, case: Case, folder: str, out: str, resumes: bool, answers: Any) -> None:
    """One rank: trains and saves, or resumes."""
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(tp),
        "OMP_NUM_THREADS": "1",
    }
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    arguments = TrainingArguments(
        output_dir=out,
        tp=tp,
        sequence_parallel=False if case.whole_sequences else "auto",
        weights=folder,
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
    phases.ends("load")
    trainer.train(resume_from_checkpoint=str(Path(out) / f"checkpoint-{STEPS}") if resumes else None)
    if resumes:
        phases.ends("resume")
    shares: list[Any] = [phases.peaks]
    if tp > 1:
        shares = [None] * tp
        dist.all_gather_object(shares, phases.peaks)
    if rank == 0:
        answers.put({phase: max(share[phase] for share in shares) for phase in phases.peaks})
    if dist.is_initialized():
        dist.destroy_process_group()


def measured(tp: int, case: Case, folder: str) -> dict[str, int]:
    """Returns the bytes of each phase of the fullest rank."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as out:
        for resumes in (False, True):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            answers = context.SimpleQueue()
            ranks = [
                context.Process(target=work, args=(rank, tp, port, case, folder, out, resumes, answers))
                for rank in range(tp)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            if any(process.exitcode for process in ranks):
                raise SystemExit("a rank failed")
            new = answers.get()
            found |= {phase: new[phase] for phase in PHASES if phase in new and phase not in found}
    return found


def medians(runs: Sequence[dict[str, int]]) -> dict[str, int]:
    """Returns the median of each phase over several runs."""
    return {phase: int(statistics.median(run[phase] for run in runs)) for phase in PHASES}


def write(case: Case, folder: str) -> None:
    """Writes the model."""
    transformers.LlamaForCausalLM(config_of(case.megabytes, case.length)).save_pretrained(folder)


def report(results: Sequence[tuple[int, dict[str, int]]], total: int, repetitions: int) -> None:
    """Prints a table: MiB of each phase, and the share of what the first number of shards needs."""
    print(
        f"weights: {total / MB:.0f} MiB; MiB of the fullest rank above an idle process, median of {repetitions}, and "
        "the share of the first"
    )
    print(f"{'tp':>4}" + "".join(f"{phase:>16}" for phase in (*PHASES, "highest")))
    first = results[0][1]
    for tp, peaks in results:
        both = [(peaks[phase], first[phase]) for phase in PHASES] + [(max(peaks.values()), max(first.values()))]
        print(f"{tp:4}" + "".join(f"{peak / MB:10.0f} {peak / whole:5.2f}" for peak, whole in both))


def main() -> None:
    """Prints a table; the same as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024, help="of the weights, about")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 4], help="numbers of shards; shares are of the first")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--whole-sequences", action="store_true", help="sequence_parallel=False")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each, of which the median counts")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    case = Case(options.megabytes, options.length, options.whole_sequences)
    with torch.device("meta"):
        parameters = transformers.LlamaForCausalLM(config_of(case.megabytes, case.length)).parameters()
        total = 4 * sum(parameter.numel() for parameter in parameters)
    with tempfile.TemporaryDirectory() as folder:
        writer = multiprocessing.get_context("spawn").Process(target=write, args=(case, folder))
        writer.start()
        writer.join()
        runs = {tp: [measured(tp, case, folder) for _ in range(options.repetitions)] for tp in options.tp}
    results = [(tp, medians(found)) for tp, found in runs.items()]
    report(results, total, options.repetitions)
    if options.json:
        figures = [{"tp": tp, **peaks, "runs": runs[tp]} for tp, peaks in results]
        options.json.write_text(json.dumps({"weights": total, "results": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
