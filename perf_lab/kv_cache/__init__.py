"""Key/value cache: keys and values of the tokens seen so far, kept so that each is computed once.

An implementation is a class:

    cache = Cache(layers=, batch=, kv_heads=, head_dim=, capacity=, dtype=, device=)

It holds `length` committed tokens (0 <= length <= capacity), the same number in every layer, and
works in two phases, because a forward pass writes layer by layer and a rejected guess must leave nothing:

append(layer, k, v)  writes T tokens, k and v [B, Hkv, T, D], at slots length..length+T-1 of one layer; they
                     are pending there. Gives (k, v) of all tokens, committed and new, [B, Hkv, length+T, D].
                     It always writes right after the committed tokens: what an earlier append left pending at
                     that layer is replaced, so that a forward pass that broke off can simply be run again.
commit(n)            the first n pending tokens of every layer count from now on; the other pending ones are
                     dropped. n may not exceed what the layer with the fewest has pending.
truncate(length)     keeps the first `length` committed tokens, drops the others and the pending ones.
rollback(n)          drops the last n committed tokens, and the pending ones.
reset()              truncate(0).

A caller that keeps the length on the device (a decode step in a CUDA graph) uses instead

write(layer, k, v, at)  puts T tokens into the slots `at` [T] of one layer, a tensor on the device, and gives
                     all of its memory, [B, Hkv, capacity, D]. Nothing is pending, nothing committed.
memory(layer)        gives that memory without writing, for kernels that write by themselves.
advance(n)           commits the n slots after the committed ones, which `write` has filled in every layer.

memory   2 * layers * batch * kv_heads * capacity * head_dim elements (`nbytes`), all taken at the start;
         where slots come in blocks of block_size, the capacity is rounded up to whole ones.
work     O(T) an append, whatever the length: what it gives are views of the cache's own memory. A view shows
         the tokens of its append until their slots are written again (after a truncate, rollback or reset).
         A cache whose slots are scattered gives copies (its known failures say so), and has `attend(layer, q,
         k, v, window=, mask=)` instead, which a model asks for: it appends k and v, and gives the attention
         of q over all tokens, read where they lie.
slots    past the pending tokens are never part of a view; they may hold anything, NaN included.
dtypes   k, v and the cache have one dtype and one device; nothing is cast.
empty    T = 0 is allowed and gives the committed tokens alone.
errors   ValueError or TypeError, found before anything is written: after one, the cache is what it was.
grad     the cache keeps no gradients: k or v that needs one is a ValueError.

least bytes  of an append: T tokens read and written once, 4 * B * Hkv * T * D elements. No FLOPs.

Source: Shazeer, Fast Transformer Decoding: One Write-Head is All You Need, arXiv:1911.02150, section 2.4;
preallocation: Pope et al., Efficiently Scaling Transformer Inference, arXiv:2211.05102.
"""

from perf_lab.op import Op

kv_cache: Op = Op("kv_cache", reference="contiguous")
kv_cache.load(__name__, "contiguous", "paged")

from perf_lab.kv_cache.contiguous import ContiguousCache  # noqa: E402  (they register themselves above)
from perf_lab.kv_cache.paged import PagedCache  # noqa: E402
from perf_lab.kv_cache.pool import Pool, PoolFullError, Sequence  # noqa: E402
from perf_lab.kv_cache.rows import Rows  # noqa: E402

__all__ = ["ContiguousCache", "PagedCache", "Pool", "PoolFullError", "Rows", "Sequence", "kv_cache"]
