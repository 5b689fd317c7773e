"""Which blocks of a pool are free, which are in use by how many tables, which only wait to be found again."""

from collections import OrderedDict

from perf_lab.kv_cache.prefix import Entry, Hasher, Link, PrefixIndex, Tokens, content_hash


class Blocks:
    """Every block is in exactly one of three states.

    free   in the list `free`: its contents mean nothing.
    used   references[block] tables hold it.
    idle   no table holds it, but it is findable: in `idle`, the least recently used first. It is taken for
           something else only when none is free.
    """

    def __init__(self, total: int, hasher: Hasher = content_hash) -> None:
        self.total = total
        self.free = list(range(total - 1, -1, -1))  # a stack: block 0 first
        self.references = [0] * total
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.index = PrefixIndex(hasher)

    @property
    def available(self) -> int:
        """How many can be taken."""
        return len(self.free) + len(self.idle)

    @property
    def used(self) -> int:
        """How many are in some table."""
        return self.total - self.available

    def take(self) -> int:
        """A block for new contents, referenced once. There must be one available."""
        if not self.free:
            self.evict()
        block = self.free.pop()
        self.references[block] = 1
        return block

    def evict(self) -> None:
        """Free the least recently used idle block. There must be one."""
        self.hide(next(iter(self.idle)))

    def share(self, block: int) -> int:
        """One more table holds the block."""
        self.references[block] += 1
        self.idle.pop(block, None)
        return block

    def release(self, block: int) -> None:
        """One table less holds the block."""
        self.references[block] -= 1
        if self.references[block]:
            return
        if block in self.index.by_block:
            self.idle[block] = None
        else:
            self.free.append(block)

    def hide(self, block: int) -> None:
        """The block is not to be found any more."""
        self.index.forget(block)
        if block in self.idle:
            del self.idle[block]
            self.free.append(block)

    def prefix(self, root: Link, tokens: list[int], size: int) -> list[Entry]:
        """The longest chain of findable blocks of `size` tokens, all full and none with the last token: it is
        always left to compute, since its logits are what is asked for.
        """
        entries: list[Entry] = []
        link = root
        for start in range(0, (len(tokens) - 1) // size * size, size):
            entry = self.index.find(link, tuple(tokens[start : start + size]))
            if entry is None:
                break
            entries.append(entry)
            link = entry.link
        return entries

    def publish(self, parent: Link, tokens: Tokens, block: int) -> Link:
        """The block is filled with these tokens: make it findable, unless an equal one is. Gives its link.
        Another entry of the same digest gives way.
        """
        if entry := self.index.find(parent, tokens):
            return entry.link
        if occupant := self.index.occupant(parent, tokens):
            self.hide(occupant.block)
        return self.index.add(parent, tokens, block)
