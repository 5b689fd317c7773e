"""Causal attention whose keys and values lie in blocks of a pool, found through a table a row.

    paged_attention(q, k, v, tables, lengths, *, scale=None, window=None) -> [B, Hq, Tq, D]

q        [B, Hq, Tq, D]: the last Tq tokens of each row. Tq = 1 is decoding; a prompt in chunks, or after a
         prefix that is there already, has more.
k, v     [N, S, Hkv, D]: N blocks of S tokens each, of q's dtype (float32, float16, bfloat16, float64), any
         strides. S from 1 to 256, any whole number.
tables   [B, M] int32 or int64: key j of row b lies in block tables[b, j // S], at j % S. Rows may name the
         same block. Entries that hold no key of the row are not read: they may be any number.
lengths  [B] int32 or int64, up to M * S: how many keys row b has, its Tq own included; 0 and below: none.
causal   always, aligned bottom-right: query i of row b sees key j when j <= i + lengths[b] - Tq. With
         lengths[b] < Tq the first Tq - lengths[b] queries see none.
window   W >= 1: of those keys a query sees the last W, itself counted.
nothing  a query that sees no key gets zeros.
slack    slots past a row's length and blocks that no row names may hold anything, NaN included, and never
         reach a result. Keys and values that exist must be finite.
heads    grouped and interleaved: query head h reads head h // (Hq / Hkv).
scale    positive and finite, 1/sqrt(D) by default. Sums are in float32 (float64 for float64).
empty    a B, Hq or Tq of 0 gives an empty result, M = 0 or N = 0 zeros; D >= 1.

On an accelerator the values of tables and lengths are not checked, as that would wait for the device.

    paged_write(k, v, new_k, new_v, tables, starts)     in place

Puts new_k and new_v [B, Hkv, T, D] at keys starts[b] .. starts[b] + T - 1 of each row; a position below 0 is
left out. No two rows may write to one slot. All else in the pool stays as it is, bit for bit.

FLOPs        4 D for each query head and visible pair of query and key.
least bytes  q and the result once; keys and values that some query of their row sees once, and so each of
             their table entries. Of a write: the new tokens read and written once.

Source: Kwon et al., PagedAttention, arXiv:2309.06180; split over keys: Dao et al., Flash-Decoding (2023).
"""

import math
from typing import Any

import torch
from torch import Tensor

from perf_lab.attention import DTYPES, LENGTH_DTYPES
from perf_lab.attention import baseline as dense_baseline
from perf_lab.attention import terms as dense_terms
from perf_lab.op import Cost, Op

LARGEST_BLOCK = 256


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    **own: Any,
) -> Tensor:
    """The definition, one row and head at a time, in the float64 of its arguments. `own`: ignored."""
    (B, Hq, Tq, D), (S, Hkv) = q.shape, k.shape[1:3]
    out = q.new_zeros(B, Hq, Tq, D)
    scale = 1 / math.sqrt(D) if scale is None else scale
    for b, n in enumerate(lengths.tolist()):
        if n <= 0:
            continue
        row = tables[b].tolist()
        slots = [(row[j // S], j % S) for j in range(n)]
        keys, values = (
            torch.stack([x[block, place] for block, place in slots]) for x in (k, v)
        )  # [n, Hkv, D]
        last = torch.arange(Tq, device=q.device)[:, None] + n - Tq  # the last key that a query sees
        key = torch.arange(n, device=q.device)
        hidden = (key > last) if window is None else (key > last) | (key <= last - window)  # [Tq, n]
        for h in range(Hq):
            scores = scale * q[b, h] @ keys[:, h // (Hq // Hkv)].T
            scores = scores.masked_fill(hidden, -math.inf)
            weights = torch.exp(scores - scores.amax(1, keepdim=True).clamp(min=torch.finfo(q.dtype).min))
            total = weights.sum(1, keepdim=True)
            out[b, h] = torch.where(total > 0, weights / total, 0.0) @ values[:, h // (Hq // Hkv)]
    return out


def magnitude(q: Tensor, k: Tensor, v: Tensor, *where: Tensor, **kwargs: Any) -> Tensor:
    """What is summed up to each element: the weights times |v|."""
    return oracle(q, k, v.abs(), *where, **kwargs)


def dense(pool: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
    """What the tables name, as [B, Hkv, M * S, D]; zeros where a row has no key."""
    B, (N, S, Hkv, D), M = tables.shape[0], pool.shape, tables.shape[1]
    held = lengths.to(tables.device)[:, None] > torch.arange(M * S, device=tables.device)  # [B, M * S]
    if not N:
        return pool.new_zeros(B, Hkv, M * S, D)
    named = tables.masked_fill(~held[:, ::S], 0).long() if M else tables.long()
    slots = pool[named].reshape(B, M * S, Hkv, D)
    return slots.masked_fill(~held[:, :, None, None], 0).transpose(1, 2)


def baseline(q: Tensor, k: Tensor, v: Tensor, tables: Tensor, lengths: Tensor, **how: Any) -> Tensor:
    """The plain torch computation on a copy of what the tables name."""
    keys, values = dense(k, tables, lengths), dense(v, tables, lengths)
    return dense_baseline(q, keys, values, lengths=lengths.clamp(min=0), causal=True, **how)


def terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    **how: Any,
) -> int:
    """As those of perf_lab.attention, on the keys that exist."""
    keys = dense(k, tables, lengths)
    return dense_terms(q, keys, keys, scale=scale)


def validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    **own: Any,
) -> None:
    """Raise TypeError or ValueError for what the contract refuses. `own`: an implementation's own options."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _validate_tensor(name, x, q)
    B, Hq, _, D = q.shape
    if D == 0:
        raise ValueError("q: got head dim 0, accepted are head dims from 1")
    _validate_pool(k, v, D)
    if Hq % k.shape[2] if k.shape[2] else Hq:
        raise ValueError(f"q: got {Hq} heads, accepted are multiples of the {k.shape[2]} heads of k")
    if scale is not None and not (isinstance(scale, float | int) and 0 < scale < math.inf):
        raise ValueError(f"scale: got {scale!r}, accepted are None and positive finite numbers")
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(f"window: got {window!r}, accepted are None and whole numbers from 1")
    validate_places("lengths", tables, lengths, B, k)


def _validate_tensor(name: str, x: Tensor, q: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, accepted is a Tensor")
    if x.ndim != 4:
        axes = "[B, Hq, Tq, D]" if name == "q" else "[N, S, Hkv, D]"
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, accepted are shapes {axes}")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: got {x.dtype}, accepted are {DTYPES}")
    if x.dtype is not q.dtype or x.device != q.device:
        raise ValueError(f"{name}: got {x.dtype} on {x.device}, accepted is q's {q.dtype} on {q.device}")


def _validate_pool(k: Tensor, v: Tensor, D: int) -> None:
    if not 1 <= k.shape[1] <= LARGEST_BLOCK:
        raise ValueError(f"k: got blocks of {k.shape[1]} tokens, accepted are 1 to {LARGEST_BLOCK}")
    if k.shape[3] != D:
        raise ValueError(f"k: got head dim {k.shape[3]}, accepted is the {D} of q")
    if v.shape != k.shape:
        raise ValueError(f"v: got shape {tuple(v.shape)}, accepted is that of k, {tuple(k.shape)}")


def validate_places(name: str, tables: Tensor, counts: Tensor, B: int, k: Tensor, new: int = 0) -> None:
    """Raise unless tables [B, M] and counts [B] (plus `new`) name slots of the pool k [N, S, ...]."""
    for what, x, shape in (("tables", tables, "[B, M]"), (name, counts, "[B]")):
        if not isinstance(x, Tensor):
            raise TypeError(f"{what}: got {type(x).__name__}, accepted is a Tensor")
        if x.dtype not in LENGTH_DTYPES:
            raise TypeError(f"{what}: got {x.dtype}, accepted are {LENGTH_DTYPES}")
        if x.ndim != len(shape.split(",")) or x.shape[0] != B:
            raise ValueError(f"{what}: got shape {tuple(x.shape)}, accepted is {shape} of {B} rows")
        if x.device != k.device:
            raise ValueError(f"{what}: got one on {x.device}, accepted is k's device {k.device}")
    if k.device.type != "cpu":
        return
    (N, S), M = k.shape[:2], tables.shape[1]
    if ((counts + new) > M * S).any():
        raise ValueError(f"{name}: got {counts.tolist()}, accepted are at most {M * S - new}: M * S slots")
    held = (counts + new)[:, None] > torch.arange(M) * S  # [B, M]
    if (held & ((tables < 0) | (tables >= N))).any():
        raise ValueError(f"tables: got {tables.tolist()}, accepted are 0 to {N - 1} where a row has a key")


def cost(
    q: Tensor, k: Tensor, v: Tensor, tables: Tensor, lengths: Tensor, *, window: int | None = None, **how: Any
) -> Cost:
    """The contract's formulas."""
    (_, Hq, Tq, D), (S, Hkv) = q.shape, k.shape[1:3]
    counts = [max(0, n) for n in lengths.tolist()]
    keys = [min(n, Tq - 1 + (window or n)) if Tq else 0 for n in counts]
    pairs = sum(min(max(0, i + n - Tq + 1), window or n) for n in counts for i in range(Tq))
    entries = sum(-(-n // S) for n in keys) * tables.element_size()
    elements = 2 * q.numel() + 2 * Hkv * sum(keys) * D
    return Cost(flops=4 * D * Hq * pairs, bytes=elements * q.element_size() + entries)


def write_oracle(
    k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor, tables: Tensor, starts: Tensor
) -> Tensor:
    """Both pools after the write, [2, N, S, Hkv, D], one token at a time."""
    pools, S = torch.stack((k, v)), k.shape[1]
    for b, start in enumerate(starts.tolist()):
        for t in range(new_k.shape[2]):
            if start + t >= 0:
                block = int(tables[b, (start + t) // S])
                pools[0, block, (start + t) % S] = new_k[b, :, t]
                pools[1, block, (start + t) % S] = new_v[b, :, t]
    return pools


def validate_write(
    k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor, tables: Tensor, starts: Tensor
) -> None:
    """Raise TypeError or ValueError for what the contract refuses."""
    for name, x in (("k", k), ("v", v), ("new_k", new_k), ("new_v", new_v)):
        _validate_tensor(name, x, k)
    _validate_pool(k, v, k.shape[3])
    B, T = new_k.shape[0], new_k.shape[2]
    for name, x in (("new_k", new_k), ("new_v", new_v)):
        if x.shape != (B, k.shape[2], T, k.shape[3]):
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)}, accepted is [{B}, {k.shape[2]}, {T}, {k.shape[3]}]"
            )
    validate_places("starts", tables, starts, B, k, T)


paged_attention = Op(
    "paged_attention",
    oracle=oracle,
    baseline=baseline,
    magnitude=magnitude,
    reduction=terms,
    validate=validate,
    cost=cost,
    reference="gather",
)
paged_write = Op("paged_write", oracle=write_oracle, validate=validate_write, reference="torch")
paged_turn = Op("paged_turn", reference="triton")  # a rotation and a write in one kernel, for decode steps
paged_attention.load(__name__, "gather", "scatter", "triton")
if "triton" in paged_attention.missing:
    paged_turn.missing["triton"] = paged_write.missing["triton"] = paged_attention.missing["triton"]
