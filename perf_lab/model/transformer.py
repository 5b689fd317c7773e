"""The decoder with few kernels a step: one matrix product for queries, keys and values, one rotation for
queries and keys together, no mask for a single token, nothing that waits for the device.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perf_lab.attention import attention
from perf_lab.kv_cache import ContiguousCache
from perf_lab.model import ModelConfig, decoder
from perf_lab.model.rope import ByLength, plain_speeds
from perf_lab.model.step import best, decode_step

Where = slice | Tensor  # positions: a slice of the tables (a view, no kernel), or [T] or [B, T] int64


@decoder.register("transformer")
class Transformer(nn.Module):
    """The decoder of a `ModelConfig`; the contract is the docstring of perf_lab.model.

    The weights start as torch.nn makes them; `seeded` gives the same ones on every machine.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__()
        like: dict[str, Any] = {"dtype": dtype, "device": device}
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width, **like)
        self.position = (
            nn.Embedding(config.max_length, config.width, **like) if config.positions == "learned" else None
        )
        self.rotary = Rotary(config, **like) if config.positions == "rotary" else None
        self.layers = nn.ModuleList(Layer(config, index, **like) for index in range(config.layers))
        self.norm = nn.RMSNorm(config.width, config.norm_eps, **like)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False, **like)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    @classmethod
    def seeded(
        cls,
        config: ModelConfig,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Self:
        """A model with normal weights and biases of variance 1 / fan-in, the same float32 numbers for every
        dtype and device; the global random state is left alone.
        """
        with torch.random.fork_rng(devices=[]):
            model = cls(config, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        branch = 1 / math.sqrt(2 * config.layers)  # 2 * layers branches add up to variance 1
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 2:
                    scale = _fan_in(name, config) ** -0.5 * (
                        branch if name.endswith(("out.weight", "down.weight")) else 1
                    )
                    weight.copy_(scale * torch.randn(weight.shape, generator=generator))
                elif name.endswith("bias"):
                    weight.copy_(
                        _fan_in(name, config) ** -0.5 * torch.randn(weight.shape, generator=generator)
                    )
        return model.to(device)

    def forward(
        self,
        tokens: Tensor,
        cache: ContiguousCache | None = None,
        *,
        positions: Tensor | None = None,
        pads: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits [B, T, V] of tokens [B, T], which follow those in the cache and are added to it.

        positions  [T] or [B, T] int64, where they are not the next ones; checking them waits for the device.
        pads       [B] int64, the left padding of each row, the same in every call on one cache.
        last_only  gives [B, 1, V], the last token's.
        Raises ValueError or TypeError for arguments outside the contract, before the cache is touched.
        """
        start = 0 if cache is None else cache.length
        self._check(tokens, cache, positions, pads, start)
        where = self._where(cache, start, tokens.shape[1], pads) if positions is None else positions
        mask = None if pads is None else visible(pads, start + tokens.shape[1])
        x = self.hidden(tokens, cache, where, mask)
        if cache is not None:
            cache.commit(tokens.shape[1])
        return self.head(self.norm(x[:, -1:] if last_only else x))

    def step(self, tokens: Tensor, slots: Any, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits [B, 1, V] of one token a row, as a CUDA graph can hold it: see perf_lab.model.step."""
        return decode_step[best(slots, self.embedding.weight)].fn(self, tokens, slots, positions, mask)

    def hidden(self, tokens: Tensor, cache: Any, where: Where, mask: Tensor | None) -> Tensor:
        """What the last layer gives, [B, T, W]; `forward` without its checks, norm and head."""
        x = self.embedding(tokens)  # [B, T, W]
        if self.position is not None:
            x = x + self.position.weight[where]
        turn = None if self.rotary is None else self.rotary(where)
        for layer in self.layers:
            x = layer(x, turn, cache, mask)
        return x

    def new_cache(self, batch: int, capacity: int) -> ContiguousCache:
        """An empty cache for `batch` sequences of up to `capacity` tokens, as the weights are."""
        config, weight = self.config, self.embedding.weight
        return ContiguousCache(
            layers=config.layers,
            batch=batch,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            capacity=capacity,
            dtype=weight.dtype,
            device=weight.device,
        )

    def first_layers(self, n: int) -> Self:
        """A model of the first n layers with the same embeddings, norm and head: shared, not copied.

        Raises ValueError unless 1 <= n <= layers.
        """
        if not 1 <= n <= self.config.layers:
            raise ValueError(f"n: got {n}, accepted are 1 to {self.config.layers} layers")
        model = type(self)(dataclasses.replace(self.config, layers=n), device="meta")
        model.embedding, model.position, model.rotary = self.embedding, self.position, self.rotary
        model.layers, model.norm, model.head = self.layers[:n], self.norm, self.head
        return model.train(self.training)

    def _where(self, cache: Any, start: int, new: int, pads: Tensor | None) -> Where:
        """The positions of the `new` tokens after `start` slots; a cache of unequal rows has its own."""
        if hasattr(cache, "where"):
            return cache.where(new)
        if pads is None:
            return slice(start, start + new)
        slots = torch.arange(start, start + new, device=pads.device)
        return (slots - pads[:, None]).clamp(min=0)  # [B, T]

    def _check(
        self,
        tokens: Tensor,
        cache: ContiguousCache | None,
        positions: Tensor | None,
        pads: Tensor | None,
        start: int,
    ) -> None:
        _check_ids("tokens", tokens, None)
        if tokens.ndim != 2:
            raise ValueError(f"tokens: got shape {tuple(tokens.shape)}, accepted is [B, T]")
        batch, new = tokens.shape
        most = self.config.max_length
        if start + new > most:
            raise ValueError(
                f"tokens: got {new} after {start}, accepted are at most {most} in all (max_length)"
            )
        if cache is not None:
            self._check_cache(cache, batch, new)
        if pads is not None:
            _check_ids("pads", pads, tokens.device)
            if pads.shape != (batch,):
                raise ValueError(f"pads: got shape {tuple(pads.shape)}, accepted is [{batch}]")
        if positions is not None:
            _check_ids("positions", positions, tokens.device)
            if positions.shape not in ((new,), (batch, new)):
                raise ValueError(
                    f"positions: got shape {tuple(positions.shape)}, accepted are [{new}], [{batch}, {new}]"
                )
            if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < most:
                raise ValueError(
                    f"positions: got {positions.tolist()}, accepted are 0 to {most - 1} (max_length)"
                )

    def _check_cache(self, cache: ContiguousCache, batch: int, new: int) -> None:
        for name, got, accepted in (
            ("layers", cache.layers, self.config.layers),
            ("batch", cache.batch, batch),
        ):
            if got != accepted:
                raise ValueError(f"cache: got one of {got} {name}, accepted is {accepted}")
        if cache.length + new > cache.capacity:
            raise ValueError(
                f"cache: got one of capacity {cache.capacity}, accepted is {cache.length + new} and above: "
                f"it holds {cache.length} tokens and {new} are to come"
            )


class Layer(nn.Module):
    """Attention and MLP, each added to what comes in."""

    def __init__(self, config: ModelConfig, index: int, **like: Any) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, config.norm_eps, **like)
        self.attention = Attention(config, index, **like)
        self.mlp_norm = nn.RMSNorm(config.width, config.norm_eps, **like)
        self.mlp = MLPS[config.mlp](config, **like)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor] | None, cache: Any, mask: Tensor | None
    ) -> Tensor:
        """From x [B, T, W] to [B, T, W]."""
        x = x + self.attention(self.attention_norm(x), turn, cache, mask)
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Causal self-attention with grouped heads; its keys and values go through the cache."""

    def __init__(self, config: ModelConfig, index: int, **like: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.index, self.window = index, config.window_of(index)
        self.attend = attention[config.attention].fn
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.width, rows, bias=config.qkv_bias, **like)
        self.out = nn.Linear(config.heads * config.head_dim, config.width, bias=config.out_bias, **like)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor] | None, cache: Any, mask: Tensor | None
    ) -> Tensor:
        """From x [B, T, W] to [B, T, W]."""
        batch, new, _ = x.shape
        h, h_kv = self.heads, self.kv_heads
        qkv = self.qkv(x).view(batch, new, h + 2 * h_kv, self.head_dim)
        qk, v = qkv.split((h + h_kv, h_kv), dim=2)
        if turn is not None:
            qk = rotate(qk, *turn)
        q, k = qk.split((h, h_kv), dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H or Hkv, T, D]
        if hasattr(cache, "attend"):
            y = cache.attend(self.index, q, k, v, window=self.window, mask=mask)  # [B, H, T, D]
        else:
            if cache is not None:
                k, v = cache.append(self.index, k, v)  # [B, Hkv, length + T, D]
            causal = new > 1 or self.window is not None  # one token sees all keys: it needs no mask
            y = self.attend(q, k, v, causal=causal, window=self.window, mask=mask)  # [B, H, T, D]
        return self.out(y.transpose(1, 2).reshape(batch, new, h * self.head_dim))


class GELU(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, config: ModelConfig, **like: Any) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp_width, bias=config.mlp_bias, **like)
        self.down = nn.Linear(config.mlp_width, config.width, bias=config.mlp_bias, **like)

    def forward(self, x: Tensor) -> Tensor:
        """From x [B, T, W] to [B, T, W]."""
        return self.down(F.gelu(self.up(x)))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, config: ModelConfig, **like: Any) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.mlp_width, bias=config.mlp_bias, **like)
        self.down = nn.Linear(config.mlp_width, config.width, bias=config.mlp_bias, **like)

    def forward(self, x: Tensor) -> Tensor:
        """From x [B, T, W] to [B, T, W]."""
        gate, up = self.gate_up(x).chunk(2, -1)  # [B, T, M]
        return self.down(F.silu(gate) * up)


MLPS = {"gelu": GELU, "swiglu": SwiGLU}


class Rotary(nn.Module):
    """The rotation at every position: cosines [max_length, D], and sines with the sign of their half.

    One that goes by the sequence's length is no table, and is computed anew in each call.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        speeds, rope = plain_speeds(config.rope_theta, config.head_dim), config.rope
        self.gain = 1.0 if rope is None else rope.gain
        self.by_length: ByLength | None = None
        self.rows: dict[torch.device, Tensor] = {}  # of by_length, [2, D/2] on each device so far
        length = config.max_length
        if isinstance(rope, ByLength):
            self.by_length, length = rope, 0
            self.rows[speeds.device] = rope.rows(speeds)
        elif rope is not None:
            speeds = rope.speeds(speeds, config.rope_theta)
        angle = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), speeds)
        cos, sin = self._of(angle)
        self.register_buffer("cos", cos.to(device, dtype), persistent=False)
        self.register_buffer("sin", sin.to(device, dtype), persistent=False)
        if self.by_length:
            self._rows()

    def forward(self, where: Where) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, D] or [B, T, 1, D], to be broadcast over heads."""
        if self.by_length is None:
            cos, sin = self.cos[where], self.sin[where]
        else:
            cos, sin = self._computed(self.by_length, where)
        return cos.unsqueeze(-2), sin.unsqueeze(-2)

    def _of(self, angle: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., D] of angles [..., D/2]."""
        sin = angle.sin() * self.gain
        return (angle.cos() * self.gain).repeat(*[1] * (angle.ndim - 1), 2), torch.cat((-sin, sin), -1)

    def _computed(self, scaling: ByLength, where: Where) -> tuple[Tensor, Tensor]:
        """[T, D] or [B, T, D], each row by the length of its own sequence. Nothing waits for the device."""
        if isinstance(where, slice):
            where = torch.arange(where.start, where.stop, device=self.cos.device)
        lengths = where.amax(-1, keepdim=True) + 1 if where.shape[-1] else where.new_ones(1)  # [1] or [B, 1]
        speeds = scaling.speeds_at(self._rows(), lengths)  # [D/2] or [B, D/2]
        cos, sin = self._of(where.unsqueeze(-1) * speeds.unsqueeze(-2))
        return cos.to(self.cos.dtype), sin.to(self.sin.dtype)

    def _rows(self) -> Tensor:
        """Those on the device of the buffers; float64 where it has that, whatever the buffers' dtype."""
        device = self.cos.device
        if device not in self.rows:
            wide = torch.float32 if device.type == "mps" else torch.float64
            self.rows[device] = self.rows[torch.device("cpu")].to(device, wide)
        return self.rows[device]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What every move of a module goes through: the copy to a device is then not left to a step."""
        super()._apply(fn, recurse)
        if self.by_length:
            self._rows()
        return self


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_j, x_{j+D/2}) of x [B, T, H, D]: (a, b) -> (a cos - b sin, b cos + a sin)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def visible(pads: Tensor, slots: int) -> Tensor:
    """Which of the key slots each row may see, [B, 1, 1, slots]."""
    return (torch.arange(slots, device=pads.device) >= pads[:, None])[:, None, None]


def _fan_in(name: str, config: ModelConfig) -> int:
    """The terms that a weight's rows are summed over: one for a table, unless it is the head's too."""
    if name.startswith(("embedding", "position")):
        return config.width if config.tie_embeddings and name.startswith("embedding") else 1
    if ".out." in name:
        return config.heads * config.head_dim
    return config.mlp_width if ".down." in name else config.width


def _check_ids(name: str, x: Tensor, device: torch.device | None) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, accepted is a Tensor")
    if x.dtype != torch.int64:
        raise TypeError(f"{name}: got {x.dtype}, accepted is torch.int64")
    if device is not None and x.device != device:
        raise ValueError(f"{name}: got a tensor on {x.device}, accepted is the tokens' {device}")
