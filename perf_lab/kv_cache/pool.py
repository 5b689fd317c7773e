"""One pool of fixed-size blocks of keys and values, and the sequences that live in it.

    pool = Pool(layers=, kv_heads=, head_dim=, blocks=, block_size=16, dtype=, device=)

A sequence owns no memory: its table lists the blocks that hold its tokens, block_size to a block, and two
sequences with an equal prefix list the same blocks. What each operation does:

allocate(tokens, namespace)  a new sequence with slots for all of these tokens. Its first `length` tokens are
                   there already: the longest findable prefix of whole blocks, of the same namespace, without
                   the last token, so that at least one is left to compute.
extend(seq, tokens)  slots for these tokens more. If the block that is to be written next is in another table
                   too, it is copied first.
commit(seq, n)     the next n tokens are computed and count. A block that is full now becomes findable.
fork(seq)          a second sequence of the same computed tokens, sharing every block, a partial one too.
truncate(seq, n)   keeps the first n computed tokens; all others and their slots are dropped.
free(seq)          the sequence is over. Findable blocks stay, until their memory is needed: the least
                   recently used first, a sequence's last one before its first.
preempt(seq)       gives all its blocks back, and keeps its tokens.
resume(seq)        slots for all its tokens again, as `allocate` does for new ones.

full        allocate, extend and resume take all that they need or raise PoolFullError and change nothing;
            can_allocate, can_extend and can_resume say beforehand which of the two.
tokens      of a sequence: `tokens`, of which the first `length` are computed. Keys and values of the others
            are written with the tables; perf_lab.kv_cache.rows does it. ids=False: a sequence whose tokens
            nobody knows; it is never found, and its tokens are counted only.
namespace   anything hashable (a model, an adapter, a tenant's salt, a tuple of these): nothing is shared,
            nor to be seen from hits, across two.
memory      2 * layers * blocks * block_size * kv_heads * head_dim elements, all taken at the start. A
            sequence of n tokens holds ceil(n / block_size) blocks: less than one block more than it needs.
contents    k and v [layers, blocks, block_size, Hkv, D]. What no table lists, and slots from a sequence's
            length on, may hold anything, NaN included.
errors      ValueError or TypeError, found before anything changes.

Sources: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention,
arXiv:2309.06180 (blocks, tables, copy on write); Zheng et al., SGLang, arXiv:2312.07104 (prefix reuse, LRU).
"""

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Several
from typing import Any

import torch

from perf_lab.kv_cache.blocks import Blocks
from perf_lab.kv_cache.checks import check_count, check_dtype
from perf_lab.kv_cache.prefix import Entry, Hasher, Link, content_hash
from perf_lab.op import Op

kv_pool: Op = Op("kv_pool", reference="paged")

UNKNOWN = -1  # the id of a token that nobody told


class PoolFullError(ValueError):
    """More blocks are needed than can be had; nothing was changed."""


class Sequence:
    """Tokens of one pool: `blocks` is the table, the first `length` of `tokens` are computed."""

    def __init__(self, root: Link, tokens: list[int], ids: bool = True) -> None:
        self.root, self.ids = root, ids
        self.tokens = tokens
        self.length = 0
        self.blocks: list[int] = []
        self.links: list[Link] = []  # the ends of its filled blocks
        self.state = "new"  # then live, and then preempted or freed

    def __repr__(self) -> str:
        return f"<sequence of {self.length} of {len(self.tokens)} tokens, {self.state}, blocks {self.blocks}>"


@kv_pool.register("paged")
class Pool:
    """Blocks of `block_size` tokens; the contract is the docstring of perf_lab.kv_cache.pool.

    hasher   digests of prefixes; any function is right, a poor one finds less.
    Raises ValueError for a size below 1 (blocks: below 0), TypeError for one that is no int or a dtype that
    is not floating.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        hasher: Hasher = content_hash,
    ) -> None:
        sizes = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
        for name, size in sizes.items():
            check_count(name, size, 1)
        check_count("blocks", blocks, 0)
        check_dtype(dtype)
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.block_size = block_size
        shape = (layers, blocks, block_size, kv_heads, head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)  # [layers, N, S, Hkv, D]
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.blocks = Blocks(blocks, hasher)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.k.nbytes + self.v.nbytes

    def can_allocate(self, tokens: Several[int], namespace: Hashable = None) -> bool:
        """Whether `allocate` would succeed now."""
        found = self._found(tokens, namespace)
        return self._lacking(len(tokens), found) <= 0

    def allocate(self, tokens: Several[int], namespace: Hashable = None, *, ids: bool = True) -> Sequence:
        """A sequence with slots for these tokens, of which the first `length` are there already.

        Raises PoolFullError, TypeError for a namespace that is not hashable or tokens that are no ints.
        """
        sequence = Sequence(self.blocks.index.root(namespace), _ids(tokens), ids)
        self._fill(sequence)
        return sequence

    def can_extend(self, sequence: Sequence, count: int) -> bool:
        """Whether `extend` by so many tokens would succeed now."""
        self._check(sequence, "live")
        return self.needed(sequence, count) <= self.blocks.available

    def needed(self, sequence: Sequence, count: int) -> int:
        """Blocks that `extend` by `count` takes: for new slots, and for a copy of one that is shared."""
        new = self._blocks_for(len(sequence.tokens) + count) - len(sequence.blocks)
        return new + (count > 0 and self._next_is_shared(sequence))

    def extend(self, sequence: Sequence, tokens: Several[int]) -> None:
        """Slots for these tokens more. Raises PoolFullError, ValueError for a sequence that is not live."""
        self._check(sequence, "live")
        added = _ids(tokens)
        needed = self.needed(sequence, len(added))
        if needed > self.blocks.available:
            raise _full(needed, self.blocks.available)
        if added:
            self._own_next_block(sequence)
        sequence.tokens += added
        self._cover(sequence)

    def commit(self, sequence: Sequence, n: int) -> None:
        """The next n tokens are computed. Raises ValueError for more than there are slots for."""
        self._check(sequence, "live")
        check_count("n", n, 0, len(sequence.tokens) - sequence.length, "with slots")
        sequence.length += n
        if sequence.ids:
            self._publish(sequence)

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence of the computed tokens. Raises ValueError for a sequence that is not live."""
        self._check(sequence, "live")
        twin = Sequence(sequence.root, sequence.tokens[: sequence.length], sequence.ids)
        held = sequence.blocks[: self._blocks_for(sequence.length)]
        twin.blocks = [self.blocks.share(block) for block in held]
        twin.links = list(sequence.links)
        twin.length, twin.state = sequence.length, "live"
        return twin

    def truncate(self, sequence: Sequence, n: int) -> None:
        """Keep the first n computed tokens, drop all others and their slots.

        Raises ValueError unless 0 <= n <= length, or for a sequence that is not live.
        """
        self._check(sequence, "live")
        check_count("n", n, 0, sequence.length, "computed")
        self._drop(sequence, self._blocks_for(n))
        del sequence.tokens[n:], sequence.links[n // self.block_size :]
        sequence.length = n

    def free(self, sequence: Sequence) -> None:
        """Give its blocks back, for good. Raises ValueError for a sequence that was freed."""
        self._check(sequence, "live", "preempted")
        self._drop(sequence, 0)
        sequence.length, sequence.links, sequence.state = 0, [], "freed"

    def preempt(self, sequence: Sequence) -> None:
        """Give its blocks back, and keep its tokens. Raises ValueError for a sequence that is not live."""
        self._check(sequence, "live")
        self._drop(sequence, 0)
        sequence.length, sequence.links, sequence.state = 0, [], "preempted"

    def can_resume(self, sequence: Sequence) -> bool:
        """Whether `resume` would succeed now."""
        self._check(sequence, "preempted")
        return self._lacking(len(sequence.tokens), self._prefix(sequence)) <= 0

    def resume(self, sequence: Sequence) -> None:
        """Slots for its tokens again; the first `length` are there already.

        Raises PoolFullError, ValueError for a sequence that is not preempted.
        """
        self._check(sequence, "preempted")
        self._fill(sequence)

    def evict(self) -> bool:
        """Free the block that was not used for longest; False when all free ones are free already."""
        if not self.blocks.idle:
            return False
        self.blocks.evict()
        return True

    def _fill(self, sequence: Sequence) -> None:
        """Take what is there of the tokens, and blocks for the others."""
        found = self._prefix(sequence)
        if (lacking := self._lacking(len(sequence.tokens), found)) > 0:
            needed = self._blocks_for(len(sequence.tokens)) - len(found)
            raise _full(needed, needed - lacking)
        sequence.blocks = [self.blocks.share(entry.block) for entry in found]
        sequence.links = [entry.link for entry in found]
        sequence.length = len(found) * self.block_size
        sequence.state = "live"
        self._cover(sequence)

    def _found(self, tokens: Several[int], namespace: Hashable) -> list[Entry]:
        return self.blocks.prefix(self.blocks.index.root(namespace), list(tokens), self.block_size)

    def _prefix(self, sequence: Sequence) -> list[Entry]:
        if not sequence.ids:
            return []
        return self.blocks.prefix(sequence.root, sequence.tokens, self.block_size)

    def _lacking(self, tokens: int, found: list[Entry]) -> int:
        """How many blocks are missing to hold the tokens; found ones that are idle are not available too."""
        idle = sum(entry.block in self.blocks.idle for entry in found)
        return self._blocks_for(tokens) - len(found) - (self.blocks.available - idle)

    def _next_is_shared(self, sequence: Sequence) -> bool:
        """Whether the next slot lies in a block that another table lists too."""
        place = sequence.length // self.block_size
        return place < len(sequence.blocks) and self.blocks.references[sequence.blocks[place]] > 1

    def _own_next_block(self, sequence: Sequence) -> None:
        """The block of the next slot becomes the sequence's alone, and is not found while it is written."""
        place = sequence.length // self.block_size
        if place >= len(sequence.blocks):
            return
        block = sequence.blocks[place]
        if self._next_is_shared(sequence):
            own = self.blocks.take()
            self._copy(block, own)
            sequence.blocks[place] = own
            self.blocks.release(block)
        else:
            self.blocks.hide(block)

    def _copy(self, block: int, to: int) -> None:
        """Keys and values of one block, in every layer."""
        for memory in (self.k, self.v):
            memory[:, to].copy_(memory[:, block])

    def _cover(self, sequence: Sequence) -> None:
        """Blocks for all its tokens."""
        while len(sequence.blocks) < self._blocks_for(len(sequence.tokens)):
            sequence.blocks.append(self.blocks.take())

    def _drop(self, sequence: Sequence, keep: int) -> None:
        """Give the blocks from `keep` on back, the last one first."""
        while len(sequence.blocks) > keep:
            self.blocks.release(sequence.blocks.pop())

    def _publish(self, sequence: Sequence) -> None:
        size = self.block_size
        for place in range(len(sequence.links), sequence.length // size):
            parent = sequence.links[-1] if sequence.links else sequence.root
            tokens = tuple(sequence.tokens[place * size : (place + 1) * size])
            sequence.links.append(self.blocks.publish(parent, tokens, sequence.blocks[place]))

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _check(self, sequence: Any, *states: str) -> None:
        if not isinstance(sequence, Sequence):
            raise TypeError(f"sequence: got {type(sequence).__name__}, accepted is a Sequence")
        if sequence.state not in states:
            raise ValueError(f"sequence: got {sequence}, accepted are those that are {' or '.join(states)}")


def _ids(tokens: Iterable[int]) -> list[int]:
    ids = list(tokens)
    if any(not isinstance(token, int) for token in ids):
        raise TypeError(f"tokens: got {ids!r}, accepted are ints")
    return ids


def _full(needed: int, available: int) -> PoolFullError:
    return PoolFullError(
        f"tokens: got some that need {needed} blocks, accepted are {available}: the pool is full"
    )
