"""fresh_store(): a store without the keys of processes that have ended, made of one that outlives them.

torchrun keeps the store of a job (TORCHELASTIC_USE_AGENT_STORE), and processes that it starts again find in it where
those before them could be reached, and why these failed (pytorch/pytorch#135712). It tells them no number of theirs
that all of them have in common: `TORCHELASTIC_RESTART_COUNT` is each launcher's own.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from torch._C._distributed_c10d import PrefixStore

_LOOK_SECONDS = 0.05


def fresh_store(store: Any, rank: int, world: int) -> PrefixStore:
    """Returns a part of `store` that nobody has written into; all ranks of the job call.

    Each rank says hello with a number that nobody has had before; rank 0 answers to each number that it finds, also to
    those of ranks that have ended, and waits until all ranks have heard an answer.

    Raises: DistStoreError, or TimeoutError on rank 0, when another rank does not come in the store's time.
    """
    number, root = secrets.token_hex(8), "fold3d/fresh"
    if rank > 0:
        store.set(f"{root}/hello {rank}", number)
        name = store.get(f"{root}/answer {number}").decode()
        store.set(f"{root}/heard {name} {rank}", "")
        return PrefixStore(f"{root}/{name}", store)
    deadline = time.monotonic() + store.timeout.total_seconds()
    missing, answered = set(range(1, world)), set[str]()
    while missing:
        for other in sorted(missing):
            if store.check([f"{root}/heard {number} {other}"]):
                missing.discard(other)
            elif store.check([f"{root}/hello {other}"]):
                hello = store.get(f"{root}/hello {other}").decode()
                if hello not in answered:
                    store.set(f"{root}/answer {hello}", number)
                    answered.add(hello)
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"rank {min(missing)} has not come to the job's store (setting ddp_timeout)")
        time.sleep(_LOOK_SECONDS if missing else 0.0)
    return PrefixStore(f"{root}/{number}", store)
