"""What others are given to start a training: a script for sbatch, a task and times for SkyPilot."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from fold3d.cluster.cost import Offer
from fold3d.cluster.slurm.commands import options, script
from fold3d.cluster.slurm.folder import On, Wish

PREEMPTED = 75
"""The status with which the script of SkyPilot's task ends when the training was asked to end: EX_TEMPFAIL."""
_GOES_ON = "--enable_jit_checkpoint --resume auto"
"""What makes the Trainer save when it is asked to end, and go on from there."""


def sbatch(offer: Offer, command: Sequence[str], output: str) -> str:
    """Returns the script for sbatch: the cheapest offer's machines, its time at worst, and the training.

    Args:
        command: the user's script and its arguments.
        output: its output_dir.
    """
    machine = offer.plan.machine
    on, folder = On(machine.device, machine.count, machine.gpus, offer.known.rate), Path(output)
    arguments = (*command[1:], *shlex.split(offer.plan.flags), "--output_dir", output, *_GOES_ON.split())
    wish = Wish(name=Path(command[0]).stem, script=command[0], arguments=arguments, on=(on,), output=output)
    words = [*options(wish, on, folder, ()), f"--time={math.ceil(60 * offer.hours_at_worst)}"]
    first, rest = script(wish, on, folder).split("\n", 1)
    return "\n".join([first, *(f"#SBATCH {shlex.quote(word)}" for word in words), rest])


def skypilot(offers: Sequence[Offer], command: Sequence[str], output: str) -> str:
    """Returns a task of SkyPilot in YAML: machines in the order of what the training costs on them, the number of
    machines being that of the first; started again, on the next ones if need be, when they were taken away.

    Args:
        offers: the cheapest first.
    """
    count = offers[0].plan.machine.count
    mine = [one for one in offers if one.plan.machine.count == count]
    entries: list[tuple[float, str]] = []
    for offer in mine:
        machine = offer.plan.machine
        infra = f", infra: {machine.cloud}" if machine.cloud else ""
        for price, is_spot in ((machine.spot, "true"), (machine.price, "false")):
            if price is not None:
                said = f"accelerators: {machine.accelerator}:{machine.gpus}, use_spot: {is_spot}{infra}"
                entries.append((offer.hours * price, f"    - {{{said}}}"))
    # As the driver calls them, the longest first: *A100*80* is also *A100*, and *L40S* also *L4*.
    names = sorted(
        ((f"*{one.plan.machine.device.upper().replace('-', '*')}*", one) for one in mine),
        key=lambda case: -len(case[0]),
    )
    cases = "\n".join(f"    {name}) FLAGS={shlex.quote(one.plan.flags)} ;;" for name, one in names)
    node = '--nnodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK"'
    return f"""# Written by fold3d cost. sky jobs launch FILE
num_nodes: {count}
resources:
  ordered:
{chr(10).join(text for _, text in sorted(entries))}
  job_recovery:
    strategy: FAILOVER
    recover_on_exit_codes: [{PREEMPTED}]
run: |
  case "$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)" in
{cases}
    *) echo "no plan for this GPU" >&2; exit 1 ;;
  esac
  STATUS=0
  torchrun {node} --nproc-per-node "$SKYPILOT_NUM_GPUS_PER_NODE" \\
    --master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" --master-port 29500 \\
    {shlex.join(command)} $FLAGS --output_dir {shlex.quote(output)} {_GOES_ON} || STATUS=$?
  # torchrun ends with 1 whether the training was preempted or has failed: the mark says which.
  if [ -e {shlex.quote(output)}/preempted.json ]; then exit {PREEMPTED}; fi
  exit $STATUS
"""


def estimator(offers: Sequence[Offer], model: str, tokens: float) -> str:
    """Returns a Python file whose `estimate` SkyPilot's optimizer asks: task.set_time_estimator(estimate)."""
    count = offers[0].plan.machine.count
    rows = "".join(
        f"    ({one.plan.machine.accelerator!r}, {one.plan.machine.gpus}): {3600.0 * one.hours:.0f},\n"
        for one in offers
        if one.plan.machine.count == count
    )
    return f'''"""How long {model} takes for {tokens:g} tokens, by fold3d cost: task.set_time_estimator(estimate)."""

SECONDS = {{
{rows}}}


def estimate(resources):
    """Returns seconds on {count} machine(s) with these accelerators."""
    ((name, count),) = resources.accelerators.items()
    return SECONDS[name, int(count)]
'''
