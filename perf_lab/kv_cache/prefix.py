"""Which filled block holds which tokens after which others: what makes a prefix findable.

A chain of filled blocks ends in a `Link`. Its digest is a hash over the whole chain, namespace included, and
finds a candidate; its identity is a number that is given once and decides: a candidate is a hit only if its
tokens are the ones asked for and its parent's identity is that of the chain so far. By induction the whole
prefix is then equal, whatever the hash function; the cost is one comparison of block_size tokens a block.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

Tokens = tuple[int, ...]
Hasher = Callable[[int, Tokens], int]


def content_hash(parent: int, tokens: Tokens) -> int:
    """A hash of a block's tokens and the digest of all before them."""
    return hash((parent, tokens))


@dataclass(frozen=True, slots=True)
class Link:
    """The end of a chain of filled blocks."""

    identity: Hashable
    digest: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A findable block: these tokens, after the chain that ends in `parent`."""

    block: int
    parent: Link
    tokens: Tokens
    link: Link


class PrefixIndex:
    """At most one block for a digest and one entry for a block."""

    def __init__(self, hasher: Hasher = content_hash) -> None:
        self.hasher = hasher
        self.by_digest: dict[int, Entry] = {}
        self.by_block: dict[int, Entry] = {}
        self._given = 0  # identities

    def root(self, namespace: Hashable) -> Link:
        """The empty chain of a namespace: chains of two are never equal. TypeError for what has no hash."""
        try:
            return Link(("namespace", namespace), hash(namespace))
        except TypeError:
            raise TypeError(f"namespace: got {namespace!r}, accepted is anything hashable") from None

    def find(self, parent: Link, tokens: Tokens) -> Entry | None:
        """The entry of exactly these tokens after exactly this chain."""
        entry = self.by_digest.get(self.hasher(parent.digest, tokens))
        equal = entry and entry.tokens == tokens and entry.parent.identity == parent.identity
        return entry if equal else None

    def occupant(self, parent: Link, tokens: Tokens) -> Entry | None:
        """Whatever lies where such an entry would."""
        return self.by_digest.get(self.hasher(parent.digest, tokens))

    def add(self, parent: Link, tokens: Tokens, block: int) -> Link:
        """Make a block findable where there is no occupant; gives the end of its chain."""
        self._given += 1
        entry = Entry(block, parent, tokens, Link(self._given, self.hasher(parent.digest, tokens)))
        self.by_digest[entry.link.digest] = self.by_block[block] = entry
        return entry.link

    def forget(self, block: int) -> None:
        """The block holds something else from now on."""
        if entry := self.by_block.pop(block, None):
            del self.by_digest[entry.link.digest]
