"""What is asked of Slurm: squeue, sinfo, sbatch, scancel; and the job script: torchrun under srun, requeued where the
site preempted it, never after a crash.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fold3d.cluster.jobs import Cluster, Kind
from fold3d.cluster.slurm.folder import On, Wish
from fold3d.errors import ConfigError

GRACE = 30
"""Seconds between SIGTERM and SIGKILL that torchrun grants its processes: Slurm's KillWait where nobody changed it."""


COMMENT = "fold3d "
"""Of jobs that are ours; where they run follows."""


def options(wish: Wish, on: On, folder: Path, after: tuple[str, ...]) -> list[str]:
    """Returns what sbatch is told; the job waits for the end of those in `after`."""
    words = [
        f"--job-name={wish.name}",
        f"--comment={COMMENT}{on}",
        f"--nodes={on.nodes}",
        "--ntasks-per-node=1",
        f"--gres=gpu:{on.kind}:{on.per_node}",
        "--requeue",
        "--open-mode=append",
        f"--output={folder / 'out.txt'}",
    ]
    return words + ([f"--dependency=afterany:{':'.join(after)}"] if after else [])


def script(wish: Wish, on: On, folder: Path) -> str:
    """Returns the script. torchrun starts what ends with .py, a process for each GPU; others run once a node."""
    given = " ".join(shlex.quote(word) for word in (wish.script, *wish.arguments))
    if wish.script.endswith(".py"):
        node = '--nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --master-addr "$MASTER" --master-port "$PORT"'
        given = f"torchrun {node} --nproc-per-node {on.per_node} {given}"
    output, ended, failed = (shlex.quote(str(one)) for one in (wish.output, folder / "ended", folder / "failed"))
    # srun returns the highest status, which is that of the nodes that it ends when one has failed; the first tells why.
    keeps = f"[ $STATUS = 0 ] || [ $STATUS -gt 128 ] || (set -C; echo $STATUS > {failed}) 2> /dev/null"
    on_node = f"trap : TERM; {given}; STATUS=$?; {keeps}; exit $STATUS"
    return f"""#!/bin/bash
# Written by fold3d cluster. Node names need not resolve: NodeAddr does.
FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER=$(scontrol show node "$FIRST" -o | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
export PORT=$((20000 + SLURM_JOB_ID % 20000))
export FOLD3D_KIND={on.kind} FOLD3D_GPUS={on.gpus} FOLD3D_OUTPUT={output} FOLD3D_STARTED=$(date +%s.%N)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={GRACE}
mkdir -p {output}
rm -f {output}/preempted.json {failed}
# SIGTERM reaches the step's processes, which save. scancel ends this shell, too; when the site preempts, it goes on.
srun --kill-on-bad-exit=1 bash -c {shlex.quote(on_node)}
STATUS=$?
if [ -e {failed} ]; then STATUS=$(cat {failed}); fi
if [ -e {output}/preempted.json ]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
if [ $STATUS = 0 ]; then echo "done" > {ended}; else echo "failed: status $STATUS" > {ended}; fi
exit $STATUS
"""


_SECONDS = 60.0
"""For which a command may take."""
_ENDING = {"COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}


@dataclass(frozen=True, slots=True)
class Queued:
    """A job of the user's that Slurm knows and that has not ended."""

    id: str
    name: str
    state: str
    """PENDING, RUNNING, .."""
    comment: str
    seconds: int
    """For which it has run."""


def queue() -> list[Queued]:
    """Returns the user's jobs, the oldest first. Raises: ConfigError where Slurm does not answer."""
    # Other lines are warnings, or rests of the comments of jobs that are not ours: ours have one line each.
    form = r"([^|]+)\|([^|]*)\|([A-Z_]+)\|([^|]*)\|(.*)"
    lines = _matches(form, "squeue", "--me", "--sort=i", "--format=%i|%j|%T|%M|%k")
    found = [Queued(id, name, state, comment, _duration(time)) for id, name, state, time, comment in lines]
    return [job for job in found if job.state not in _ENDING]


def gpus() -> Cluster:
    """Returns the GPUs with a type of all nodes that work. Raises: ConfigError where there are none."""
    counts: dict[str, int] = {}
    seen = set()
    for node, state, generic in _matches(r"([^|]+)\|([^|]+)\|(.*)", "sinfo", "--Node", "--format=%N|%T|%G"):
        if node in seen or re.match(r"(down|drain|fail|maint|unknown|inval)", state):
            continue
        seen.add(node)
        for kind, count in re.findall(r"gpu:([\w.-]+):(\d{1,9})", generic):
            counts[kind] = counts.get(kind, 0) + int(count)
    counts = {kind: count for kind, count in counts.items() if count}
    if not counts:
        raise ConfigError("sinfo shows no GPUs with a type (gpu:a100:8); name them: --gpus a100:8,t4:16")
    return Cluster(tuple(Kind(kind, count) for kind, count in sorted(counts.items())))


def submit(words: Sequence[str], script: str) -> str:
    """Returns the id of the job that Slurm made of the script."""
    return _run("sbatch", "--parsable", *words, input=script).strip().split(";")[0]


def cancel(ids: Sequence[str]) -> None:
    """Ends jobs: their processes get SIGTERM, and save."""
    if ids:
        _run("scancel", *ids)


def _matches(form: str, *words: str) -> list[tuple[str, ...]]:
    """Returns the groups of each line of the command's table that has the form; others are left out."""
    lines = _run(*words, "--noheader").splitlines()
    return [found.groups() for line in lines if (found := re.fullmatch(form, line.strip()))]


def _duration(text: str) -> int:
    """Returns the seconds of `1-02:03:04`, `2:03:04` or `3:04`; 0 of what is none (`INVALID`)."""
    found = re.fullmatch(r"(?:(\d{1,9})-)?(?:(\d\d?):)?(\d\d?):(\d\d)", text)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    return ((24 * days + hours) * 60 + minutes) * 60 + seconds


def _run(*words: str, input: str | None = None) -> str:
    try:
        done = subprocess.run(
            words, input=input, capture_output=True, encoding="utf-8", errors="replace", timeout=_SECONDS
        )
    except FileNotFoundError:
        raise ConfigError(f"{words[0]} is not installed: these commands run where Slurm's are") from None
    except OSError as error:
        raise ConfigError(f"{words[0]} cannot be started: {error}; these commands run where Slurm's are") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{' '.join(words[:2])} did not answer within {_SECONDS:g} s; is slurmctld up?") from None
    if done.returncode:
        raise ConfigError(f"{' '.join(words)}: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout
