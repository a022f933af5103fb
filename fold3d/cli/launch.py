"""`fold3d launch`: runs a script with torchrun on this host, on hosts reached by ssh, or in a Slurm allocation."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fold3d.errors import ConfigError, did_you_mean

_GRACE = 60.0
"""Seconds that the other hosts have to end by themselves when one has failed."""
_ANSWER = 120.0
"""Seconds until a host that says nothing of its environment cannot be used."""
_SSH = ("ssh", "-tt", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15")
"""With a terminal: the job on the other host ends with its ssh."""
_CHECK = (
    "import json, os, platform, sys; from importlib.metadata import version as v; "
    "print(json.dumps(dict(host=platform.node(), python=platform.python_version(), fold3d=v('fold3d'), "
    "torch=v('torch'), transformers=v('transformers'), script=os.path.exists(sys.argv[1]))))"
)
_TABLES = ("launch", "arguments", "script")
_OF_LAUNCH: dict[str, type] = {"script": str, "hosts": list, "nproc_per_node": int, "port": int, "interface": str}
_OF_LAUNCH |= {"python": str, "env": list}


def add(subcommands: Any) -> None:
    """Adds the subcommand to the parser."""
    command = subcommands.add_parser(
        "launch",
        help="run a script on one or several hosts",
        description=__doc__,
        epilog="Several hosts: the working folder, the script and Python lie at the same paths on all of them. Check "
        "hosts and links first: fold3d launch --hosts A,B -n 4 -m fold3d doctor.",
    )
    command.add_argument("script", nargs="?", help="the training script; may stand in the recipe instead")
    command.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="everything after the script")
    command.add_argument("-m", "--module", action="store_true", help="the script is a module, as for python -m")
    command.add_argument("--config", metavar="FILE.toml", help="a recipe: tables [launch], [arguments] and [script]")
    command.add_argument("--hosts", metavar="A,B,..", help="hosts to log in to by ssh; default: Slurm's, or this one")
    command.add_argument("-n", "--nproc-per-node", type=int, metavar="N", help="processes per host; default: its GPUs")
    command.add_argument(
        "--port", type=int, help="port of the first host where processes meet; default 29500, in a Slurm job by its id"
    )
    command.add_argument("--interface", metavar="NAME", help="network interface of every host, such as eth0")
    command.add_argument("--env", action="append", metavar="NAME=VALUE", help="environment variable; may be repeated")
    command.add_argument("--python", metavar="PATH", help="Python of every host; default: this one")
    command.add_argument("--no-check", action="store_true", help="do not compare the environments of the hosts first")
    command.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    command.set_defaults(run=run)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What is started, and where."""

    hosts: tuple[str, ...]
    """By rank of the node; () for this host alone."""
    is_slurm: bool
    per_host: int
    python: str
    port: int
    environment: Mapping[str, str]
    words: tuple[str, ...]
    """The script and its arguments."""
    is_module: bool
    """Whether the script is the name of a module."""

    def on_node(self, python: Sequence[str], node: str) -> list[str]:
        """Returns the command on a host. Args: python: what Python is given; node: the host's place, or a variable."""
        given = [f"{name}={value}" for name, value in self.environment.items()]
        command = [*(["env", *given] if given else []), self.python, *python]
        if not self.hosts:
            return command
        text = " ".join(word if word == node else shlex.quote(word) for word in command)
        if self.is_slurm:
            cores = os.environ.get("SLURM_CPUS_PER_TASK")  # srun does not take it from the job by itself
            limits = [f"--cpus-per-task={cores}"] if cores else []
            return ["srun", "--kill-on-bad-exit=1", "--ntasks-per-node=1", *limits, "bash", "-c", f"exec {text}"]
        return [*_SSH, self.hosts[int(node)], f"cd {shlex.quote(os.getcwd())} && exec {text}"]

    @property
    def nodes(self) -> list[str]:
        """The place of each host for which there is a command: Slurm starts all of them with one."""
        return ['"$SLURM_NODEID"'] if self.is_slurm else [str(k) for k in range(max(1, len(self.hosts)))]

    @property
    def commands(self) -> list[list[str]]:
        """A command per node."""
        count = max(1, len(self.hosts))
        made = []
        for node in self.nodes:
            where = ["--standalone"]
            if count > 1:
                where = ["--nnodes", str(count), "--node-rank", node, "--master-addr", self._address()]
                where += ["--master-port", str(self.port)]
            run = ["-m", "torch.distributed.run", *where, "--nproc-per-node", str(self.per_host)]
            run += [*(["--module"] if self.is_module else []), *self.words]
            made.append(self.on_node(run, node))
        return made

    def _address(self) -> str:
        """Returns the first host's address: by Slurm's name for it, which need not resolve, what Slurm itself takes."""
        if not self.is_slurm:
            return self.hosts[0].rpartition("@")[2]
        words = _said(["scontrol", "show", "node", self.hosts[0], "-o"]).split()
        return next((word.partition("=")[2] for word in words if word.startswith("NodeAddr=")), self.hosts[0])


def run(options: argparse.Namespace) -> None:
    """Starts the job and waits for it. Raises: ConfigError; SystemExit with the job's code when that is not 0."""
    job = _job(options)
    for line in _plan(job):
        print(line, file=sys.stderr)
    if options.dry_run:
        for command in job.commands:
            print(shlex.join(command))
        return
    if not job.is_module and not os.path.exists(job.words[0]):
        raise ConfigError(f"{job.words[0]!r} is no file here")
    if job.hosts and not options.no_check:
        _check(job)
    sys.stderr.flush()
    if len(job.commands) == 1:  # signals and the terminal are torchrun's, or srun's
        try:
            os.execvp(job.commands[0][0], job.commands[0])
        except OSError as error:
            raise ConfigError(f"{job.commands[0][0]} cannot be started: {error.strerror}") from None
    code = _run_all(dict(zip(job.hosts, job.commands, strict=True)))
    if code:
        raise SystemExit(code)


def _job(options: argparse.Namespace) -> _Job:
    recipe: dict[str, Any] = {}
    words: list[str] = []
    if options.config is not None:
        recipe, words = _recipe(Path(options.config))
    said = {name: getattr(options, name, None) for name in _OF_LAUNCH}
    said["hosts"] = said["hosts"].split(",") if said["hosts"] else None
    given = recipe | {name: value for name, value in said.items() if value is not None}
    if given.get("script") is None:
        raise ConfigError("which script? fold3d launch train.py --output_dir out")
    job_id = os.environ.get("SLURM_JOB_ID")
    hosts, is_slurm = tuple(given.get("hosts", ())), False
    if not hosts and job_id and os.environ.get("SLURM_JOB_NODELIST"):
        hosts = tuple(_said(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]).split())
        is_slurm = True
    if len(set(hosts)) < len(hosts) or "" in hosts:
        raise ConfigError(f"--hosts={','.join(hosts)}: must be different names, separated by commas")
    pairs = [text.partition("=") for text in given.get("env", ())]
    wrong = [name for name, equals, _ in pairs if not equals or not name.isidentifier()]
    if wrong:
        raise ConfigError(f"--env={wrong[0]}: must be NAME=VALUE")
    interface = given.get("interface")
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ()
    per_host = given.get("nproc_per_node")
    if per_host is not None and per_host < 1:
        raise ConfigError(f"-n is {per_host}: how many processes to start on each host, at least 1")
    per_host = per_host or int(os.environ.get("SLURM_GPUS_ON_NODE") or 0) or _gpus()
    if per_host < 1:
        raise ConfigError("this host has no GPU: say how many processes to start on each host, -n 4")
    port = given.get("port", 20000 + int(job_id) % 10000 if is_slurm and job_id else 29500)
    if not 0 < port < 1 << 16:
        raise ConfigError(f"--port is {port}; it must be between 1 and 65535")
    return _Job(
        hosts=hosts,
        is_slurm=is_slurm,
        per_host=per_host,
        python=given.get("python") or sys.executable,
        port=port,
        environment=dict.fromkeys(names, str(interface)) | {name: value for name, _, value in pairs},
        words=(str(given["script"]), *words, *options.arguments),
        is_module=options.module,
    )


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _recipe(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns the table [launch] of a recipe, and the script's arguments that the others say."""
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config={str(path)!r}: {error}") from None
    _known(path, tables, _TABLES, "the recipe")
    launch, arguments, own = (tables.get(name, {}) for name in _TABLES)
    if not all(isinstance(table, dict) for table in (launch, arguments, own)):
        raise ConfigError(f"--config={str(path)!r}: write [launch], [arguments] and [script] as tables")
    _known(path, launch, _OF_LAUNCH, "[launch]")
    for name, value in launch.items():
        if type(value) is not _OF_LAUNCH[name]:
            raise ConfigError(f"--config={str(path)!r}: {name}={value!r}: must be a {_OF_LAUNCH[name].__name__}")
        if isinstance(value, list) and not all(isinstance(one, str) for one in value):
            raise ConfigError(f"--config={str(path)!r}: {name}={value!r}: must be a list of texts")
    if arguments:
        from fold3d.trainer.arguments import TrainingArguments

        _known(path, arguments, [one.name for one in fields(TrainingArguments)], "[arguments]; [script] takes others")
    return launch, [word for name, value in {**arguments, **own}.items() for word in _flag(name, value)]


def _known(path: Path, table: Mapping[str, Any], names: Sequence[str] | Mapping[str, Any], where: str) -> None:
    for name in table:
        if name not in names:
            raise ConfigError(f"--config={str(path)!r}: {name!r} is no name of {where}{did_you_mean(name, names)}")


def _flag(name: str, value: Any) -> Iterator[str]:
    """Yields a value as HfArgumentParser reads it: lists as several words, tables as JSON."""
    yield f"--{name}"
    for one in value if isinstance(value, list) else [value]:
        yield one if isinstance(one, str) else json.dumps(one, default=str)  # a date, say


def _plan(job: _Job) -> Iterator[str]:
    """Yields lines that say what is started where. Raises: ConfigError for a mesh that does not fit the hosts."""
    from fold3d.config import ParallelConfig
    from fold3d.topology import coordinates

    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("dp", "tp", "pp"):
        known.add_argument(f"--{name}", type=int)
    known.add_argument("--parallel")
    mesh, _ = known.parse_known_args(job.words[1:])
    world = max(1, len(job.hosts)) * job.per_host
    where = f"{len(job.hosts)} hosts" if len(job.hosts) > 1 else "one host"
    if mesh.parallel is not None:
        yield f"{world} processes on {where}; the mesh is chosen at the start"
        return
    tp, pp = (1 if size is None else size for size in (mesh.tp, mesh.pp))
    is_told = not {mesh.dp, mesh.tp, mesh.pp} <= {None}
    dp = ParallelConfig(dp=mesh.dp, tp=tp, pp=pp).resolve_dp(world)
    yield f"{world} processes on {where}" + (f": dp={dp}, tp={tp}, pp={pp}" if is_told else "")
    for node, host in enumerate(job.hosts or ("this host",)):
        first, last = node * job.per_host, (node + 1) * job.per_host - 1
        if not is_told:  # the script may say it
            yield f"  {host}: ranks {first}..{last}"
            continue
        places = [coordinates(rank, pp, tp) for rank in range(first, last + 1)]
        replicas, stages = ({getattr(place, axis) for place in places} for axis in ("dp", "pp"))
        yield f"  {host}: ranks {first}..{last}; replicas {_few(replicas)}, stages {_few(stages)}"
    if any(coordinates(node * job.per_host, pp, tp).tp for node in range(len(job.hosts))):
        yield f"  tensor-parallel groups span hosts: tp={tp} does not divide {job.per_host} processes per host"


def _few(numbers: set[int]) -> str:
    return f"{min(numbers)}..{max(numbers)}" if len(numbers) > 1 else str(min(numbers))


def _check(job: _Job) -> None:
    """Compares the environments of all hosts. Raises: ConfigError that names what differs, and where."""
    asked = [job.on_node(["-c", _CHECK, "." if job.is_module else job.words[0]], node) for node in job.nodes]
    pipe: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(one, stderr=subprocess.PIPE, **pipe) for one in asked]
    found = []
    for node, process in enumerate(processes):
        host = "Slurm" if job.is_slurm else job.hosts[node]
        try:
            out, err = process.communicate(timeout=_ANSWER)
        except subprocess.TimeoutExpired:
            process.kill()
            raise ConfigError(
                f"{host} has not said within {_ANSWER:g} s what is installed; --no-check skips it"
            ) from None
        if process.returncode:
            why = [*(out + err).strip().splitlines(), f"exit code {process.returncode}"]
            raise ConfigError(f"{host}: {why[-1] if len(why) == 1 else why[-2]}; is {job.python} there, with fold3d?")
        found += [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    for one in found:
        if not one["script"]:
            raise ConfigError(f"{one['host']}: there is no {job.words[0]} in {os.getcwd()}")
    for name in ("fold3d", "torch", "transformers", "python"):
        versions = {one["host"]: one[name] for one in found}
        if len(set(versions.values())) > 1:
            text = ", ".join(f"{version} on {host}" for host, version in versions.items())
            raise ConfigError(f"{name} differs: {text}; install the same on all hosts, or set --no-check")


def _run_all(commands: Mapping[str, list[str]]) -> int:
    """Runs a command per host and relays what they print; when one fails, the others end. Returns the first code."""
    running: dict[str, subprocess.Popen[str]] = {}
    relays: list[threading.Thread] = []
    pipe: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    try:
        for host, command in commands.items():
            running[host] = subprocess.Popen(command, stderr=subprocess.STDOUT, **pipe)
            relays.append(threading.Thread(target=_relay, args=(host, running[host]), daemon=True))
            relays[-1].start()
        deadline, first = float("inf"), 0
        # Each is asked: the first host may wait for another one that has failed.
        while None in [process.poll() for process in running.values()] and time.monotonic() < deadline:
            failed = {host: process.returncode for host, process in running.items() if process.returncode}
            if failed and not first:
                (host, first), *_ = failed.items()
                print(f"fold3d: {host} ended with code {first}; the others end", file=sys.stderr)
                deadline = time.monotonic() + _GRACE
            time.sleep(0.1)
        return first or max(abs(process.returncode or 0) for process in running.values())
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
        for relay in relays:
            relay.join(_GRACE)


def _relay(host: str, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(f"{host}: {line.rstrip()}\n")  # in one piece: print writes the end of the line by itself
        sys.stdout.flush()


def _said(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ANSWER).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{shlex.join(command)}: {error}; say --hosts, or start inside a Slurm allocation") from None
