"""What the processes of ranks have imported when they begin: they are forked from a server that imports this once.

Nothing here starts threads that a fork would lose or uses a device.
"""

from __future__ import annotations

import contextlib
import gc

import torch
import transformers.trainer  # noqa: F401  seconds, in each of the processes otherwise

with contextlib.suppress(ImportError):  # not built: the test that needs it says so with its own traceback
    import fold3d.trainer  # noqa: F401

torch.set_num_threads(1)
gc.freeze()
