"""What a pool of blocks and its sequences must never get wrong: each sequence holds what a cache of its own
would, whatever is shared, copied, evicted, preempted and resumed around it.
"""

import functools
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from perf_lab.kv_cache.pool import PoolFullError, kv_pool
from perf_lab.kv_cache.prefix import content_hash
from perf_lab.kv_cache.rows import Rows
from perf_lab.numerics import poisoned
from perf_lab.pytest_plugin import drive, implementations

from .test_kv_cache import refuses

NAMESPACES = ("", "other tenant")
HEADS, DIM = 2, 3

prompts = st.lists(st.integers(0, 1), max_size=14)  # two ids: equal blocks after unequal ones come often
spaces = st.sampled_from(NAMESPACES)
sizes = st.integers(1, 5)


def constant_hash(parent: int, tokens: tuple[int, ...]) -> int:
    """All collide."""
    return 0


@implementations(kv_pool)
def test_behaves_like_dense_caches(device, impl):
    drive_and_count(impl, device, content_hash)


@implementations(kv_pool)
def test_behaves_like_dense_caches_when_all_hashes_collide(device, impl):
    drive_and_count(impl, device, constant_hash)


@implementations(kv_pool)
@given(size=sizes, blocks=st.integers(0, 3), off=st.integers(-1, 1), seed=st.integers(0, 99))
def test_a_prefix_that_is_kept_is_found_but_for_its_last_token(device, impl, size, blocks, off, seed):
    tokens = ids(max(0, blocks * size + off), seed)
    pool = new(impl, device, block_size=size, blocks=40)
    for expected in (0, max(0, len(tokens) - 1) // size * size):
        sequence = pool.allocate(tokens)
        assert sequence.length == expected, f"{sequence.length} of {len(tokens)} tokens found, block {size}"
        compute(pool, sequence, "")
        pool.free(sequence)


@implementations(kv_pool)
@given(tokens=prompts, size=sizes, asks=spaces, has=spaces)
def test_nothing_is_found_across_namespaces(device, impl, tokens, size, asks, has):
    pool = new(impl, device, block_size=size)
    compute(pool, pool.allocate(tokens, has), has)
    found = pool.allocate(tokens, asks).length
    assert found == (max(0, len(tokens) - 1) // size * size if asks == has else 0)


@implementations(kv_pool)
@given(first=prompts, other=prompts, last=prompts, size=sizes)
def test_blocks_are_shared_where_whole_prefixes_are_equal_and_only_there(
    device, impl, first, other, last, size
):
    """[A, X] then [B, X]: equal blocks after unequal ones are not the same."""
    pool = new(impl, device, block_size=size, blocks=60)
    one, two = pool.allocate(first + last), None
    compute(pool, one, "")
    two = pool.allocate(other + last)
    pairs = list(zip(first + last, other + last, strict=False))
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    equal = min(equal, max(0, len(other + last) - 1)) // size
    assert two.blocks[:equal] == one.blocks[:equal] and two.length == equal * size
    assert not set(two.blocks[equal:]) & set(one.blocks)


@implementations(kv_pool)
@given(length=st.integers(1, 12), size=sizes, computed=st.integers(0, 12))
def test_a_block_is_found_only_when_it_is_filled(device, impl, length, size, computed):
    tokens, pool = ids(length, 1), new(impl, device, block_size=size)
    sequence = pool.allocate(tokens)
    compute(pool, sequence, "", computed)
    full = min(computed, length - 1) // size * size
    assert pool.allocate(tokens).length == full


@implementations(kv_pool)
@given(asked=st.lists(prompts, min_size=1, max_size=6), size=sizes, blocks=st.integers(4, 14))
def test_what_is_found_is_what_was_computed(device, impl, asked, size, blocks):
    """One prompt after another, each freed again, in a pool so small that blocks change hands."""
    pool = new(impl, device, block_size=size, blocks=max(blocks, -(-14 // size)))
    for tokens in [*asked, *asked]:
        sequence = pool.allocate(tokens)
        assert_holds(pool, sequence, "", tokens, sequence.length)
        compute(pool, sequence, "")
        pool.free(sequence)


@implementations(kv_pool)
@given(tokens=prompts, size=sizes, cut=st.integers(0, 14), more=prompts)
def test_after_a_cut_only_what_was_kept_is_found_and_what_came_then(device, impl, tokens, size, cut, more):
    pool, cut = new(impl, device, block_size=size, blocks=80), min(cut, len(tokens))
    sequence = pool.allocate(tokens)
    compute(pool, sequence, "")
    pool.truncate(sequence, cut)
    pool.extend(sequence, more)
    compute(pool, sequence, "")
    for asked in (tokens, tokens[:cut] + more):
        again = pool.allocate([*asked, 0])
        assert_holds(pool, again, "", [*asked, 0], again.length)
    assert again.length == len(asked) // size * size, "what was computed last is not found"


@implementations(kv_pool)
@given(tokens=prompts, size=sizes, held=st.integers(0, 3), more=prompts, blocks=st.integers(4, 16))
def test_can_allocate_keeps_its_word(device, impl, tokens, size, held, more, blocks):
    """Blocks that a prompt finds are not also room for the rest of it."""
    pool = new(impl, device, block_size=size, blocks=max(blocks, -(-14 // size)))
    old = pool.allocate(tokens)
    compute(pool, old, "")
    pool.free(old)
    other = pool.allocate([2] * (size * min(held, pool.blocks.available)))
    can, before = pool.can_allocate(tokens + more), state(pool, [other])
    try:
        pool.allocate(tokens + more)
        done = True
    except PoolFullError:
        done = False
        assert state(pool, [other]) == before
    except (LookupError, StopIteration) as error:
        raise AssertionError(f"said to be possible, and broke: {error!r}") from error
    assert done == can == (-(-len(tokens + more) // size) <= pool.blocks.total - len(other.blocks))


@implementations(kv_pool)
@given(size=st.integers(2, 5), chains=st.integers(2, 4), asked=st.lists(st.integers(0, 3), max_size=6))
def test_the_least_recently_used_goes_first_and_the_end_of_a_chain_before_its_start(
    device, impl, size, chains, asked
):
    """`chains` prompts of two full blocks fill the pool; they are used again in the order `asked`."""
    pool = new(impl, device, block_size=size, blocks=2 * chains + 1)
    prompt = [[chain] * (2 * size) + [9] for chain in range(chains)]
    order = list(dict.fromkeys(reversed([*range(chains), *(i % chains for i in asked)])))[::-1]
    for chain in [*range(chains), *(i % chains for i in asked)]:
        sequence = pool.allocate(prompt[chain])
        compute(pool, sequence, "")
        pool.free(sequence)
    blocks = 2 * chains
    while pool.evict():
        held, blocks = [found(pool, tokens) // size for tokens in prompt], blocks - 1
        # of those used longest ago nothing is left, of one perhaps the first block, of the others all
        should_be = [0] * chains
        for chain in reversed(order):
            should_be[chain] = min(2, blocks - sum(should_be))
        assert held == should_be, f"kept blocks {held}, should be {should_be}, used in the order {order}"


@implementations(kv_pool)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    size=st.integers(1, 16),
    more=st.integers(0, 9),
)
def test_a_sequence_wastes_less_than_a_block(device, impl, lengths, size, more):
    pool = new(impl, device, block_size=size, blocks=400)
    sequences = [pool.allocate([i + 2] * n) for i, n in enumerate(lengths)]  # nothing to share
    for sequence in sequences:
        compute(pool, sequence, "")
        pool.extend(sequence, ids(more, 0))
    slots = pool.blocks.used * size
    needed = sum(n + more for n in lengths)
    assert needed <= slots <= needed + (size - 1) * len(lengths), f"{slots} slots for {needed} tokens"


@implementations(kv_pool)
@given(tokens=prompts, size=sizes, more=prompts, other=prompts)
def test_forks_write_into_blocks_of_their_own(device, impl, tokens, size, more, other):
    pool = new(impl, device, block_size=size, blocks=60)
    parent = pool.allocate(tokens)
    compute(pool, parent, "")
    twin = pool.fork(parent)
    assert twin.blocks == parent.blocks, "a fork copies nothing"
    for sequence, added in ((parent, more), (twin, other)):
        pool.extend(sequence, added)
        compute(pool, sequence, "")
    for sequence, added in ((parent, more), (twin, other)):
        assert_holds(pool, sequence, "", tokens + added)


@implementations(kv_pool)
@given(bad=st.deferred(lambda: st.sampled_from(sorted(REFUSED))))
def test_a_refused_call_changes_nothing(device, impl, bad):
    pool = new(impl, device, blocks=4, block_size=2)
    sequence = pool.allocate([0, 1, 0])
    compute(pool, sequence, "")
    preempted, freed = pool.allocate([1, 1, 1]), pool.allocate([])
    pool.preempt(preempted), pool.free(freed)
    before = state(pool, [sequence, preempted, freed])
    with refuses(TypeError, ValueError):
        REFUSED[bad](pool, sequence, preempted, freed)
    assert state(pool, [sequence, preempted, freed]) == before
    assert_holds(pool, sequence, "", [0, 1, 0])


@implementations(kv_pool)
@given(
    bad=st.sampled_from(
        [*(f"{name}=0" for name in ("layers", "kv_heads", "head_dim", "block_size")), "blocks=-1"]
    )
)
def test_impossible_sizes_are_refused(device, impl, bad):
    name, _, size = bad.partition("=")
    for wrong, error in ((int(size), ValueError), (1.5, TypeError)):
        with refuses(error, naming=name):
            new(impl, device, **{name: wrong})


def drive_and_count(impl: Any, device: str, hasher: Any) -> None:
    """Run the state machine, and print what it did (pytest -s shows it)."""
    done: Counter[str] = Counter()
    drive(lambda: machine(impl, device, hasher, done)())
    print(f"\n{impl}, {hasher.__name__}: {statistics(done)}")  # noqa: T201 -- pytest -s shows it


def statistics(done: Counter[str]) -> str:
    """What a run of the machine did, in one line."""
    events = f"{done['_hits']} prefixes found, {done['_copies']} blocks copied on write, "
    rules = {name: count for name, count in sorted(done.items()) if not name.startswith("_")}
    most = f"longest sequence {done['_longest']} tokens, largest pool {done['_pool']} blocks"
    runs = f"{sum(rules.values())} rules in {done['_runs']} runs, {done['_sequences']} sequences"
    return f"{runs}, {events}{most}; {rules}"


@dataclass(eq=False)
class Twin:
    """A sequence, and what a cache of its own would be: its tokens in order, the first `length` computed."""

    sequence: Any
    namespace: str
    tokens: list[int]
    length: int
    live: bool = True


def machine(impl: Any, device: str, hasher: Any, done: Counter[str]) -> type[RuleBasedStateMachine]:
    """A state machine that drives one pool beside dense caches, and checks all its books after each step."""

    class PoolBesideDenseCaches(RuleBasedStateMachine):
        @initialize(blocks=st.integers(4, 40), size=sizes, layers=st.integers(1, 2))
        def start(self, blocks, size, layers):
            self.pool = new(impl, device, blocks=blocks, block_size=size, layers=layers, hasher=hasher)
            self.total, self.size, self.copies = blocks, size, 0
            self.twins: list[Twin] = []
            self.seen: list[
                tuple[list[int], str]
            ] = []  # what was computed at some time, and in which namespace
            self.chains = {("namespace", space): (space, ()) for space in NAMESPACES}
            self.watch(self.pool.blocks.index)
            done["_runs"] += 1
            done["_pool"] = max(done["_pool"], blocks)

        def watch(self, index):
            """Note the whole prefix of every link that is given."""
            add = index.add

            def noted(parent, tokens, block):
                link = add(parent, tokens, block)
                space, before = self.chains[parent.identity]
                self.chains[link.identity] = space, before + tokens
                return link

            index.add = noted
            copy = self.pool._copy

            def counted(block, to):
                self.copies += 1
                copy(block, to)

            self.pool._copy = counted

        @rule(tokens=prompts, space=spaces, keep=st.integers(0, 30), whole=st.booleans(), data=st.data())
        def allocate(self, tokens, space, keep, whole, data):
            if self.seen and keep:  # most often what some sequence began with: there is something to find
                old, space = data.draw(st.sampled_from(self.seen), label="like")
                tokens = old[:keep] + tokens[:5]
            fits = -(-len(tokens) // self.size) <= self.total - len(self.used())
            can = self.pool.can_allocate(tokens, space)
            assert can or not fits, "can_allocate refuses what fits without sharing"
            sequence = self.tried("allocate", can, lambda: self.pool.allocate(tokens, space))
            if can:
                self.twins.append(Twin(sequence, space, list(tokens), sequence.length))
                self.check_found(self.twins[-1])
                done["_sequences"] += 1
                done["_hits"] += sequence.length > 0
                if whole:
                    self.compute_more(self.twins[-1], 99)

        @precondition(lambda self: self.live())
        @rule(new=prompts, whole=st.booleans(), data=st.data())
        def extend(self, new, whole, data):
            twin = data.draw(st.sampled_from(self.live()), label="sequence")
            can = self.pool.can_extend(twin.sequence, len(new))
            whole = -(-(len(twin.tokens) + len(new)) // self.size) - len(twin.sequence.blocks) + 1
            assert can or whole > self.total - len(self.used()), "can_extend refuses what fits"
            self.tried("extend", can, lambda: self.pool.extend(twin.sequence, new))
            if can:
                twin.tokens = twin.tokens + new
                if whole:
                    self.compute_more(twin, 99)

        @precondition(lambda self: self.live())
        @rule(n=st.integers(0, 20), data=st.data())
        def compute(self, n, data):
            twin = data.draw(st.sampled_from(self.live()), label="sequence")
            self.compute_more(twin, n)

        def compute_more(self, twin, n):
            n = min(n, len(twin.tokens) - twin.length)
            self.tried("compute", True, lambda: compute(self.pool, twin.sequence, twin.namespace, n))
            twin.length += n
            if n:
                self.seen.append((twin.tokens[: twin.length], twin.namespace))
            done["_longest"] = max(done["_longest"], twin.length)

        @precondition(lambda self: self.live())
        @rule(data=st.data())
        def fork(self, data):
            twin = data.draw(st.sampled_from(self.live()), label="sequence")
            sequence = self.tried("fork", True, lambda: self.pool.fork(twin.sequence))
            self.twins.append(Twin(sequence, twin.namespace, twin.tokens[: twin.length], twin.length))
            done["_sequences"] += 1

        @precondition(lambda self: self.live())
        @rule(data=st.data())
        def truncate(self, data):
            twin = data.draw(st.sampled_from(self.live()), label="sequence")
            n = data.draw(st.integers(0, twin.length), label="n")
            self.tried("truncate", True, lambda: self.pool.truncate(twin.sequence, n))
            twin.tokens, twin.length = twin.tokens[:n], n

        @precondition(lambda self: self.twins)
        @rule(data=st.data())
        def free(self, data):
            twin = data.draw(st.sampled_from(self.twins), label="sequence")
            self.tried("free", True, lambda: self.pool.free(twin.sequence))
            self.twins.remove(twin)

        @precondition(lambda self: self.live())
        @rule(data=st.data())
        def preempt(self, data):
            twin = data.draw(st.sampled_from(self.live()), label="sequence")
            self.tried("preempt", True, lambda: self.pool.preempt(twin.sequence))
            twin.live, twin.length = False, 0

        @precondition(lambda self: len(self.live()) < len(self.twins))
        @rule(data=st.data())
        def resume(self, data):
            asleep = [twin for twin in self.twins if not twin.live]
            twin = data.draw(st.sampled_from(asleep), label="sequence")
            can = self.pool.can_resume(twin.sequence)
            self.tried("resume", can, lambda: self.pool.resume(twin.sequence))
            if can:
                twin.live, twin.length = True, twin.sequence.length
                self.check_found(twin)

        @precondition(lambda self: self.pool.blocks.idle)
        @rule()
        def evict(self):
            idle = len(self.pool.blocks.idle)
            evicted = self.tried("evict", True, self.pool.evict)
            assert evicted == (idle > 0) and len(self.pool.blocks.idle) == max(0, idle - 1)

        def tried(self, name, can, call):
            """The result of a call that must be done, or refused and without effect."""
            sequences = [twin.sequence for twin in self.twins]
            before, copies = state(self.pool, sequences), self.copies
            try:
                result = call()
            except PoolFullError:
                done[f"{name} refused"] += 1
                assert not can, f"{name} is refused, although it was said to be possible"
                assert state(self.pool, sequences) == before, f"{name} was refused, and changed something"
                return None
            except Exception as error:
                raise AssertionError(f"{name} broke: {error!r}") from error
            done["_copies"] += self.copies - copies
            assert can, f"{name} is done, although it was said to be impossible"
            done[name] += 1
            for memory in (self.pool.k, self.pool.v):  # what is free may be overwritten by anything
                memory[:, self.pool.blocks.free] = float("nan")
            return result

        def check_found(self, twin):
            assert twin.length % self.size == 0 and twin.length < max(1, len(twin.tokens)), (
                "nothing left to compute"
            )

        def live(self):
            return [twin for twin in self.twins if twin.live]

        def used(self):
            return {block for twin in self.twins for block in twin.sequence.blocks}

        @invariant()
        def contents_are_those_of_dense_caches(self):
            for twin in self.live():
                assert_holds(self.pool, twin.sequence, twin.namespace, twin.tokens, twin.length)

        @invariant()
        def every_block_is_free_or_idle_or_used_and_counted_once(self):
            books = self.pool.blocks
            used, everything = self.used(), range(self.total)
            assert sorted([*books.free, *books.idle, *used]) == list(everything), (
                "free + idle + used != total"
            )
            assert books.used == len(used) and books.available == self.total - len(used)
            held = Counter(block for twin in self.twins for block in twin.sequence.blocks)
            assert books.references == [held[block] for block in everything], (
                "references are not table entries"
            )

        @invariant()
        def tables_are_as_long_as_needed(self):
            for twin in self.twins:
                slots = len(twin.tokens) if twin.live else 0
                held = len(twin.sequence.blocks)
                assert held == -(-slots // self.size), f"{held} blocks of {self.size} for {slots} tokens"

        @invariant()
        def what_is_findable_is_what_its_hash_says(self):
            index = self.pool.blocks.index
            entries = list(index.by_digest.values())
            assert {e.block: e for e in entries} == index.by_block and len(index.by_block) == len(entries)
            for digest, entry in index.by_digest.items():
                assert digest == entry.link.digest == hasher(entry.parent.digest, entry.tokens)
                assert entry.block not in self.pool.blocks.free, "a free block is findable"
                space, whole = self.chains[entry.link.identity]
                k, v = truth(space, whole, self.pool.layers)
                assert len(entry.tokens) == self.size, "a block is findable before it is full"
                for memory, right in ((self.pool.k, k), (self.pool.v, v)):
                    got = memory[:, entry.block].cpu()
                    assert torch.equal(got, right[:, -self.size :]), (
                        f"block {entry.block} is not what its hash says"
                    )

        @invariant()
        def idle_blocks_are_findable(self):
            assert set(self.pool.blocks.idle) <= set(self.pool.blocks.index.by_block)

        @invariant()
        def blocks_are_shared_only_where_whole_prefixes_are_equal(self):
            holders: dict[int, tuple[Any, int]] = {}
            for twin in self.live():
                for place, block in enumerate(twin.sequence.blocks):
                    other, there = holders.setdefault(block, (twin, place))
                    both = min(other.length, twin.length, (place + 1) * self.size)
                    equal = other.tokens[:both] == twin.tokens[:both] and other.namespace == twin.namespace
                    assert there == place and equal, f"block {block} is shared by unequal prefixes"

        def teardown(self):
            if not hasattr(self, "pool"):
                return
            for twin in self.twins:
                self.pool.free(twin.sequence)
            while self.pool.evict():
                pass
            assert sorted(self.pool.blocks.free) == list(range(self.total)), "blocks are lost after a drain"

    return PoolBesideDenseCaches


@functools.lru_cache(maxsize=4096)
def truth(namespace: Hashable, tokens: tuple[int, ...], layers: int) -> tuple[Tensor, Tensor]:
    """Keys and values [layers, tokens, Hkv, D] of these tokens: each depends on all before it."""
    sums, running = [], NAMESPACES.index(namespace) + 1
    for token in tokens:
        running = (31 * running + 7 * token + 1) % 99991
        sums.append(float(running))
    at = torch.arange(2 * layers * HEADS * DIM, dtype=torch.float32).view(2, layers, 1, HEADS, DIM) / 4
    k, v = torch.tensor(sums).view(1, 1, -1, 1, 1) + at  # exact: below 2^17, in quarters
    return k, v


def new(impl: Any, device: str, **sizes: Any) -> Any:
    """A pool whose unwritten slots hold NaN."""
    defaults = {"layers": 2, "kv_heads": HEADS, "head_dim": DIM, "blocks": 30, "block_size": 4}
    with poisoned():
        return impl.fn(**{**defaults, **sizes}, device=device)


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def found(pool: Any, tokens: list[int]) -> int:
    """How many tokens of a prompt are there; nothing is taken."""
    return len(pool.blocks.prefix(pool.blocks.index.root(None), tokens, pool.block_size)) * pool.block_size


def compute(pool: Any, sequence: Any, namespace: str, n: int | None = None) -> None:
    """Write and commit the next n tokens of a sequence (all that are left), as a model would."""
    left = len(sequence.tokens) - sequence.length
    n = left if n is None else min(n, left)
    start = sequence.length
    k, v = truth(namespace, tuple(sequence.tokens[: start + n]), pool.layers)
    rows = Rows.of(pool, [sequence])
    for layer in range(pool.layers):
        rows.write(layer, *(x[layer, start:].transpose(0, 1)[None].to(pool.k) for x in (k, v)))
    pool.commit(sequence, n)


def assert_holds(
    pool: Any, sequence: Any, namespace: str, tokens: list[int], length: int | None = None
) -> None:
    """The sequence is these tokens, and its slots hold their keys and values, read through its table."""
    length = len(tokens) if length is None else length
    assert sequence.tokens == list(tokens), f"tokens {sequence.tokens}, should be {tokens}"
    assert sequence.length == length, f"{sequence.length} computed tokens, should be {length}"
    for memory, right in zip(
        (pool.k, pool.v), truth(namespace, tuple(tokens[:length]), pool.layers), strict=True
    ):
        got = memory[:, sequence.blocks].flatten(1, 2)[:, :length].cpu()  # [layers, length, Hkv, D]
        if not torch.equal(got, right):
            layer, token, _, _ = (got != right).nonzero()[0].tolist()
            values = (
                f"{got[layer, token].flatten().tolist()}, should be {right[layer, token].flatten().tolist()}"
            )
            raise AssertionError(f"{sequence}: token {token} is in layer {layer} {values}")


def state(pool: Any, sequences: list[Any]) -> Any:
    """Everything that a refused call must leave alone."""
    books = pool.blocks
    return (
        sorted(books.free),
        list(books.idle),
        list(books.references),
        dict(books.index.by_digest),
        [(s.state, s.length, list(s.tokens), list(s.blocks), list(s.links)) for s in sequences],
    )


REFUSED: dict[str, Any] = {
    "allocate more than there is": lambda pool, live, preempted, freed: pool.allocate([1] * 9),
    "allocate what is no int": lambda pool, live, preempted, freed: pool.allocate([0.5]),
    "allocate in a namespace that has no hash": lambda pool, live, preempted, freed: pool.allocate([0], []),
    "extend by more than there is": lambda pool, live, preempted, freed: pool.extend(live, [1] * 6),
    "extend by what is no int": lambda pool, live, preempted, freed: pool.extend(live, ["a"]),
    "extend a preempted one": lambda pool, live, preempted, freed: pool.extend(preempted, [1]),
    "extend a freed one": lambda pool, live, preempted, freed: pool.extend(freed, [1]),
    "commit more than there are": lambda pool, live, preempted, freed: pool.commit(live, 1),
    "commit of a negative n": lambda pool, live, preempted, freed: pool.commit(live, -1),
    "commit of no int": lambda pool, live, preempted, freed: pool.commit(live, 0.0),
    "truncate to more": lambda pool, live, preempted, freed: pool.truncate(live, 4),
    "truncate to a negative n": lambda pool, live, preempted, freed: pool.truncate(live, -1),
    "truncate a preempted one": lambda pool, live, preempted, freed: pool.truncate(preempted, 0),
    "fork a freed one": lambda pool, live, preempted, freed: pool.fork(freed),
    "free twice": lambda pool, live, preempted, freed: pool.free(freed),
    "preempt twice": lambda pool, live, preempted, freed: pool.preempt(preempted),
    "resume what is live": lambda pool, live, preempted, freed: pool.resume(live),
    "resume what is freed": lambda pool, live, preempted, freed: pool.resume(freed),
    "free of no sequence": lambda pool, live, preempted, freed: pool.free([1, 2]),
}
