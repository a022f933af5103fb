"""answer_requests: a rank's side of `benchmarks.cluster.testbed.ranks.Ranks`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def answer_requests(answer: Callable[[dict[str, Any]], Any], join: Callable[[], None]) -> None:
    """Answers each line of JSON on standard input with one on standard output, until there are no more.

    Whatever else is written to standard output, by a library such as gloo, goes to standard error.

    Args:
        answer: what a request is answered with.
        join: called first, once standard output is free: joins the process group.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    join()
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()
