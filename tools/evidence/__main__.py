"""Run `python -m tools.evidence` from the root of a clone."""

import sys

from tools.evidence.command import main

sys.exit(main())
