"""perf_lab: a laboratory for LLM inference speed.

Each optimization stands in three places under one name: `perf_lab/<name>/`
is the code, `tests/test_<name>.py` what it must never get wrong, and
`bench/test_<name>_speed.py` what it buys on this machine.
"""

__version__ = "0.1.0"
