"""A real Slurm on this machine: a controller and three nodes of two types of GPU, as children of the test.

It needs root and Debian's slurmctld, slurmd, slurm-client and slurm-wlm-basic-plugins (scripts/system_packages.sh), no
munge, cgroups or systemd. The GPUs are null devices: Slurm counts them, and that is all.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

NODES = {"a0": "a100", "t0": "t4", "t1": "t4"}
"""Names and types; each has two GPUs."""
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PriorityType=priority/basic
GresTypes=gpu
KillWait=30
MinJobAge=300
JobRequeue=1
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
_START = 60.0
"""Seconds until all nodes must be there."""


def missing() -> str | None:
    """Returns why Slurm cannot be started here, None where it can."""
    programs = [name for name in ("slurmctld", "slurmd", "sbatch", "srun") if shutil.which(name) is None]
    if programs:
        return f"{', '.join(programs)} not installed: scripts/system_packages.sh installs Debian's packages"
    return None if os.geteuid() == 0 else "Slurm's daemons are started as root"


@contextmanager
def slurm(folder: Path) -> Iterator[None]:
    """Runs Slurm; SLURM_CONF is set inside. Raises: RuntimeError with the logs where it does not come up."""
    host, devices = socket.gethostname().split(".")[0], folder / "dev"
    for part in ("state", "dev", *(f"spool/{node}" for node in NODES)):
        (folder / part).mkdir(parents=True)
    ports, lines, generic = _free_ports(1 + len(NODES)), [], []
    for number, (node, kind) in enumerate(NODES.items()):
        for gpu in range(2):
            os.mknod(devices / f"{node}-{gpu}", 0o666 | 0o020000, os.makedev(1, 3))
        where = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1 + number]} CPUs=8 RealMemory=4000"
        lines.append(f"NodeName={node} {where} Gres=gpu:{kind}:2")
        generic.append(f"NodeName={node} Name=gpu Type={kind} File={devices}/{node}-[0-1]")
    text = _CONFIGURATION.format(host=host, folder=folder, ports=ports)
    before_partitions, partitions = text.split("PartitionName=low")
    (folder / "slurm.conf").write_text(before_partitions + "\n".join(lines) + "\nPartitionName=low" + partitions)
    (folder / "gres.conf").write_text("\n".join(generic) + "\n")
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    daemons = [subprocess.Popen(["slurmctld", "-D", "-c"], stderr=subprocess.DEVNULL)]
    try:
        daemons += [subprocess.Popen(["slurmd", "-D", "-N", node], stderr=subprocess.DEVNULL) for node in NODES]
        if not until(lambda: _said("sinfo", "-h", "-o", "%t %D").split() == ["idle", str(len(NODES))], _START):
            logs = "\n".join(path.read_text() for path in folder.glob("*.log"))
            raise RuntimeError(f"Slurm did not come up: {logs[-4000:]}")
        yield
    finally:
        for how in (["--signal=KILL", "--full"], []):  # what runs, and what waits to run again
            subprocess.run(["scancel", "--me", *how], capture_output=True, timeout=_START)
        until(lambda: not _said("squeue", "-h"), _START)  # else the daemons of its steps outlive it
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(_START)
        os.environ.pop("SLURM_CONF") if before is None else os.environ.update(SLURM_CONF=before)


def until(happens: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Returns whether it happens in time; asks ten times a second."""
    end = time.monotonic() + seconds
    while not happens():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _said(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=_START).stdout


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
