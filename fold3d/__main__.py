"""`python -m fold3d`: the `fold3d` command."""

import sys

from fold3d.cli.main import main

sys.exit(main())
