"""Scaled dot-product attention: softmax(scale * q k^T + mask) v over the keys that a query sees.

q        [B, Hq, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv] of one dtype (float32, float16,
         bfloat16, float64) and any strides; the result is [B, Hq, Tq, Dv] in that dtype.
heads    grouped and interleaved: query head h reads head h // (Hq / Hkv) of k and v.
lengths  [B] int32 or int64, 0 to Tk: how many keys row b has, n = lengths[b]; without it n = Tk.
         Keys from n on do not exist: k, v and mask may hold NaN there. The keys that do exist
         must be finite in k and v, also those that a mask hides (0 * NaN is NaN).
causal   aligned bottom-right to the keys that exist: query i sees key j when j <= i + n - Tq, so
         the last query sees them all, and with Tq > n the first Tq - n queries see none.
window   W >= 1, with causal only (alone it is refused): of those keys a query sees the last W,
         its own position counted: j > i + n - Tq - W.
mask     broadcastable to [B, Hq, Tq, Tk]: bool (True: may be seen), or of q's dtype, added to the
         scores: finite, or -inf to hide a key. The lowest finite number is a number: a row of it
         alone gives what softmax says, the mean of v.
nothing  a query that sees no key gets zeros, and so does a row of -inf alone.
scale    positive and finite, 1/sqrt(D) by default.
empty    a B, Hq, Tq or Dv of 0 gives an empty result, Tk = 0 gives zeros; D >= 1.
sums     scores, softmax and sums are in float32 (float64 for float64) whatever the dtype, so float16
         inputs whose q k^T passes 65504 are in. Scores from 2^24 on are out: float32 has no
         fractions left there, and what is subtracted and rounded before exp differs by kernel.

On an accelerator the values of `lengths` are not checked, as that would wait for the device.

FLOPs        2 (D + Dv) for each query head and visible pair of query and key; causal with Tq = Tk
             leaves half of the pairs.
least bytes  q and the result once, k and v once where a key exists within some query's window, the mask once.

Source: Vaswani et al., Attention is all you need, arXiv:1706.03762; grouped heads: Ainslie et al.,
GQA, arXiv:2305.13245; sliding window: Beltagy et al., Longformer, arXiv:2004.05150.
"""

import math
from typing import Any

import torch
from torch import Tensor

from perf_lab.attention import tiles
from perf_lab.numerics import CAP, eps, upcast
from perf_lab.op import FLOATS, Cost, Op

DTYPES = (*FLOATS, torch.float64)
LENGTH_DTYPES = (torch.int32, torch.int64)


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    **own: Any,
) -> Tensor:
    """The definition, one head at a time, in the float64 of its arguments. `own`: ignored."""
    B, Hq, Tq, D = q.shape
    out = q.new_zeros(B, Hq, Tq, v.shape[3])
    scale = 1 / math.sqrt(D) if scale is None else scale
    for b in range(B):
        n = k.shape[2] if lengths is None else int(lengths[b])
        for h in range(Hq if n else 0):
            head = h // (Hq // k.shape[1])
            logits = scale * (q[b, h] @ k[b, head, :n].T)  # [Tq, n]
            if mask is not None:
                logits += _additive(mask.expand(B, Hq, Tq, k.shape[2])[b, h, :, :n])
            logits[~_sees(Tq, n, causal, window, q.device)] = -math.inf
            highest = logits.amax(1, keepdim=True)
            weights = torch.exp(logits - torch.where(highest.isfinite(), highest, 0.0))
            total = weights.sum(1, keepdim=True)
            out[b, h] = torch.where(total > 0, weights / total, 0.0) @ v[b, head, :n]
    return out


def _additive(mask: Tensor) -> Tensor:
    return torch.where(mask, 0.0, -math.inf).double() if mask.dtype is torch.bool else mask


def _sees(Tq: int, n: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Whether query i sees key j, [Tq, n]: the contract's sentences for causal and window."""
    i = torch.arange(Tq, device=device)[:, None]
    j = torch.arange(n, device=device)[None, :]
    sees = torch.ones(Tq, n, dtype=torch.bool, device=device)
    if causal:
        sees &= j <= i + n - Tq
    if window is not None:
        sees &= j > i + n - Tq - window
    return sees


def magnitude(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    """What is summed up to each element: the weights times |v|."""
    return oracle(q, k, v.abs(), **kwargs)


def terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    **kwargs: Any,
) -> int:
    """2^r - 1: as many terms as a pairwise sum adds in the r roundings that one output element meets.

    An output is sum_j p_j v_j. A float32 error d in every score changes each p_j, relatively, by up
    to 2 d. A score is a sum of D products (log2(D + 1) roundings), times the scale, plus the mask,
    minus the maximum, and its exponential begins with one more product: log2(D + 1) + 4 roundings,
    each up to eps/2 of S = scale max|q| max|k| + max|mask|, which bounds every partial sum
    (Cauchy-Schwarz). The sums over Tk keys, of the weights and of the outputs, add log2(Tk + 1)
    roundings each. In units of eps: r = log2(Tk + 1) + S (log2(D + 1) + 4).

    So large scores are allowed more float32 error, in every dtype, but no more rounding to float16
    or bfloat16, as a factor on the magnitude would. Mask values at or below half the lowest number
    stay out of S: they absorb a score exactly, in the oracle too. r is at most CAP / eps(float32).
    """
    if not (q.numel() and k.numel()):
        return 0
    size = (scale or q.shape[3] ** -0.5) * _longest(q) * _longest(tiles.without_slack(k, lengths))
    if mask is not None and mask.is_floating_point():
        counted = mask[mask.isfinite() & (mask > torch.finfo(mask.dtype).min / 2)]
        size += counted.abs().max().item() if counted.numel() else 0.0
    roundings = math.log2(k.shape[2] + 1) + size * (math.log2(q.shape[3] + 1) + 4)
    return 2 ** math.ceil(min(roundings, CAP / eps(torch.float32))) - 1


def _longest(x: Tensor) -> float:
    return upcast(x).norm(dim=3).max().item()


def baseline(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    **own: Any,
) -> Tensor:
    """The plain torch computation: scores, softmax and output all rounded to the dtype of q."""
    Tq, Tk = q.shape[2], k.shape[2]
    rows, cols = (torch.arange(n, device=q.device) for n in (Tq, Tk))
    seen = tiles.visible(rows, cols, Tq, Tk, causal=causal, window=window, lengths=lengths)
    scores = tiles.product(q, k.mT) * (scale or q.shape[3] ** -0.5)  # [B, Hq, Tq, Tk]
    scores = tiles.hide(scores, seen, mask)
    weights = scores.softmax(3).masked_fill((scores == -math.inf).all(3, keepdim=True), 0)
    return tiles.product(weights, tiles.without_slack(v, lengths))


def validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    **own: Any,
) -> None:
    """Raise TypeError or ValueError for what the contract refuses. `own`: an implementation's own options."""
    _validate_tensors(q, k, v)
    if not isinstance(causal, bool):
        raise TypeError(f"causal: got {causal!r}, accepted are True and False")
    if scale is not None and not (isinstance(scale, float | int) and 0 < scale < math.inf):
        raise ValueError(f"scale: got {scale!r}, accepted are None and positive finite numbers")
    if window is not None:
        _validate_window(window, causal)
    if mask is not None:
        _validate_mask(mask, q, (*q.shape[:3], k.shape[2]))
    if lengths is not None:
        _validate_lengths(lengths, q, k.shape[2])


def _validate_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, accepted is a Tensor")
        if x.ndim != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, accepted are shapes [B, H, T, D]")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: got {x.dtype}, accepted are {DTYPES}")
        if x.dtype is not q.dtype or x.device != q.device:
            raise ValueError(f"{name}: got {x.dtype} on {x.device}, accepted is q's {q.dtype} on {q.device}")
    (B, Hq, _, D), (Hkv, Tk) = q.shape, k.shape[1:3]
    if D == 0:
        raise ValueError("q: got head dim 0, accepted are head dims from 1")
    if k.shape[0] != B or k.shape[3] != D:
        raise ValueError(
            f"k: got shape {tuple(k.shape)}, accepted are [{B}, Hkv, Tk, {D}] for q's {tuple(q.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v: got shape {tuple(v.shape)}, accepted are [{B}, {Hkv}, {Tk}, Dv] for k's {tuple(k.shape)}"
        )
    if Hq % Hkv if Hkv else Hq:
        raise ValueError(f"q: got {Hq} heads, accepted are multiples of the {Hkv} heads of k")


def _validate_window(window: int, causal: bool) -> None:
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ValueError(f"window: got {window!r}, accepted are None and whole numbers from 1")
    if not causal:
        raise ValueError(
            f"window: got {window} with causal=False, accepted is a window with causal=True only"
        )


def _validate_mask(mask: Tensor, q: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask: got {type(mask).__name__}, accepted is a Tensor")
    if mask.dtype not in (torch.bool, q.dtype):
        raise TypeError(f"mask: got {mask.dtype}, accepted are torch.bool and q's {q.dtype}")
    if mask.device != q.device:
        raise ValueError(f"mask: got one on {mask.device}, accepted is q's device {q.device}")
    axes = zip(reversed(mask.shape), reversed(shape), strict=False)
    if mask.ndim > 4 or any(got not in (1, n) for got, n in axes):
        raise ValueError(f"mask: got shape {tuple(mask.shape)}, accepted is what broadcasts to {shape}")


def _validate_lengths(lengths: Tensor, q: Tensor, kv_len: int) -> None:
    if not isinstance(lengths, Tensor):
        raise TypeError(f"lengths: got {type(lengths).__name__}, accepted is a Tensor")
    if lengths.dtype not in LENGTH_DTYPES:
        raise TypeError(f"lengths: got {lengths.dtype}, accepted are {LENGTH_DTYPES}")
    if lengths.shape != q.shape[:1]:
        raise ValueError(f"lengths: got shape {tuple(lengths.shape)}, accepted is [{q.shape[0]}]")
    if lengths.device not in (q.device, torch.device("cpu")):
        raise ValueError(f"lengths: got one on {lengths.device}, accepted are cpu and q's {q.device}")
    if lengths.device.type == "cpu" and not ((lengths >= 0) & (lengths <= kv_len)).all():
        raise ValueError(f"lengths: got {lengths.tolist()}, accepted are 0 to {kv_len}")


def cost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    **kwargs: Any,
) -> Cost:
    """The contract's formulas; the pairs that a mask hides are not counted."""
    (B, Hq, Tq, D), (Hkv, Tk), Dv = q.shape, k.shape[1:3], v.shape[3]
    counts = [Tk] * B if lengths is None else lengths.tolist()
    keys = sum(min(n, Tq - 1 + (window or n)) for n in counts) if Tq else 0
    elements = q.numel() + Hkv * keys * (D + Dv) + B * Hq * Tq * Dv
    if mask is None:
        mask_bytes, pairs = 0, Hq * sum(_pairs(Tq, n, causal, window) for n in counts)
    else:
        mask_bytes = mask.numel() * mask.element_size()
        pairs = _pairs_under(mask, q, Tk, causal=causal, window=window, lengths=lengths)
    return Cost(flops=2 * (D + Dv) * pairs, bytes=elements * q.element_size() + mask_bytes)


def _pairs(Tq: int, n: int, causal: bool, window: int | None) -> int:
    if not causal:
        return Tq * n
    return sum(min(max(0, i + n - Tq + 1), window or n) for i in range(Tq))


def _pairs_under(mask: Tensor, q: Tensor, Tk: int, **sight: Any) -> int:
    rows, cols = (torch.arange(n, device=q.device) for n in (q.shape[2], Tk))
    seen = tiles.visible(rows, cols, q.shape[2], Tk, **sight)
    shown = (mask if mask.dtype is torch.bool else mask > -math.inf).expand(*q.shape[:3], Tk)
    return int((shown if seen is None else shown & seen).sum())


attention = Op(
    "attention",
    oracle=oracle,
    baseline=baseline,
    magnitude=magnitude,
    reduction=terms,
    validate=validate,
    cost=cost,
    reference="naive",
)
attention.load(__name__, "naive", "chunked", "sdpa", "sdpa_backends", "flex", "triton_flash", "triton_split")
