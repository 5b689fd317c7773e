"""Wrong readers of Llama and Qwen2 models, each the right one but for one fault."""

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from perf_lab.model import Transformer
from perf_lab.model import load as right
from perf_lab.model.load import converting, from_hugging_face, loading, reading
from perf_lab.model.rope import Dynamic, LongRope, Yarn

from . import mutant

LOGITS = "test_llama::test_the_logits_are_those_of_transformers"
SPLIT = "test_llama::test_any_split_gives_the_logits_that_it_gives_transformers"
STRETCH = "test_llama::test_positions_stretch_once_the_sequence_is_longer_than_the_original"
FOLDER = "test_llama::test_a_folder_holds_the_model_that_was_saved_in_it"
NAMED = "test_llama::test_a_tensor_that_is_not_as_it_should_be_is_named"


def swapped(weight: Tensor, first: int, rows: int) -> None:
    """Swap two neighbouring blocks of this many rows."""
    a, b = weight[first : first + rows].clone(), weight[first + rows : first + 2 * rows].clone()
    weight[first : first + rows], weight[first + rows : first + 2 * rows] = b, a


@mutant(converting, killed_by=LOGITS)
def keys_for_values(model: Any, **how: Any) -> Transformer:
    """Keys and values are swapped in the fused matrix."""
    ours = from_hugging_face(model, **how)
    d = ours.config.head_dim
    for layer in ours.layers:
        swapped(layer.attention.qkv.weight, ours.config.heads * d, ours.config.kv_heads * d)
    return ours


@mutant(converting, killed_by=LOGITS)
def up_for_gate(model: Any, **how: Any) -> Transformer:
    """Gate and up are swapped in the fused matrix."""
    ours = from_hugging_face(model, **how)
    for layer in ours.layers:
        swapped(layer.mlp.gate_up.weight, 0, ours.config.mlp_width)
    return ours


@mutant(converting, killed_by=LOGITS)
def key_bias_forgotten(model: Any, **how: Any) -> Transformer:
    """The bias of queries, keys and values is left out."""
    ours = from_hugging_face(model, **how)
    for layer in ours.layers:
        layer.attention.qkv.bias = None
    return ours


@mutant(converting, killed_by=LOGITS)
def gelu_for_silu(model: Any, **how: Any) -> Transformer:
    """The gate goes through GELU."""
    ours = from_hugging_face(model, **how)
    for layer in ours.layers:
        layer.mlp.forward = lambda x, mlp=layer.mlp: mlp.down(
            nn.functional.gelu(mlp.gate_up(x).chunk(2, -1)[0]) * mlp.gate_up(x).chunk(2, -1)[1]
        )
    return ours


@mutant(converting, killed_by=LOGITS)
def windows_everywhere(model: Any, **how: Any) -> Transformer:
    """The window holds in the layers before max_window_layers too."""
    return from_hugging_face(model, window_layers=None, **how)


@mutant(converting, killed_by=LOGITS)
def window_of_one_more(model: Any, **how: Any) -> Transformer:
    """The window does not count the current token."""
    ours = from_hugging_face(model, **how)
    for layer in ours.layers:
        layer.attention.window = layer.attention.window and layer.attention.window + 1
    return ours


@mutant(converting, killed_by=LOGITS)
def eps_of_its_own(model: Any, **how: Any) -> Transformer:
    """The norms have this decoder's default epsilon."""
    return from_hugging_face(model, norm_eps=1e-5, **how)


@mutant(converting, killed_by=LOGITS)
def scaling_ignored(model: Any, **how: Any) -> Transformer:
    """Rotary positions are the plain ones."""
    return from_hugging_face(model, rope=None, **how)


@mutant(converting, killed_by=LOGITS)
def gain_ignored(model: Any, **how: Any) -> Transformer:
    """yarn and longrope do not scale cosines and sines."""
    config = right.read_config(model.config.to_dict())
    rope = (
        dataclasses.replace(config.rope, gain=1.0)
        if isinstance(config.rope, Yarn | LongRope)
        else config.rope
    )
    return from_hugging_face(model, rope=rope, **how)


@mutant(converting, killed_by=LOGITS)
def ramp_untruncated(model: Any, **how: Any) -> Transformer:
    """The bounds of yarn's ramp are never whole numbers."""
    config = right.read_config(model.config.to_dict())
    rope = dataclasses.replace(config.rope, truncate=False) if isinstance(config.rope, Yarn) else config.rope
    return from_hugging_face(model, rope=rope, **how)


def at_length(wrong: Any) -> Any:
    """from_hugging_face whose scaling by length is told `wrong(scaling, length)` for the length."""

    def convert(model: Any, **how: Any) -> Transformer:
        ours = from_hugging_face(model, **how)
        if ours.rotary.by_length:
            ours.rotary.by_length = Misled(ours.rotary.by_length, wrong)
        return ours

    return convert


class Misled:
    """A scaling that is told wrong lengths."""

    def __init__(self, scaling: Any, wrong: Any) -> None:
        self.scaling, self.wrong = scaling, wrong

    def speeds_at(self, rows: Tensor, length: Tensor) -> Tensor:
        return self.scaling.speeds_at(rows, self.wrong(self.scaling, length))


@mutant(converting, killed_by=STRETCH)
def always_short(model: Any, **how: Any) -> Transformer:
    """dynamic and longrope take every sequence for a short one."""
    return at_length(lambda scaling, length: torch.ones_like(length))(model, **how)


@mutant(converting, killed_by=STRETCH)
def long_one_too_early(model: Any, **how: Any) -> Transformer:
    """longrope takes a sequence of the original length for a long one."""
    shift = {LongRope: 1, Dynamic: 0}
    return at_length(lambda scaling, length: length + shift[type(scaling)])(model, **how)


@mutant(converting, killed_by=SPLIT)
def length_of_the_call(model: Any, **how: Any) -> Transformer:
    """dynamic and longrope go by the tokens of the call, not by the sequence."""
    ours, new = from_hugging_face(model, **how), [0]
    if ours.rotary.by_length:
        ours.rotary.by_length = Misled(ours.rotary.by_length, lambda s, length: length * 0 + new[0])
    forward = ours.forward

    def told(tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        new[0] = tokens.shape[1]
        return forward(tokens, *args, **kwargs)

    ours.forward = told
    return ours


@mutant(converting, killed_by="test_llama::test_a_padded_row_of_a_stretched_model_is_as_if_alone")
def length_of_the_longest_row(model: Any, **how: Any) -> Transformer:
    """dynamic and longrope go by the longest row of the batch."""
    return at_length(lambda scaling, length: length.max().expand(length.shape))(model, **how)


@mutant(converting, killed_by="test_llama::test_in_float32_too_transformers_as_it_is_gives_these_logits")
def coarse_rotation(model: Any, **how: Any) -> Transformer:
    """Cosines and sines were rounded to bfloat16."""
    ours = from_hugging_face(model, **how)
    rotate = ours.rotary.forward
    ours.rotary.forward = lambda where: tuple(x.bfloat16().to(x.dtype) for x in rotate(where))
    return ours


@mutant(converting, killed_by="test_llama::test_greedy_text_is_that_of_transformers")
def window_ends_with_the_prompt(model: Any, **how: Any) -> Transformer:
    """After the prompt, a window no longer hides anything."""
    ours = from_hugging_face(model, **how)
    for layer in ours.layers:
        attend, window = layer.attention.attend, layer.attention.window
        layer.attention.attend = lambda q, k, v, attend=attend, window=window, **how: attend(
            q, k, v, **{**how, "window": window if q.shape[2] > 1 else None}
        )
    return ours


@mutant(converting, killed_by="test_llama::test_every_matrix_but_a_tied_head_can_be_quantized")
def gate_up_of_another_class(model: Any, **how: Any) -> Transformer:
    """gate_up is a subclass of Linear, which quantize_ leaves alone."""

    class Fused(nn.Linear):
        pass

    ours = from_hugging_face(model, **how)
    for layer in ours.layers:
        layer.mlp.gate_up.__class__ = Fused
    return ours


@mutant(loading, killed_by=NAMED)
def missing_unnoticed(path: Any, **how: Any) -> Transformer:
    """A tensor that is missing keeps what the memory held."""
    with patched(_Lenient):
        return right.load(path, **how)


@mutant(loading, killed_by=NAMED)
def extra_unnoticed(path: Any, **how: Any) -> Transformer:
    """A tensor too many is passed over."""
    names = right._Folder.names
    with mock.patch.object(right._Folder, "names", lambda self: set(names(self)) & set(known(self))):
        return right.load(path, **how)


def known(folder: Any) -> list[str]:
    """The names that the folder's config asks for."""
    return list(right._parts(right.read_config(right.json.loads((folder.path / "config.json").read_text()))))


class _Lenient(right._Folder):
    def names(self) -> Any:
        return known(self)

    def shape(self, name: str) -> tuple[int, ...]:
        return super().shape(name) if name in self.where else self.wanted(name)

    def wanted(self, name: str) -> tuple[int, ...]:
        settings = right.json.loads((self.path / "config.json").read_text())
        return right._parts(right.read_config(settings))[name].shape

    def read(self, name: str) -> Tensor:
        return super().read(name) if name in self.where else torch.zeros(self.wanted(name))


def patched(folder: type) -> Any:
    return mock.patch.object(right, "_Folder", folder)


@mutant(loading, killed_by=NAMED)
def misshapen_broadcast(path: Any, **how: Any) -> Transformer:
    """A tensor of another shape is cut or repeated to fit."""

    class Fitting(right._Folder):
        def shape(self, name: str) -> tuple[int, ...]:
            return _Lenient.wanted(self, name)

        def read(self, name: str) -> Tensor:
            shape, got = _Lenient.wanted(self, name), super().read(name)
            return got.flatten().repeat(2)[: torch.Size(shape).numel()].view(shape)

    with patched(Fitting):
        return right.load(path, **how)


@mutant(loading, killed_by="test_llama::test_a_folder_without_its_weights_is_refused")
def pickles_opened(path: Any, **how: Any) -> Any:
    """A folder without safetensors is read with torch.load."""
    pickles = list(Path(path).glob("*.bin"))
    return torch.load(pickles[0]) if pickles else right.load(path, **how)


@mutant(loading, killed_by=FOLDER)
def old_spelling_unread(path: Any, **how: Any) -> Transformer:
    """rope_scaling and rope_theta are not looked at."""
    rope = right._rope

    def new_only(settings: Any, length: int) -> Any:
        old = {"rope_scaling", "rope_theta"}
        return rope({key: value for key, value in settings.items() if key not in old}, length)

    with mock.patch.object(right, "_rope", new_only):
        return right.load(path, **how)


@mutant(loading, killed_by=FOLDER)
def first_shard_only(path: Any, **how: Any) -> Transformer:
    """Tensors of the second shard on are read from the first, or taken for zeros."""
    files = right._safetensors
    with patched(_Lenient), mock.patch.object(right, "_safetensors", lambda path: files(path)[:1]):
        return right.load(path, **how)


@mutant(loading, killed_by=FOLDER)
def always_float32(path: Any, *, dtype: Any = None, **how: Any) -> Transformer:
    """The dtype of the file does not count."""
    return right.load(path, dtype=dtype or torch.float32, **how)


@mutant(loading, killed_by="test_llama::test_a_gguf_file_holds_the_model_that_was_written_to_it")
def rows_as_they_lie(path: Any, **how: Any) -> Transformer:
    """Heads keep llama.cpp's order of their rows."""
    ours = right.load(path, **how)
    d = ours.config.head_dim
    for layer in ours.layers:
        rows = layer.attention.qkv.weight[: ours.config.heads * d]
        rows.copy_(rows.view(-1, 2, d // 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape))
    return ours


@mutant(reading, killed_by="test_llama::test_a_config_that_this_decoder_cannot_follow_is_refused")
def unknown_rope_is_plain(settings: Any) -> Any:
    """A rope type that is not known counts as the default."""
    rope = settings.get("rope_parameters") or {}
    known = rope.get("rope_type") in right.ROPE_TYPES
    return right.read_config(settings if known else settings | {"rope_parameters": None})


@mutant(reading, killed_by="test_llama::test_a_config_that_this_decoder_cannot_follow_is_refused")
def architecture_unseen(settings: Any) -> Any:
    """Every model is taken for a Llama."""
    return right.read_config({**settings, "model_type": "llama"})
