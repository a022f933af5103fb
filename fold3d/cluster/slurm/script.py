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
