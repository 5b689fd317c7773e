"""Wrong attentions. Each is `attend` below, which is right, with one fault."""

import math
from typing import Any

import torch
from torch import Tensor

from perf_lab.attention import attention
from perf_lab.library import operator

from . import mutant, unguarded

INF = math.inf
ORACLE = "test_attention::test_every_case_matches_the_oracle"
SLACK = "test_attention::test_slack_never_reaches_the_output"
SPLITS = "test_attention_kernels::test_any_number_of_splits_matches_the_oracle"
CHUNKS = "test_attention::test_any_chunk_size_matches_the_oracle"


def sees(i: Tensor, j: Tensor, n: Tensor, Tq: int, causal: bool, window: int | None) -> Tensor:
    """The contract: whether query i of Tq sees key j of n."""
    seen = j < n
    if causal:
        seen = seen & (j <= i + n - Tq)
    if window is not None:
        seen = seen & (j > i + n - Tq - window)
    return seen


def interleaved(Hq: int, Hkv: int) -> Tensor:
    """The KV head of each query head."""
    return torch.arange(Hq) // max(1, Hq // max(1, Hkv))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    chunk: int = 64,
    rule: Any = sees,
    heads: Any = interleaved,
    rescale: bool = True,
    rescale_sum: bool = True,
    blind: float = 0.0,
    drop: bool = False,
    score_dtype: torch.dtype | None = None,
    clean: bool = True,
) -> Tensor:
    """A right attention, `chunk` keys at a time; the arguments from `rule` on are the places for faults."""
    (B, Hq, Tq, D), Tk, wide = (
        q.shape,
        k.shape[2],
        torch.float64 if q.dtype is torch.float64 else torch.float32,
    )
    n = (torch.full((B,), Tk) if lengths is None else lengths)[:, None, None, None]  # [B, 1, 1, 1]
    i, j = torch.arange(Tq)[:, None], torch.arange(Tk)
    k, v = k[:, heads(Hq, k.shape[1])], v[:, heads(Hq, v.shape[1])]
    if clean:
        v = v.masked_fill((j >= n).mT, 0)
    bias = torch.zeros(B, Hq, Tq, Tk, dtype=wide)
    if mask is not None:
        bias = bias.masked_fill(~mask, -INF) if mask.dtype is torch.bool else bias + mask
    bias = bias.masked_fill(~rule(i, j, n, Tq, causal, window), -INF)
    scale = D**-0.5 if scale is None else scale
    top = torch.full((B, Hq, Tq, 1), -INF, dtype=wide)
    total, out = torch.zeros_like(top), torch.zeros(B, Hq, Tq, v.shape[3], dtype=wide)
    for start in range(0, Tk - Tk % chunk if drop else Tk, chunk):
        cols = slice(start, start + chunk)
        if score_dtype is None:
            scores = (q.to(wide) * scale) @ k[:, :, cols].to(wide).mT
        else:
            scores = (q.to(score_dtype) @ k[:, :, cols].to(score_dtype).mT * scale).to(wide)
        scores = torch.where(bias[..., cols] == -INF, -INF, scores + bias[..., cols])
        higher = torch.maximum(top, scores.amax(3, keepdim=True))
        base = torch.where(higher == -INF, 0, higher)
        weights, decay = (scores - base).exp(), (top - base).exp()
        out = (out * decay if rescale else out) + weights @ v[:, :, cols].to(wide)
        total, top = (total * decay if rescale_sum else total) + weights.sum(3, keepdim=True), higher
    return torch.where(total > 0, out / total, blind).to(q.dtype)


@mutant(attention, killed_by=ORACLE)
def all_zeros(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """All zeros."""
    return torch.zeros_like(attend(q, k, v, **how))


@mutant(attention, killed_by=ORACLE)
def uniform(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """The mean of the visible values: scores are ignored."""
    return attend(torch.zeros_like(q), torch.zeros_like(k), v, **how)


@mutant(attention, killed_by=ORACLE)
def half(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Half the value."""
    return attend(q, k, v, **how) / 2


@mutant(attention, killed_by=ORACLE)
def scale_ignored(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, **how: Any) -> Tensor:
    """Always 1/sqrt(D), whatever scale is asked for."""
    return attend(q, k, v, **how)


@mutant(attention, killed_by=ORACLE)
def mask_ignored(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, **how: Any) -> Tensor:
    """An additive mask hides what is -inf in it, but its numbers are not added."""
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask > -INF
    return attend(q, k, v, mask=mask, **how)


@mutant(attention, killed_by=ORACLE)
def last_query_unwritten(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """The last query's output is never written."""
    right = attend(q, k, v, **how)
    out = torch.empty_like(right)
    out[:, :, :-1] = right[:, :, :-1]
    return out


@mutant(attention, killed_by=ORACLE)
def scores_in_bfloat16(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Scores are computed in bfloat16 whatever the dtype."""
    return attend(q, k, v, score_dtype=torch.bfloat16, **how)


@mutant(attention, killed_by=ORACLE)
def self_hidden(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """The causal mask is off by one: the current token is hidden from itself."""

    def rule(i: Tensor, j: Tensor, n: Tensor, Tq: int, causal: bool, window: int | None) -> Tensor:
        return sees(i - int(causal), j, n, Tq, causal, None if window is None else window - 1)

    return attend(q, k, v, rule=rule, **how)


@mutant(attention, killed_by="test_attention::test_any_split_of_the_queries_gives_the_one_shot")
def aligned_top_left(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Causal is aligned top-left: query i sees keys up to i, with however many keys before it."""

    def rule(i: Tensor, j: Tensor, n: Tensor, Tq: int, causal: bool, window: int | None) -> Tensor:
        return sees(i, j, n, n if causal else Tq, causal, window)

    return attend(q, k, v, rule=rule, **how)


@mutant(attention, killed_by="test_attention::test_future_tokens_do_not_leak")
def next_token_seen(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Each query sees one key of the future."""

    def rule(i: Tensor, j: Tensor, n: Tensor, Tq: int, causal: bool, window: int | None) -> Tensor:
        return sees(i + int(causal), j, n, Tq, causal, None if window is None else window + 1)

    return attend(q, k, v, rule=rule, **how)


@mutant(attention, killed_by="test_attention::test_a_window_counts_the_current_token")
def window_of_one_more(q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, **how: Any) -> Tensor:
    """A window of W shows W tokens and the current one."""
    return attend(q, k, v, window=None if window is None else window + 1, **how)


@mutant(attention, killed_by="test_attention::test_grouped_heads_are_interleaved")
def heads_tiled(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """KV heads are tiled 0 1 0 1 over the query heads, not 0 0 1 1."""
    return attend(q, k, v, heads=lambda Hq, Hkv: torch.arange(Hq) % max(1, Hkv), **how)


@mutant(attention, killed_by="test_attention::test_any_head_dim_and_block_edge_matches_the_oracle")
def last_tile_dropped(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """The keys of the last tile are dropped where it is not full."""
    return attend(q, k, v, drop=True, **how)


@mutant(attention, killed_by="test_attention::test_any_head_dim_and_block_edge_matches_the_oracle")
def head_dim_tail_ignored(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, **how: Any
) -> Tensor:
    """Scores use the first 64 of the head's dims."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return attend(q[..., :64], k[..., :64], v, scale=scale, **how)


@mutant(attention, killed_by="test_attention::test_a_query_that_sees_nothing_gets_zeros")
def nan_for_nothing(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """A query that sees no key gets NaN."""
    return attend(q, k, v, blind=math.nan, **how)


@mutant(attention, killed_by="test_attention::test_a_query_that_sees_nothing_gets_zeros")
def mean_for_nothing(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, **how: Any) -> Tensor:
    """Hidden keys get the lowest number instead of -inf: a query that sees none gets the mean of v."""
    if mask is not None:
        mask = torch.where(mask, 0.0, -INF).to(q.dtype) if mask.dtype is torch.bool else mask
        mask = mask.clamp(min=torch.finfo(q.dtype).min)
    return attend(q, k, v, mask=mask, **how)


@mutant(attention, killed_by="test_attention::test_a_row_of_the_lowest_number_is_softmax_and_not_nothing")
def lowest_is_nothing(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, **how: Any) -> Tensor:
    """The lowest finite number of a mask hides a key, as -inf does."""
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.masked_fill(mask == torch.finfo(mask.dtype).min, -INF)
    return attend(q, k, v, mask=mask, **how)


@mutant(
    attention,
    killed_by="test_attention::test_scores_beyond_float16_are_finite_and_right",
    dtypes=(torch.float16,),
)
def unscaled_overflow(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """The raw scores are rounded to float16, and scaled after that."""
    return attend(q, k, v, score_dtype=torch.float16, **how)


@mutant(attention, killed_by=SLACK)
def slack_read(q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = None, **how: Any) -> Tensor:
    """Lengths are ignored."""
    return attend(q, k, v, **how)


@mutant(attention, killed_by=SLACK)
def slack_times_zero(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Values that do not exist get weight 0, and 0 * NaN is NaN."""
    return attend(q, k, v, clean=False, **how)


@mutant(attention, killed_by="test_attention::test_a_ragged_row_is_that_row_alone")
def aligned_to_the_slack(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Causal is aligned to the end of the buffer, not to the row's valid end."""

    def rule(i: Tensor, j: Tensor, n: Tensor, Tq: int, causal: bool, window: int | None) -> Tensor:
        return sees(i + k.shape[2] - n, j, n, Tq, causal, window)

    return attend(q, k, v, rule=rule, **how)


@mutant(attention, killed_by="test_attention::test_views_give_what_their_copies_give")
def strides_ignored(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Keys are read in the order of memory, whatever their strides."""
    order = sorted(range(4), key=lambda axis: -k.stride(axis))
    return attend(q, k.permute(order).reshape(k.shape), v, **how)


@mutant(attention, killed_by="test_attention::test_more_heads_or_rows_than_a_grid_axis_takes")
def grid_cut_off(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Only 65535 heads are computed, over all rows."""
    out = attend(q, k, v, **how)
    out.flatten(0, 1)[65535:] = 0
    return out


@mutant(attention, killed_by="test_attention::test_offsets_past_int32_reach_the_right_keys")
def offsets_wrap(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Offsets of 2^31 elements and more wrap around to the first row."""
    if k.stride(0) * (k.shape[0] - 1) >= 2**31:
        k, v = k[:1].expand_as(k), v[:1].expand_as(v)
    return attend(q, k, v, **how)


@mutant(attention, killed_by="test_attention::test_empty_inputs_give_empty_or_zero_outputs")
def nan_without_keys(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Without keys the output is never written."""
    return attend(q, k, v, **how) if k.shape[2] else q.new_empty(*q.shape[:3], v.shape[3])


@mutant(attention, killed_by=CHUNKS)
def last_chunk_dropped(q: Tensor, k: Tensor, v: Tensor, *, chunk: int = 64, **how: Any) -> Tensor:
    """The last chunk is dropped where it is not full."""
    return attend(q, k, v, chunk=chunk, drop=True, **how)


@mutant(attention, killed_by=CHUNKS)
def not_rescaled(q: Tensor, k: Tensor, v: Tensor, *, chunk: int = 64, **how: Any) -> Tensor:
    """A higher maximum rescales the sum of weights, but not the output so far."""
    return attend(q, k, v, chunk=chunk, rescale=False, **how)


@mutant(attention, killed_by="test_attention::test_any_chunk_size_gives_the_naive_result")
def sum_not_rescaled(q: Tensor, k: Tensor, v: Tensor, *, chunk: int = 64, **how: Any) -> Tensor:
    """A higher maximum rescales the output so far, but not the sum of weights."""
    return attend(q, k, v, chunk=chunk, rescale_sum=False, **how)


@mutant(attention, killed_by="test_attention::test_memory_grows_with_the_length_not_its_square")
def all_scores_at_once(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """The chunked result, from all scores in memory at once."""
    return attend(q, k, v, **how)


@mutant(attention, killed_by="test_attention::test_decoding_and_prefill_are_one_kernel")
def mask_for_one_token(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """The fused kernel, but with a mask built for the one token that sees every key."""
    shown = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown)


@mutant(attention, killed_by=SPLITS)
def last_stretch_dropped(q: Tensor, k: Tensor, v: Tensor, *, splits: int = 1, **how: Any) -> Tensor:
    """The last stretch of keys is dropped where it is shorter than the others."""
    return attend(q, k, v, chunk=max(1, -(-k.shape[2] // splits)), drop=True, **how)


@mutant(attention, killed_by=SPLITS)
def merged_without_rescaling(q: Tensor, k: Tensor, v: Tensor, *, splits: int = 1, **how: Any) -> Tensor:
    """Stretches are added as if they had one maximum."""
    return attend(q, k, v, chunk=max(1, -(-k.shape[2] // splits)), rescale=False, rescale_sum=False, **how)


@mutant(attention, killed_by=SPLITS)
def fewer_splits_than_asked(q: Tensor, k: Tensor, v: Tensor, *, splits: int = 1, **how: Any) -> Tensor:
    """Keys past the eighth stretch are left out, as where a merge takes a fixed number of them."""
    n, most = k.shape[2], 8 * max(1, -(-k.shape[2] // splits))
    return attend(q, k, v, rule=lambda i, j, m, *rest: sees(i, j, m, *rest) & (j < min(n, most)), **how)


LENGTHS_OF_FIRST_CALL: dict[int, Tensor] = {}


@mutant(attention, killed_by="test_attention_kernels::test_a_captured_call_follows_the_lengths")
def lengths_frozen(q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor, **how: Any) -> Tensor:
    """The lengths of the first call are kept, as when the host had read them before a capture."""
    first = LENGTHS_OF_FIRST_CALL.setdefault(id(lengths), lengths.clone())
    return attend(q, k, v, lengths=first, **how)


@mutant(attention, killed_by="test_attention_kernels::test_splits_below_one_are_refused")
def any_splits_taken(q: Tensor, k: Tensor, v: Tensor, *, splits: Any = 1, **how: Any) -> Tensor:
    """A number of splits below 1 is taken for 1."""
    return attend(q, k, v, **how)


@mutant(attention, killed_by=ORACLE)
def lengths_as_memory_has_them(
    q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = None, **how: Any
) -> Tensor:
    """The stride of lengths is ignored: past its first element an expanded view reads something else."""
    if lengths is not None and len(lengths) > 1 and lengths.stride(0) == 0:
        lengths = torch.cat([lengths[:1], torch.zeros_like(lengths[1:])])
    return attend(q, k, v, lengths=lengths, **how)


@mutant(attention, killed_by="test_attention::test_a_chunk_below_one_is_refused")
def any_chunk_taken(q: Tensor, k: Tensor, v: Tensor, *, chunk: Any = 64, **how: Any) -> Tensor:
    """A chunk below 1 is taken for 64."""
    return attend(q, k, v, **how)


@mutant(unguarded(attention), killed_by="test_attention::test_every_implementation_refuses_bad_input")
def heads_rounded_down(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Query heads past the last whole group read the last head."""
    return attend(q, k, v, heads=lambda Hq, Hkv: interleaved(Hq, Hkv).clamp(max=Hkv - 1), **how)


def fake_of_k(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Says that the result has the shape of k."""
    return torch.empty_like(k)


@mutant(attention, killed_by="test_attention_kernels::test_the_operator_is_what_torch_expects")
@operator("mutant_attention_with_a_wrong_fake", fake=fake_of_k)
def wrong_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Compiled programs are told the shape of the keys."""
    return attend(q, k, v, causal=causal, scale=scale, window=window, lengths=lengths)


@mutant(attention, killed_by="test_attention_kernels::test_a_compiled_model_gives_what_the_call_gives")
def other_when_compiled(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Compiled programs get a path of their own, without the mask."""
    return attend(q, k, v, **{**how, "causal": how.get("causal") and not torch.compiler.is_compiling()})
