"""Some sequences of a pool as one forward of a model sees them: rows of unequal length, read through tables.

    rows = Rows(pool, tables, starts, known)
    model(tokens, rows)        tokens [B, T]: T new ones a row, after the starts[b] that row b has

A model's attention asks a cache that has `attend` for its result instead of all keys and values: the new ones
are written to their slots, and the op `paged_attention` reads all through the tables. Lengths and tables are
tensors on the device and nothing waits for it, so that a forward over rows can be captured in a graph.
"""

import torch
from torch import Tensor

from perf_lab.attention import attention
from perf_lab.kv_cache.pool import Pool, Sequence
from perf_lab.paged_attention import paged_attention, paged_turn, paged_write


class Rows:
    """What a model needs of a cache, over `tables` [B, M] and `starts` [B], int32 on the pool's device.

    known   the most tokens that a row has, which the host knows: 0 lets a prefill attend to its own keys.
    A row whose start is -T has no token after a forward over T: nothing of it is written, its result is 0.
    The slots must be there: who allocated and extended the sequences commits what the forward computed.
    """

    def __init__(self, pool: Pool, tables: Tensor, starts: Tensor, known: int) -> None:
        self.pool, self.tables, self.starts, self.length = pool, tables, starts, known
        self.layers, self.batch = pool.layers, tables.shape[0]
        self.capacity = tables.shape[1] * pool.block_size
        self.seen: Tensor | None = None  # [B], keys of each row, the new ones counted
        kernels = "triton" in paged_attention.implementations and pool.k.dtype is not torch.float64
        self.fast = pool.k.is_cuda and kernels  # whether nothing here waits for the device
        self._read = paged_attention["triton" if self.fast else "gather"].fn
        self._write = paged_write["triton" if self.fast else "torch"].fn
        self._masked = attention["naive" if pool.k.is_cuda else "sdpa"].fn  # reads lengths on the device

    @classmethod
    def of(cls, pool: Pool, sequences: list[Sequence]) -> "Rows":
        """A row a sequence."""
        tables = table_of(sequences).to(pool.k.device)
        starts = torch.tensor([sequence.length for sequence in sequences], dtype=torch.int32)
        return cls(pool, tables, starts.to(pool.k.device), max(sequence.length for sequence in sequences))

    def where(self, new: int) -> slice | Tensor:
        """The positions of the new tokens."""
        if self.batch == 1:
            return slice(self.length, self.length + new)
        steps = torch.arange(new, dtype=torch.int32, device=self.starts.device)
        return (self.starts[:, None] + steps).clamp(min=0)  # [B, T]

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
        """Write k and v [B, Hkv, T, D] of the new tokens; the attention of q [B, Hq, T, D] to all up to them.

        With a mask, what the tables name is copied first.
        """
        self.write(layer, k, v)
        if self.length == 0 and q.shape[2] > 1:
            return attention["sdpa"].fn(q, k, v, causal=True, window=window, mask=mask)
        return self.look(layer, q, window=window, mask=mask)

    def look(self, layer: int, q: Tensor, *, window: int | None = None, mask: Tensor | None = None) -> Tensor:
        """The attention of q [B, Hq, T, D] to all tokens that are written, its own T included."""
        if self.seen is None:
            self.seen = self.starts + q.shape[2]  # one kernel a forward, not one a layer
        if mask is not None:
            keys, values = self.gathered(layer, mask.shape[3])
            return self._masked(q, keys, values, causal=True, window=window, mask=mask, lengths=self.seen)
        return self._read(q, self.pool.k[layer], self.pool.v[layer], self.tables, self.seen, window=window)

    def turn_and_store(
        self, layer: int, qkv: Tensor, turn: tuple[Tensor, Tensor] | None, heads: int
    ) -> Tensor:
        """Turn the queries and keys of one token a row, qkv [B, 1, (H + 2 Hkv) D], by (cos, sin), put keys
        and values into their slots, and give q [B, H, 1, D]: in one kernel, where `fast`.
        """
        memory = self.pool.k[layer], self.pool.v[layer]
        return paged_turn["triton"].fn(qkv, turn, heads, *memory, self.tables, self.starts)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put k and v [B, Hkv, T, D] of the new tokens into their slots."""
        self._write(self.pool.k[layer], self.pool.v[layer], k, v, self.tables, self.starts)

    def gathered(self, layer: int, slots: int) -> tuple[Tensor, Tensor]:
        """Copies of the first `slots` slots of every row, [B, Hkv, slots, D]."""
        keys, values = (
            memory[layer].index_select(0, self.tables.flatten()).view(self.batch, -1, *memory.shape[3:])
            for memory in (self.pool.k, self.pool.v)
        )
        return keys[:, :slots].transpose(1, 2), values[:, :slots].transpose(1, 2)

    def commit(self, n: int) -> None:
        """Nothing: whose sequences these are commits them."""


def table_of(sequences: list[Sequence]) -> Tensor:
    """The tables [B, M] int32 of these sequences, filled up with 0."""
    width = max((len(sequence.blocks) for sequence in sequences), default=0)
    rows = [sequence.blocks + [0] * (width - len(sequence.blocks)) for sequence in sequences]
    return torch.tensor(rows, dtype=torch.int32).view(len(sequences), width)
