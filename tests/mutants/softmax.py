"""Wrong softmaxes. Forward tests of well-known libraries pass the first two."""

import functools
from typing import Any

import torch
from torch import Tensor

from perf_lab import machine
from perf_lab.library import operator
from perf_lab.softmax import softmax

from . import mutant, unguarded


def by_rows(x: Tensor) -> Tensor:
    """x [..., C] as [R, C]."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


@mutant(softmax, killed_by="test_softmax::test_matches_the_oracle")
def all_zeros(x: Tensor) -> Tensor:
    """All zeros."""
    return torch.zeros_like(x)


@mutant(softmax, killed_by="test_softmax::test_matches_the_oracle")
def uniform(x: Tensor) -> Tensor:
    """The same probability everywhere."""
    return torch.full_like(x, 1 / max(1, x.shape[-1]))


@mutant(softmax, killed_by="test_softmax::test_matches_the_oracle")
def half(x: Tensor) -> Tensor:
    """Half the value."""
    return torch.softmax(x, -1) / 2


@mutant(softmax, killed_by="test_softmax::test_does_not_overflow")
def unshifted(x: Tensor) -> Tensor:
    """The maximum is not subtracted."""
    weights = x.float().exp()
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype)


@mutant(softmax, killed_by="test_softmax::test_matches_the_oracle", dtypes=(torch.bfloat16,))
def bfloat16_sum(x: Tensor) -> Tensor:
    """The sum is accumulated in bfloat16, term after term."""
    weights = (x - x.amax(-1, keepdim=True)).float().exp() if x.numel() else x.float()
    total = weights.new_zeros(x.shape[:-1]).to(x.dtype)
    for column in weights.unbind(-1):
        total = total + column.to(x.dtype)
    return (weights / total.float().unsqueeze(-1)).to(x.dtype)


@mutant(softmax, killed_by="test_softmax::test_equal_inputs_share_equally", dtypes=(torch.bfloat16,))
def bfloat16_count(x: Tensor) -> Tensor:
    """The sum is accumulated in bfloat16, which stands still at 256 ones."""
    return bfloat16_sum(x)


@mutant(softmax, killed_by="test_softmax::test_any_row_length")
def last_block_dropped(x: Tensor) -> Tensor:
    """Columns after the last whole block of 8192 of a longer row are left out."""
    whole = x.shape[-1] // 8192 * 8192 or x.shape[-1]
    y = torch.zeros_like(x)
    y[..., :whole] = torch.softmax(x[..., :whole], -1)
    return y


@mutant(softmax, killed_by="test_softmax::test_any_row_length")
def one_block_only(x: Tensor) -> Tensor:
    """A row ends where the largest block of a kernel ends, 65536 columns."""
    y = torch.zeros_like(x)
    y[..., :65536] = torch.softmax(x[..., :65536], -1)
    return y


@mutant(softmax, killed_by="test_softmax::test_a_row_sums_to_one")
def guarded_division(x: Tensor) -> Tensor:
    """A small number is added to the sum against a division by zero."""
    weights = torch.exp(x.float() - x.float().amax(-1, keepdim=True))
    return (weights / (weights.sum(-1, keepdim=True) + 1e-3)).to(x.dtype)


@mutant(softmax, killed_by="test_softmax::test_a_shift_changes_nothing")
def maximum_of_zero(x: Tensor) -> Tensor:
    """Lanes past the row's end enter the maximum as zeros, so a row far below zero underflows."""
    weights = torch.exp(x.float() - x.float().amax(-1, keepdim=True).clamp(min=0))
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype)


@mutant(softmax, killed_by="test_softmax::test_what_is_masked_gets_exactly_zero")
def finite_mask(x: Tensor) -> Tensor:
    """-inf is replaced by -10, a large enough number in tests that nobody made."""
    return torch.softmax(x.clamp(min=-10), -1)


@mutant(softmax, killed_by="test_softmax::test_what_is_not_finite_stays_in_its_row")
def nan_hidden(x: Tensor) -> Tensor:
    """What is not a number becomes zero."""
    return torch.softmax(x, -1).nan_to_num(0)


@mutant(softmax, killed_by="test_softmax::test_permuting_the_input_permutes_the_result")
def last_takes_the_rest(x: Tensor) -> Tensor:
    """The last probability is what the others leave, to the rounding of a sum near one."""
    y = torch.softmax(x, -1)
    y[..., -1] = 1 - y[..., :-1].sum(-1)
    return y


@mutant(softmax, killed_by="test_softmax::test_rows_share_nothing")
def one_maximum(x: Tensor) -> Tensor:
    """All rows are shifted by the maximum of the whole tensor."""
    weights = torch.exp(x.float() - x.float().max())
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype)


@mutant(softmax, killed_by="test_softmax::test_strides_do_not_matter")
def unit_stride(x: Tensor) -> Tensor:
    """Neighbours in memory are taken for neighbours in the row."""
    return torch.softmax(x.as_strided(x.shape, (*x.stride()[:-1], 1)), -1)


@mutant(softmax, killed_by="test_softmax::test_the_input_is_left_alone")
def in_place(x: Tensor) -> Tensor:
    """The shift is done in the input."""
    return torch.softmax(x.sub_(x.amax(-1, keepdim=True)), -1)


@functools.cache
def buffer(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """One buffer a shape."""
    return torch.empty(shape, dtype=dtype)


@mutant(softmax, killed_by="test_softmax::test_a_result_is_not_overwritten_by_the_next_call")
def reused_output(x: Tensor) -> Tensor:
    """All calls of a shape share their output."""
    return buffer(x.shape, x.dtype).copy_(torch.softmax(x, -1))


@mutant(softmax, killed_by="test_softmax::test_empty_in_empty_out")
def at_least_one_row(x: Tensor) -> Tensor:
    """A launch always has a program, so no rows give one."""
    return torch.softmax(x, -1) if x.numel() else x.new_zeros(1)


@mutant(softmax, killed_by="test_softmax::test_float64_is_exact_or_refused")
def float64_in_float32(x: Tensor) -> Tensor:
    """float64 is computed in float32."""
    return torch.softmax(x.float(), -1).to(x.dtype)


@mutant(softmax, killed_by="test_softmax::test_more_rows_than_a_grid_axis_holds")
def grid_cut(x: Tensor) -> Tensor:
    """Rows past 65535, the most that the second grid axis takes, are never written."""
    y = torch.empty(x.shape, dtype=x.dtype)
    by_rows(y)[:65535] = torch.softmax(by_rows(x)[:65535], -1)
    return y


@mutant(softmax, killed_by="test_softmax::test_offsets_past_two_billion")
def wrapped_offsets(x: Tensor) -> Tensor:
    """The offset of a row is counted in 31 bits."""
    starts = [row * x.stride(0) % 2**31 for row in range(x.shape[0])]
    rows = [x.as_strided(x.shape[1:], x.stride()[1:], x.storage_offset() + start) for start in starts]
    return torch.softmax(torch.stack(rows), -1)


def split_at(x: Tensor, block: int, of_all: bool) -> Tensor:
    """Softmax by parts of a row, each by the maximum and sum of all parts, or of its own."""
    parts = x.float().split(block, -1) if x.numel() else ()
    tops = [part.amax(-1, keepdim=True) for part in parts]
    sums = [(part - top).exp().sum(-1, keepdim=True) for part, top in zip(parts, tops, strict=True)]
    if not parts:
        return x.clone()
    top = torch.stack(tops).amax(0)
    total = sum(s * (t - top).exp() for s, t in zip(sums, tops, strict=True)) if of_all else sum(sums)
    return torch.cat([(part - top).exp() / total for part in parts], -1).to(x.dtype)


@mutant(softmax, killed_by="test_softmax::test_any_row_length")
def sums_not_rescaled(x: Tensor) -> Tensor:
    """The programs of a split row add up their sums, each taken by its own maximum."""
    return split_at(x, 8192, of_all=False)


@mutant(softmax, killed_by="test_softmax::test_what_is_not_finite_stays_in_its_row")
def empty_part(x: Tensor) -> Tensor:
    """A part of a split row that is -inf alone makes the row NaN: -inf - -inf."""
    return split_at(x, 1, of_all=True)


compiled_each = torch.compile(lambda x: torch.softmax(x, -1), backend="eager", dynamic=False)


@mutant(softmax, killed_by="test_softmax::test_new_sizes_compile_nothing_new")
def compiled_each_size(x: Tensor) -> Tensor:
    """Every new size is compiled, until dynamo gives up and runs it uncompiled."""
    return compiled_each(x)


@mutant(softmax, killed_by="test_softmax::test_torch_finds_the_operator_sound")
@operator("mutant_softmax_with_a_float32_fake", fake=lambda x: torch.empty(x.shape, device=x.device))
def wrong_fake(x: Tensor) -> Tensor:
    """Compiled programs are told float32, whatever the dtype of x."""
    return torch.softmax(x, -1)


@mutant(softmax, killed_by="test_softmax::test_torch_finds_the_operator_sound")
@operator("mutant_softmax_in_place", fake=torch.empty_like)
def undeclared_change(x: Tensor) -> Tensor:
    """The operator changes its input, which its schema denies."""
    return torch.softmax(x.mul_(2), -1)


@mutant(softmax, killed_by="test_softmax::test_runs_within_a_compiled_program")
def other_when_compiled(x: Tensor) -> Tensor:
    """Compiled programs get a path of their own, and a coarser one."""
    return torch.softmax(x.bfloat16() if torch.compiler.is_compiling() else x, -1).to(x.dtype)


# Under the interpreter a wrong kernel is as wrong as on a GPU: proof that it can fail there.
if machine.interpreting() and "triton" not in softmax.missing:
    import triton
    import triton.language as tl

    from perf_lab.rows import Cut as Cut

    @triton.jit
    def faulty_kernel(x_ptr, y_ptr, rows, columns, BLOCK: tl.constexpr, OTHER: tl.constexpr):
        column = tl.arange(0, BLOCK)
        offset = tl.program_id(0) * columns + column
        inside = (column < columns) & (offset < rows * columns)
        x = tl.load(x_ptr + offset, mask=inside, other=OTHER).to(tl.float32)
        weights = tl.exp(x - tl.max(x, 0))
        y = weights / tl.sum(weights, 0)
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=inside)

    def launched(x: Tensor, rows: int, other: float) -> Tensor:
        """A row a program; the mask lets `rows` rows through."""
        y = torch.empty(x.shape, dtype=x.dtype)
        if x.numel():
            block: Any = max(2, triton.next_power_of_2(x.shape[-1]))
            faulty_kernel[(by_rows(x).shape[0],)](x.contiguous(), y, rows, x.shape[-1], block, other)
        return y

    @mutant(softmax, killed_by="test_softmax::test_matches_the_oracle")
    def kernel_sums_its_padding(x: Tensor) -> Tensor:
        """A kernel whose masked lanes enter maximum and sum as zeros."""
        return launched(x, by_rows(x).shape[0], other=0.0)

    @mutant(softmax, killed_by="test_softmax::test_matches_the_oracle")
    def kernel_skips_the_last_row(x: Tensor) -> Tensor:
        """A kernel that leaves the last row as the allocator gave it."""
        return launched(x, by_rows(x).shape[0] - 1, other=float("-inf"))

    def run(x: Tensor, cut: Any) -> Tensor:
        """Softmax with a cut: the last block of a row in steps is left out where it is not full."""
        y = torch.softmax(x, -1)
        if x.shape[-1] > cut.block:
            y[..., x.shape[-1] // cut.block * cut.block :] = 0
        return y

    mutant(softmax, killed_by="test_softmax::test_any_cut_of_the_kernel_is_right")(run)


OWN_KERNEL = (
    0  # elements from which a shape has a kernel of its own, as in the module that this one stands for
)
compiled_once = torch.compile(lambda x: torch.softmax(x, -1), backend="eager", dynamic=False)


@mutant(softmax, killed_by="test_softmax::test_large_calls_stay_compiled_however_many")
def one_function_for_all(x: Tensor) -> Tensor:
    """Kernels of all shapes share one compiled function, which dynamo gives up on after eight."""
    return compiled_once(x)


@mutant(unguarded(softmax), killed_by="test_softmax::test_bad_input_is_refused_by_name")
def anything_made_float(x: Any) -> Tensor:
    """Whatever comes is made a tensor of floats."""
    return torch.softmax(torch.as_tensor(x).float(), -1)
