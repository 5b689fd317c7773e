"""What a quantized weight, and a Linear that holds one, must never get wrong."""

import contextlib
import copy
import pickle
import weakref
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from perf_lab.numerics import assert_close, judge, poisoned
from perf_lab.pytest_plugin import implementations
from perf_lab.quant import NF4_LEVELS, Quantized, QuantizedLinear, int8, nf4, quantize_op, quantized_linear
from perf_lab.strategies import Input, dtype_name, inputs, lengths

SMALLEST_DENORMAL, LARGEST = 2.0**-149, torch.finfo(torch.float32).max  # of float32
BLOCKS = st.sampled_from([2**k for k in range(4, 13)])
FORMATS = st.one_of(st.just(("int8", 64)), st.tuples(st.just("nf4"), BLOCKS))
SHAPES = st.lists(lengths(40), max_size=3).map(tuple)  # 0-d, empty and odd ones too
SEEDS = st.integers(0, 2**16)


def each_format(test):
    """`implementations`, of both formats."""
    params = []
    for op in (int8, nf4):
        namesake = type(test.__name__, (), {})  # takes the mark in place of the test
        for param in implementations(op)(namesake).pytestmark[0].args[1]:
            params.append(pytest.param(*param.values, marks=param.marks, id=f"{param.id}-{op.name}"))
    return pytest.mark.parametrize(("device", "impl"), params)(test)


@dataclass(frozen=True)
class Rows:
    """Normal numbers with each row times a power of two of its own, from 2^low to 2^high; one in
    four rows is zeros. What would overflow is the dtype's largest number."""

    shape: tuple[int, ...]
    dtype: str
    seed: int
    low: int = -149
    high: int = 128

    def on(self, device: str) -> Tensor:
        """The tensor; the same numbers on every device."""
        g = torch.Generator().manual_seed(self.seed)
        w = torch.randn(self.shape, generator=g, dtype=torch.float64)
        rows = (*self.shape[:-1], 1)
        w = w * 2.0 ** torch.randint(self.low, self.high + 1, rows, generator=g)
        w = torch.where(torch.rand(rows, generator=g) < 1 / 4, 0, w)
        dtype = getattr(torch, self.dtype)
        largest = torch.finfo(dtype).max
        return w.clamp(-largest, largest).to(dtype).to(device)


def rows(dtype=torch.float32, low=-149, high=128):
    """A `Rows` of any two lengths, within these powers of two."""
    shapes = st.tuples(lengths(9, smallest=1), lengths(300))
    return st.builds(Rows, shapes, st.just(dtype_name(dtype)), SEEDS, st.just(low), st.just(high))


def decoded(q: Quantized) -> Tensor:
    """What q means, in float64 on the CPU, by the oracle of its format."""
    return (int8 if q.layout == "int8" else nf4).oracle(q)


def flushed(device: str) -> float:
    """What a device adds to an error that treats denormals as zero."""
    return 2.0**-126 if device == "mps" else 0.0


def block_absmax(w: Tensor, block_size: int) -> Tensor:
    """For each element of w the largest magnitude in its block, in float64 on the CPU."""
    blocks = w.cpu().double().flatten().abs().split(block_size)
    return torch.cat([block.max().expand(block.shape) if len(block) else block for block in blocks]).view(
        w.shape
    )


# Both formats


@each_format
@given(w=rows())
def test_finite_weights_of_any_size_come_back_finite_and_with_their_sign(device, impl, w):
    w = w.on(device)
    with poisoned():
        back = impl().dequantize(impl().quantize(w))
    assert back.isfinite().all()
    assert (back.sign() * w.sign() >= 0).all()


@each_format
@given(width=lengths(300, smallest=1), seed=SEEDS, tiny=st.sampled_from([1e-45, 1e-39, 3e-6, 1.0, 3.4e38]))
def test_zeros_beside_other_weights_come_back_as_zeros(device, impl, width, seed, tiny):
    kept = torch.rand(5, 1, generator=torch.Generator().manual_seed(seed)) < 0.5
    w = torch.where(kept, tiny, torch.zeros(5, width)).to(device)
    back = impl().dequantize(impl().quantize(w))
    assert (back[w == 0] == 0).all()


@each_format
@given(data=st.data())
def test_strided_weights_give_what_their_contiguous_copy_gives(device, impl, data):
    w = data.draw(SHAPES.flatmap(lambda shape: inputs(shape, torch.float32)), label="w").on(device)
    got, should_be = impl().quantize(w), impl().quantize(w.clone(memory_format=torch.contiguous_format))
    assert torch.equal(got.codes, should_be.codes)
    assert torch.equal(got.scales, should_be.scales)


@each_format
@given(w=rows(), layout=st.sampled_from(["strided", "transposed", "offset"]))
def test_strided_codes_and_scales_decode_as_their_contiguous_copies(device, impl, w, layout):
    q = impl().quantize(w.on(device))
    moved = Quantized(*(with_strides(t, layout) for t in (q.codes, q.scales)), q.layout, q.shape, q.dtype)
    assert torch.equal(impl().dequantize(moved), impl().dequantize(q))


def with_strides(t: Tensor, layout: str) -> Tensor:
    """The same numbers in a buffer with other strides."""
    if layout == "transposed":
        return t.mT.contiguous().mT if t.ndim > 1 else t
    buffer = t.new_full((*t.shape[:-1], 2 * t.shape[-1] + 3), 99)
    view = buffer[..., :-3:2] if layout == "strided" else buffer[..., 3 : 3 + t.shape[-1]]
    return view.copy_(t)


@each_format
@given(shape=SHAPES, dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_shape_dtype_and_device_come_back(device, impl, shape, dtype):
    w = Input(shape, dtype_name(dtype)).on(device)
    back = impl().dequantize(impl().quantize(w))
    assert (back.shape, back.dtype, back.device) == (w.shape, w.dtype, w.device)


@each_format
@given(w=rows())
def test_codes_mean_what_the_contract_says(device, impl, w):
    q = impl().quantize(w.on(device))
    should_be = decoded(q)
    allowed = (
        2**-24 * should_be.abs() + SMALLEST_DENORMAL / 2 + flushed(device)
    )  # one rounding of the product
    assert_close(
        impl().dequantize(q, torch.float32), should_be, allowed, f"{impl}().quantize({w}.on({device!r}))"
    )


@each_format
@given(w=rows(low=-100))
def test_devices_agree_bit_for_bit(device, impl, w):
    here, there = impl().quantize(w.on("cpu")), impl().quantize(w.on(device)).to("cpu")
    assert torch.equal(there.codes, here.codes) and torch.equal(there.scales, here.scales)
    assert torch.equal(impl().dequantize(here.to(device)).cpu(), impl().dequantize(here))


@each_format
@given(
    shape=st.sampled_from([(700, 777), (3, 2**18 + 17), (2**18 + 1, 2), (2**19,), (2**18 + 1,)]), seed=SEEDS
)
def test_large_weights_decode_as_small_ones_do(device, impl, shape, seed):
    q = impl().quantize(Input(shape, seed=seed).on(device))
    with poisoned():
        back = impl().dequantize(q)
    assert_close(
        back, decoded(q), 2**-24 * decoded(q).abs(), f"{impl}().quantize(Input({shape}, seed={seed}).on())"
    )


@each_format
@given(w=rows(torch.bfloat16), dtype=st.sampled_from([torch.float16, torch.bfloat16]))
def test_half_precision_is_the_float32_weight_rounded_once(device, impl, w, dtype):
    q = impl().quantize(w.on(device))
    assert torch.equal(impl().dequantize(q, dtype), impl().dequantize(q, torch.float32).to(dtype))


@each_format
@given(w=rows())
def test_arguments_are_left_as_they_were(device, impl, w):
    before, w = w.on(device), w.on(device)
    q = impl().quantize(w)
    codes, scales = q.codes.clone(), q.scales.clone()
    impl().dequantize(q)
    assert torch.equal(w, before) and torch.equal(q.codes, codes) and torch.equal(q.scales, scales)


@each_format
@given(shape=st.tuples(lengths(9, smallest=1), lengths(99, smallest=1)), data=st.data())
def test_weights_that_are_not_finite_are_refused_with_their_place(device, impl, shape, data):
    where = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    w = Input(shape).on(device)
    w[where] = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    with expected(ValueError, "w: got", str(list(where))):
        impl().quantize(w)


@contextlib.contextmanager
def expected(error: type[Exception], *words: str):
    """`pytest.raises`, with all of these words in the message; a missing error is an AssertionError,
    as a mutant must meet it.
    """
    found = None
    try:
        yield
    except error as raised:
        found = raised
    assert found is not None, f"no {error.__name__} was raised"
    missing = [word for word in words if word not in str(found)]
    assert not missing, f"{missing} not in the message: {found}"


@each_format
@given(w=st.sampled_from([3.0, torch.ones(3, dtype=torch.int32), torch.ones(3, dtype=torch.float64)]))
def test_what_is_no_float_tensor_is_refused(device, impl, w):
    with expected(TypeError, "w: got"):
        impl().quantize(w)


@each_format
def test_codes_of_another_layout_are_refused(device, impl):
    q = impl().quantize(Input((4, 32)).on(device))
    foreign = Quantized(q.codes, q.scales, "nf4/16", q.shape, q.dtype)
    with expected(ValueError, "q: got the layout 'nf4/16'", repr(q.layout)):
        impl().dequantize(foreign)


@each_format
def test_weights_are_dequantized_to_float_dtypes_only(device, impl):
    with expected(TypeError, "dtype: got torch.int64"):
        impl().dequantize(impl().quantize(Input((4, 32)).on(device)), torch.int64)


# int8


@implementations(int8, dtypes=True)
@given(data=st.data())
def test_int8_error_is_at_most_half_a_step(device, impl, dtype, data):
    recipe = data.draw(rows(dtype), label="w")
    w = recipe.on(device)
    back = impl().dequantize(impl().quantize(w), torch.float32)
    w = w.cpu().double()
    absmax = w.abs().amax(-1, keepdim=True) if w.numel() else w
    allowed = (absmax * (1 / 254 + 2**-23)).clamp_min(2.0**-127) + flushed(device)
    assert_close(back, w, allowed, f"{impl}().quantize({recipe}.on({device!r}))")


@implementations(int8)
@given(largest=st.one_of(st.just(LARGEST), st.integers(-119, 126).map(lambda e: 2.0**e)))
def test_int8_rounds_to_nearest_over_all_of_a_row(device, impl, largest):
    w = (torch.linspace(-1, 1, 4001, dtype=torch.float64) * largest).float().to(device)
    back = impl().dequantize(impl().quantize(w))
    assert_close(back, w.cpu().double(), largest * (1 / 254 + 2**-23), f"{impl} on a line to {largest}")


@implementations(int8)
@given(w=rows(low=-116, high=128))
def test_int8_codes_reach_127_in_each_row_and_never_pass_it(device, impl, w):
    w = w.on(device)
    codes = impl().quantize(w).codes
    assert codes.dtype is torch.int8 and codes.shape == w.shape
    largest = codes.int().abs().amax(-1) if w.numel() else codes.int()
    assert largest.le(127).all()
    # 2^-119: below it the scale is held, and codes stay smaller
    assert (largest[w.abs().amax(-1) >= 2**-119] == 127).all() if w.numel() else True


@implementations(int8)
@given(w=rows(), other=SEEDS)
def test_int8_channels_do_not_depend_on_each_other(device, impl, w, other):
    w = w.on(device)
    changed = torch.cat([Rows((1, w.shape[1]), "float32", other).on(device), w[1:]])
    got, should_be = impl().quantize(changed), impl().quantize(w)
    assert torch.equal(got.codes[1:], should_be.codes[1:])
    assert torch.equal(got.scales[1:], should_be.scales[1:])


@implementations(int8)
@given(shape=SHAPES)
def test_int8_takes_a_byte_a_weight_and_a_float32_a_row(device, impl, shape):
    q = impl().quantize(Input(shape).on(device))
    n = torch.Size(shape)
    assert q.scales.dtype is torch.float32
    assert q.nbytes == n.numel() + 4 * n[:-1].numel()


# nf4


def test_nf4_levels_are_quantiles_of_the_normal_distribution():
    tail = (1 / 32 + 1 / 30) / 2  # QLoRA, appendix E
    up = torch.special.ndtri(torch.linspace(1 - tail, 0.5, 9, dtype=torch.float64))
    down = -torch.special.ndtri(torch.linspace(1 - tail, 0.5, 8, dtype=torch.float64))
    should_be = torch.cat([down, up[:-1].flip(0)]) / up[0]
    # the published levels were computed in float32: several roundings of a quantile up to 1.85
    assert_close(torch.tensor(NF4_LEVELS).double(), should_be, 4 * 2**-24, "NF4_LEVELS")


@implementations(nf4, dtypes=True)
@given(data=st.data(), block_size=BLOCKS)
def test_nf4_error_is_at_most_half_the_widest_gap(device, impl, dtype, data, block_size):
    recipe = data.draw(rows(dtype), label="w")
    w = recipe.on(device)
    fmt = impl(block_size=block_size)
    with poisoned():
        back = fmt.dequantize(fmt.quantize(w), torch.float32)
    allowed = block_absmax(w, block_size) * (0.1519036 + 3 * 2**-24) + SMALLEST_DENORMAL / 2 + flushed(device)
    assert_close(back, w.cpu().double(), allowed, f"{impl}({block_size}).quantize({recipe}.on({device!r}))")


@implementations(nf4)
@given(w=rows(low=-100, high=128), block_size=BLOCKS)
def test_nf4_takes_the_nearest_level(device, impl, w, block_size):
    recipe, w = w, w.on(device)
    absmax = block_absmax(w, block_size)
    distances = (w.cpu().double()[..., None] - absmax[..., None] * levels64()).abs()  # [..., 16]
    q = impl(block_size=block_size).quantize(w)
    got = (w.cpu().double() - decoded(q)).abs()
    assert_close(
        got,
        distances.amin(-1),
        3 * 2**-24 * absmax,
        f"{impl}({block_size}).quantize({recipe}.on({device!r}))",
    )


def levels64() -> Tensor:
    return torch.tensor(NF4_LEVELS).double()  # what they are as float32


@implementations(nf4)
def test_nf4_midway_takes_the_lower_level_and_a_hair_more_the_upper(device, impl):
    levels = torch.tensor(NF4_LEVELS)
    middle = (levels[1:] + levels[:-1]) / 2
    more = torch.nextafter(middle, torch.tensor(2.0))
    w = torch.cat([middle, more, torch.ones(1)]).to(device)  # absmax 1
    assert impl().unpack(impl().quantize(w).codes, 31).tolist() == [*range(15), *range(1, 16), 15]


@implementations(nf4)
@given(codes=st.lists(st.integers(0, 15), max_size=99))
def test_nf4_unpacks_what_was_packed(device, impl, codes):
    codes = torch.tensor(codes, dtype=torch.uint8, device=device)
    with poisoned():
        packed = impl().pack(codes)
        assert torch.equal(impl().unpack(packed, len(codes)), codes)
    assert packed.dtype is torch.uint8 and packed.shape == ((len(codes) + 1) // 2,)


@implementations(nf4)
def test_nf4_packs_the_first_code_high_and_ends_with_zero(device, impl):
    codes = torch.tensor([1, 2, 15], device=device)
    assert impl().pack(codes).tolist() == [0x12, 0xF0]


@implementations(nf4)
@given(code=st.integers(-128, 127).filter(lambda code: not 0 <= code <= 15))
def test_nf4_packs_no_code_past_four_bits(device, impl, code):
    with expected(ValueError, "codes: got", str(code)):
        impl().pack(torch.tensor([3, code, 3], device=device))


@implementations(nf4)
@given(w=rows(low=-100), block_size=BLOCKS)
def test_nf4_weights_on_levels_come_back_bit_for_bit(device, impl, w, block_size):
    fmt = impl(block_size=block_size)
    q = fmt.quantize(w.on(device))
    once = fmt.dequantize(q, torch.float32)
    again = fmt.quantize(once)
    assert torch.equal(again.codes, q.codes) and torch.equal(again.scales, q.scales)
    assert torch.equal(fmt.dequantize(again, torch.float32), once)


@implementations(nf4)
@given(w=rows(), block_size=BLOCKS)
def test_nf4_scales_are_the_absmax_of_the_real_elements(device, impl, w, block_size):
    w = w.on(device)
    with poisoned():
        scales = impl(block_size=block_size).quantize(w).scales
    should_be = block_absmax(w, block_size).flatten()[::block_size]
    assert scales.dtype is torch.float32
    assert torch.equal(scales.cpu().double(), should_be)


@implementations(nf4)
@given(shape=SHAPES, block_size=BLOCKS)
def test_nf4_takes_half_a_byte_a_weight_and_a_float32_a_block(device, impl, shape, block_size):
    q = impl(block_size=block_size).quantize(Input(shape).on(device))
    n = torch.Size(shape).numel()
    assert q.nbytes == (n + 1) // 2 + 4 * -(-n // block_size)


@implementations(nf4)
@given(seed=SEEDS)
def test_nf4_error_on_gaussian_weights_is_9_20_percent(device, impl, seed):
    w = Input((512, 512), seed=seed).on(device)
    error = (impl().dequantize(impl().quantize(w)) - w).norm() / w.norm()
    assert abs(100 * error.item() - 9.20) <= 0.1


@implementations(nf4)
@given(block_size=st.sampled_from([0, -64, 8, 48, 8192, 64.0, True, "64"]))
def test_nf4_refuses_other_block_sizes(device, impl, block_size):
    with expected(ValueError, "block_size: got", "4096"):
        impl(block_size=block_size)


# QuantizedLinear


def linear(out: int, inner: int, bias: bool = True, seed: int = 0, device: str = "cpu") -> nn.Linear:
    """A Linear with these normal weights."""
    layer = nn.utils.skip_init(nn.Linear, inner, out, bias=bias)
    layer.weight.data = Input((out, inner), seed=seed).on()
    if bias:
        layer.bias.data = Input((out,), seed=seed + 1).on()
    return layer.to(device)


def hold_to_oracle(impl, layer, x: Tensor) -> None:
    """The output for x is, within the allowed error, the float64 product with the decoded weight."""
    bias = [] if layer.bias is None else [layer.bias]
    judge(impl, layer(x), (x, decoded(layer.stored), *bias), {}, f"{layer} of x {list(x.shape)}")


@implementations(quantized_linear, dtypes=True)
@given(data=st.data(), format=FORMATS, bias=st.booleans(), seed=SEEDS)
def test_linear_multiplies_by_the_decoded_weight(device, impl, dtype, data, format, bias, seed):
    out, inner = data.draw(st.tuples(lengths(40), lengths(70)), label="out, in")
    leading = data.draw(st.sampled_from([(), (0,), (1,), (3,), (2, 3), (2, 0, 3)]), label="leading")
    x = data.draw(inputs((*leading, inner), dtype), label="x").on(device)
    hold_to_oracle(impl, impl.fn.from_linear(linear(out, inner, bias, seed, device), *format), x)


@each_format
@given(shape=st.tuples(lengths(40), lengths(70)), seed=SEEDS)
def test_linear_serves_any_object_with_the_methods_of_a_format(device, impl, shape, seed):
    layer = QuantizedLinear.from_linear(linear(*shape, seed=seed, device=device), impl())
    hold_to_oracle(quantized_linear["torch"], layer, Input((3, shape[1]), seed=seed).on(device))


@implementations(quantized_linear)
@given(size=lengths(40, smallest=2), format=FORMATS, seed=SEEDS)
def test_linear_gives_one_row_what_it_gives_the_first_of_two(device, impl, size, format, seed):
    layer = impl.fn.from_linear(linear(size, size, seed=seed, device=device), *format)
    x = Input((2, size), seed=seed + 2).on(device)
    hold_to_oracle(impl, layer, x)
    hold_to_oracle(impl, layer, x[:1])


@implementations(quantized_linear)
@given(format=FORMATS, bias=st.booleans(), shape=st.tuples(lengths(40, smallest=1), lengths(70, smallest=1)))
def test_linear_loads_what_another_saved(device, impl, format, bias, shape):
    saved = impl.fn.from_linear(linear(*shape, bias, seed=1, device=device), *format)
    fresh = impl.fn.from_linear(linear(*shape, bias, seed=2, device=device), *format)
    fresh.load_state_dict(saved.state_dict(), strict=True)
    x = Input((3, shape[1])).on(device)
    assert torch.equal(fresh(x), saved(x))
    assert torch.equal(fresh.codes, saved.codes) and torch.equal(fresh.scales, saved.scales)


# What is wrong with a state, and the words that say so.
FOREIGN = {
    "a block size of 32": ["nf4/32", "nf4/64"],
    "another format": ["int8", "nf4/64"],
    "another shape": ["shape [8, 12]", "shape [12, 8]"],
    "a later version": ["version 2", "version 1"],
    "no layout": ["without ['_extra_state']"],
    "no scales": ["without ['scales']"],
    "half scales": ["scales", "torch.float16", "torch.float32"],
    "a float weight": ["float weight"],
}


def foreign_state(impl, device: str, change: str) -> dict:
    """The state_dict of a 12 x 8 nf4/64 layer, with one thing changed."""
    shape = (8, 12) if change == "another shape" else (12, 8)
    format = {"a block size of 32": ("nf4", 32), "another format": ("int8", 64)}.get(change, ("nf4", 64))
    float_layer = linear(*shape, seed=2, device=device)
    state = dict(impl.fn.from_linear(float_layer, *format).state_dict())
    if change == "a later version":
        state["_extra_state"] = torch.tensor(list(b"version 2, nf4/64, shape [12, 8]"), dtype=torch.uint8)
    if change == "half scales":
        state["scales"] = state["scales"].half()
    if change == "a float weight":
        state = dict(float_layer.state_dict())
    state.pop({"no layout": "_extra_state", "no scales": "scales"}.get(change), None)
    return state


@implementations(quantized_linear)
@given(change=st.sampled_from(sorted(FOREIGN)), strict=st.booleans())
def test_linear_refuses_a_state_of_another_layout_and_keeps_its_own(device, impl, change, strict):
    layer = impl.fn.from_linear(linear(12, 8, seed=1, device=device), "nf4", 64)
    before = copy.deepcopy(layer.state_dict())
    with expected(RuntimeError, *FOREIGN[change]):
        layer.load_state_dict(foreign_state(impl, device, change), strict=strict)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@implementations(quantized_linear)
@given(format=FORMATS, convert=st.sampled_from(["half", "bfloat16", "double", "float", "to"]))
def test_linear_keeps_codes_and_scales_when_the_module_changes_dtype(device, impl, format, convert):
    layer = impl.fn.from_linear(linear(12, 24, device=device), *format)
    codes, scales = layer.codes.clone(), layer.scales.clone()
    asked = [torch.bfloat16] if convert == "to" else []
    getattr(nn.Sequential(layer), convert)(*asked)
    assert (layer.codes.dtype, layer.scales.dtype) == (codes.dtype, torch.float32)
    assert torch.equal(layer.codes, codes) and torch.equal(layer.scales, scales)
    assert layer.weight.dtype == layer.bias.dtype  # the weight that it shows follows, as in nn.Linear


@implementations(quantized_linear)
@given(format=FORMATS)
def test_linear_moves_with_its_module(device, impl, format):
    layer = nn.Sequential(impl.fn.from_linear(linear(12, 24), *format)).to(device)[0]
    hold_to_oracle(impl, layer, Input((3, 24)).on(device))


@implementations(quantized_linear)
@given(format=FORMATS)
def test_linear_takes_a_quarter_of_the_bytes_and_frees_the_float_weight(device, impl, format):
    source = linear(256, 512, bias=False, device=device)
    layer, freed = impl.fn.from_linear(source, *format), weakref.ref(source.weight)
    held = sum(t.untyped_storage().nbytes() for t in (*layer.parameters(), *layer.buffers()))
    assert held == layer.stored.nbytes <= 512 * 256 + 4 * max(256, 512 * 256 / format[1])
    # whatever it refers to is pickled with it: a weight in float32 or bfloat16 alone is this or more
    assert len(pickle.dumps(layer)) < source.weight.nbytes / 2
    del source
    assert freed() is None


@implementations(quantized_linear)
@given(format=FORMATS)
def test_linear_can_be_copied_and_pickled(device, impl, format):
    layer = impl.fn.from_linear(linear(12, 24, device=device), *format)
    x = Input((3, 24)).on(device)
    should_be = layer(x)
    others = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    layer.scales.zero_()
    assert all(torch.equal(other(x), should_be) for other in others)


@implementations(quantized_linear)
@given(format=FORMATS)
def test_linear_trains_its_bias_and_not_its_weight(device, impl, format):
    source = linear(12, 24, device=device)
    layer = impl.fn.from_linear(source, *format)
    x = Input((3, 24)).on(device).requires_grad_()
    layer(x).sum().backward()
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    assert layer.bias is source.bias and torch.equal(layer.bias.grad, torch.full_like(layer.bias, 3))
    should_be = decoded(layer.stored).sum(0).expand(3, 24)
    # a sum of 12 terms in float32: 11 additions, each rounding up to the sum of the magnitudes
    assert_close(x.grad, should_be, 11 * 2**-24 * decoded(layer.stored).abs().sum(0), f"{layer} backward")
    assert not (layer.codes.requires_grad or layer.scales.requires_grad or layer.weight.requires_grad)


@implementations(quantized_linear)
@given(format=FORMATS)
def test_linear_refuses_x_of_another_width_or_whole_numbers(device, impl, format):
    layer = impl.fn.from_linear(linear(12, 12, device=device), *format)
    for shape in ((3, 11), (12, 3), ()):
        with expected(ValueError, "x: got shape", "12"):
            layer(torch.ones(shape, device=device))
    with expected(TypeError, "x: got torch.int64"):
        layer(torch.ones(3, 12, device=device, dtype=torch.int64))


# quantize_


class Tiny(nn.Module):
    """Embedding, a block with a norm, a head; the head's weight is the embedding's when `tied`."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.mlp = nn.Sequential(
            nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 16, bias=False), nn.LayerNorm(16)
        )
        self.head = nn.Linear(16, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mlp(self.embed(ids)))


def kinds(module: nn.Module) -> dict[str, type]:
    """The class of each module that has no children."""
    return {path: type(m) for path, m in module.named_modules() if not list(m.children())}


def quantized_paths(module: nn.Module) -> set[str]:
    """Where a Linear was replaced."""
    return {path for path, kind in kinds(module).items() if kind is quantized_linear["torch"].fn}


@implementations(quantize_op)
@given(format=FORMATS, train=st.booleans())
def test_quantize_makes_a_module_compute_with_the_decoded_weights(device, impl, format, train):
    torch.manual_seed(0)  # the initial weights of both modules
    for module, x in (
        (Tiny(), torch.arange(10)),
        (nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True), Input((2, 5, 16)).on()),
    ):
        module, x = module.to(device).train(train), x.to(device)
        twin = copy.deepcopy(module)
        assert impl(module, *format[:1], block_size=format[1]) is module
        for path in quantized_paths(module):
            layer = module.get_submodule(path)
            twin.get_submodule(path).weight.data = layer.weight
            assert layer.training is train
        assert torch.equal(module(x), twin(x))


# What is skipped, and what stays a Linear then.
SKIPS = [
    ((), set()),
    ("head", {"head"}),
    (["head", "mlp.0"], {"head", "mlp.0"}),
    ("mlp", {"mlp.0", "mlp.2"}),
    ("mlp.[01]", {"mlp.0"}),
    ("*", {"mlp.0", "mlp.2", "head"}),
    (lambda path, linear: linear.bias is None, {"mlp.2", "head"}),
]


@implementations(quantize_op)
@given(case=st.sampled_from(SKIPS))
def test_quantize_replaces_all_but_what_it_is_told_to_skip(device, impl, case):
    skip, stay = case
    module = impl(Tiny(), "int8", skip=skip)
    assert quantized_paths(module) == {"mlp.0", "mlp.2", "head"} - stay


def shared() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.Linear(8, 8), layer)


def with_a_nan() -> nn.Module:
    module = Tiny()
    module.head.weight.data[3, 4] = float("nan")
    return module


def with_a_hook() -> nn.Module:
    module = Tiny()
    module.head.register_forward_hook(lambda *args: None)
    return module


# How a module is made and quantized, and the words that the refusal says.
REFUSED = [
    (lambda: Tiny(tied=True), {}, ["embed.weight", "head.weight"]),
    (shared, {}, ["0.weight", "2.weight"]),
    (shared, {"skip": "0"}, ["0.weight", "2.weight"]),
    (with_a_nan, {}, ["head.weight", "nan", "[3, 4]"]),
    (with_a_hook, {}, ["head", "hooks"]),
    (Tiny, {"format": "int4"}, ["format", "'int4'", "int8", "nf4"]),
    (Tiny, {"format": "nf4", "block_size": 48}, ["block_size", "48"]),
    (Tiny, {"skip": "lm_head"}, ["skip", "lm_head"]),
    (lambda: nn.Linear(3, 4), {}, ["module", "from_linear"]),
]


@implementations(quantize_op)
@given(case=st.sampled_from(REFUSED))
def test_quantize_refuses_the_whole_module_and_changes_nothing(device, impl, case):
    make, kwargs, words = case
    module = make()
    before = kinds(module)
    with expected(ValueError, *words):
        impl(module, **{"format": "int8", **kwargs})
    assert kinds(module) == before


@implementations(quantize_op)
def test_quantize_skips_a_tied_head_and_leaves_it_tied(device, impl):
    module = impl(Tiny(tied=True), "int8", skip="head")
    assert quantized_paths(module) == {"mlp.0", "mlp.2"}
    assert module.head.weight is module.embed.weight


@implementations(quantize_op)
def test_quantize_leaves_alone_what_is_quantized(device, impl):
    module = impl(Tiny(), "int8", skip="head")
    before = module.mlp[0]
    impl(module, "nf4")
    assert module.mlp[0] is before and module.head.layout == "nf4/64"


@implementations(quantize_op)
@given(format=FORMATS)
def test_quantized_modules_load_what_another_saved(device, impl, format):
    saved, fresh = (impl(Tiny().to(device), format[0], block_size=format[1]) for _ in range(2))
    fresh.load_state_dict(saved.state_dict())
    ids = torch.arange(10, device=device)
    assert torch.equal(fresh(ids), saved(ids))


@implementations(quantize_op)
@given(format=FORMATS)
def test_a_module_without_memory_is_quantized_and_then_loaded(device, impl, format):
    saved = impl(Tiny().to(device), format[0], block_size=format[1])
    with torch.device("meta"):
        fresh = impl(Tiny(), format[0], block_size=format[1])
    fresh.load_state_dict(saved.state_dict(), assign=True)
    ids = torch.arange(10, device=device)
    assert torch.equal(fresh(ids), saved(ids))
