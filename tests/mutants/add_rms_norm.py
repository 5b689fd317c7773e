"""Wrong fusions of residual addition and RMS normalization."""

import functools
from typing import Any

import torch
from torch import Tensor

from perf_lab.add_rms_norm import add_rms_norm
from perf_lab.library import operator

from . import mutant, unguarded

Pair = tuple[Tensor, Tensor]


def right(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """The op, for mutants that are wrong around it."""
    s = x + residual
    return norm(s, weight, eps), s


def norm(s: Tensor, weight: Tensor, eps: float, like: Tensor | None = None) -> Tensor:
    """The RMS norm of s in float32, rounded once to the dtype of `like`."""
    wide = s.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * rstd * weight.float()).to((s if like is None else like).dtype)


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_matches_the_oracle")
def all_zeros(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """All zeros."""
    return torch.zeros_like(x), torch.zeros_like(x)


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_matches_the_oracle")
def residual_not_normed(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """The norm is of x alone."""
    return norm(x, weight, eps), x + residual


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_matches_the_oracle")
def swapped(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """The results come in the other order."""
    return right(x, residual, weight, eps)[::-1]


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_matches_the_oracle")
def one_result(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The sum is not given back."""
    return right(x, residual, weight, eps)[0]


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_matches_the_oracle")
def eps_outside_the_root(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """eps is added to the root instead of under it."""
    s = x + residual
    rstd = 1 / (s.float().square().mean(-1, keepdim=True).sqrt() + eps)
    return (s.float() * rstd * weight.float()).to(s.dtype), s


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_any_row_length")
def last_block_dropped(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """Columns after the last whole block of 8192 of a longer row are left out of the mean."""
    whole = x.shape[-1] // 8192 * 8192 or x.shape[-1]
    s = x + residual
    rstd = torch.rsqrt(s[..., :whole].float().square().mean(-1, keepdim=True) + eps)
    return (s.float() * rstd * weight.float()).to(s.dtype), s


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_the_sum_is_the_one_that_torch_gives")
def sum_in_bfloat16(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """The residual stream is kept in bfloat16 whatever its dtype."""
    y, s = right(x, residual, weight, eps)
    return y, s.bfloat16().to(x.dtype)


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_the_result_is_the_norm_of_the_rounded_sum")
def norm_of_the_exact_sum(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """The norm is of the sum in float32, which is not the sum that is given back."""
    return norm(x.float() + residual.float(), weight, eps, like=x), x + residual


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_matches_the_oracle", dtypes=(torch.float16,))
def sum_of_scaled(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """Squares are float16, and overflow."""
    s = x + residual
    rstd = torch.rsqrt(s.square().mean(-1, keepdim=True).float() + eps)
    return (s.float() * rstd * weight.float()).to(s.dtype), s


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_x_and_residual_change_places")
def residual_rounded_first(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """The residual is read in bfloat16."""
    return right(x, residual.bfloat16().to(x.dtype), weight, eps)


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_what_cancels_gives_zeros")
def eps_dropped(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """There is no eps."""
    return right(x, residual, weight, 0.0)


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_scale_cancels")
def eps_fixed(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """eps is 1e-6 whatever the caller says."""
    return right(x, residual, weight, 1e-6)


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_a_weight_acts_on_its_own_column")
def weight_on_the_sum(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """The sum that is given back carries the weight too."""
    y, s = right(x, residual, weight, eps)
    return y, (s.float() * weight.float()).to(s.dtype)


@mutant(
    add_rms_norm,
    killed_by="test_add_rms_norm::test_the_results_have_the_dtype_of_x",
    dtypes=(torch.float16, torch.bfloat16),
)
def promoted(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """A float32 weight makes a float32 result."""
    y, s = right(x, residual, weight, eps)
    return y.to(torch.promote_types(x.dtype, weight.dtype)), s


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_what_is_not_finite_stays_in_its_row")
def nan_hidden(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """What is not a number becomes zero."""
    y, s = right(x, residual, weight, eps)
    return y.nan_to_num(0), s


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_rows_share_nothing")
def one_mean(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """All rows share the mean of the whole tensor."""
    s = x + residual
    return (s.float() * torch.rsqrt(s.float().square().mean() + eps) * weight.float()).to(s.dtype), s


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_strides_do_not_matter")
def strides_of_x(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """The residual is read with the strides of x."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    if residual.storage_offset() + reach < residual.untyped_storage().nbytes() // residual.element_size():
        residual = residual.as_strided(x.shape, x.stride(), residual.storage_offset())
    return right(x, residual, weight, eps)


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_the_inputs_are_left_alone")
def in_place(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """The sum overwrites the residual, as inference engines do it."""
    s = residual.add_(x)
    return norm(s, weight, eps), s


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_the_inputs_are_left_alone")
def results_share_memory(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """Both results are views of one buffer."""
    y, s = right(x, residual, weight, eps)
    return tuple(torch.stack((y, s)).unbind())


@functools.cache
def buffer(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """One buffer a shape."""
    return torch.empty(shape, dtype=dtype)


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_a_result_is_not_overwritten_by_the_next_call")
def reused_output(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """All calls of a shape share the memory of their sum."""
    y, s = right(x, residual, weight, eps)
    return y, buffer(x.shape, x.dtype).copy_(s)


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_empty_in_empty_out")
def at_least_one_row(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """A launch always has a program, so no rows give one."""
    return right(x, residual, weight, eps) if x.numel() else (x.new_zeros(1), x.new_zeros(1))


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_float64_is_exact_or_refused")
def float64_in_float32(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """float64 is computed in float32."""
    return right(x, residual, weight, eps)


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_more_rows_than_a_grid_axis_holds")
def grid_cut(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """Rows past 65535, the most that the second grid axis takes, are never written."""
    y, s = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    y[:65535], s[:65535] = right(x[:65535], residual[:65535], weight, eps)
    return y, s


def wrapped(x: Tensor) -> Tensor:
    """x as a kernel reads it that counts the offset of a row in 31 bits."""
    starts = [row * x.stride(0) % 2**31 for row in range(x.shape[0])]
    rows = [x.as_strided(x.shape[1:], x.stride()[1:], x.storage_offset() + start) for start in starts]
    return torch.stack(rows)


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_offsets_past_two_billion")
def wrapped_offsets(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """The offset of a row of x is counted in 31 bits."""
    return right(wrapped(x), residual, weight, eps)


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_offsets_past_two_billion")
def wrapped_residual(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """The offset of a row of the residual is counted in 31 bits."""
    return right(x, wrapped(residual), weight, eps)


compiled_each = torch.compile(right, backend="eager", dynamic=False)


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_new_sizes_compile_nothing_new")
def compiled_each_size(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """Every new size is compiled, until dynamo gives up and runs it uncompiled."""
    return compiled_each(x, residual, weight, eps)


def swapped_fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """Says that y has the shape of the weight."""
    return torch.empty_like(weight), torch.empty(x.shape, dtype=x.dtype, device=x.device)


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_torch_finds_the_operator_sound")
@operator("mutant_add_rms_norm_with_a_wrong_fake", fake=swapped_fake)
def wrong_fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """Compiled programs are told a wrong shape."""
    return right(x, residual, weight, eps)


@mutant(add_rms_norm, killed_by="test_add_rms_norm::test_runs_within_a_compiled_program")
def other_when_compiled(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Pair:
    """Compiled programs get a path of their own, and a coarser one."""
    return right(x.bfloat16().to(x.dtype) if torch.compiler.is_compiling() else x, residual, weight, eps)


@mutant(unguarded(add_rms_norm), killed_by="test_add_rms_norm::test_bad_input_is_refused_by_name")
def anything_made_float(x: Any, residual: Any, weight: Any, eps: float = 1e-6) -> Pair:
    """Whatever comes is made a tensor of floats."""
    return right(torch.as_tensor(x).float(), residual, weight, eps)


if "triton" not in add_rms_norm.missing:
    from perf_lab.rows import Cut as Cut

    def run(x: Tensor, residual: Tensor, weight: Tensor, eps: float, cut: Any) -> Pair:
        """With a cut: the last block of a row in steps is left out of the mean where it is not full."""
        s = x + residual
        whole = s.shape[-1] // cut.block * cut.block or s.shape[-1]
        rstd = torch.rsqrt(s[..., :whole].float().square().mean(-1, keepdim=True) + eps)
        return (s.float() * rstd * weight.float()).to(s.dtype), s

    mutant(add_rms_norm, killed_by="test_add_rms_norm::test_any_cut_of_the_kernel_is_right")(run)
