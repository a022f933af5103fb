"""examine(): looks at everything, on all ranks, and says it; Meeting: ranks come together over the job's store, and who
does not come is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fold3d.config import text_of_bytes
from fold3d.device import default_device, make_current
from fold3d.doctor.advice import Speed, advice, too_slow
from fold3d.doctor.exchange import collective_speeds, copy_speeds, meet_pairs, process_group
from fold3d.doctor.facts import Card, Facts, Gpu, by_host, find_facts, share_host
from fold3d.errors import ConfigError, Fold3dError, RankError

_STORES: Any = dist  # whose stores are no part of its typed interface
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Meeting:
    """Of the ranks that torchrun started; a single process meets itself."""

    def __init__(self, timeout: float) -> None:
        """Args:
        timeout: seconds that a rank is waited for, each time.
        Raises: ConfigError where the environment is not torchrun's; RankError when the store cannot be reached.
        """
        self.rank, self.world = (_number(name, default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"RANK={self.rank}, WORLD_SIZE={self.world}: start the processes with torchrun")
        self.timeout = timeout
        self._store: Any = None
        if self.world == 1:
            return
        missing = [name for name in _VARIABLES if not os.environ.get(name)]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE={self.world}, but {missing[0]} is not set; start the processes with torchrun"
            )
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        try:
            # torchrun's agent has the store; else rank 0 does.
            is_here = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            self._store = _STORES.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                self.world,
                is_here,
                timedelta(seconds=timeout),
                wait_for_workers=False,
            )
        except Exception as error:
            raise RankError(
                f"rank {self.rank} does not reach the job's store at {where} within {timeout:g} s: {error}; is rank 0 "
                "running, and does a firewall let this host reach it?"
            ) from error
        run = os.environ.get("TORCHELASTIC_RUN_ID", "") + os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        self._store = _STORES.PrefixStore(f"fold3d doctor {run}", self._store)

    @property
    def store(self) -> Any:
        """For a process group."""
        return _STORES.PrefixStore("group", self._store)

    def gather(self, what: str, value: Any) -> list[Any]:
        """Returns what each rank brings, JSON; all ranks call, once for each `what`.

        Raises: RankError, naming the ranks that did not come in time and those that gave up, with why.
        """
        if self.world == 1:
            return [json.loads(json.dumps(value))]
        self._store.set(f"{what}/{self.rank}", json.dumps({"value": value}))
        return self._collect(what)

    def give_up(self, what: str, why: str) -> None:
        """Tells the others, who wait in `gather`, that this rank does not come."""
        if self.world > 1:
            self._store.set(f"{what}/{self.rank}", json.dumps({"why": why}))

    def causes(self, what: str) -> list[str]:
        """Returns why ranks have given up so far, this one's own last."""
        found: dict[int, str] = {}
        with contextlib.suppress(Exception):  # the store may be gone with rank 0
            for rank in range(self.world):
                if self._store.check([f"{what}/{rank}"]):
                    said = json.loads(self._store.get(f"{what}/{rank}"))
                    found |= {rank: f"rank {rank}: {said['why']}"} if "why" in said else {}
        return [*(text for rank, text in found.items() if rank != self.rank), found.get(self.rank, "")]

    def leave(self) -> None:
        """Waits until all ranks have read what they need: rank 0 may have the store."""
        self.gather("end", None)
        if self.world > 1 and self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            self._store.set("bye/0", "")
            self._wait([f"bye/{rank}" for rank in range(self.world)], time.monotonic() + self.timeout)
        elif self.world > 1:
            self._store.set(f"bye/{self.rank}", "")

    def _collect(self, what: str) -> list[Any]:
        keys = [f"{what}/{rank}" for rank in range(self.world)]
        absent = self._wait(keys, time.monotonic() + self.timeout)
        if absent:
            who = ", ".join(str(rank) for rank in absent)
            raise RankError(
                f"rank {who} did not answer within {self.timeout:g} s ({what}); look at its output and its host, or "
                "set --timeout to more"
            )
        said = [json.loads(self._store.get(key)) for key in keys]
        errors = [f"rank {rank}: {one['why']}" for rank, one in enumerate(said) if "why" in one]
        if errors:
            raise RankError("; ".join(errors))
        return [one["value"] for one in said]

    def _wait(self, keys: Sequence[str], deadline: float) -> list[int]:
        """Returns the places of the keys that nobody has set until the deadline."""
        for place, key in enumerate(keys):
            left = max(deadline - time.monotonic(), 0.01)
            try:
                self._store.wait([key], timedelta(seconds=left))
            except Exception:  # of several types, all of which mean that it is not there
                with contextlib.suppress(Exception):
                    return [k for k in range(place, len(keys)) if not self._store.check([keys[k]])]
                return [place]  # the store went with rank 0, which has waited for the same
        return []


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise ConfigError(f"{name}={text!r}: must be a number; start the processes with torchrun")
    return int(text) if text else default


_SLOW_PAIRS = 3


def examine(
    say: Callable[[str], None],
    *,
    device: str,
    size: int,
    timeout: float,
    report: Callable[[dict[str, Any]], None] = lambda found: None,
) -> int:
    """Looks at this host, or under torchrun at all ranks and what is between them; all ranks call.

    Args:
        say: told line by line, on rank 0.
        device: "auto", "cpu" or "cuda".
        size: bytes of a message, a copy and a collective.
        timeout: seconds that a rank, or an exchange, is waited for.
        report: given everything at the end, as values for JSON, on rank 0: the facts of each rank ("ranks"; sizes in
            bytes), "speeds" (GB/s) and what "to_change".
    Returns: how many things should be changed, the same on every rank.
    Raises: ConfigError; RankError, naming ranks that did not answer or do not reach each other.
    """
    where = _device(device)
    meeting = Meeting(timeout)
    out = say if meeting.rank == 0 else lambda line: None
    ranks = [_facts(one) for one in meeting.gather("looking at the host", asdict(find_facts()))]
    for line in _described(ranks):
        out(line)
    todo = advice(ranks)
    if todo:  # now: where ranks do not reach each other, this says why, and there is no later
        _list(out, "to change:", todo)
    copies = meeting.gather("copies", copy_speeds(where, size))
    speeds = _of_copies(copies, ranks)
    if meeting.world > 1:
        try:
            with process_group(meeting.store, meeting.rank, meeting.world, where, timeout):
                met = partial(meet_pairs, meeting.rank, meeting.world, where, size, timeout)
                pairs = _together(meeting, "pairs", lambda: list(met().items()))
                sums = _together(meeting, "collectives", lambda: collective_speeds(meeting.world, where, size))
        except Fold3dError:
            raise
        except Exception as error:
            raise RankError(f"rank {meeting.rank}: {error}") from error
        speeds += _of_pairs(pairs, ranks) + _of_collectives(sums, ranks)
        out(f"{meeting.world} ranks: each pair has exchanged messages both ways, in the order of streams")
    out("speeds (GB/s; in parentheses what the hardware should give)")
    for one in speeds:
        out(f"  {one.what}: {one.gbytes:.2f}" + (f" ({one.expected:.2f})" if one.expected else ""))
    slow = too_slow(speeds)
    if slow:
        _list(out, "also to change:" if todo else "to change:", slow)
    else:
        out("nothing else to change" if todo else "nothing to change")
    if meeting.rank == 0:
        report({"ranks": [asdict(one) for one in ranks], "speeds": list(map(asdict, speeds)), "to_change": todo + slow})
    meeting.leave()
    return len(todo) + len(slow)


def _list(out: Callable[[str], None], heading: str, lines: Sequence[str]) -> None:
    out(heading)
    for line in lines:
        out(f"  - {line}")


def _device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; leave it out, or look at nvidia-smi")
    return make_current(default_device())


def _together(meeting: Meeting, what: str, measure: Callable[[], Any]) -> list[Any]:
    """Returns what all ranks have measured. Raises: RankError on all of them when one fails."""
    try:
        value = measure()
    except Exception as error:
        meeting.give_up(what, str(error))
        raise RankError("; ".join(meeting.causes(what))) from error  # others' come first, whose lack others notice
    return meeting.gather(what, value)


def _facts(said: dict[str, Any]) -> Facts:
    devices = tuple(Gpu(**one) for one in said.pop("devices"))
    cards = tuple(Card(**one) for one in said.pop("cards"))
    return Facts(devices=devices, cards=cards, **said)


def _described(ranks: Sequence[Facts]) -> list[str]:
    first = ranks[0]
    lines = [
        f"fold3d {first.fold3d}, built for torch {first.built_for} with compiler {first.compiler}; CUDA kernels: "
        + (f"by nvcc {first.nvcc}" if first.nvcc else "none"),
        f"python {first.python}, torch {first.torch}, transformers {first.transformers}, CUDA {first.cuda or 'none'}, "
        f"NCCL {first.nccl or 'none'}",
    ]
    for name, members in by_host(ranks).items():
        facts = members[0]
        cards = ", ".join(f"{card.name} {card.address}" + _speed(card) for card in facts.cards) or "none that is up"
        lines += [
            f"host {name}: {len(members)} rank(s), {facts.cores} cores, "
            f"{text_of_bytes(facts.memory)} of memory, {text_of_bytes(facts.available)} of it left",
            f"  devices: {_devices(facts)}",
            f"  network: {cards}; ranks listen at {facts.address}",
            f"  /dev/shm: {text_of_bytes(facts.shm)}, {text_of_bytes(facts.shm_free)} of it left; open files: "
            f"{_limit(facts.open_files, str)}; locked memory: {_limit(facts.locked, text_of_bytes)}",
        ]
    return lines


def _devices(facts: Facts) -> str:
    if not facts.devices:
        return "none but the CPU"
    names = ", ".join(f"{one.name} ({text_of_bytes(one.memory)})" for one in facts.devices)
    links = "unknown" if facts.nvlinks is None else f"between {facts.nvlinks} pair(s)"
    return f"{names}; NVLink: {links}; MPS: {'running' if facts.mps else 'not running'}"


def _speed(card: Card) -> str:
    return "" if card.gbits is None else f" ({card.gbits:g} Gbit/s)"


def _limit(value: int, text: Callable[[int], str]) -> str:
    return "unlimited" if value < 0 else text(value)


def _of_copies(copies: Sequence[dict[str, float]], ranks: Sequence[Facts]) -> list[Speed]:
    """The slowest rank's; all copy at the same time."""
    slots = [device.pcie for facts in ranks for device in facts.devices if device.pcie]
    expected = min(slots) if slots else None
    remedy = "look at the GPU's slot (nvidia-smi -q, PCIe generation and width) and at NUMA binding (numactl)"
    return [
        Speed(f"copies, {way}", min(one[way] for one in copies), None if "host to host" in way else expected, remedy)
        for way in copies[0]
    ]


def _of_pairs(pairs: Sequence[Sequence[tuple[int, float]]], ranks: Sequence[Facts]) -> list[Speed]:
    """The median of pairs within a host and of others, and those that are far slower than their like."""
    of_pair = {(rank, other): speed for rank, met in enumerate(pairs) for other, speed in met if rank < other}
    remedy = "look at the cable, the switch's port and the card of these hosts (ethtool, ibstat)"
    out = []
    for same, name in ((True, "within a host"), (False, "between hosts")):
        speeds = {pair: s for pair, s in of_pair.items() if share_host(ranks[pair[0]], ranks[pair[1]]) == same}
        if not speeds:
            continue
        middle = statistics.median(speeds.values())
        card = None if same else _slowest_card(ranks)
        # Both ways together, while a round's pairs share the hosts' cards.
        out.append(Speed(f"pairs {name}, both ways (median of {len(speeds)})", middle, card, remedy))
        slow = sorted((s, pair) for pair, s in speeds.items() if s < middle / 2)[:_SLOW_PAIRS]
        out += [Speed(f"ranks {a} and {b}, both ways", s, middle, remedy) for s, (a, b) in slow]
    return out


def _of_collectives(sums: Sequence[dict[str, float]], ranks: Sequence[Facts]) -> list[Speed]:
    expected = _slowest_card(ranks) if len(by_host(ranks)) > 1 else None
    remedy = "set NCCL_DEBUG=INFO and look at which card and which protocol NCCL takes; NCCL_SOCKET_IFNAME names one"
    return [Speed(f"{kind}, sent by each rank", min(one[kind] for one in sums), expected, remedy) for kind in sums[0]]


def _slowest_card(ranks: Sequence[Facts]) -> float | None:
    """Returns GB/s one way of the card that the ranks use, of the slowest host, where the system says it."""
    speeds = [card.gbits for facts in ranks for card in facts.cards if card.address == facts.address]
    known = [speed for speed in speeds if speed is not None]
    return min(known) / 8 if known else None
