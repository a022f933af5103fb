"""The job script: torchrun under srun; requeued where the site preempted it, never after a crash."""

from __future__ import annotations

import shlex
from pathlib import Path

from fold3d.cluster.slurm.folder import On, Wish

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
    output, ended = shlex.quote(wish.output), shlex.quote(str(folder / "ended"))
    return f"""#!/bin/bash
# Written by fold3d cluster. Node names need not resolve: NodeAddr does.
FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER=$(scontrol show node "$FIRST" -o | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
export PORT=$((20000 + SLURM_JOB_ID % 20000))
export FOLD3D_KIND={on.kind} FOLD3D_GPUS={on.gpus} FOLD3D_OUTPUT={output} FOLD3D_STARTED=$(date +%s.%N)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={GRACE}
mkdir -p {output}
rm -f {output}/preempted.json
# SIGTERM reaches the step's processes, which save. scancel ends this shell, too; when the site preempts, it goes on.
srun --kill-on-bad-exit=1 bash -c {shlex.quote(f"exec {given}")}
STATUS=$?
if [ -e {output}/preempted.json ]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
if [ $STATUS = 0 ]; then echo "done" > {ended}; else echo "failed: status $STATUS" > {ended}; fi
exit $STATUS
"""
