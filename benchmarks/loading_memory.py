"""How much memory a rank needs where a script loads a model whole, and where it does not; and what logits take.

    python -m benchmarks.loading_memory [--megabytes 1024] [--pp 4] [--vocabulary 131072] [--tokens 1024] [--chunk 128]

A Llama of about that many bytes (fp32) is written to a folder as safetensors. Fresh processes train LoRA over it for a
step, as it is and quantised to 4 bits (nf4, by bitsandbytes); once each process calls `from_pretrained`, once
in `fold3d.empty_weights()`. Of the fullest rank: the highest resident memory, above that of a process that has imported
everything, until the model is cut, and until the step is over.

Then the most bytes that tensors hold in a forward and a backward of a model with one layer, beside weights and
gradients: with the logits of all tokens, and with `chunked_loss`.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model

import fold3d
from benchmarks.local.ranks import run_ranks
from benchmarks.rank_memory import MB, Tokens, config_of, status
from fold3d import _C
from fold3d.tensor_parallel.vocabulary.chunked_loss import install_chunked_loss
from fold3d.trace.coat import Coat

LENGTH = 64


def work(folder: str, out: str, pp: int, quantised: bool, empty: bool) -> tuple[int, int]:
    """One rank: loads and trains; returns the bytes until the model is cut, and until the step is over."""
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    import bitsandbytes  # noqa: F401 (what a process has imported does not count)

    base = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    four_bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    arguments = fold3d.TrainingArguments(
        output_dir=out,
        pp=pp,
        schedule="1f1b",
        per_device_train_batch_size=1,
        max_steps=1,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    with fold3d.empty_weights() if empty else contextlib.nullcontext():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, quantization_config=four_bits if quantised else None
        )
    adapted: Any = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    cut: list[int] = []
    trainer = fold3d.Trainer(adapted, arguments, train_dataset=Tokens(LENGTH))
    trainer.engine.on_build.append(lambda: cut.append(status("VmHWM") - base))
    if trainer.engine.is_built:
        cut.append(status("VmHWM") - base)
    trainer.train()
    if dist.is_initialized():
        dist.destroy_process_group()
    return cut[0], status("VmHWM") - base


def write(folder: str, megabytes: int) -> None:
    """Writes the model."""
    transformers.LlamaForCausalLM(config_of(megabytes, LENGTH)).save_pretrained(folder)


def of_a_loss(vocabulary: int, tokens: int, chunk: int | None) -> int:
    """Returns the most bytes of tensors in a forward and a backward, beside weights and their gradients."""
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=vocabulary, max_position_embeddings=tokens, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    if chunk is not None:
        install_chunked_loss(Coat(), model, chunk)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(vocabulary, (1, tokens))
    _C.count_cpu_bytes(True)
    _C.reset_peak_cpu_bytes()
    before = _C.peak_cpu_bytes()
    loss: Any = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return _C.peak_cpu_bytes() - before


def main() -> None:
    """Prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024, help="of the weights, about")
    parser.add_argument("--pp", type=int, default=4, help="stages, one process each")
    parser.add_argument("--vocabulary", type=int, default=131072, help="entries")
    parser.add_argument("--tokens", type=int, default=1024, help="of a micro-batch")
    parser.add_argument("--chunk", type=int, default=128, help="tokens whose logits are there at a time")
    options = parser.parse_args()
    print("| weights | loaded | until cut, MiB | step, MiB |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as out:
        run_ranks(write, 1, folder, options.megabytes)
        for quantised in (False, True):
            for empty in (False, True):
                found = run_ranks(work, options.pp, folder, out, options.pp, quantised, empty, timeout=3600)
                cut, step = (max(one) / MB for one in zip(*found, strict=True))
                way = "fold3d.empty_weights()" if empty else "by every process"
                print(f"| {'4 bits' if quantised else 'fp32'} | {way} | {cut:,.0f} | {step:,.0f} |", flush=True)
    whole, chunked = (of_a_loss(options.vocabulary, options.tokens, one) / MB for one in (None, options.chunk))
    logits = 4 * options.vocabulary * options.tokens / MB
    print(f"\nlogits of all {options.tokens} tokens: {logits:,.0f} MiB; loss and its backward: {whole:,.0f} MiB, with")
    print(f"chunked_loss={options.chunk} {chunked:,.0f} MiB")


if __name__ == "__main__":
    main()
