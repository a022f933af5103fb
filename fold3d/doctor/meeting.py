"""Meeting: ranks come together over the job's store, and who does not come is named."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fold3d.errors import ConfigError, RankError

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
