"""Wrong attentions through block tables. Each is `attend` below, which is right, with one fault."""

import math
from typing import Any

import torch
from torch import Tensor

from perf_lab.model.transformer import rotate
from perf_lab.paged_attention import paged_attention, paged_turn, paged_write
from perf_lab.paged_attention.scatter import scatter

from . import mutant, unguarded

ORACLE = "test_paged_attention::test_every_case_matches_the_oracle"
CHUNKS = "test_paged_attention::test_a_prompt_in_chunks_gives_the_one_shot"
UNUSED = "test_paged_attention::test_what_is_unused_never_reaches_the_output"
WRITE = "test_paged_attention::test_a_write_puts_tokens_into_their_slots_and_nowhere_else"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    block_of: Any = lambda row, j, size: row[j // size],
    place_of: Any = lambda j, size: j % size,
    keys_of: Any = lambda n, size, slots: n,
    last_of: Any = lambda i, n, Tq: i + n - Tq,
    head_of: Any = lambda h, Hq, Hkv: h // (Hq // Hkv),
    order_of: Any = lambda blocks: torch.arange(len(blocks)),
    own_scale: bool = True,
) -> Tensor:
    """A right paged attention; the arguments from `block_of` on are the places for faults."""
    (B, Hq, Tq, D), (N, S, Hkv) = q.shape, k.shape[:3]
    sums = torch.float64 if q.dtype is torch.float64 else torch.float32
    out = torch.zeros(B, Hq, Tq, D, dtype=sums)
    for b, length in enumerate(lengths.tolist()):
        n = keys_of(length, S, tables.shape[1] * S)
        if n <= 0 or not N or not q.numel():
            continue
        row = tables[b].tolist()
        blocks = torch.tensor([min(max(block_of(row, j, S), 0), N - 1) for j in range(n)])
        places = torch.tensor([place_of(j, S) for j in range(n)])
        keys, values = k[blocks, places].to(sums), v[blocks, places].to(sums)  # [n, Hkv, D]
        last = torch.tensor([last_of(i, n, Tq) for i in range(Tq)])[:, None]
        j = order_of(blocks)
        keys, values = keys[j], values[j]
        hidden = (j > last) | ((j <= last - window) if window else False)
        for h in range(Hq):
            head = head_of(h, Hq, Hkv)
            scores = q[b, h].to(sums) @ keys[:, head].T * ((scale if own_scale else None) or D**-0.5)
            weights = scores.masked_fill(hidden, -math.inf).softmax(1).nan_to_num(0)
            weights = torch.where(hidden.all(1, keepdim=True), 0, weights)
            out[b, h] = weights @ values[:, head]
    return out.to(q.dtype)


@mutant(paged_attention, killed_by=ORACLE)
def all_zeros(q, k, v, tables, lengths, **how):
    """All zeros."""
    return torch.zeros_like(q)


@mutant(paged_attention, killed_by=ORACLE)
def half(q, k, v, tables, lengths, **how):
    """Half the value."""
    return attend(q, k, v, tables, lengths, **how) / 2


@mutant(paged_attention, killed_by=ORACLE)
def table_of_the_first_row(q, k, v, tables, lengths, **how):
    """All rows read the blocks of the first."""
    return attend(q, k, v, tables[:1].expand(tables.shape), lengths, **how)


@mutant(paged_attention, killed_by=ORACLE)
def blocks_in_a_row(q, k, v, tables, lengths, **how):
    """After its first block a row is read on from there, as if blocks lay beside each other."""
    return attend(q, k, v, tables, lengths, block_of=lambda row, j, size: row[0] + j // size, **how)


@mutant(paged_attention, killed_by=ORACLE)
def block_size_of_16(q, k, v, tables, lengths, **how):
    """Blocks are taken to be of a power of two, at the least."""
    size = 1 << (k.shape[1] - 1).bit_length()
    rows = {"block_of": lambda row, j, _: row[j // size], "place_of": lambda j, s: j % size % s}
    return attend(q, k, v, tables, lengths, **rows, **how)


@mutant(paged_attention, killed_by="test_paged_attention::test_any_block_size_matches_the_oracle")
def last_block_dropped(q, k, v, tables, lengths, **how):
    """A last block that holds one key is left out."""
    drop = {"keys_of": lambda n, size, slots: n - 1 if n > 1 and n % size == 1 % size else n}
    return attend(q, k, v, tables, lengths, **drop, **how)


@mutant(paged_attention, killed_by=UNUSED)
def whole_blocks(q, k, v, tables, lengths, **how):
    """The last block is read to its end."""
    return attend(q, k, v, tables, lengths, keys_of=lambda n, size, slots: -(-n // size) * size, **how)


@mutant(paged_attention, killed_by=UNUSED)
def slack_times_zero(q, k, v, tables, lengths, **how):
    """What is past the length gets a weight of 0, and is multiplied by it."""
    y = attend(q, k, v, tables, lengths, **how)
    for b, n in enumerate(lengths.tolist()):
        if 0 < n < tables.shape[1] * k.shape[1] and n % k.shape[1]:
            slack = v[tables[b, n // k.shape[1]].long(), n % k.shape[1]]  # [Hkv, D]
            y[b] += (0 * slack).repeat_interleave(q.shape[1] // k.shape[2], 0)[:, None]
    return y


@mutant(paged_attention, killed_by=CHUNKS)
def top_left(q, k, v, tables, lengths, **how):
    """Causal from the top left: the first query sees the first key only."""
    return attend(q, k, v, tables, lengths, last_of=lambda i, n, Tq: i, **how)


@mutant(paged_attention, killed_by=CHUNKS)
def sees_one_ahead(q, k, v, tables, lengths, **how):
    """Each query but the last sees the key after its own."""
    return attend(q, k, v, tables, lengths, last_of=lambda i, n, Tq: i + n - Tq + 1, **how)


@mutant(paged_attention, killed_by=ORACLE)
def tiled_heads(q, k, v, tables, lengths, **how):
    """Query head h reads head h % Hkv."""
    return attend(q, k, v, tables, lengths, head_of=lambda h, Hq, Hkv: h % Hkv, **how)


@mutant(paged_attention, killed_by=ORACLE)
def window_off_by_one(q, k, v, tables, lengths, *, window=None, **how):
    """A window of W shows W + 1 keys."""
    return attend(q, k, v, tables, lengths, window=window and window + 1, **how)


@mutant(paged_attention, killed_by=ORACLE)
def its_own_scale(q, k, v, tables, lengths, **how):
    """The scale that is asked for is not looked at."""
    return attend(q, k, v, tables, lengths, own_scale=False, **how)


@mutant(paged_attention, killed_by="test_paged_attention::test_empty_in_empty_out")
def at_least_one_row(q, k, v, tables, lengths, **how):
    """A launch always has a program, so no rows give one."""
    return attend(q, k, v, tables, lengths, **how) if q.numel() else q.new_zeros(1)


@mutant(paged_attention, killed_by="test_paged_attention::test_where_blocks_lie_does_not_matter")
def in_order_of_memory(q, k, v, tables, lengths, **how):
    """Keys are summed in the order in which their blocks lie, which is right up to rounding."""
    return attend(q, k, v, tables, lengths, order_of=lambda blocks: blocks.argsort(stable=True), **how)


@mutant(paged_write, killed_by=WRITE)
def writes_below_zero(k, v, new_k, new_v, tables, starts):
    """Positions below 0 are written to the front of the first block."""
    S = k.shape[1]
    for b, start in enumerate(starts.tolist()):
        for t in range(new_k.shape[2]):
            at = max(0, start + t)
            block = max(0, int(tables[b, at // S]))
            k[block, at % S], v[block, at % S] = new_k[b, :, t], new_v[b, :, t]


@mutant(paged_write, killed_by=WRITE)
def keys_for_values(k, v, new_k, new_v, tables, starts):
    """Keys are written as values too."""
    scatter(k, v, new_k, new_k, tables, starts)


@mutant(paged_write, killed_by=WRITE)
def into_a_copy(k, v, new_k, new_v, tables, starts):
    """A pool that is not contiguous is copied, and the copy written."""
    scatter(k.contiguous(), v.contiguous(), new_k, new_v, tables, starts)


@mutant(paged_attention, killed_by="test_paged_attention::test_head_dims_of_models_match_the_oracle")
def head_dims_past_64_ignored(q, k, v, tables, lengths, *, scale=None, **how):
    """Scores use the first 64 of the head's dims."""
    wide = torch.arange(q.shape[3]) < 64
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return attend(torch.where(wide, q, 0), k, v, tables, lengths, scale=scale, **how)


@mutant(paged_attention, killed_by="test_paged_attention::test_any_cut_matches_the_oracle")
def last_part_dropped(q, k, v, tables, lengths, *, cut=None, **how):
    """Of keys in parts, what is past the last whole part is left out."""
    parts = 1 if cut is None else cut.splits
    kept = {"keys_of": lambda n, size, slots: n // parts * parts if n > parts else n}
    return attend(q, k, v, tables, lengths, **kept, **how)


@mutant(
    unguarded(paged_attention), killed_by="test_paged_attention::test_what_the_contract_refuses_is_refused"
)
def nothing_is_refused(q, k, v, tables, lengths, **how):
    """Whatever comes gives zeros."""
    return q


@mutant(
    paged_attention, killed_by="test_paged_attention::test_one_block_after_another_is_the_dense_attention"
)
def first_block_last(q, k, v, tables, lengths, **how):
    """A row's blocks are read from its last to its first."""
    return attend(
        q,
        k,
        v,
        tables,
        lengths,
        block_of=lambda row, j, size: row[int(lengths.max() - 1) // size - j // size],
    )


TURN = "test_paged_attention::test_one_kernel_turns_and_stores_as_a_rotation_and_a_write"


def turned_and_put(qkv, turned, heads, k, v, tables, starts, shift=0, turn_values=False):
    """A right rotation and then a write; `shift` and `turn_values` are the places for faults."""
    parts = qkv.view(len(qkv), 1, -1, k.shape[3])
    cut = parts.shape[2] if turn_values else heads + k.shape[2]
    if turned is not None:
        parts = torch.cat((rotate(parts[:, :, :cut], *turned), parts[:, :, cut:]), 2)
    q, new_k, new_v = parts.split((heads, k.shape[2], k.shape[2]), 2)
    scatter(k, v, new_k.transpose(1, 2), new_v.transpose(1, 2), tables, starts + shift)
    return q.transpose(1, 2)


@mutant(paged_turn, killed_by=TURN)
def one_slot_early(qkv, turned, heads, k, v, tables, starts):
    """Keys and values are put over those of the token before."""
    return turned_and_put(qkv, turned, heads, k, v, tables, starts, shift=-1)


@mutant(paged_turn, killed_by=TURN)
def turns_values(qkv, turned, heads, k, v, tables, starts):
    """Values are turned as keys are."""
    return turned_and_put(qkv, turned, heads, k, v, tables, starts, turn_values=True)
