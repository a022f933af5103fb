"""decide_mesh(): what parallel="auto" stands for, decided on all ranks before an engine is made."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from fold3d.comms.consistency import all_or_none
from fold3d.comms.groups import Groups, place_in_job
from fold3d.comms.interface import host_identity
from fold3d.comms.world_group import WorldGroup
from fold3d.config import AUTO, BLOCKS, GRAPH, ParallelConfig, text_of_bytes
from fold3d.device import all_rng_untouched
from fold3d.engine.arguments import check_compiled, check_model
from fold3d.engine.division import why_not_divided
from fold3d.engine.planning.planner import (
    Training,
    agreed_profile,
    links_of,
    probing,
    profile_of,
    shard_link,
    steps_parts,
)
from fold3d.errors import ConfigError, MemoryLimitError, TraceError
from fold3d.faults.supervisor import supervisor_of_engine
from fold3d.observe.announce import announce
from fold3d.plan.costs import ACTION_SECONDS, BUCKET_SECONDS, Profile
from fold3d.plan.job import HostLink, Hosts, TrainingJob
from fold3d.plan.layout import places
from fold3d.plan.micro_batch_size import in_parts, sizes_of
from fold3d.plan.resolve import resolve_auto
from fold3d.plan.search import decide_jobs
from fold3d.plan.space.mesh import Mesh, meshes, search_meshes
from fold3d.plan.strategy import Constraints
from fold3d.profile.shard import shard_profile
from fold3d.schedule import style_of
from fold3d.splitting.plan_sharding import plan_sharding
from fold3d.topology import Topology
from fold3d.trace import Trace, trace
from fold3d.trace.batches import part_of, samples_of
from fold3d.trace.shadow import shared_shadows

logger = logging.getLogger(__name__)

_SECONDS = 1.0
"""For which a micro-batch is measured; as long again with one sample."""
_CLOSE = 1.03
"""A mesh with fewer ranks in a replica, then the one with larger micro-batches, may take so many times as long:
predictions are right to some percent, and it depends on less."""
_SHOWN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision(Mesh):
    """A mesh with micro-batches of so many samples, and what it was decided for."""

    samples: int
    """Of a micro-batch."""
    parameters: int
    """Of the model."""

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.dp * self.tp * self.pp

    @property
    def flags(self) -> str:
        """The Trainer's arguments that pin it."""
        sizes = f"--dp {self.dp} --tp {self.tp} --pp {self.pp} --per_device_train_batch_size {self.samples}"
        return f"{sizes} --gradient_accumulation_steps {self.micro_batches}"

    @property
    def name(self) -> str:
        """In words."""
        return f"dp={self.dp} tp={self.tp} pp={self.pp}, {self.micro_batches} micro-batches of {self.samples} samples"

    def config(self, asked: ParallelConfig) -> ParallelConfig:
        """Returns the layout with it. Raises: ConfigError where a setting does not go with it."""
        return asked.decided(dp=self.dp, tp=self.tp, pp=self.pp, micro_batches=self.micro_batches)

    def answers(self, asked: ParallelConfig, world: int, parameters: int, most_samples: int) -> bool:
        """Whether it was decided for such a job."""
        same = (self.world, self.parameters) == (world, parameters) and self.samples <= most_samples
        batch = self.dp * self.micro_batches * self.samples == asked.global_batch_size
        kept = all(getattr(asked, axis) in (None, getattr(self, axis)) for axis in ("dp", "tp", "pp"))
        return same and batch and kept

    def to_dict(self) -> dict[str, int]:
        """Returns what `of` reads."""
        return asdict(self)

    @staticmethod
    def of(content: Mapping[str, Any] | None) -> Decision | None:
        """Returns what `to_dict` wrote; None for nothing, and for what another version wrote."""
        try:
            return None if content is None else Decision(**content)
        except TypeError:
            return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked(Training):
    """A training whose mesh is open, in `config`; the same on every rank but for `example`."""

    example: Mapping[str, Any]
    """The largest micro-batch that may be: keyword arguments of the model's forward."""
    samples: int
    """Of a micro-batch at most. Of an example that is not divided by samples: of each."""

    @property
    def parameters(self) -> int:
        """Of the model."""
        return sum(one.numel() for one in self.model.parameters())

    @property
    def divides(self) -> bool:
        """Whether smaller micro-batches than the example may be."""
        return not why_not_divided(self.example)

    @property
    def most_samples(self) -> int:
        """Of the example, and so of a micro-batch."""
        return (samples_of(self.example) or 1) if self.divides else self.samples

    def why_not(self, mesh: Mesh) -> str:
        """Returns why the settings do not go with a mesh, as far as that can be told at once; empty where they do."""
        try:
            config = self.config.decided(dp=mesh.dp, tp=mesh.tp, pp=mesh.pp, micro_batches=mesh.micro_batches)
            resolve_auto(config, config.resolve_dp(mesh.dp * mesh.tp * mesh.pp))
            check_compiled(config.tp, self.compile_options)
            check_model(self.model, config, None)
        except ConfigError as error:
            return str(error)
        return ""


def decide_mesh(asked: Asked, kept: Decision | None = None) -> Decision:
    """Returns what rank 0 has decided; all ranks of the job call, before any of them makes an engine of the model.

    Where there is a choice the model is recorded once, its layers are timed whole, alone and beside those of the other
    ranks, and the links within hosts and between them are probed. The random numbers, and the model, stay as they are.

    Args:
        kept: what an earlier run has decided; taken if the job is still the same. Rank 0's counts.
    Raises: on every rank, ConfigError when no mesh is possible, MemoryLimitError when none fits into `memory_limit`,
        TraceError when the model must be cut and cannot be.
    """
    rank, world = place_in_job()
    begin = time.perf_counter()
    flat = Topology(dp=world, pp=1, rank=rank)
    supervisor = supervisor_of_engine(flat, asked.config.silence_seconds)
    with supervisor.supervise("deciding the mesh", meets=True), all_rng_untouched(asked.device):
        group = WorldGroup(flat, asked.config.timeout_seconds, supervisor.progress)
        try:
            found, told = _decide(asked, kept, group)
        finally:
            group.close()
    supervisor.progress.life.close()
    supervisor.close()
    if rank == 0:
        announce(
            logger, f'{told}\n  parallel="auto" took {time.perf_counter() - begin:.1f} s; pin it with {found.flags}'
        )
    return found


def _decide(asked: Asked, kept: Decision | None, group: WorldGroup) -> tuple[Decision, str]:
    world, config = group.topology.world, asked.config
    kept = group.share(kept, timeout=group.patience)
    if kept is not None and kept.answers(config, world, asked.parameters, asked.most_samples):
        return kept, f"{kept.name}, as the last checkpoint has it"
    per_host = group.decide(host_identity(), _per_host, timeout=group.patience)
    with shared_shadows():  # of the model, which is the same for all meshes
        recording = _recorded(asked, group)
        stages = 1 if recording is None else len(places(recording))
        options = group.decide(None, lambda _: _options(asked, world, per_host, stages), timeout=group.patience)
        first = options[0]
        if len(options) == 1:
            return first, f"{first.name}: nothing else is possible"
        if recording is None:  # replicas alone, of which those with the largest micro-batches fill a device best
            return first, f"{first.name}: the model has no blocks that could be measured"
        profile, one = _measured(asked, recording, group)
        group.progress.turn_to("measuring links")
        hosts = _links(asked, profile, per_host, group)
        limit = group.decide(
            asked.limit, lambda limits: min(filter(None, limits), default=None), timeout=group.patience
        )
        group.progress.turn_to("comparing meshes")
        jobs = _Jobs(asked, recording, profile, one, hosts, limit)
        return group.decide(None, lambda _: _best(asked, jobs, options, limit), timeout=group.patience)


def _recorded(asked: Asked, group: WorldGroup) -> Trace | None:
    """Returns the recording; None where the model cannot be recorded and need not be cut."""
    config, found = asked.config, None
    chunks = (config.pp or group.topology.world) * (config.given_segments or 1)
    group.progress.turn_to("recording the model")
    with all_or_none(group):
        try:
            found = trace(
                asked.model, blocks=config.blocks, partition=config.partition, example=asked.example, chunks=chunks
            )
        except TraceError as error:
            named = config.blocks != AUTO or config.partition != BLOCKS
            if named or (config.pp or 1) * (config.tp or 1) > 1 or config.given_segments not in (1, None):
                raise
            logger.info("the model stays in one piece: %s", error)
    everywhere = group.decide(found is not None, all, timeout=group.patience)
    return found if everywhere else None


def _options(asked: Asked, world: int, per_host: int, stages: int) -> list[Decision]:
    """Returns what is possible as far as can be told at once: those with fewer ranks in a replica first, of these those
    with larger micro-batches. Raises: ConfigError where there is nothing."""
    config, samples = asked.config, asked.config.global_batch_size
    assert samples is not None, "checked with the others"
    alone = config.partition == GRAPH or asked.compile_options is not None or stages == 1
    tp = config.tp or (1 if alone else None)
    try:
        found = meshes(world, samples, tp=tp, pp=config.pp, ranks_per_host=per_host, most_stages=stages)
    except ConfigError:
        found = []
    whys = [f"global_batch_size={samples} and {world} processes can be divided by no dp with what is set of dp, tp, pp"]
    options, parameters = [], asked.parameters
    for mesh in sorted(found, key=lambda one: (one.tp * one.pp, one.tp)):
        if config.dp not in (None, mesh.dp):
            continue
        most = asked.most_samples
        sizes = sizes_of(mesh.micro_batches, most) if asked.divides else [most] * (mesh.micro_batches % most == 0)
        sized = [
            Decision(
                **asdict(mesh) | {"micro_batches": mesh.micro_batches // size}, samples=size, parameters=parameters
            )
            for size in sizes
        ]
        reasons = [asked.why_not(one) for one in sized]
        options += [one for one, why in zip(sized, reasons, strict=True) if not why]
        whys += [why for why in reasons if why]
    if not options:
        raise ConfigError(f'parallel="auto": no mesh is possible: {whys[-1]}')
    return options


def _per_host(hosts: Sequence[str]) -> int:
    """Returns how many ranks each host has; 1 where they are not numbered host by host, as many on each."""
    count = hosts.count(hosts[0])
    even = len(hosts) % count == 0 and all(
        len(set(hosts[first : first + count])) == 1 for first in range(0, len(hosts), count)
    )
    return count if even and len(set(hosts)) * count == len(hosts) else 1


def _measured(asked: Asked, recording: Trace, group: WorldGroup) -> tuple[Profile, Profile | None]:
    """Returns what the largest micro-batch costs, and what one sample does, the same on every rank."""
    most, one = asked.most_samples, None
    group.progress.turn_to("measuring layers")
    with all_or_none(group):  # whatever the model raises
        profile: Profile | None = profile_of(asked, recording, asked.example, seconds=_SECONDS)
        if asked.divides and most > 1:
            one = profile_of(asked, recording, part_of(asked.example, 0, 1, most), seconds=_SECONDS)
    profile, one = (agreed_profile(group, recording, each, every=True) for each in (profile, one))
    assert profile is not None, "measured on all ranks"
    return profile, one


def _links(asked: Asked, profile: Profile, per_host: int, group: WorldGroup) -> Hosts:
    """Returns what links the ranks, probed as DP.sync and TP.sync use it, by all of them at once."""
    world, size = group.topology.world, max(profile.activation_bytes)

    @contextmanager
    def grouped(shards: int) -> Iterator[Groups]:
        topology = Topology(dp=world // shards, pp=1, tp=shards, rank=group.topology.rank)
        own = WorldGroup(topology, asked.config.timeout_seconds, group.progress)
        try:
            with probing(topology, own, asked) as groups:
                yield groups
        finally:
            own.close()

    within = None
    several = world > per_host
    with grouped(per_host if several else 1) as groups:
        found = links_of(groups, asked, size)
        link = HostLink(found.bandwidth, found.hop_latency)
        if several and per_host > 1:
            shards = shard_link(groups, asked, size)
            within = HostLink(shards.bandwidth, shards.latency)
    if not several:
        within = link
        if world > 1 and asked.config.tp != 1:
            with grouped(per_host) as groups:
                shards = shard_link(groups, asked, size)
            within = HostLink(min(link.bandwidth, shards.bandwidth), shards.latency)
    between = HostLink(link.bandwidth * per_host, link.latency)
    return Hosts(per_host=per_host, between=between, within=within or link, toll=found.toll)


class _Jobs:
    """What the planner is told of each mesh; rank 0's."""

    def __init__(
        self, asked: Asked, recording: Trace, profile: Profile, one: Profile | None, hosts: Hosts, limit: int | None
    ) -> None:
        self._asked, self._recording, self._hosts, self._limit = asked, recording, hosts, limit
        self._profiles: dict[int, tuple[Profile, Profile | None] | ConfigError] = {1: (profile, one)}

    def of(self, mesh: Decision) -> TrainingJob:
        """Raises: ConfigError when the model cannot be shared out so."""
        asked = self._asked
        profile, one = self._of_shard(mesh.tp)
        elsewhere = asked.device.type != "cpu"
        whole = TrainingJob(
            trace=self._recording.under(mesh.tp),
            profile=profile,
            network=self._hosts.network(mesh.dp * mesh.tp * mesh.pp, mesh.tp),
            hosts=self._hosts.of_places(mesh.dp, mesh.pp, mesh.tp),
            dp=mesh.dp,
            pp=mesh.pp,
            tp=mesh.tp,
            style=style_of(asked.config.schedule),
            micro_batches=1,
            samples=asked.most_samples,
            one_sample=one,
            memory_limit=self._limit,
            preempt=asked.config.preempt,
            may_split=mesh.tp == 1 and asked.compile_options is None,
            action_seconds=ACTION_SECONDS,
            bucket_seconds=BUCKET_SECONDS,
            pool_is_elsewhere=elsewhere or asked.config.offload_disk is not None,
            host_is_elsewhere=elsewhere,
        )
        sized = in_parts(whole, mesh.samples)
        return replace(sized, micro_batches=mesh.micro_batches, samples=None, one_sample=None)

    def _of_shard(self, tp: int) -> tuple[Profile, Profile | None]:
        if tp not in self._profiles:
            try:
                self._profiles[tp] = self._shared(tp)
            except (ConfigError, TraceError) as error:
                self._profiles[tp] = ConfigError(str(error))
        found = self._profiles[tp]
        if isinstance(found, ConfigError):
            raise found
        return found

    def _shared(self, tp: int) -> tuple[Profile, Profile | None]:
        asked, recording = self._asked, self._recording
        whole = self._profiles[1]
        assert not isinstance(whole, ConfigError)
        shares = bool(asked.config.sequence_parallel)
        sharding = plan_sharding(
            asked.model, recording, asked.example, tp, asked.config.tp_plan, sequence_parallel=shares
        )

        def shard(profile: Profile, example: Mapping[str, Any]) -> Profile:
            return shard_profile(profile, asked.model, recording, example, sharding, asked.device, asked.autocast)

        profile, one = whole
        if one is None:
            return shard(profile, asked.example), None
        return shard(profile, asked.example), shard(one, part_of(asked.example, 0, 1, asked.most_samples))


def _best(asked: Asked, jobs: _Jobs, options: Sequence[Decision], limit: int | None) -> tuple[Decision, str]:
    """Returns what is predicted to be fastest, and what it was compared with, in words."""
    constraints = _constraints(asked, options)
    tried = search_meshes(
        options, jobs.of, lambda some: decide_jobs(some, constraints, partial(steps_parts, asked.optimizer))
    )
    known = [(one.step_ms, one.mesh, one.found) for one in tried if one.step_ms is not None and one.found is not None]
    if not known:
        raise ConfigError(f'parallel="auto": no mesh is possible: {tried[0].reason}')
    fits = tried[0].counts
    if not fits and asked.config.memory_size is not None:
        raise MemoryLimitError(
            f"memory_limit={asked.config.memory_limit}: no mesh fits, the least that a process would need is about "
            f"{text_of_bytes(known[0][2].memory_bytes)}; raise memory_limit, start more processes, or leave more of "
            "dp, tp, pp, recompute and offload open"
        )
    # Where nothing fits into nine tenths of a device's memory, what needs least.
    known = [(ms, mesh, found) for ms, mesh, found in known if found.fits == fits]
    close = [one for one in known if fits and one[0] <= _CLOSE * known[0][0]] or known[:1]
    step_ms, decision, found = min(close, key=lambda one: options.index(one[1]))
    lines = [f"{decision.name}: {step_ms:.1f} ms a step predicted, {text_of_bytes(found.memory_bytes)}"]
    if limit is not None:
        lines[0] += f" of {text_of_bytes(limit)}" + ("" if fits else ": nothing fits")
    seen = {(decision.tp, decision.pp)}
    for ms, other, _ in known:  # of each mesh the best
        if (other.tp, other.pp) not in seen and len(seen) <= _SHOWN:
            seen.add((other.tp, other.pp))
            lines.append(f"  {other.name}: {ms:.1f} ms")
    return decision, "\n".join(lines)


def _constraints(asked: Asked, options: Sequence[Decision]) -> Constraints:
    """Returns what the user has set, of the options that leave most open."""
    mesh = max(options, key=lambda one: one.dp * one.pp)
    config = asked.config.decided(dp=mesh.dp, tp=mesh.tp, pp=mesh.pp, micro_batches=mesh.micro_batches)
    return resolve_auto(config, mesh.dp)
