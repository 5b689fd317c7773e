"""Wrong quantizers and wrong Linear layers on them; most were reported of well-known libraries."""

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perf_lab.quant import (
    NF4_LEVELS,
    Quantized,
    QuantizedLinear,
    int8,
    nf4,
    quantize_,
    quantize_op,
    quantized_linear,
)

from . import mutant, unguarded

RightInt8 = int8["torch"].fn
RightNF4 = nf4["torch"].fn
SMALLEST = 2.0**-126


def int8_of(w: Tensor, scales: Tensor) -> Quantized:
    """The codes that belong to these scales."""
    codes = (w.float() / scales).round().clamp(-127, 127).to(torch.int8)
    return Quantized(codes, scales, "int8", tuple(w.shape), w.dtype)


def absmax(w: Tensor) -> Tensor:
    """Of each row, [..., 1]."""
    w = w.float().abs()
    return w.amax(-1, keepdim=True) if w.numel() else w.new_zeros((*w.shape[:-1], 1))


def in_storage_order(t: Tensor) -> Tensor:
    """What code reads that knows no strides; t itself where its storage is too short for that."""
    if t.untyped_storage().nbytes() < (t.storage_offset() + t.numel()) * t.element_size():
        return t
    return t.as_strided(t.shape, torch.empty(t.shape, device="meta").stride())


@mutant(int8, killed_by="test_quant::test_int8_error_is_at_most_half_a_step")
class ScaleFrom128(RightInt8):
    """The scale is absmax / 128."""

    def quantize(self, w):
        return int8_of(w, (absmax(w) / 128).clamp_min(SMALLEST))


@mutant(int8, killed_by="test_quant::test_int8_rounds_to_nearest_over_all_of_a_row")
class Truncates(RightInt8):
    """Codes are cut off, not rounded."""

    def quantize(self, w):
        q = super().quantize(w)
        return dataclasses.replace(q, codes=(w.float() / q.scales).clamp(-127, 127).to(torch.int8))


@mutant(int8, killed_by="test_quant::test_int8_codes_reach_127_in_each_row_and_never_pass_it")
class UsesMinus128(RightInt8):
    """The most negative weight of a row becomes -128."""

    def quantize(self, w):
        q = super().quantize(w)
        return dataclasses.replace(q, codes=q.codes - (q.codes == -127).to(torch.int8))


@mutant(int8, killed_by="test_quant::test_int8_error_is_at_most_half_a_step")
class Wraps(RightInt8):
    """A scale for 7 bits and a half, and a cast that wraps around where it should saturate."""

    def quantize(self, w):
        scales = (absmax(w) / 180).clamp_min(SMALLEST)
        codes = (w.float() / scales).round().to(torch.int32).to(torch.int8)
        return Quantized(codes, scales, "int8", tuple(w.shape), w.dtype)


@mutant(int8, killed_by="test_quant::test_finite_weights_of_any_size_come_back_finite_and_with_their_sign")
class ScaleUncapped(RightInt8):
    """The scale of the largest float32 is absmax / 127, and 127 times that is infinite."""

    def quantize(self, w):
        return int8_of(w, (absmax(w) / 127).clamp_min(SMALLEST))


@mutant(int8, killed_by="test_quant::test_zeros_beside_other_weights_come_back_as_zeros")
class ZeroOverZero(RightInt8):
    """A row of zeros has the scale 0, and zeros divided by it are NaN, stored as whatever that casts to."""

    def quantize(self, w):
        scales = absmax(w) / 127
        codes = (w.float() / scales).round().clamp(-127, 127)
        return Quantized(codes, scales, "int8", tuple(w.shape), w.dtype)


@mutant(int8, killed_by="test_quant::test_int8_error_is_at_most_half_a_step")
class ReciprocalOfATinyScale(RightInt8):
    """Weights are multiplied by 1 / scale, which overflows: in a tiny row all become the largest."""

    def quantize(self, w):
        scales = absmax(w) / 127
        inverse = torch.where(scales > 0, 1 / scales, 0)
        codes = (w.float() * inverse).round().clamp(-127, 127).to(torch.int8)
        return Quantized(codes, scales, "int8", tuple(w.shape), w.dtype)


@mutant(int8, killed_by="test_quant::test_int8_error_is_at_most_half_a_step")
class PerTensorScale(RightInt8):
    """All rows share the largest scale."""

    def quantize(self, w):
        scales = super().quantize(w).scales
        return int8_of(w, scales.amax().expand_as(scales).contiguous() if scales.numel() else scales)


@mutant(int8, killed_by="test_quant::test_int8_channels_do_not_depend_on_each_other")
class ScaleOfTheNeighbour(RightInt8):
    """Rows take the larger of their own scale and the first row's."""

    def quantize(self, w):
        scales = super().quantize(w).scales
        return int8_of(w, torch.maximum(scales, scales[:1]))


@mutant(int8, killed_by="test_quant::test_int8_error_is_at_most_half_a_step")
class HalfScale(RightInt8):
    """The scale went through float16."""

    def quantize(self, w):
        largest = torch.finfo(torch.float16).max
        return int8_of(w, super().quantize(w).scales.clamp(2.0**-24, largest).half().float())


@mutant(int8, killed_by="test_quant::test_finite_weights_of_any_size_come_back_finite_and_with_their_sign")
class HalfScaleUnclamped(RightInt8):
    """The scale is rounded through float16 down to its denormals, and a code past 127 wraps around."""

    def quantize(self, w):
        largest = torch.finfo(torch.float16).max
        scales = super().quantize(w).scales.clamp(2.0**-24, largest).half().float()
        codes = (w.float() / scales).round().to(torch.int32).to(torch.int8)
        return Quantized(codes, scales, "int8", tuple(w.shape), w.dtype)


@mutant(int8, killed_by="test_quant::test_int8_takes_a_byte_a_weight_and_a_float32_a_row")
class TwoBytesACode(RightInt8):
    """The codes are right but kept in int16."""

    def quantize(self, w):
        q = super().quantize(w)
        return dataclasses.replace(q, codes=q.codes.to(torch.int16))


@mutant(int8, killed_by="test_quant::test_strided_weights_give_what_their_contiguous_copy_gives")
class ReadsTheBuffer(RightInt8):
    """Strides are ignored: the weights are read from the storage in order."""

    def quantize(self, w):
        return super().quantize(in_storage_order(w).nan_to_num())


@mutant(int8, killed_by="test_quant::test_strided_codes_and_scales_decode_as_their_contiguous_copies")
class DecodesTheBuffer(RightInt8):
    """Strides of the codes are ignored."""

    def dequantize(self, q, dtype=None):
        return super().dequantize(dataclasses.replace(q, codes=in_storage_order(q.codes)), dtype)


@mutant(int8, killed_by="test_quant::test_half_precision_is_the_float32_weight_rounded_once")
class MultipliesInHalfPrecision(RightInt8):
    """The scale is rounded to the dtype asked for, and then the product is too."""

    def dequantize(self, q, dtype=None):
        dtype = dtype or q.dtype
        return q.codes.to(dtype) * q.scales.to(dtype)


@mutant(int8, killed_by="test_quant::test_arguments_are_left_as_they_were")
class DividesInPlace(RightInt8):
    """The weight itself is divided by its scale."""

    def quantize(self, w):
        q = super().quantize(w)
        w.copy_(w / q.scales)
        return q


@mutant(int8, killed_by="test_quant::test_weights_that_are_not_finite_are_refused_with_their_place")
class AcceptsNaN(RightInt8):
    """What is not finite becomes zero, without a word."""

    def quantize(self, w):
        return super().quantize(w.nan_to_num(0, 0, 0))


@mutant(int8, killed_by="test_quant::test_shape_dtype_and_device_come_back")
class ForgetsTheDtype(RightInt8):
    """Everything comes back in float32."""

    def dequantize(self, q, dtype=None):
        return super().dequantize(q, dtype or torch.float32)


@mutant(int8, killed_by="test_quant::test_what_is_no_float_tensor_is_refused")
class AcceptsNumbers(RightInt8):
    """Whatever torch can make a float32 tensor of is taken."""

    def quantize(self, w):
        return super().quantize(torch.as_tensor(w).float())


@mutant(int8, killed_by="test_quant::test_weights_are_dequantized_to_float_dtypes_only")
class CutsToWholeNumbers(RightInt8):
    """A weight is dequantized to whole numbers when asked for, and loses all below 1."""

    def dequantize(self, q, dtype=None):
        return super().dequantize(q, torch.float32).to(dtype or q.dtype)


@mutant(int8, killed_by="test_quant::test_large_weights_decode_as_small_ones_do")
class DropsTheLastRows(RightInt8):
    """Rows are decoded 4096 weights at a time, and what is left over is not."""

    def dequantize(self, q, dtype=None):
        w = torch.empty(q.shape, dtype=dtype or q.dtype)
        whole = q.codes.numel() // 4096 * 4096
        w.view(-1)[:whole] = super().dequantize(q, dtype).view(-1)[:whole]
        return w


@mutant(int8, killed_by="test_quant::test_codes_of_another_layout_are_refused")
class DecodesAnything(RightInt8):
    """The layout is not looked at."""

    def dequantize(self, q, dtype=None):
        return super().dequantize(dataclasses.replace(q, layout="int8"), dtype)


def with_scales(fmt, w: Tensor, scales: Tensor) -> Quantized:
    """nf4 with the codes that belong to these scales."""
    q = RightNF4.quantize(fmt, w)
    levels = torch.tensor(NF4_LEVELS)
    each = scales.repeat_interleave(fmt.block_size)[: w.numel()].view(w.shape)
    unit = w.float() / torch.where(each > 0, each, 1)
    codes = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2).flatten()
    return dataclasses.replace(q, codes=fmt.pack(codes), scales=scales)


@mutant(nf4, killed_by="test_quant::test_nf4_scales_are_the_absmax_of_the_real_elements")
class TailPolluted(RightNF4):
    """The last block is filled up with memory that nobody wrote, and its absmax counts that too."""

    def quantize(self, w):
        scales, tail = super().quantize(w).scales, w.numel() % self.block_size
        if not tail:
            return super().quantize(w)
        rest = torch.empty(self.block_size - tail).abs().amax()
        scales[-1:] = torch.maximum(scales[-1:], rest)
        return with_scales(self, w, scales)


@mutant(nf4, killed_by="test_quant::test_nf4_error_is_at_most_half_the_widest_gap")
class TailPadded(RightNF4):
    """The last block is filled up with ones, and its absmax counts them."""

    def quantize(self, w):
        scales = super().quantize(w).scales
        if w.numel() % self.block_size:
            scales[-1].clamp_(min=1)
        return with_scales(self, w, scales)


@mutant(nf4, killed_by="test_quant::test_codes_mean_what_the_contract_says")
class NibblesSwapped(RightNF4):
    """The second of two codes is decoded first."""

    def dequantize(self, q, dtype=None):
        return super().dequantize(dataclasses.replace(q, codes=q.codes << 4 | q.codes >> 4), dtype)


@mutant(nf4, killed_by="test_quant::test_nf4_packs_the_first_code_high_and_ends_with_zero")
class NibblesSwappedBothWays(RightNF4):
    """The first code is packed low, and unpacked from there: consistent, but another layout."""

    def pack(self, codes):
        packed = super().pack(codes)
        return packed << 4 | packed >> 4

    def unpack(self, packed, count):
        return super().unpack(packed << 4 | packed >> 4, count)


@mutant(nf4, killed_by="test_quant::test_nf4_unpacks_what_was_packed")
class DropsTheOddCode(RightNF4):
    """The last of an odd number of codes is not packed."""

    def pack(self, codes):
        packed = super().pack(codes)
        return packed if len(codes) % 2 == 0 else F.pad(packed[:-1], (0, 1))


@mutant(nf4, killed_by="test_quant::test_nf4_packs_no_code_past_four_bits")
class PacksAnything(RightNF4):
    """A code past four bits spills into its neighbour."""

    def pack(self, codes):
        even = F.pad(codes.to(torch.uint8), (0, len(codes) % 2))
        return even[0::2] << 4 | even[1::2]


@mutant(nf4, killed_by="test_quant::test_nf4_takes_the_nearest_level")
class LevelBelow(RightNF4):
    """Not the nearest level is taken but the next lower one."""

    def quantize(self, w):
        q = super().quantize(w)
        each = q.scales.repeat_interleave(self.block_size)[: w.numel()].view(w.shape)
        unit = w.float() / torch.where(each > 0, each, 1)
        codes = torch.bucketize(unit, torch.tensor(NF4_LEVELS[1:]), right=True).flatten()
        return dataclasses.replace(q, codes=self.pack(codes))


@mutant(nf4, killed_by="test_quant::test_nf4_midway_takes_the_lower_level_and_a_hair_more_the_upper")
class TiesGoUp(RightNF4):
    """Midway between two levels the upper is taken."""

    def quantize(self, w):
        q, levels = super().quantize(w), torch.tensor(NF4_LEVELS)
        each = q.scales.repeat_interleave(self.block_size)[: w.numel()].view(w.shape)
        unit = w.float() / torch.where(each > 0, each, 1)
        codes = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2, right=True).flatten()
        return dataclasses.replace(q, codes=self.pack(codes))


@mutant(nf4, killed_by="test_quant::test_nf4_error_on_gaussian_weights_is_9_20_percent")
class EvenLevels(RightNF4):
    """Sixteen levels at even distances, good to the same bound but not made for normal weights."""

    def quantize(self, w):
        q = super().quantize(w)
        each = q.scales.repeat_interleave(self.block_size)[: w.numel()].view(w.shape)
        unit = w.float() / torch.where(each > 0, each, 1)
        return dataclasses.replace(q, codes=self.pack(((unit + 1) * 7.5).round().to(torch.uint8).flatten()))

    def dequantize(self, q, dtype=None):
        unit = self.unpack(q.codes, torch.Size(q.shape).numel()).float() / 7.5 - 1
        each = q.scales.repeat_interleave(self.block_size)[: unit.numel()]
        return (unit * each).view(q.shape).to(dtype or q.dtype)


@mutant(nf4, killed_by="test_quant::test_nf4_takes_half_a_byte_a_weight_and_a_float32_a_block")
class ACodeAByte(RightNF4):
    """Codes are not packed: 3.8 times smaller than float32, not 7.1."""

    def quantize(self, w):
        q = super().quantize(w)
        return dataclasses.replace(q, codes=self.unpack(q.codes, w.numel()))

    def dequantize(self, q, dtype=None):
        return super().dequantize(dataclasses.replace(q, codes=self.pack(q.codes)), dtype)


@mutant(nf4, killed_by="test_quant::test_zeros_beside_other_weights_come_back_as_zeros")
class ZeroBlockOfOnes(RightNF4):
    """A block of zeros is divided by 0, and the NaN is stored as the highest level with the scale 1."""

    def quantize(self, w):
        q = super().quantize(w)
        zero = (q.scales == 0).repeat_interleave(self.block_size)[: w.numel()]
        codes = self.unpack(q.codes, w.numel()).masked_fill(zero, 15)
        return dataclasses.replace(q, codes=self.pack(codes), scales=torch.where(q.scales > 0, q.scales, 1))


@mutant(nf4, killed_by="test_quant::test_nf4_scales_are_the_absmax_of_the_real_elements")
class ScaleOfBfloat16(RightNF4):
    """The scale went through bfloat16."""

    def quantize(self, w):
        return with_scales(self, w, super().quantize(w).scales.bfloat16().float().clamp(max=3e38))


@mutant(nf4, killed_by="test_quant::test_nf4_weights_on_levels_come_back_bit_for_bit")
class ScaleAHairHigh(RightNF4):
    """The scale is the next float32 above the absmax: each time it is saved, it grows."""

    def quantize(self, w):
        scales = super().quantize(w).scales
        return with_scales(self, w, torch.nextafter(scales, scales.sign() * 3e38))


@mutant(nf4, killed_by="test_quant::test_strided_weights_give_what_their_contiguous_copy_gives")
class FlattensTheStorage(RightNF4):
    """Strides are ignored: the weights are read from the storage in order."""

    def quantize(self, w):
        return super().quantize(in_storage_order(w).nan_to_num())


@mutant(quantized_linear, killed_by="test_quant::test_linear_multiplies_by_the_decoded_weight")
class TransposesSquareWeights(QuantizedLinear):
    """A square weight is taken for [in, out]."""

    def forward(self, x):
        if self.in_features != self.out_features:
            return super().forward(x)
        return F.linear(x, self.weight.to(x.dtype).mT, None if self.bias is None else self.bias.to(x.dtype))


@mutant(quantized_linear, killed_by="test_quant::test_linear_gives_one_row_what_it_gives_the_first_of_two")
class TransposesForOneRow(QuantizedLinear):
    """The fast path for one row takes a square weight for [in, out]."""

    def forward(self, x):
        if x.shape[:-1].numel() == 1 and self.in_features == self.out_features:
            return x @ self.weight.to(x.dtype) + (0 if self.bias is None else self.bias.to(x.dtype))
        return super().forward(x)


@mutant(quantized_linear, killed_by="test_quant::test_linear_multiplies_by_the_decoded_weight")
class DropsTheBias(QuantizedLinear):
    """The bias is kept, and not added."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


@mutant(quantized_linear, killed_by="test_quant::test_linear_multiplies_by_the_decoded_weight")
class MultipliesInBfloat16(QuantizedLinear):
    """The product is computed in bfloat16 whatever x is."""

    def forward(self, x):
        return super().forward(x.bfloat16()).to(x.dtype)


@mutant(quantized_linear, killed_by="test_quant::test_linear_multiplies_by_the_decoded_weight")
class FlattensTheBatch(QuantizedLinear):
    """Leading axes come back as one."""

    def forward(self, x):
        return super().forward(x).flatten(0, -2) if x.ndim > 2 else super().forward(x)


@mutant(quantized_linear, killed_by="test_quant::test_linear_loads_what_another_saved")
class KeepsOldScales(QuantizedLinear):
    """Scales are saved, and nothing loads them."""

    def _load_from_state_dict(self, *args):
        own = self.scales.clone()
        super()._load_from_state_dict(*args)
        self.scales.copy_(own)


@mutant(
    quantized_linear, killed_by="test_quant::test_linear_refuses_a_state_of_another_layout_and_keeps_its_own"
)
class LoadsAnyLayout(QuantizedLinear):
    """Whatever has the right names is taken."""

    def _fault(self, state):
        return None


@mutant(
    quantized_linear, killed_by="test_quant::test_linear_keeps_codes_and_scales_when_the_module_changes_dtype"
)
class ScalesFollowTheDtype(QuantizedLinear):
    """module.half() rounds the scales."""

    def _apply(self, fn, recurse=True):
        return nn.Module._apply(self, fn, recurse)


@mutant(
    quantized_linear,
    killed_by="test_quant::test_linear_takes_a_quarter_of_the_bytes_and_frees_the_float_weight",
)
class KeepsTheFloatWeight(QuantizedLinear):
    """The float weight is kept in an attribute, out of sight of parameters() and buffers()."""

    @classmethod
    def from_linear(cls, linear, *format):
        layer = super().from_linear(linear, *format)
        layer.original = (linear.weight,)
        return layer


@mutant(quantized_linear, killed_by="test_quant::test_linear_trains_its_bias_and_not_its_weight")
class DetachesX(QuantizedLinear):
    """No gradient reaches x."""

    def forward(self, x):
        return super().forward(x.detach()) + 0 * x.sum()


@mutant(quantized_linear, killed_by="test_quant::test_linear_can_be_copied_and_pickled")
class SharesItsCopy(QuantizedLinear):
    """A copy has the very same scales."""

    def __deepcopy__(self, memo):
        return type(self)(self.stored, self.bias, self.format)


@mutant(quantized_linear, killed_by="test_quant::test_linear_refuses_x_of_another_width_or_whole_numbers")
class RoundsToWholeNumbers(QuantizedLinear):
    """Whole numbers are multiplied by weights cut to whole numbers."""

    def forward(self, x):
        return x if not x.is_floating_point() else super().forward(x)


@mutant(quantize_op, killed_by="test_quant::test_quantize_refuses_the_whole_module_and_changes_nothing")
def unties_silently(module, format, skip=(), block_size=64):
    """A tied weight is quantized in one place and stays float in the other."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.data)
    return quantize_(module, format, skip, block_size)


@mutant(quantize_op, killed_by="test_quant::test_quantize_refuses_the_whole_module_and_changes_nothing")
def half_done(module, format, skip=(), block_size=64):
    """Layers are replaced one by one, and the error comes in the middle."""
    for child in module.children():
        if not isinstance(child, nn.Linear) and list(child.children()) and not skip:
            quantize_(child, format, block_size=block_size)
    return quantize_(module, format, skip, block_size)


@mutant(quantize_op, killed_by="test_quant::test_quantize_replaces_all_but_what_it_is_told_to_skip")
def skips_nothing(module, format, skip=(), block_size=64):
    """skip is checked and then forgotten."""
    quantize_(module, format, skip, block_size)
    return quantize_(module, format, (), block_size)


@mutant(quantize_op, killed_by="test_quant::test_quantize_makes_a_module_compute_with_the_decoded_weights")
def quantizes_to_eval(module, format, skip=(), block_size=64):
    """The replacements forget whether the module was in training."""
    quantize_(module, format, skip, block_size)
    for layer in module.modules():
        if isinstance(layer, QuantizedLinear):
            layer.eval()
    return module


@mutant(quantize_op, killed_by="test_quant::test_quantize_leaves_alone_what_is_quantized")
def quantizes_again(module, format, skip=(), block_size=64):
    """What is quantized already is quantized once more."""
    quantize_(module, format, skip, block_size)
    for path, layer in list(module.named_modules()):
        if isinstance(layer, QuantizedLinear) and layer.layout != "nf4/64" and format == "nf4":
            linear = nn.Linear(layer.in_features, layer.out_features)
            linear.weight.data, linear.bias = layer.weight, layer.bias
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, QuantizedLinear.from_linear(linear, "nf4"))
    return module


@mutant(quantize_op, killed_by="test_quant::test_quantize_skips_a_tied_head_and_leaves_it_tied")
def copies_what_it_skips(module, format, skip=(), block_size=64):
    """What is skipped keeps its values, but in a copy of its own."""
    quantize_(module, format, skip, block_size)
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.weight = nn.Parameter(layer.weight.detach().clone())
    return module


@mutant(quantize_op, killed_by="test_quant::test_quantized_modules_load_what_another_saved")
def hides_the_scales(module, format, skip=(), block_size=64):
    """Scales are not part of the state, and loading asks for none."""
    quantize_(module, format, skip, block_size)
    for layer in module.modules():
        if isinstance(layer, QuantizedLinear):
            layer.register_buffer("scales", layer.scales, persistent=False)
            layer._fault = lambda state: None
    return module


@mutant(int8, killed_by="test_quant::test_devices_agree_bit_for_bit")
class RoundsAtRandom(RightInt8):
    """Codes are rounded up or down by chance, as gradients are: right on average, different every time."""

    def quantize(self, w):
        q = super().quantize(w)
        codes = (w.float() / q.scales + torch.rand(w.shape)).floor().clamp(-127, 127).to(torch.int8)
        return dataclasses.replace(q, codes=codes)


@mutant(unguarded(nf4), killed_by="test_quant::test_nf4_refuses_other_block_sizes")
class AnyBlockSize(RightNF4):
    """A block size that is none is taken for 64."""

    def __init__(self, block_size=64):
        super().__init__()


@mutant(int8, killed_by="test_quant::test_linear_serves_any_object_with_the_methods_of_a_format")
class HalfOfEachCode(RightInt8):
    """Weights come back as half of what their codes say."""

    def dequantize(self, q, dtype=None):
        return super().dequantize(q, dtype) / 2


@mutant(quantized_linear, killed_by="test_quant::test_linear_moves_with_its_module")
class BiasLeftBehind(QuantizedLinear):
    """A layer that has moved no longer adds its bias."""

    moved = False

    def _apply(self, fn, recurse=True):
        self.moved = True
        return super()._apply(fn, recurse)

    def forward(self, x):
        y = super().forward(x)
        return y - self.bias if self.moved else y


@mutant(quantize_op, killed_by="test_quant::test_a_module_without_memory_is_quantized_and_then_loaded")
def scales_not_loaded(module, *args, **kwargs):
    """A module without memory takes ones for the scales that it is to load."""
    empty = any(p.is_meta for p in module.parameters())
    quantize_(module, *args, **kwargs)

    def ones(layer, state, prefix, *rest):
        state[f"{prefix}scales"] = torch.ones_like(state[f"{prefix}scales"])

    for layer in module.modules():
        if empty and isinstance(layer, QuantizedLinear):
            layer.register_load_state_dict_pre_hook(ones)
    return module


@mutant(quantized_linear, killed_by="test_quant::test_linear_multiplies_by_the_decoded_weight")
class OneScaleATile(QuantizedLinear):
    """A tile of two blocks is multiplied by the scale of the first."""

    def forward(self, x):
        kept, scales = self.scales, self.scales.clone()
        if self.layout != "int8":
            scales[1::2] = scales[: len(scales) - 1 : 2]
        self.scales = scales
        y = super().forward(x)
        self.scales = kept
        return y
