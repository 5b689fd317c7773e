"""Wrong RMS normalizations, several of them released by somebody."""

import functools
from typing import Any

import torch
from torch import Tensor

from perf_lab import machine
from perf_lab.library import operator
from perf_lab.rms_norm import rms_norm

from . import mutant, unguarded

HALVES = (torch.float16, torch.bfloat16)


def right(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The op, for mutants that are wrong around it."""
    return scaled(x, rstd_of(x, eps), weight)


def rstd_of(x: Tensor, eps: float) -> Tensor:
    """The factor of each row [..., 1] in float32."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def scaled(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """x * rstd * weight in float32, rounded once."""
    return (x.float() * rstd * weight.float()).to(x.dtype)


@mutant(rms_norm, killed_by="test_rms_norm::test_matches_the_oracle")
def all_zeros(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """All zeros."""
    return torch.zeros_like(x)


@mutant(rms_norm, killed_by="test_rms_norm::test_matches_the_oracle")
def weight_only(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The weight with x's sign, as if every element were of typical size."""
    return (x.sign().float() * weight.float()).to(x.dtype)


@mutant(rms_norm, killed_by="test_rms_norm::test_matches_the_oracle")
def half(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Half the value."""
    return right(x, weight, eps) / 2


@mutant(rms_norm, killed_by="test_rms_norm::test_matches_the_oracle")
def padded_mean(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The sum of squares is divided by the width of the block, a power of two."""
    block = 1 << max(0, x.shape[-1] - 1).bit_length()
    return scaled(x, torch.rsqrt(x.float().square().sum(-1, keepdim=True) / block + eps), weight)


@mutant(rms_norm, killed_by="test_rms_norm::test_matches_the_oracle")
def centered(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The mean is subtracted first, as in layer normalization."""
    return right(x - x.float().mean(-1, keepdim=True).to(x.dtype), weight, eps)


@mutant(rms_norm, killed_by="test_rms_norm::test_matches_the_oracle", dtypes=(torch.bfloat16,))
def bfloat16_sum(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Squares are accumulated in bfloat16, term after term."""
    total = x.new_zeros(x.shape[:-1])
    for column in x.unbind(-1):
        total = total + column * column
    return scaled(x, torch.rsqrt(total.float().unsqueeze(-1) / max(1, x.shape[-1]) + eps), weight)


@mutant(rms_norm, killed_by="test_rms_norm::test_a_constant_row_has_a_closed_form", dtypes=(torch.float16,))
def float16_squares(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Squares are float16: 300 gives inf."""
    return scaled(x, torch.rsqrt((x * x).float().mean(-1, keepdim=True) + eps), weight)


@mutant(rms_norm, killed_by="test_rms_norm::test_a_constant_row_has_a_closed_form", dtypes=HALVES)
def eps_in_half(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """eps is added in x's dtype: in float16 1e-8 is nothing, in bfloat16 1e-8 and 1e-6 are cut to 8 bits."""
    squares = x.float().square().mean(-1, keepdim=True).to(x.dtype)
    return scaled(x, torch.rsqrt((squares + eps).float()), weight)


@mutant(rms_norm, killed_by="test_rms_norm::test_a_constant_row_has_a_closed_form")
def eps_outside_the_root(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """eps is added to the root instead of under it."""
    return scaled(x, 1 / (x.float().square().mean(-1, keepdim=True).sqrt() + eps), weight)


@mutant(rms_norm, killed_by="test_rms_norm::test_a_row_of_zeros_gives_zeros")
def eps_dropped(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """There is no eps."""
    return scaled(x, rstd_of(x, 0.0), weight)


@mutant(rms_norm, killed_by="test_rms_norm::test_scale_cancels")
def eps_fixed(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """eps is 1e-6 whatever the caller says."""
    return right(x, weight, 1e-6)


@mutant(rms_norm, killed_by="test_rms_norm::test_any_row_length")
def last_block_dropped(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Columns after the last whole block of 8192 of a longer row are left out of the sum."""
    whole = x.shape[-1] // 8192 * 8192 or x.shape[-1]
    return scaled(x, rstd_of(x[..., :whole], eps), weight)


@mutant(rms_norm, killed_by="test_rms_norm::test_any_row_length")
def one_block_only(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """A row ends where the largest block of a kernel ends, 65536 columns."""
    y = torch.zeros_like(x)
    y[..., :65536] = right(x[..., :65536], weight[:65536], eps)
    return y


@mutant(rms_norm, killed_by="test_rms_norm::test_the_result_is_linear_in_the_weight")
def one_plus_weight(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The weight is stored as its distance from one, as Gemma does."""
    return scaled(x, rstd_of(x, eps), 1 + weight.float())


@mutant(rms_norm, killed_by="test_rms_norm::test_a_weight_acts_on_its_own_column")
def weight_ignored(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The weight is ignored."""
    return scaled(x, rstd_of(x, eps), torch.ones_like(weight))


@mutant(rms_norm, killed_by="test_rms_norm::test_a_weight_acts_on_its_own_column")
def weight_tiled(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The first half of the weight serves both halves of a row."""
    first = weight[: (weight.numel() + 1) // 2]
    return scaled(x, rstd_of(x, eps), torch.cat([first, first])[: weight.numel()])


@mutant(rms_norm, killed_by="test_rms_norm::test_rounds_once", dtypes=(torch.float16,))
def cast_before_weight(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Rounded to x's dtype before the weight, and again after it."""
    return ((x.float() * rstd_of(x, eps)).to(x.dtype) * weight).to(x.dtype)


@mutant(rms_norm, killed_by="test_rms_norm::test_rounds_once", dtypes=(torch.float16,))
def weight_narrowed(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """A float32 weight is rounded to x's dtype."""
    return right(x, weight.to(x.dtype), eps)


@mutant(rms_norm, killed_by="test_rms_norm::test_the_result_has_the_dtype_of_x", dtypes=HALVES)
def promoted(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """A float32 weight makes a float32 result."""
    return right(x, weight, eps).to(torch.promote_types(x.dtype, weight.dtype))


@mutant(rms_norm, killed_by="test_rms_norm::test_what_is_not_finite_stays_in_its_row")
def nan_hidden(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """What is not a number becomes zero."""
    return right(x, weight, eps).nan_to_num(0)


@mutant(rms_norm, killed_by="test_rms_norm::test_rows_share_nothing")
def one_mean(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """All rows are scaled by the mean of the whole tensor."""
    return scaled(x, torch.rsqrt(x.float().square().mean() + eps), weight)


@mutant(rms_norm, killed_by="test_rms_norm::test_strides_do_not_matter")
def unit_stride(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Neighbours in memory are taken for neighbours in the row."""
    return right(x.as_strided(x.shape, (*x.stride()[:-1], 1)), weight, eps)


@mutant(rms_norm, killed_by="test_rms_norm::test_strides_do_not_matter")
def unit_stride_of_weight(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Neighbours in memory are taken for neighbours in the weight."""
    spread = weight.stride(0) > 1  # a weight of stride 0 has no neighbours to read
    return right(x, weight.as_strided(weight.shape, (1,)) if spread else weight, eps)


@mutant(rms_norm, killed_by="test_rms_norm::test_the_input_is_left_alone")
def in_place(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The result overwrites the input."""
    return x.copy_(right(x, weight, eps))


@functools.cache
def buffer(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """One buffer a shape."""
    return torch.empty(shape, dtype=dtype)


@mutant(rms_norm, killed_by="test_rms_norm::test_a_result_is_not_overwritten_by_the_next_call")
def reused_output(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """All calls of a shape share their output."""
    return buffer(x.shape, x.dtype).copy_(right(x, weight, eps))


@mutant(rms_norm, killed_by="test_rms_norm::test_empty_in_empty_out")
def at_least_one_row(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """A launch always has a program, so no rows give one."""
    return right(x, weight, eps) if x.numel() else x.new_zeros(1)


@mutant(rms_norm, killed_by="test_rms_norm::test_float64_is_exact_or_refused")
def float64_in_float32(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """float64 is computed in float32."""
    return right(x, weight, eps)


@mutant(rms_norm, killed_by="test_rms_norm::test_more_rows_than_a_grid_axis_holds")
def grid_cut(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Rows past 65535, the most that the second grid axis takes, are never written."""
    y = torch.empty(x.shape, dtype=x.dtype)
    y[:65535] = right(x[:65535], weight, eps)
    return y


@mutant(rms_norm, killed_by="test_rms_norm::test_offsets_past_two_billion")
def wrapped_offsets(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The offset of a row is counted in 31 bits."""
    starts = [row * x.stride(0) % 2**31 for row in range(x.shape[0])]
    rows = [x.as_strided(x.shape[1:], x.stride()[1:], x.storage_offset() + start) for start in starts]
    return right(torch.stack(rows), weight, eps)


compiled_each = torch.compile(right, backend="eager", dynamic=False)


@mutant(rms_norm, killed_by="test_rms_norm::test_new_sizes_compile_nothing_new")
def compiled_each_size(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Every new size is compiled, until dynamo gives up and runs it uncompiled."""
    return compiled_each(x, weight, eps)


@mutant(rms_norm, killed_by="test_rms_norm::test_torch_finds_the_operator_sound")
@operator("mutant_rms_norm_with_a_wrong_fake", fake=lambda x, weight, eps=1e-6: torch.empty_like(weight))
def wrong_fake(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Compiled programs are told the shape and dtype of the weight."""
    return right(x, weight, eps)


# Under the interpreter a wrong kernel is as wrong as on a GPU: proof that it can fail there.
if machine.interpreting() and "triton" not in rms_norm.missing:
    import triton
    import triton.language as tl

    from perf_lab.rows import Cut as Cut

    @triton.jit
    def faulty_kernel(
        x_ptr, weight_ptr, y_ptr, columns, eps, BLOCK: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr
    ):
        column = tl.arange(0, BLOCK)
        offset = tl.program_id(0) * columns + column
        x = tl.load(x_ptr + offset, mask=column < columns, other=0.0)
        if WIDE:
            x = x.to(tl.float32)
        count = BLOCK if PADDED else columns
        rstd = tl.rsqrt(tl.sum((x * x).to(tl.float32), 0) / count + eps)
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        y = x.to(tl.float32) * rstd * weight
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=column < columns)

    def launched(x: Tensor, weight: Tensor, eps: float, padded: bool = False, wide: bool = True) -> Tensor:
        """A row a program."""
        y = torch.empty(x.shape, dtype=x.dtype)
        if x.numel():
            columns = x.shape[-1]
            block: Any = max(2, triton.next_power_of_2(columns))
            grid = (x.numel() // columns,)
            faulty_kernel[grid](x.contiguous(), weight.contiguous(), y, columns, eps, block, padded, wide)
        return y

    @mutant(rms_norm, killed_by="test_rms_norm::test_matches_the_oracle")
    def kernel_divides_by_its_block(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        """A kernel whose mean is over the block, not over the row."""
        return launched(x, weight, eps, padded=True)

    @mutant(rms_norm, killed_by="test_rms_norm::test_matches_the_oracle", dtypes=(torch.bfloat16,))
    def kernel_squares_in_bfloat16(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        """A kernel that does not widen what it loads: the interpreter multiplies bit patterns."""
        return launched(x, weight, eps, wide=False)

    def run(x: Tensor, weight: Tensor, eps: float, cut: Any) -> Tensor:
        """With a cut: the last block of a row in steps is left out of the mean where it is not full."""
        whole = x.shape[-1] // cut.block * cut.block or x.shape[-1]
        return scaled(x, rstd_of(x[..., :whole], eps), weight)

    mutant(rms_norm, killed_by="test_rms_norm::test_any_cut_of_the_kernel_is_right")(run)


OWN_KERNEL = (
    0  # elements from which a shape has a kernel of its own, as in the module that this one stands for
)
compiled_once = torch.compile(lambda *args: right(*args), backend="eager", dynamic=False)


@mutant(rms_norm, killed_by="test_rms_norm::test_large_calls_stay_compiled_however_many")
def one_function_for_all(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Kernels of all shapes share one compiled function, which dynamo gives up on after eight."""
    return compiled_once(x, weight, eps)


@mutant(rms_norm, killed_by="test_rms_norm::test_runs_within_a_compiled_program")
def other_when_compiled(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Compiled programs get a path of their own, and a coarser one."""
    return right(x.bfloat16().to(x.dtype) if torch.compiler.is_compiling() else x, weight, eps)


@mutant(unguarded(rms_norm), killed_by="test_rms_norm::test_bad_input_is_refused_by_name")
def anything_made_float(x: Any, weight: Any, eps: float = 1e-6) -> Tensor:
    """Whatever comes is made a tensor of floats."""
    return right(torch.as_tensor(x).float(), weight, eps)
