"""What a key/value cache must never get wrong."""

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perf_lab.kv_cache import kv_cache
from perf_lab.numerics import poisoned
from perf_lab.pytest_plugin import drive, implementations
from perf_lab.strategies import Input, dtype_name, inputs

SMALL = {"layers": 2, "batch": 2, "kv_heads": 2, "head_dim": 3, "capacity": 6}


@implementations(kv_cache)
def test_behaves_like_a_plain_list(device, impl):
    drive(lambda: machine(impl, device)())


@implementations(kv_cache)
@given(bad=st.deferred(lambda: st.sampled_from(sorted(REFUSED))))
def test_a_refused_call_changes_nothing(device, impl, bad):
    cache = new(impl, device, **SMALL)
    rows = [[append(cache, layer, 2, device, seed=layer)] for layer in range(2)]
    cache.commit(2)
    for layer in range(2):
        rows[layer].append(append(cache, layer, 3, device, seed=10 + layer))
    with refuses(TypeError, ValueError):
        REFUSED[bad](cache, device)
    with takes("commit(3) of the 3 pending tokens"):
        cache.commit(3)
    assert same_contents(cache, [joined(parts) for parts in rows])


@implementations(kv_cache)
@given(pending=st.lists(st.integers(0, 3), min_size=1, max_size=3), n=st.integers(0, 4))
def test_commit_takes_only_what_every_layer_has(device, impl, pending, n):
    cache = new(impl, device, **{**SMALL, "layers": len(pending)})
    rows = [append(cache, layer, count, device, seed=layer) for layer, count in enumerate(pending)]
    right = n <= min(pending)
    with takes(f"commit({n}) of {pending}") if right else refuses(ValueError, naming="n"):
        cache.commit(n)
    assert same_contents(cache, [first(row, n if right else 0) for row in rows])


@implementations(kv_cache)
@given(
    cut=st.deferred(lambda: st.sampled_from(sorted(CUTS))),
    committed=st.integers(1, 3),
    pending=st.integers(1, 3),
)
def test_pending_tokens_do_not_outlive_a_cut(device, impl, cut, committed, pending):
    cache = new(impl, device, **SMALL)
    fill(cache, committed, device)
    for layer in range(cache.layers):
        append(cache, layer, pending, device)
    CUTS[cut](cache)
    with refuses(ValueError, naming="n"):
        cache.commit(1)


@implementations(kv_cache)
@given(held=st.integers(1, 6), data=st.data())
def test_a_cut_keeps_exactly_the_first_tokens(device, impl, held, data):
    kept = data.draw(st.integers(0, held), label="kept")
    for cut, n in (("truncate", kept), ("rollback", held - kept)):
        cache = new(impl, device, **SMALL)
        rows = fill(cache, held, device)
        getattr(cache, cut)(n)
        assert cache.length == kept, cut
        assert same_contents(cache, [first(row, kept) for row in rows]), cut


@implementations(kv_cache)
@given(chunks=st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_append_gives_views_of_one_memory(device, impl, chunks):
    cache = new(impl, device, **{**SMALL, "capacity": sum(chunks) + 1})
    places = set()
    for chunk in [*chunks, 1]:
        k, v = cache.append(0, *tokens(cache, chunk, device))
        places.add((k.untyped_storage().data_ptr(), v.untyped_storage().data_ptr()))
        cache.append(1, *tokens(cache, chunk, device))
        cache.commit(chunk)
    assert len(places) == 1, f"the views of {len(chunks) + 1} appends lie in {len(places)} memories, not one"


@implementations(kv_cache)
@given(held=st.integers(0, 3), new_tokens=st.integers(1, 3), seed=st.integers(0, 99))
def test_slots_written_by_the_device_are_as_appended(device, impl, held, new_tokens, seed):
    cache = new(impl, device, **SMALL)
    rows = [[append(cache, layer, held, device, seed=layer)] for layer in range(cache.layers)]
    cache.commit(held)
    for layer in range(cache.layers):
        at = torch.arange(held, held + new_tokens, device=device)
        k_new, v_new = tokens(cache, new_tokens, device, seed=seed + layer)
        keys, values = cache.write(layer, k_new, v_new, at)
        assert keys.shape == (cache.batch, cache.kv_heads, cache.capacity, cache.head_dim)
        rows[layer].append((k_new, v_new))
        k, v = joined(rows[layer])
        end = held + new_tokens
        assert torch.equal(keys[:, :, :end], k) and torch.equal(values[:, :, :end], v)
    assert cache.length == held, "what was written counts before advance"
    cache.advance(new_tokens)
    assert same_contents(cache, [joined(parts) for parts in rows])


@implementations(kv_cache)
@given(length=st.integers(1, 200), chunk=st.integers(0, 3))
def test_appending_costs_the_same_at_every_length(device, impl, length, chunk):
    cache = new(impl, device, **{**SMALL, "layers": 1, "capacity": length + chunk})
    at_the_start = elements_written(cache, chunk, device)
    cache.append(0, *tokens(cache, length, device))
    cache.commit(length)
    assert elements_written(cache, chunk, device) == at_the_start


@implementations(kv_cache)
@given(
    layers=st.integers(1, 3),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    dim=st.integers(1, 5),
    data=st.data(),
)
def test_memory_is_linear_in_the_capacity(device, impl, layers, batch, heads, dim, data):
    capacity = data.draw(st.integers(0, 300), label="capacity")
    cache = new(impl, device, layers=layers, batch=batch, kv_heads=heads, head_dim=dim, capacity=capacity)
    views = [
        view for layer in range(layers) for view in cache.append(layer, *tokens(cache, capacity, device))
    ]
    held = {view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in views}
    block = getattr(cache, "block_size", 1)  # slots that are taken together
    slots = -(-capacity // block) * block
    should_be = 2 * layers * batch * heads * slots * dim * 4  # bytes: keys and values, float32
    assert cache.nbytes == should_be
    assert sum(held.values()) == should_be


@implementations(kv_cache, dtypes=True)
@given(data=st.data())
def test_what_comes_out_is_what_went_in(device, impl, dtype, data):
    cache = new(impl, device, **SMALL, dtype=dtype)
    k, v = (data.draw(inputs((2, 2, 4, 3), dtype), label=name).on(device) for name in "kv")
    for layer in range(2):
        keys, values = cache.append(layer, k, v)
        assert keys.dtype == values.dtype == dtype
        assert torch.equal(keys, k) and torch.equal(values, v)


@implementations(kv_cache, dtypes=True)
@given(other=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_another_dtype_is_refused_not_cast(device, impl, dtype, other):
    cache = new(impl, device, **SMALL, dtype=dtype)
    k = torch.zeros(2, 2, 1, 3, dtype=other, device=device)
    if other == dtype:
        cache.append(0, k, k)
        return
    with refuses(TypeError, naming="k"):
        cache.append(0, k, k)


@implementations(kv_cache)
@given(first=st.integers(0, 6), again=st.integers(0, 6))
def test_reset_is_as_new(device, impl, first, again):
    cache = new(impl, device, **SMALL)
    fill(cache, first, device)
    cache.reset()
    assert cache.length == 0
    with refuses(ValueError, naming="n"):
        cache.commit(1)
    rows = fill(cache, again, device, seed=1)
    assert same_contents(cache, rows)


@implementations(kv_cache)
@given(
    bad=st.sampled_from(
        [*(f"{name}=0" for name in ("layers", "batch", "kv_heads", "head_dim")), "capacity=-1"]
    )
)
def test_impossible_sizes_are_refused(device, impl, bad):
    name, _, size = bad.partition("=")
    with refuses(ValueError, naming=name):
        new(impl, device, **{**SMALL, name: int(size)})
    with refuses(TypeError, naming=name):
        new(impl, device, **{**SMALL, name: 1.5})


def machine(impl: Any, device: str) -> type[RuleBasedStateMachine]:
    """A state machine that drives one cache beside a plain list of tokens a layer."""

    class CacheBesideList(RuleBasedStateMachine):
        @initialize(
            layers=st.integers(1, 2),
            batch=st.integers(1, 2),
            heads=st.integers(1, 2),
            capacity=st.integers(0, 9),
            dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        )
        def start(self, layers, batch, heads, capacity, dtype):
            sizes = {"layers": layers, "batch": batch, "kv_heads": heads, "capacity": capacity}
            self.cache = new(impl, device, **sizes, head_dim=2, dtype=dtype)
            self.layers, self.capacity, self.bytes = layers, capacity, self.cache.nbytes
            none = tokens(self.cache, 0, device)
            self.committed = [none] * layers  # (k, v) of each layer, [B, Hkv, tokens, D]
            self.pending = [none] * layers

        @rule(layer=st.integers(0, 1), new=st.integers(0, 4), seed=st.integers(0, 99))
        def append(self, layer, new, seed):
            k, v = tokens(self.cache, new, device, seed)
            if layer < self.layers and count(self.committed[layer]) + new <= self.capacity:
                self.pending[layer] = k, v
                should_be = joined([self.committed[layer], (k, v)])
                assert same(self.cache.append(layer, k, v), should_be), "append does not give all tokens"
            else:
                self.refused(lambda: self.cache.append(layer, k, v))

        @rule(new=st.integers(0, 4), seed=st.integers(0, 99))
        def append_to_every_layer(self, new, seed):
            for layer in range(self.layers):
                self.append(layer, new, seed + layer)

        @rule(new=st.integers(0, 4), seed=st.integers(0, 99), data=st.data())
        def append_to_every_layer_and_commit(self, new, seed, data):
            self.append_to_every_layer(new, seed)
            self.commit(data)

        @rule(data=st.data())
        def commit(self, data):
            n = data.draw(st.integers(-1, max(count(rows) for rows in self.pending) + 1), label="n")
            if 0 <= n <= min(count(rows) for rows in self.pending):
                self.cache.commit(n)
                pairs = zip(self.committed, self.pending, strict=True)
                self.settle([joined([old, first(new, n)]) for old, new in pairs])
            else:
                self.refused(lambda: self.cache.commit(n))

        @rule(data=st.data())
        def truncate(self, data):
            length = data.draw(st.integers(-2, count(self.committed[0]) + 2), label="length")
            if 0 <= length <= count(self.committed[0]):
                self.cache.truncate(length)
                self.settle([first(rows, length) for rows in self.committed])
            else:
                self.refused(lambda: self.cache.truncate(length))

        @rule(data=st.data())
        def rollback(self, data):
            length = count(self.committed[0])
            n = data.draw(st.integers(-2, length + 2), label="n")
            if 0 <= n <= length:
                self.cache.rollback(n)
                self.settle([first(rows, length - n) for rows in self.committed])
            else:
                self.refused(lambda: self.cache.rollback(n))

        @rule()
        def reset(self):
            self.cache.reset()
            self.settle([first(rows, 0) for rows in self.committed])

        def settle(self, committed):
            self.committed = committed
            self.pending = [first(rows, 0) for rows in committed]

        def refused(self, call):
            with refuses(ValueError):
                call()

        @invariant()
        def length_is_that_of_the_list(self):
            assert 0 <= self.cache.length <= self.cache.capacity == self.capacity
            assert self.cache.length == count(self.committed[0])
            assert self.cache.nbytes == self.bytes

        @invariant()
        def contents_are_those_of_the_list(self):
            assert same_contents(self.cache, self.committed)

    return CacheBesideList


Rows = tuple[Tensor, Tensor]  # keys and values [B, Hkv, tokens, D]


@contextlib.contextmanager
def refuses(*kinds: type[Exception], naming: str = r"\w+") -> Iterator[None]:
    """Within it, one of these errors must come, with a message "argument: got ..., accepted ..."."""
    caught: Exception | None = None
    try:
        yield
    except kinds as error:
        caught = error
    wanted = " or ".join(kind.__name__ for kind in kinds)
    assert caught is not None, f"taken without an error; should be {wanted}"
    message = f"{caught!r} does not say what was got and what is accepted"
    assert re.search(f"^{naming}: got .*accepted", str(caught)), message


@contextlib.contextmanager
def takes(call: str) -> Iterator[None]:
    """Within it, an error is wrong."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{call} is refused: {error}") from error


def new(impl: Any, device: str, **sizes: Any) -> Any:
    """A cache whose unwritten slots hold NaN."""
    with poisoned():
        return impl.fn(**sizes, device=device)


def tokens(cache: Any, count: int, device: str, seed: int = 0, **changed: int) -> Rows:
    """Random keys and values of `count` tokens that fit the cache, but for the sizes in `changed`."""
    sizes = {
        "batch": cache.batch,
        "kv_heads": cache.kv_heads,
        "count": count,
        "head_dim": cache.head_dim,
        **changed,
    }
    k, v = Input((2, *sizes.values()), dtype_name(cache.dtype), seed).on(device)
    return k, v


def append(cache: Any, layer: int, count: int, device: str, seed: int = 0) -> Rows:
    rows = tokens(cache, count, device, seed)
    cache.append(layer, *rows)
    return rows


def fill(cache: Any, count: int, device: str, seed: int = 0) -> list[Rows]:
    """Append and commit `count` tokens in every layer; gives what was written."""
    rows = [append(cache, layer, count, device, seed + layer) for layer in range(cache.layers)]
    cache.commit(count)
    return rows


def count(rows: Rows) -> int:
    return rows[0].shape[2]


def first(rows: Rows, n: int) -> Rows:
    return rows[0][:, :, :n], rows[1][:, :, :n]


def joined(parts: list[Rows]) -> Rows:
    return torch.cat([k for k, _ in parts], 2), torch.cat([v for _, v in parts], 2)


def same(got: Rows, should_be: Rows) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, should_be, strict=True))


def same_contents(cache: Any, committed: list[Rows]) -> bool:
    """Whether the cache holds these tokens; read from a copy, since reading drops what is pending."""
    reader = copy.deepcopy(cache)
    none = tokens(cache, 0, str(cache.device))
    return all(same(reader.append(layer, *none), rows) for layer, rows in enumerate(committed))


class Writes(TorchDispatchMode):
    """Counts the elements that torch writes: outputs that are no mere views."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outs = out if isinstance(out, tuple | list) else (out,)
        for value, returned in zip(outs, func._schema.returns, strict=False):
            if isinstance(value, Tensor) and (returned.alias_info is None or returned.alias_info.is_write):
                self.elements += value.numel()
        return out


def elements_written(cache: Any, count: int, device: str) -> int:
    """What appending `count` tokens writes; nothing is committed."""
    rows = tokens(cache, count, device)
    with Writes() as writes:
        cache.append(0, *rows)
    return writes.elements


def _refused_append(count: int = 1, layer: Any = 0, **changed: int) -> Callable[[Any, str], Any]:
    return lambda cache, device: cache.append(layer, *tokens(cache, count, device, **changed))


def _refused_write(at: Tensor) -> Callable[[Any, str], Any]:
    return lambda cache, device: cache.write(0, *tokens(cache, 2, device, seed=99), at.to(device))


def _refused_value(change: Callable[[Tensor], Any]) -> Callable[[Any, str], Any]:
    """A right k of other numbers, and a v that does not fit."""

    def call(cache: Any, device: str) -> Any:
        k, v = tokens(cache, 2, device, seed=99)
        return cache.append(0, k, change(v))

    return call


CUTS: dict[str, Callable[[Any], None]] = {
    "truncate to the same length": lambda cache: cache.truncate(cache.length),
    "truncate": lambda cache: cache.truncate(cache.length - 1),
    "rollback of nothing": lambda cache: cache.rollback(0),
    "rollback": lambda cache: cache.rollback(1),
    "reset": lambda cache: cache.reset(),
    "commit of nothing": lambda cache: cache.commit(0),
}

REFUSED: dict[str, Callable[[Any, str], Any]] = {
    "append past the capacity": _refused_append(5),
    "append one past the capacity, longer than what is free": _refused_append(7),
    "layer past the last": _refused_append(layer=2),
    "negative layer": _refused_append(layer=-1),
    "layer of no int": _refused_append(layer=0.0),
    "another batch": _refused_append(batch=1),
    "more heads": _refused_append(kv_heads=4),
    "one head, which would be broadcast": _refused_append(kv_heads=1),
    "another head size": _refused_append(head_dim=1),
    "v of another dtype": _refused_value(lambda v: v.half()),
    "v of another length": _refused_value(lambda v: v[:, :, :1]),
    "v without heads": _refused_value(lambda v: v[:, 0]),
    "v on another device": _refused_value(lambda v: v.to("meta")),
    "v that needs a gradient": _refused_value(lambda v: v.requires_grad_()),
    "v of no tensor": _refused_value(lambda v: v.tolist()),
    "commit of a negative n": lambda cache, device: cache.commit(-1),
    "commit of more than is pending": lambda cache, device: cache.commit(4),
    "commit of no int": lambda cache, device: cache.commit(1.0),
    "commit of a truth value": lambda cache, device: cache.commit(True),
    "truncate to a negative length": lambda cache, device: cache.truncate(-1),
    "truncate to a longer length": lambda cache, device: cache.truncate(3),
    "rollback of a negative n": lambda cache, device: cache.rollback(-1),
    "rollback of more than there is": lambda cache, device: cache.rollback(3),
    "advance of a negative n": lambda cache, device: cache.advance(-1),
    "advance past the capacity": lambda cache, device: cache.advance(5),
    "write to slots of another number": _refused_write(torch.tensor([2, 3, 4])),
    "write to slots of no int64": _refused_write(torch.tensor([2.0, 3.0])),
}
