"""`python -m perf_lab` is the command `perf-lab`."""

import sys

from perf_lab.cli import main

sys.exit(main())
