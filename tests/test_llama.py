"""What holds the decoder to transformers' Llama and Qwen2: the same logits from the same weights."""

import contextlib
import inspect
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from perf_lab.generate import generate
from perf_lab.model.load import converting, from_hugging_face, loading, reading
from perf_lab.numerics import assert_close
from perf_lab.pytest_plugin import implementations
from perf_lab.quant import QuantizedLinear, quantize_
from perf_lab.strategies import lengths

from .test_kv_cache import refuses
from .test_model import cuts, empty_cache, ids, seeds, within

transformers = pytest.importorskip("transformers", reason="needs the package transformers")
from safetensors.torch import load_file, save_file  # noqa: E402  (transformers needs it too)

# In units of the largest logit: 1e-9 is the project's bar for float64; float32 has the one of test_model.
EXACT, SINGLE = 1e-9, 1e-4

ropes = {
    "default": st.just({}),
    "linear": st.fixed_dictionaries({"factor": st.sampled_from([1.0, 2.0, 3.5])}),
    "dynamic": st.fixed_dictionaries({"factor": st.sampled_from([2.0, 3.0])}),
    "llama3": st.fixed_dictionaries(
        {
            "factor": st.sampled_from([2.0, 8.0]),
            "low_freq_factor": st.sampled_from([0.25, 1.0]),
            "high_freq_factor": st.sampled_from([2.0, 4.0]),
            "original_max_position_embeddings": st.sampled_from([8, 16]),
        }
    ),
    "yarn": st.fixed_dictionaries(
        {
            "factor": st.sampled_from([1.5, 4.0]),
            "original_max_position_embeddings": st.sampled_from([8, 16]),
            "beta_fast": st.sampled_from([2.0, None, 8.0]),
            "beta_slow": st.sampled_from([0.25, None, 0.5]),
        },
        optional={
            "attention_factor": st.sampled_from([0.5, 1.25]),
            "truncate": st.booleans(),
            "mscale": st.sampled_from([0.7, 1.0]),
            "mscale_all_dim": st.sampled_from([0.5, 1.5]),
        },
    ),
    "longrope": st.fixed_dictionaries(
        {
            "short_factor": st.lists(st.sampled_from([1.0, 1.5, 2.0]), min_size=6, max_size=6),
            "long_factor": st.lists(st.sampled_from([1.0, 3.0, 5.0]), min_size=6, max_size=6),
            "original_max_position_embeddings": st.sampled_from([4, 8]),
        },
        optional={"factor": st.sampled_from([1.0, 4.0]), "attention_factor": st.sampled_from([0.5, 1.25])},
    ),
}


@st.composite
def hugging_face_configs(draw: Any, kinds: tuple[str, ...] = tuple(ropes)) -> Any:
    """A small LlamaConfig or Qwen2Config with rotary positions of one of these kinds."""
    groups, kv_heads = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)]))
    heads, head_dim, kind = groups * kv_heads, draw(st.sampled_from([4, 6, 12])), draw(st.sampled_from(kinds))
    rope = draw(ropes[kind])
    for factors in ("short_factor", "long_factor"):
        if factors in rope:
            rope[factors] = rope[factors][: head_dim // 2]
    settings = {
        "vocab_size": 19,
        "hidden_size": heads * draw(st.sampled_from([4, 6])),
        "intermediate_size": draw(st.sampled_from([8, 20])),
        "num_hidden_layers": draw(st.sampled_from([2, 1, 3])),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 8 if kind in ("dynamic", "linear") else 24,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "rope_parameters": {"rope_type": kind, "rope_theta": draw(st.sampled_from([1e2, 1e4])), **rope},
        "tie_word_embeddings": draw(st.booleans()),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if draw(st.booleans()):
        biases = {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}
        return transformers.LlamaConfig(**settings, **biases)
    first = draw(st.sampled_from([None, 1, 0, 2]))  # layer with a window
    windows = {
        "use_sliding_window": first is not None,
        "sliding_window": draw(st.integers(2, 6)),  # of 1, transformers' cache keeps keys[-0:], all of them
        "max_window_layers": first or 0,
    }
    return transformers.Qwen2Config(**settings, **windows)


SIZES = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA, QWEN = transformers.LlamaConfig(**SIZES), transformers.Qwen2Config(**SIZES)

TENSORS = (
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.0.self_attn.v_proj.bias",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.0.post_attention_layernorm.weight",
)


def _missing(tensors: dict[str, Tensor], name: str) -> str:
    del tensors[name]
    return name


def _misshapen(tensors: dict[str, Tensor], name: str) -> str:
    tensors[name] = tensors[name][:-1].clone()
    return name


def _extra(tensors: dict[str, Tensor], name: str) -> str:
    """As a model of one layer more would have, or another kind of projection."""
    other = (
        name.replace("layers.1", "layers.2")
        .replace("layers.0", "layers.3")
        .replace("model.norm", "model.q_norm")
    )
    other = other if other != name else name + "_scale"
    tensors[other] = tensors[name].clone()
    return other


FAULTS = {"missing": _missing, "misshapen": _misshapen, "one too many": _extra}


def _pickle(path: Path) -> tuple[type[Exception], str]:
    for file in path.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, path / "pytorch_model.bin")
    return ValueError, "pytorch_model.bin"


def _lost_shard(path: Path) -> tuple[type[Exception], str]:
    file = sorted(path.glob("*.safetensors"))[1]
    file.unlink()
    return ValueError, file.name


def _elsewhere(path: Path) -> tuple[type[Exception], str]:
    index = path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    return ValueError, "../model-00001"


def _no_config(path: Path) -> tuple[type[Exception], str]:
    (path / "config.json").unlink()
    return ValueError, "config.json"


def _nothing(path: Path) -> tuple[type[Exception], str]:
    shutil.rmtree(path)
    return FileNotFoundError, "here"


BROKEN = {
    "a pickle alone": _pickle,
    "a lost shard": _lost_shard,
    "a shard elsewhere": _elsewhere,
    "no config": _no_config,
    "nothing": _nothing,
}

ROPE = {"rope_theta": 1e4, "factor": 2.0}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mistral"}, "model_type"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"hidden_size": None}, "hidden_size"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"rope_parameters": {"rope_type": "proportional", **ROPE}}, "rope_type"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
    ({"rope_parameters": {"rope_type": "llama3", **ROPE}}, "low_freq_factor"),
    ({"rope_parameters": {"rope_type": "longrope", **ROPE}}, "short_factor"),
    ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "rope"),
    ({"rope_parameters": {"rope_type": "yarn", **ROPE, "factor": -1.0}}, "factor"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"use_sliding_window": True, "sliding_window": 4, "layer_types": ["chunked"] * 2}, "layer_types"),
]


@implementations(converting)
@given(config=hugging_face_configs(), seed=seeds, batch=st.integers(1, 2), data=st.data())
def test_the_logits_are_those_of_transformers(device, impl, config, seed, batch, data):
    with in_float64():
        theirs = random_model(config, seed).to(device)
        ours = impl(theirs)
        length = data.draw(lengths(min(16, ours.config.max_length), 1), label="length")
        tokens = ids(ours.config, (batch, length), seed, device)
        same(ours(tokens), theirs(tokens).logits, EXACT, f"{config}, seed {seed}, {length} tokens")


@implementations(converting)
@given(config=hugging_face_configs(("longrope", "dynamic")), seed=seeds, beyond=st.sampled_from([0, 1, 5]))
def test_positions_stretch_once_the_sequence_is_longer_than_the_original(device, impl, config, seed, beyond):
    with in_float64():
        theirs = random_model(config, seed).to(device)
        ours = impl(theirs)
        tokens = ids(ours.config, (1, original_length(config) + beyond), seed, device)
        same(ours(tokens), theirs(tokens).logits, EXACT, f"{config}, seed {seed}, {beyond} beyond")


@implementations(converting)
@given(config=hugging_face_configs(), seed=seeds, chunks=cuts)
def test_any_split_gives_the_logits_that_it_gives_transformers(device, impl, config, seed, chunks):
    with in_float64():
        theirs = random_model(config, seed).to(device)
        ours = impl(theirs)
        chunks = within(chunks, ours.config.max_length)
        parts = ids(ours.config, (2, sum(chunks)), seed, device).split(chunks, 1)
        mine, kept = empty_cache(ours, 2, sum(chunks)), transformers.DynamicCache()
        for part in parts:
            should_be = theirs(part, use_cache=True, **{cache_argument(theirs): kept}).logits
            same(ours(part, mine), should_be, EXACT, f"{config}, seed {seed}, chunks {chunks}")


@implementations(converting)
@given(config=hugging_face_configs(), seed=seeds, data=st.data())
def test_in_float32_too_transformers_as_it_is_gives_these_logits(device, impl, config, seed, data):
    with torch.no_grad():
        theirs = random_model(config, seed).to(device)
        ours = impl(theirs, device=device)
        length = data.draw(lengths(min(16, ours.config.max_length), 1), label="length")
        tokens = ids(ours.config, (2, length), seed, device)
        same(ours(tokens), theirs(tokens).logits, SINGLE, f"{config}, seed {seed}, {length} tokens")


@implementations(converting)
@given(config=hugging_face_configs(), seed=seeds, pads=st.lists(st.integers(0, 6), min_size=1, max_size=3))
def test_a_padded_row_of_a_stretched_model_is_as_if_alone(device, impl, config, seed, pads):
    with in_float64():
        ours = impl(random_model(config, seed), device=device)
        tokens = ids(ours.config, (len(pads), min(12, ours.config.max_length)), seed, device)
        padded = ours(tokens, pads=torch.tensor(pads, device=device))
        for row, pad in enumerate(pads):
            alone = ours(tokens[row : row + 1, pad:])
            same(padded[row : row + 1, pad:], alone, EXACT, f"{config}, seed {seed}, row {row} of {pads}")


@implementations(converting)
@given(config=hugging_face_configs(), seed=seeds, graph=st.booleans())
def test_greedy_text_is_that_of_transformers(device, impl, config, seed, graph):
    with in_float64():
        theirs = random_model(config, seed).to(device)
        ours = impl(theirs)
        prompt = ids(ours.config, (2, 3), seed, device)
        should_be = theirs.generate(prompt, max_new_tokens=5, do_sample=False, attention_mask=prompt >= 0)
        assert torch.equal(generate(ours, prompt, 5, graph=graph), should_be), f"{config}, seed {seed}"


@implementations(converting)
@given(config=hugging_face_configs(), seed=seeds, format=st.sampled_from(["int8", "nf4"]))
def test_every_matrix_but_a_tied_head_can_be_quantized(device, impl, config, seed, format):
    ours = impl(random_model(config, seed), device=device)
    plain = impl(random_model(config, seed), device=device)
    tied = ["head"] if config.tie_word_embeddings else []
    quantize_(ours, format, skip=tied)
    weights = {path: m.weight for path, m in ours.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(weights) == 4 * config.num_hidden_layers + 1 - len(tied)
    for path, weight in weights.items():
        plain.get_submodule(path).weight.copy_(weight)
    tokens = ids(ours.config, (1, 6), seed, device)
    same(ours(tokens), plain(tokens), SINGLE, f"{config}, seed {seed}, {format}")


@implementations(loading)
@given(
    config=hugging_face_configs(),
    seed=seeds,
    shard=st.sampled_from(["1GB", "1KB"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    old=st.booleans(),
)
def test_a_folder_holds_the_model_that_was_saved_in_it(device, impl, config, seed, shard, dtype, old):
    theirs = random_model(config, seed).to(dtype)
    with folder(theirs, shard) as path:
        if old:
            rewrite(path, old_spelling)
        ours = impl(path, device=device)
        as_told = impl(path, device=device, dtype=torch.float64, max_length=8)
    should_be = from_hugging_face(theirs, device=device)
    assert ours.config == should_be.config
    assert as_told.config.max_length == 8 and as_told.head.weight.dtype == torch.float64
    for name, weight in should_be.state_dict().items():
        got = ours.state_dict()[name]
        assert got.dtype is dtype and torch.equal(got, weight), f"{name} of {config}, seed {seed}"
        assert torch.equal(as_told.state_dict()[name], weight.double()), name


@implementations(loading)
@given(name=st.sampled_from(sorted(TENSORS)), fault=st.sampled_from(sorted(FAULTS)))
def test_a_tensor_that_is_not_as_it_should_be_is_named(device, impl, name, fault):
    with folder(random_model(QWEN, 0)) as path:
        file = path / "model.safetensors"
        tensors = load_file(file)
        accused = FAULTS[fault](tensors, name)
        save_file(tensors, file)
        with accuses(ValueError, path, accused):
            impl(path, device=device)


@implementations(loading)
@given(fault=st.sampled_from(sorted(BROKEN)))
def test_a_folder_without_its_weights_is_refused(device, impl, fault):
    with folder(random_model(QWEN, 0), "1KB") as path:
        error, accused = BROKEN[fault](path)
        with accuses(error, path, accused):
            impl(path, device=device)


@implementations(reading)
@given(wrong=st.sampled_from(REFUSED))
def test_a_config_that_this_decoder_cannot_follow_is_refused(device, impl, wrong):
    changes, accused = wrong
    with refuses(ValueError, naming=accused):
        impl(QWEN.to_dict() | changes)


@implementations(loading)
@given(biased=st.booleans(), seed=seeds)
def test_a_gguf_file_holds_the_model_that_was_written_to_it(device, impl, biased, seed):
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason=f"needs the package {package}")
    theirs = random_model(QWEN if biased else LLAMA, seed)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.gguf"
        write_gguf(theirs, path)
        ours = impl(path, device=device)
    tokens = ids(ours.config, (1, 7), seed, device)
    with torch.no_grad():
        same(ours(tokens), theirs.to(device)(tokens).logits, SINGLE, f"{theirs.config}, seed {seed}")


@contextlib.contextmanager
def accuses(kind: type[Exception], path: Path, accused: str) -> Iterator[None]:
    """Within it, this error must come, and say which path, what is wrong there and what is accepted."""
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    assert all(part in message for part in (f"path: got {path}", accused, "accepted")), message


@contextlib.contextmanager
def folder(model: Any, shard: str = "1GB") -> Iterator[Path]:
    """A folder in which the model is saved."""
    with tempfile.TemporaryDirectory() as name:
        model.save_pretrained(name, max_shard_size=shard)
        yield Path(name)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what config.json says."""
    settings = json.loads((path / "config.json").read_text())
    change(settings)
    (path / "config.json").write_text(json.dumps(settings))


def old_spelling(settings: dict[str, Any]) -> None:
    """As transformers before 5.0 wrote rotary positions."""
    rope = settings.pop("rope_parameters")
    settings["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    settings["rope_scaling"] = None if rope["type"] == "default" else rope
    settings["torch_dtype"] = settings.pop("dtype", None)


def write_gguf(model: Any, path: Path) -> None:
    """The model as a GGUF file, with float32 weights and llama.cpp's order of a rotated head's rows."""
    import gguf

    config, kind = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        module, _, part = name.rpartition(".")
        if kind == "llama" and (h := heads.get(module.rpartition(".")[2])):  # pairs side by side
            tensor = tensor.view(h, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{names.get_name(module)}.{part}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def original_length(config: Any) -> int:
    """Tokens of the sequences that the model was first trained with."""
    return config.rope_parameters.get("original_max_position_embeddings", config.max_position_embeddings)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """transformers rounds norms, rotary angles and softmax to float32, in every model: here it means float64
    where it says float32. Its formulas stay its own.
    """
    wide = torch.float64
    with (
        torch.no_grad(),
        mock.patch.multiple(torch, float=wide, float32=wide),
        mock.patch.object(Tensor, "float", Tensor.double),
    ):
        torch.set_default_dtype(wide)
        try:
            yield
        finally:
            torch.set_default_dtype(SINGLE_DTYPE)


SINGLE_DTYPE = torch.float32


def random_model(config: Any, seed: int) -> Any:
    """A transformers model in the default dtype, all of whose weights matter."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    for weight in model.requires_grad_(False).parameters():
        scale = weight.shape[-1] ** -0.5 if weight.ndim == 2 else 1.0
        weight.copy_(scale * torch.randn(weight.shape, generator=generator))
    return model


def cache_argument(model: Any) -> str:
    """What transformers calls the cache: "cache", or before 5.20 "past_key_values"."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def same(got: Tensor, should_be: Tensor, bar: float, call: str) -> None:
    wide = should_be.double()
    assert_close(got, wide, bar * wide.abs().max().item(), call)
