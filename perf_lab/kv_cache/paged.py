"""The cache in blocks of a pool: memory is taken a block at a time, where there is one, and shared by whoever
has the same pool.
"""

import torch
from torch import Tensor

from perf_lab.kv_cache import kv_cache
from perf_lab.kv_cache.checks import check_append, check_count
from perf_lab.kv_cache.pool import UNKNOWN, Pool, PoolFullError
from perf_lab.kv_cache.rows import Rows, table_of

DENSE = "the blocks lie scattered: all tokens in one tensor are a copy; `attend` reads them where they are"


@kv_cache.register(
    "paged",
    known_failures={
        "test_append_gives_views_of_one_memory": DENSE,
        "test_appending_costs_the_same_at_every_length": DENSE,
    },
)
class PagedCache:
    """`batch` sequences of a pool under the contract of perf_lab.kv_cache, with two differences: `append`
    gives copies, and the memory is made of whole blocks.

    pool        shared with others, of the same layers, kv_heads, head_dim, dtype and device; default: one
                of its own with room for `batch` times `capacity` tokens. Blocks are taken as tokens come
                and given back as they go; an append for which there are none is a PoolFullError, and
                writes nothing.
    block_size  tokens; that of the pool, if there is one.
    A model that asks for `attend` reads through the block tables, and makes no copy.
    """

    def __init__(
        self,
        *,
        layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        block_size: int = 16,
        pool: Pool | None = None,
    ) -> None:
        check_count("batch", batch, 1)
        check_count("capacity", capacity, 0)
        check_count("block_size", block_size, 1)
        self.pool = pool or Pool(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            blocks=batch * -(-capacity // block_size),
            block_size=block_size,
            dtype=dtype,
            device=device,
        )
        got, needed = (self.pool.layers, self.pool.kv_heads, self.pool.head_dim), (layers, kv_heads, head_dim)
        if got != needed:
            raise ValueError(f"pool: got one of layers, kv_heads, head_dim {got}, accepted is {needed}")
        self.layers, self.batch, self.kv_heads, self.head_dim = layers, batch, kv_heads, head_dim
        self.capacity, self.block_size = capacity, self.pool.block_size
        self.sequences = [self.pool.allocate([], ids=False) for _ in range(batch)]
        self._pending = [0] * layers  # tokens, by layer
        self._rows: Rows | None = None  # of the forward that is going on, over _new tokens
        self._new = 0
        self._copied: tuple[list[list[int]], Tensor] | None = None  # tables, and these on the device

    @property
    def length(self) -> int:
        """The number of committed tokens: also the position of the next one."""
        return self.sequences[0].length

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self.pool.k.dtype

    @property
    def device(self) -> torch.device:
        """Where keys and values lie."""
        return self.pool.k.device

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self.pool.nbytes

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v [B, Hkv, T, D] after the committed tokens of `layer`; gives copies of all its keys and
        values, [B, Hkv, length + T, D].

        Raises what the contract says, and PoolFullError. Nothing is written then.
        """
        rows = self._write(layer, k, v)
        return rows.gathered(layer, self.length + k.shape[2])

    def write(self, layer: int, k: Tensor, v: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Put k, v [B, Hkv, T, D] into the slots `at`, [T] int64 on the cache's device; gives a copy of the
        layer's slots, [B, Hkv, capacity, D].

        Raises what the contract says, and PoolFullError: blocks for the whole capacity are taken.
        """
        check_append(self, layer, k, v)
        if at.shape != k.shape[2:3] or at.dtype != torch.int64 or at.device != self.device:
            raise ValueError(
                f"at: got {at.dtype} {tuple(at.shape)} on {at.device}, accepted is torch.int64 "
                f"({k.shape[2]},) on {self.device}"
            )
        for t in range(len(at)):
            self.slots(at[t : t + 1]).write(layer, k[:, :, t : t + 1], v[:, :, t : t + 1])
        self.reserve()
        return Rows(self.pool, self._tables(), at[:0], 0).gathered(layer, self.capacity)

    def advance(self, n: int) -> None:
        """Commit the n slots after the committed tokens, filled by `write` in every layer.

        Raises ValueError unless 0 <= n <= capacity - length, TypeError when it is no int.
        """
        check_count("n", n, 0, self.capacity - self.length, "free")
        self._extend(self.length + n)
        for sequence in self.sequences:
            self.pool.commit(sequence, n)
        self._settle(self.length)

    def slots(self, at: Tensor) -> "PagedSlots":
        """What a decode step reads and writes through, whose next slot `at` [1] only the device knows.

        Blocks for the whole capacity are taken. Raises PoolFullError.
        """
        return PagedSlots(self, at)

    def reserve(self) -> None:
        """Take blocks for the whole capacity, so that the tables stay as they are. Raises PoolFullError."""
        self._extend(self.capacity)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Write k and v as `append` does; the causal attention of q [B, Hq, T, D] to all up to them."""
        check_append(self, layer, k, v)
        rows = self._reserved(k.shape[2])
        self._pending[layer] = k.shape[2]
        return rows.attend(layer, q, k, v, window=window, mask=mask)

    def commit(self, n: int) -> None:
        """Make the first n pending tokens count; the other pending ones are dropped.

        Raises ValueError when n is negative or more than some layer has pending, TypeError for no int.
        """
        check_count("n", n, 0, min(self._pending), "pending in every layer")
        for sequence in self.sequences:
            self.pool.commit(sequence, n)
        self._settle(self.length)

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed tokens; the others and the pending ones are dropped.

        Raises ValueError unless 0 <= length <= self.length, TypeError when it is no int.
        """
        check_count("length", length, 0, self.length, "committed")
        self._settle(length)

    def rollback(self, n: int) -> None:
        """Drop the last n committed tokens, and the pending ones.

        Raises ValueError unless 0 <= n <= self.length, TypeError when it is no int.
        """
        check_count("n", n, 0, self.length, "committed")
        self._settle(self.length - n)

    def reset(self) -> None:
        """Drop every token."""
        self._settle(0)

    def free(self) -> None:
        """Give all blocks back to the pool; the cache is over."""
        for sequence in self.sequences:
            self.pool.free(sequence)

    def _settle(self, length: int) -> None:
        for sequence in self.sequences:
            self.pool.truncate(sequence, length)
        self._pending = [0] * self.layers
        self._rows = None

    def _write(self, layer: int, k: Tensor, v: Tensor) -> Rows:
        check_append(self, layer, k, v)
        rows = self._reserved(k.shape[2])
        rows.write(layer, k, v)
        self._pending[layer] = k.shape[2]
        return rows

    def _reserved(self, new: int) -> Rows:
        """Rows with slots for so many tokens after the committed ones: made once a forward."""
        if self._rows is None or new != self._new:
            self._extend(self.length + new)
            starts = torch.full((self.batch,), self.length, dtype=torch.int32, device=self.device)
            self._rows, self._new = Rows(self.pool, self._tables(), starts, self.length), new
        return self._rows

    def _tables(self) -> Tensor:
        """The tables on the device; copied there only when they have changed."""
        blocks = [sequence.blocks for sequence in self.sequences]
        if self._copied is None or self._copied[0] != blocks:
            self._copied = [list(row) for row in blocks], table_of(self.sequences).to(self.device)
        return self._copied[1]

    def _extend(self, length: int) -> None:
        """Slots up to `length`, in all rows or none."""
        count = length - len(self.sequences[0].tokens)
        if count <= 0:
            return
        self._rows = None
        needed = sum(self.pool.needed(sequence, count) for sequence in self.sequences)
        if needed > (most := self.pool.blocks.available):
            raise PoolFullError(
                f"k: got tokens that need {needed} blocks, accepted are {most}: the pool is full"
            )
        for sequence in self.sequences:
            self.pool.extend(sequence, [UNKNOWN] * count)


class PagedSlots(Rows):
    """Rows of a cache in blocks whose next free slot, `at` [1], is known to the device only.

    The tables are a tensor that stays where it is: before steps that write to them, `begin` fills it with the
    blocks of the cache's rows, which reach to its capacity.
    """

    def __init__(self, cache: PagedCache, at: Tensor) -> None:
        self.cache, self.at = cache, at
        width = -(-cache.capacity // cache.block_size)
        tables = torch.zeros(cache.batch, width, dtype=torch.int32, device=cache.device)
        super().__init__(cache.pool, tables, at.expand(cache.batch), cache.capacity)
        self.begin()

    def begin(self) -> None:
        """Steps are to come: the cache's blocks are taken and their table is told."""
        self.cache.reserve()
        self.tables.copy_(table_of(self.cache.sequences))
