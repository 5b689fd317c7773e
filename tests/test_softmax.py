"""What a softmax must never get wrong."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from perf_lab.numerics import check
from perf_lab.pytest_plugin import implementations
from perf_lab.softmax import softmax
from perf_lab.strategies import Input, inputs, lengths


@implementations(softmax, dtypes=True)
@given(data=st.data())
def test_matches_the_oracle(device, impl, dtype, data):
    shape = data.draw(st.tuples(lengths(9), lengths(1100)), label="shape")
    x = data.draw(inputs(shape, dtype), label="x")
    check(impl, x, device=device)


@implementations(softmax)
@given(columns=lengths(5000, smallest=2), seed=st.integers(0, 99))
def test_does_not_overflow(device, impl, columns, seed):
    check(impl, Input((3, columns), "float32", seed, values="huge"), device=device)
