"""`python -m benchmarks.cluster`; `--help` lists the settings, README.md explains them."""

from __future__ import annotations

import sys

from benchmarks.cluster.run import main

if __name__ == "__main__":
    sys.exit(main())
