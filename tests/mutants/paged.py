"""Wrong pools, each the right one but for one fault. PG1 to PG9 were faults of well-known servers."""

from typing import Any

from perf_lab.kv_cache.blocks import Blocks
from perf_lab.kv_cache.pool import Pool, PoolFullError, kv_pool
from perf_lab.kv_cache.prefix import Link, PrefixIndex

from . import mutant

DENSE = "test_paged::test_behaves_like_dense_caches"
COLLIDE = "test_paged::test_behaves_like_dense_caches_when_all_hashes_collide"
REFUSED = "test_paged::test_a_refused_call_changes_nothing"


def wrong_books(pool: Pool, blocks: type[Blocks] = Blocks, index: type[PrefixIndex] = PrefixIndex) -> None:
    """Give a new pool other books."""
    hasher = pool.blocks.index.hasher
    pool.blocks = blocks(pool.blocks.total, hasher)
    pool.blocks.index = index(hasher)


@mutant(kv_pool, killed_by=COLLIDE)
class TrustsTheHash(Pool):
    """PG1: a block is a hit when its hash is the one asked for."""

    def __init__(self, **sizes: Any) -> None:
        class Index(PrefixIndex):
            def find(self, parent, tokens):
                return self.occupant(parent, tokens)

        super().__init__(**sizes)
        wrong_books(self, index=Index)


@mutant(kv_pool, killed_by=COLLIDE)
class ComparesOneBlock(Pool):
    """PG1: the tokens of the block are compared, not what came before them."""

    def __init__(self, **sizes: Any) -> None:
        class Index(PrefixIndex):
            def find(self, parent, tokens):
                entry = self.occupant(parent, tokens)
                return entry if entry and entry.tokens == tokens else None

        super().__init__(**sizes)
        wrong_books(self, index=Index)


@mutant(kv_pool, killed_by="test_paged::test_blocks_are_shared_where_whole_prefixes_are_equal_and_only_there")
class ForgetsTheParent(Pool):
    """PG2: a block's hash is that of its own tokens, whatever came before."""

    def __init__(self, **sizes: Any) -> None:
        class Index(PrefixIndex):
            def find(self, parent, tokens):
                entry = self.occupant(parent, tokens)
                return entry if entry and entry.tokens == tokens else None

            def occupant(self, parent, tokens):
                return super().occupant(Link(0, 0), tokens)

            def add(self, parent, tokens, block):
                return super().add(Link(0, 0), tokens, block)

        super().__init__(**sizes)
        wrong_books(self, index=Index)


@mutant(kv_pool, killed_by="test_paged::test_what_is_found_is_what_was_computed")
class StaleHash(Pool):
    """PG3: a block that is taken for something else is still found by what it held."""

    def __init__(self, **sizes: Any) -> None:
        class Stale(Blocks):
            def evict(self):
                self.free.append(self.idle.popitem(last=False)[0])

        super().__init__(**sizes)
        wrong_books(self, Stale)


@mutant(kv_pool, killed_by="test_paged::test_after_a_cut_only_what_was_kept_is_found_and_what_came_then")
class StaleAfterOverwriting(Pool):
    """PG3: a full block that was cut and is written again is still found by what it held."""

    def _own_next_block(self, sequence):
        place = sequence.length // self.block_size
        if place < len(sequence.blocks) and self._next_is_shared(sequence):
            super()._own_next_block(sequence)


@mutant(kv_pool, killed_by="test_paged::test_a_prefix_that_is_kept_is_found_but_for_its_last_token")
class NothingLeftToCompute(Pool):
    """PG4: a prompt of whole blocks that are all there has no token left to compute."""

    def __init__(self, **sizes: Any) -> None:
        class Greedy(Blocks):
            def prefix(self, root, tokens, size):
                return super().prefix(root, [*tokens, 0], size)

        super().__init__(**sizes)
        wrong_books(self, Greedy)


@mutant(kv_pool, killed_by="test_paged::test_forks_write_into_blocks_of_their_own")
class NoCopyOnWrite(Pool):
    """PG7: a fork writes into the partial block that it shares."""

    def _next_is_shared(self, sequence):
        return False


@mutant(kv_pool, killed_by=DENSE)
class CopiesOneLayer(Pool):
    """PG7: a shared block is copied in its first layer only."""

    def _copy(self, block, to):
        for memory in (self.k, self.v):
            memory[0, to].copy_(memory[0, block])


@mutant(kv_pool, killed_by=DENSE)
class CopyStaysReferenced(Pool):
    """PG7: the block that a fork copied keeps its reference to the old one."""

    def _own_next_block(self, sequence):
        place = sequence.length // self.block_size
        if place < len(sequence.blocks) and self._next_is_shared(sequence):
            self.blocks.share(sequence.blocks[place])
        super()._own_next_block(sequence)


@mutant(kv_pool, killed_by=DENSE)
class FreeAndIdle(Pool):
    """PG8: an idle block is in the free list too, and counted twice."""

    def __init__(self, **sizes: Any) -> None:
        class Twice(Blocks):
            def release(self, block):
                super().release(block)
                if block in self.idle:
                    self.free.append(block)

        super().__init__(**sizes)
        wrong_books(self, Twice)


@mutant(kv_pool, killed_by="test_paged::test_can_allocate_keeps_its_word")
class CountsFoundBlocksAsAvailable(Pool):
    """PG8: idle blocks that a prompt finds are counted as its prefix and as room for the rest."""

    def _lacking(self, tokens, found):
        return self._blocks_for(tokens) - len(found) - self.blocks.available


@mutant(kv_pool, killed_by=DENSE)
class LeaksOnTruncate(Pool):
    """PG8: blocks that a truncate cuts off are nobody's."""

    def truncate(self, sequence, n):
        kept = list(sequence.blocks)
        super().truncate(sequence, n)
        for block in kept[len(sequence.blocks) :]:
            if block in self.blocks.free:
                self.blocks.free.remove(block)


@mutant(kv_pool, killed_by=DENSE)
class ResumesWhereItWas(Pool):
    """PG9: after a resume the tokens computed before the preemption count, found or not."""

    def preempt(self, sequence):
        self.before = {**getattr(self, "before", {}), id(sequence): sequence.length}
        super().preempt(sequence)

    def resume(self, sequence):
        super().resume(sequence)
        sequence.length = max(sequence.length, self.before[id(sequence)])


@mutant(kv_pool, killed_by=DENSE)
class FindsLessThanItTakes(Pool):
    """PG9: what a resume finds is one block more than what it says."""

    def _fill(self, sequence):
        super()._fill(sequence)
        sequence.length = max(0, sequence.length - self.block_size)
        del sequence.links[sequence.length // self.block_size :]
        if sequence.length + self.block_size <= len(sequence.tokens) and sequence.state == "live":
            sequence.blocks.append(self.blocks.take() if self.blocks.available else 0)


@mutant(kv_pool, killed_by="test_paged::test_a_block_is_found_only_when_it_is_filled")
class FoundBeforeItIsFilled(Pool):
    """A block is findable as soon as its tokens are known."""

    def _fill(self, sequence):
        super()._fill(sequence)
        length, sequence.length = sequence.length, len(sequence.tokens)
        self._publish(sequence)
        sequence.length = length


@mutant(kv_pool, killed_by="test_paged::test_nothing_is_found_across_namespaces")
class OneNamespace(Pool):
    """All namespaces are one."""

    def __init__(self, **sizes: Any) -> None:
        class Index(PrefixIndex):
            def root(self, namespace):
                return super().root(None)

        super().__init__(**sizes)
        wrong_books(self, index=Index)


ORDER = "test_paged::test_the_least_recently_used_goes_first_and_the_end_of_a_chain_before_its_start"


@mutant(kv_pool, killed_by=ORDER)
class EvictsTheLatest(Pool):
    """The block that was used last is evicted first."""

    def __init__(self, **sizes: Any) -> None:
        class Latest(Blocks):
            def evict(self):
                self.hide(next(reversed(self.idle)))

        super().__init__(**sizes)
        wrong_books(self, Latest)


@mutant(kv_pool, killed_by=ORDER)
class EvictsTheStartFirst(Pool):
    """The first block of a chain is given back before its last, and so evicted before it."""

    def _drop(self, sequence, keep):
        for block in sequence.blocks[keep:]:
            self.blocks.release(block)
        del sequence.blocks[keep:]


@mutant(kv_pool, killed_by=DENSE)
class TakesWhatItCan(Pool):
    """A full pool is noticed when the blocks that there were are taken."""

    def extend(self, sequence, tokens):
        self._check(sequence, "live")
        if tokens:
            self._own_next_block(sequence)
        while len(sequence.blocks) < self._blocks_for(len(sequence.tokens) + len(tokens)):
            if not self.blocks.available:
                raise PoolFullError("tokens: got too many, accepted are fewer")
            sequence.blocks.append(self.blocks.take())
        sequence.tokens += tokens


@mutant(kv_pool, killed_by="test_paged::test_after_a_cut_only_what_was_kept_is_found_and_what_came_then")
class KeepsLinks(Pool):
    """After a truncate a sequence is still thought to end in the blocks that were cut off."""

    def truncate(self, sequence, n):
        links = list(sequence.links)
        super().truncate(sequence, n)
        sequence.links = links


@mutant(kv_pool, killed_by=DENSE)
class ForkSharesWhatIsPending(Pool):
    """A fork shares blocks that hold no computed token yet, and both write there."""

    def fork(self, sequence):
        twin = super().fork(sequence)
        for block in sequence.blocks[len(twin.blocks) :]:
            twin.blocks.append(self.blocks.share(block))
        return twin


@mutant(kv_pool, killed_by="test_paged::test_a_sequence_wastes_less_than_a_block")
class OneBlockAhead(Pool):
    """Every sequence has a block in reserve."""

    def _blocks_for(self, tokens):
        return super()._blocks_for(tokens) + (tokens > 0)


@mutant(kv_pool, killed_by=REFUSED)
class FreesTwice(Pool):
    """A sequence can be freed again."""

    def free(self, sequence):
        if getattr(sequence, "state", "") == "freed":
            sequence.state = "live"
        super().free(sequence)


@mutant(kv_pool, killed_by=REFUSED)
class CommitsAnyNumber(Pool):
    """commit does not look at how many tokens have slots."""

    def commit(self, sequence, n):
        super().commit(sequence, max(0, min(n, len(sequence.tokens) - sequence.length)))


@mutant(kv_pool, killed_by="test_paged::test_impossible_sizes_are_refused")
class AnySize(Pool):
    """A size of 0 is taken for 1."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**{name: size or 1 for name, size in sizes.items()})
