"""Weights of Llama and Qwen2 models, from a folder, a GGUF file or a model of transformers, in our decoder.

load("path/to/folder")        config.json beside *.safetensors, in one file or in shards with their index
load("path/to/model.gguf")    through transformers, with the packages gguf and accelerate
from_hugging_face(model)      a LlamaForCausalLM or Qwen2ForCausalLM in memory, which stays as it is

Nothing is downloaded and no pickle is opened: a folder that holds only .bin files is refused. Queries, keys
and values become one matrix, gate and up another. Every tensor must be there in its shape, and no others
(but for `rotary_emb.inv_freq`, which old files keep): all that is wrong is found before memory is taken, and
named.

config.json  both spellings: rope_parameters (transformers from 5.0), rope_scaling and rope_theta (before).
rope types   default, linear, dynamic, yarn, llama3, longrope; others are refused, and so is what this decoder
             lacks: other architectures, another activation than silu, partial rotation, quantized weights.
max_length   max_position_embeddings; times the factor of linear and dynamic; the original length times the
             factor of yarn where that is more. Another one can be given.
"""

import dataclasses
import importlib.util
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perf_lab.model import ModelConfig, Transformer
from perf_lab.model.rope import Dynamic, Linear, Llama3, LongRope, Scaling, Yarn
from perf_lab.model.transformer import Rotary
from perf_lab.op import Op

MODEL_TYPES = ("llama", "qwen2")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
loading = Op("load", reference="files")
converting = Op("from_hugging_face", reference="copy")
reading = Op("read_config", reference="json")

IGNORED = "rotary_emb.inv_freq"  # a constant that old files keep beside the weights


@loading.register("files", devices=("cpu", "cuda"))  # tested in float64, which mps lacks
def load(
    path: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", **changes: Any
) -> Transformer:
    """The decoder whose weights lie in this folder or GGUF file, in eval mode and without gradients.

    dtype    default: that of the embedding in the file (a GGUF file's weights come as float32).
    changes  fields of ModelConfig that are to differ from the file's: max_length, attention.

    Raises FileNotFoundError for a path that is not there, ValueError for what the module's docstring refuses,
    with the path in it, and ImportError with the package that a GGUF file lacks.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"path: got {path}, accepted are folders and GGUF files that are here")
    if path.suffix == ".gguf":
        return from_hugging_face(_read_gguf(path), dtype=dtype, device=device, **changes)
    if not (path / "config.json").is_file():
        raise ValueError(f"path: got {path}, accepted is a folder with a config.json, or a .gguf file")
    settings = json.loads((path / "config.json").read_text())
    try:
        config = dataclasses.replace(read_config(settings), **changes)
        with _Folder(path) as source:
            return _filled(config, source, dtype, device)
    except ValueError as error:
        raise ValueError(f"path: got {path}: {error}") from error


@converting.register("copy", devices=("cpu", "cuda"))  # likewise
def from_hugging_face(
    model: Any, *, dtype: torch.dtype | None = None, device: str | torch.device | None = None, **changes: Any
) -> Transformer:
    """The decoder with a copy of the weights of this transformers model, in eval mode, without gradients.

    dtype, device  default: those of the model's embedding. changes: as in `load`. Raises ValueError likewise.
    """
    config = dataclasses.replace(read_config(model.config.to_dict()), **changes)
    source = _Memory(model.state_dict())
    if device is None:
        device = model.get_input_embeddings().weight.device
    return _filled(config, source, dtype, device)


@reading.register("json", devices=("cpu",))
def read_config(settings: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Llama or Qwen2 config.json, of either spelling.

    Raises ValueError that names the key, for what is missing and for what this decoder does not do.
    """
    kind = settings.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"model_type: got {kind!r}, accepted are {MODEL_TYPES}")
    _refuse_unknown(settings)
    heads, width = _size(settings, "num_attention_heads"), _size(settings, "hidden_size")
    length = settings.get("max_position_embeddings", 2048 if kind == "llama" else 32768)
    theta, rope, most = _rope(settings, length)
    head_dim = settings.get("head_dim") or None
    qkv_bias = kind == "qwen2" or bool(settings.get("attention_bias"))
    windows = _windows(settings) if kind == "qwen2" else ()
    return ModelConfig(
        vocab_size=_size(settings, "vocab_size"),
        layers=_size(settings, "num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=settings.get("num_key_value_heads") or heads,
        head_size=None if head_dim and head_dim * heads == width else head_dim,
        mlp_width=_size(settings, "intermediate_size"),
        mlp="swiglu",
        max_length=most,
        rope_theta=theta,
        rope=rope,
        norm_eps=settings.get("rms_norm_eps", 1e-6),
        window=settings["sliding_window"] if windows else None,
        window_layers=windows or None,
        tie_embeddings=bool(settings.get("tie_word_embeddings")),
        qkv_bias=qkv_bias,
        out_bias=kind == "llama" and qkv_bias,
        mlp_bias=kind == "llama" and bool(settings.get("mlp_bias")),
    )


def _size(settings: Mapping[str, Any], name: str) -> int:
    if settings.get(name) is None:
        raise ValueError(f"{name}: got nothing in the config, accepted is an int")
    return settings[name]


def _refuse_unknown(settings: Mapping[str, Any]) -> None:
    """Raise for what would change the computation and is not done here."""
    if (activation := settings.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ValueError(f"hidden_act: got {activation!r}, accepted is 'silu'")
    method = (settings.get("quantization_config") or {}).get("quant_method", "gguf")
    if method != "gguf":  # what transformers read from a GGUF file, it has dequantized
        raise ValueError(f"quantization_config: got weights quantized by {method}, accepted are float ones")


def _windows(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers of a Qwen2 whose attention has a window."""
    if not settings.get("use_sliding_window") or settings.get("sliding_window") is None:
        return ()
    layers = range(_size(settings, "num_hidden_layers"))
    kinds = settings.get("layer_types")
    if kinds is None:
        return tuple(layers[settings.get("max_window_layers", 28) :])
    if len(kinds) != len(layers) or set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"layer_types: got {kinds}, accepted are {len(layers)} times full_attention or sliding_attention"
        )
    return tuple(i for i in layers if kinds[i] == "sliding_attention")


def _rope(settings: Mapping[str, Any], length: int) -> tuple[float, Scaling | None, int]:
    """theta, what stretches the positions, and how many tokens they then reach."""
    rope = dict(settings.get("rope_parameters") or settings.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type: got {kind!r}, accepted are {ROPE_TYPES}")
    partial = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor: got {partial}, accepted is 1")
    theta = rope.get("rope_theta") or settings.get("rope_theta") or 10000.0
    original = settings.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings", length
    )
    scaling = None if kind == "default" else _scaling(kind, rope, length, original)
    if isinstance(scaling, Linear | Dynamic):
        length = int(length * scaling.factor)
    if isinstance(scaling, Yarn):
        length = max(length, int(original * scaling.factor))
    return float(theta), scaling, length


def _scaling(kind: str, rope: Mapping[str, Any], length: int, original: int) -> Scaling:
    """The scaling of this kind, with the defaults that transformers gives it."""
    needed = {
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "longrope": ("short_factor", "long_factor"),
        "yarn": (),
    }.get(kind, ("factor",))
    for name in needed:
        if rope.get(name) is None:
            raise ValueError(f"{name}: got nothing for the rope type {kind}, accepted is a number")
    factor = rope.get("factor") or length / original
    if kind == "linear":
        return Linear(factor)
    if kind == "dynamic":
        return Dynamic(factor, length)
    if kind == "llama3":
        return Llama3(factor, original, rope["low_freq_factor"], rope["high_freq_factor"])
    gain = rope.get("attention_factor")
    if kind == "yarn":
        return Yarn(
            factor,
            original,
            gain if gain is not None else _yarn_gain(factor, rope.get("mscale"), rope.get("mscale_all_dim")),
            rope.get("beta_fast") or 32.0,
            rope.get("beta_slow") or 1.0,
            rope.get("truncate", True),
        )
    if gain is None:
        gain = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRope(tuple(rope["short_factor"]), tuple(rope["long_factor"]), original, gain)


def _yarn_gain(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """0.1 ln(factor) + 1, each part with the factor that some models give it."""
    log = 0.1 * math.log(max(1.0, factor))
    return (mscale * log + 1) / (mscale_all_dim * log + 1) if mscale and mscale_all_dim else log + 1


@dataclasses.dataclass(frozen=True)
class _Part:
    """Where a tensor of the file belongs: rows of a parameter."""

    parameter: str
    first: int
    shape: tuple[int, ...]


def _parts(config: ModelConfig) -> dict[str, _Part]:
    """Every tensor that the file must have, by its name there."""
    width, d = config.width, config.head_dim
    parts = {
        "model.embed_tokens.weight": _Part("embedding.weight", 0, (config.vocab_size, width)),
        "model.norm.weight": _Part("norm.weight", 0, (width,)),
    }
    if not config.tie_embeddings:
        parts["lm_head.weight"] = _Part("head.weight", 0, (config.vocab_size, width))
    q, kv = config.heads * d, config.kv_heads * d
    qkv = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    gate_up = {"mlp.gate_proj": config.mlp_width, "mlp.up_proj": config.mlp_width}
    fused = [  # our module, whether it has a bias, its inputs, and the file's modules with how many rows each
        ("attention.qkv", config.qkv_bias, width, qkv),
        ("attention.out", config.out_bias, q, {"self_attn.o_proj": width}),
        ("mlp.gate_up", config.mlp_bias, width, gate_up),
        ("mlp.down", config.mlp_bias, config.mlp_width, {"mlp.down_proj": width}),
    ]
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    for i in range(config.layers):
        for ours, theirs in norms.items():
            parts[f"model.layers.{i}.{theirs}.weight"] = _Part(f"layers.{i}.{ours}.weight", 0, (width,))
        for module, has_bias, columns, rows in fused:
            first = 0
            for theirs, n in rows.items():
                at, to = f"model.layers.{i}.{theirs}", f"layers.{i}.{module}"
                parts[f"{at}.weight"] = _Part(f"{to}.weight", first, (n, columns))
                if has_bias:
                    parts[f"{at}.bias"] = _Part(f"{to}.bias", first, (n,))
                first += n
    return parts


class _Memory:
    """The tensors of a model in memory, by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


class _Folder:
    """The tensors of a folder's safetensors files, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path, self.open_files = path, dict[str, Any]()

    def __enter__(self) -> "_Folder":
        from safetensors import safe_open

        for file in _safetensors(self.path):
            self.open_files[file] = safe_open(self.path / file, "pt")  # maps it; reads its header alone
        self.where = {name: file for file, tensors in self.open_files.items() for name in tensors.keys()}  # noqa: SIM118
        return self

    def __exit__(self, *error: object) -> None:
        self.open_files.clear()

    def names(self) -> Iterable[str]:
        return self.where

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.open_files[self.where[name]].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        return self.open_files[self.where[name]].get_tensor(name)


def _safetensors(path: Path) -> list[str]:
    """The names of the folder's weight files. Raises ValueError where there are none, or one is missing."""
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file():
        return ["model.safetensors"]
    if not index.is_file():
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
        found = f"{', '.join(pickles)}, which are pickles and can run code" if pickles else "no weights"
        raise ValueError(
            f"weights: got {found}; accepted are model.safetensors and model.safetensors.index.json"
        )
    files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    for file in files:
        if Path(file).name != file or not (path / file).is_file():
            raise ValueError(f"{index.name}: got {file!r}, accepted are names of files in its folder")
    return files


def _filled(
    config: ModelConfig, source: "_Memory | _Folder", dtype: torch.dtype | None, device: str | torch.device
) -> Transformer:
    """A model with the source's weights; each is read once, and copied to its rows."""
    parts = _parts(config)
    _check_tensors(config, parts, source)
    if dtype is None:
        dtype = source.read("model.embed_tokens.weight").dtype
    if not dtype.is_floating_point:
        raise ValueError(f"dtype: got {dtype}, accepted are float dtypes")
    model = _empty(config, dtype, device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, part in parts.items():
            rows = parameters[part.parameter][part.first : part.first + part.shape[0]]
            rows.copy_(source.read(name))
    return model.requires_grad_(False).eval()


def _empty(config: ModelConfig, dtype: torch.dtype, device: str | torch.device) -> Transformer:
    """A model whose weights are not written yet.

    On the CPU a float32 matrix lies by columns. Its product with one token is then a sum of columns, which
    torch's matrix product reads 1.5 times as fast from memory as rows (24 to 27 GB/s and not 16, on one core
    of an EPYC); with many tokens there is no difference.
    """
    model = Transformer(config, dtype=dtype, device="meta").to_empty(device=device)
    model.rotary = Rotary(config, dtype, device)
    if torch.device(device).type == "cpu" and dtype is torch.float32:
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.data = weight.new_empty(weight.shape[::-1]).T
    if config.tie_embeddings:
        model.head.weight = model.embedding.weight
    return model


def _check_tensors(config: ModelConfig, parts: Mapping[str, _Part], source: "_Memory | _Folder") -> None:
    """Raise ValueError that names every tensor that is missing, misshapen or one too many."""
    names = {name for name in source.names() if not name.endswith(IGNORED)}
    if config.tie_embeddings and "lm_head.weight" in names:
        names.remove("lm_head.weight")
        if not torch.equal(source.read("lm_head.weight"), source.read("model.embed_tokens.weight")):
            raise ValueError("lm_head.weight: got one of its own, accepted is the embedding's: they are tied")
    faults = [f"no {name}" for name in parts if name not in names]
    faults += [f"{name}, which is one too many" for name in sorted(names - set(parts))]
    for name, part in parts.items():
        if name in names and (got := source.shape(name)) != part.shape:
            faults.append(f"{name} of shape {got} and not {part.shape}")
    if faults:
        more = f" (and {len(faults) - 8} more)" if len(faults) > 8 else ""
        raise ValueError(
            f"tensors: got {'; '.join(faults[:8])}{more}; accepted are those that the config asks for"
        )


def _read_gguf(path: Path) -> Any:
    """The transformers model of a GGUF file, in float32."""
    needed = [
        name for name in ("transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None
    ]
    if needed:
        raise ImportError(f"path: got {path}, which needs packages that are not installed: {needed}")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True, dtype="float32"
    )
