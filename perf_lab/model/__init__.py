"""A decoder-only Transformer: token ids in, logits of the next token out.

    model = Transformer.seeded(ModelConfig(vocab_size=..., layers=..., width=..., heads=...), seed=0)
    model(tokens)                  the whole sequence at once
    model(tokens, cache)           only what is new: tokens follow the cache.length tokens that it holds

x_0 = embedding[tokens] (+ position[p] with learned positions), then for each layer
x += out(attention(rms_norm(x))) and x += mlp(rms_norm(x)), then logits = head(rms_norm(x)). The config also
covers Llama and Qwen2: `load(path)` and `from_hugging_face(model)` in perf_lab.model.load give one of those.

tokens     [B, T] int64 in 0..vocab_size-1. On the CPU another id is an IndexError; on a GPU it is not
           checked, since that would wait for the device.
logits     [B, T, V] in the dtype of the weights; [B, 1, V], those of the last token, with last_only.
cache      forward appends to every layer and commits all T tokens at its end; a caller who keeps only some
           of them truncates the cache afterwards. An error leaves the cache's tokens as they were.
positions  of the new tokens are cache.length .. cache.length + T - 1. A position p is where the token stands
           in its sequence, from 0: rotary (Su et al.: dimension j of a head turns with dimension j + D/2 by
           the angle p * theta^(-2j/D), or as perf_lab.model.rope says) or learned (a row of a table).
           p >= max_length is a ValueError.
pads       [B] int64, for sequences of unequal length in one batch: the first pads[b] slots of row b are left
           padding. They are seen by no token, and positions count from the first real one: each row is as if
           alone. The logits at padding are finite and mean nothing.
heads      H query heads read Hkv key/value heads: head h reads h // (H / Hkv).
empty      T = 0 gives [B, 0, V] and leaves the cache as it is.

weights    named as in `oracle`, each matrix [out, in]; attention.qkv holds the rows of all query heads, then
           those of the key heads, then those of the value heads; mlp.gate_up those of the gate, then of up.

FLOPs        2 * T * (parameters outside the embedding, the head's only for tokens whose logits are asked for)
             + 4 * H * D * (pairs of a token and one that it sees, in each layer).
least bytes  the parameters once, the cached keys and values once, the logits once.

Sources: Vaswani et al., arXiv:1706.03762; pre-norm and learned positions: Radford et al., GPT-2; RMSNorm:
Zhang and Sennrich, arXiv:1910.07467; rotary positions: Su et al., RoFormer, arXiv:2104.09864; grouped heads:
Ainslie et al., arXiv:2305.13245; gated MLP: Shazeer, arXiv:2002.05202.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from perf_lab.attention import attention
from perf_lab.model.rope import Dynamic, LongRope, Scaling, plain_speeds
from perf_lab.op import Cost, Op

POSITIONS = ("rotary", "learned")
MLPS = {"gelu": 2, "swiglu": 3}  # matrices in each


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a decoder. Raises ValueError or TypeError, naming the field, for what does not fit.

    kv_heads        default: heads.
    mlp_width       default: 4 * width.
    max_length      tokens; the longest sequence, and the number of positions.
    mlp             "gelu": down(gelu(up(x))); "swiglu": down(silu(gate(x)) * up(x)).
    attention       the name of an implementation of the op `attention`.
    window          tokens; how many each token sees at most, the last ones, itself counted. Default: all.
    window_layers   the layers, from 0, in which the window holds. Default: all.
    head_size       D, the size of a head. Default: width / heads.
    rope            what stretches rotary positions, of perf_lab.model.rope. Default: nothing.
    *_bias          whether qkv, out, and the matrices of the MLP add one.
    """

    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int = 0
    mlp_width: int = 0
    max_length: int = 8192
    positions: str = "rotary"
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    mlp: str = "gelu"
    attention: str = "sdpa"
    window: int | None = None
    tie_embeddings: bool = False
    window_layers: tuple[int, ...] | None = None
    head_size: int | None = None
    rope: Scaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "mlp_width", self.mlp_width or 4 * self.width)
        for name in ("vocab_size", "layers", "width", "heads", "kv_heads", "mlp_width", "max_length"):
            self._check_size(name)
        for name in ("window", "head_size"):
            if getattr(self, name) is not None:
                self._check_size(name)
        self._check_heads()
        self._check_layers()
        choices = {"positions": POSITIONS, "mlp": tuple(MLPS), "attention": tuple(attention.implementations)}
        for name, accepted in choices.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, accepted are {accepted}")
        for name in ("rope_theta", "norm_eps"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name}: got {getattr(self, name)}, accepted are positive numbers")
        if self.rope is not None and self.positions != "rotary":
            raise ValueError(f"rope: got {self.rope}, accepted is None for {self.positions} positions")
        if isinstance(self.rope, Dynamic | LongRope):
            self.rope.rows(plain_speeds(self.rope_theta, self.head_dim))  # raises where they do not fit

    def _check_size(self, name: str) -> None:
        size = getattr(self, name)
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{name}: got {size!r}, accepted is an int")
        if size < 1:
            raise ValueError(f"{name}: got {size}, accepted are 1 and above")

    def _check_heads(self) -> None:
        if self.head_size is None and self.width % self.heads:
            raise ValueError(f"heads: got {self.heads}, accepted are divisors of the width {self.width}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads: got {self.kv_heads}, accepted are divisors of the {self.heads} heads"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            name = "width" if self.head_size is None else "head_size"
            raise ValueError(
                f"{name}: got heads of {self.head_dim}, accepted for rotary positions are even ones"
            )

    def _check_layers(self) -> None:
        layers = self.window_layers
        if layers is None:
            return
        if not (isinstance(layers, tuple) and all(isinstance(i, int) and i >= 0 for i in layers)):
            raise TypeError(f"window_layers: got {layers!r}, accepted is a tuple of ints from 0 on")
        if self.window is None:
            raise ValueError(f"window_layers: got {layers}, accepted is None without a window")

    @property
    def head_dim(self) -> int:
        """The size of one head."""
        return self.head_size or self.width // self.heads

    def window_of(self, layer: int) -> int | None:
        """How many tokens each token sees at most in this layer; None: all before it."""
        return self.window if self.window_layers is None or layer in self.window_layers else None

    @property
    def layer_weights(self) -> int:
        """The weights of one layer's matrices."""
        attending = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.width * (attending + MLPS[self.mlp] * self.mlp_width)


def cost(
    config: ModelConfig, batch: int, new: int, known: int = 0, itemsize: int = 4, last_only: bool = True
) -> Cost:
    """What forward does at the least for `new` tokens after `known` cached ones: the contract's formulas."""
    head = config.width * config.vocab_size
    answers = 1 if last_only else new
    windows = (config.window_of(layer) for layer in range(config.layers))
    pairs = sum(min(known + i + 1, window or known + i + 1) for window in windows for i in range(new))
    per_row = 2 * (new * config.layers * config.layer_weights + answers * head)
    per_row += 4 * config.heads * config.head_dim * pairs
    weights = config.layers * config.layer_weights + head
    kept = 2 * config.layers * config.kv_heads * config.head_dim * (known + new)
    return Cost(batch * per_row, itemsize * (weights + batch * (kept + answers * config.vocab_size)))


def oracle(config: ModelConfig, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [T, V] in float64 of one sequence of tokens [T], by the definition, from a state_dict.

    Raises NotImplementedError for stretched rotary positions: what defines those is transformers.
    """
    if config.rope is not None:
        raise NotImplementedError(f"rope: got {config.rope}, accepted is None")
    w = {name: weight.detach().cpu().double() for name, weight in weights.items()}
    x = w["embedding.weight"][tokens.cpu()]  # [T, W]
    if config.positions == "learned":
        x = x + w["position.weight"][: len(tokens)]
    for i in range(config.layers):
        at = f"layers.{i}."
        a = _mapped(_normed(x, w[at + "attention_norm.weight"], config), w, at + "attention.qkv")
        x = x + _mapped(_attended(a, config, i), w, at + "attention.out")
        x = x + _mlp(_normed(x, w[at + "mlp_norm.weight"], config), w, at + "mlp.")
    return _normed(x, w["norm.weight"], config) @ w["head.weight"].T


def _mapped(x: Tensor, w: Mapping[str, Tensor], at: str) -> Tensor:
    return x @ w[at + ".weight"].T + w.get(at + ".bias", torch.zeros(()))


def _mlp(x: Tensor, w: Mapping[str, Tensor], at: str) -> Tensor:
    """The MLP that the names of the weights tell of."""
    if at + "up.weight" in w:
        u = _mapped(x, w, at + "up")
        return _mapped(u / 2 * (1 + torch.erf(u / math.sqrt(2))), w, at + "down")
    g, u = _mapped(x, w, at + "gate_up").tensor_split(2, 1)
    return _mapped(g / (1 + torch.exp(-g)) * u, w, at + "down")


def _normed(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    return x / ((x * x).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight


def _attended(qkv: Tensor, config: ModelConfig, layer: int) -> Tensor:
    """From qkv [T, (H + 2 Hkv) D] the heads' outputs [T, H D], one head and one token at a time."""
    length, h, h_kv, d = len(qkv), config.heads, config.kv_heads, config.head_dim
    window = config.window if config.window_layers is None or layer in config.window_layers else None
    q, k, v = qkv.reshape(length, h + 2 * h_kv, d).split((h, h_kv, h_kv), 1)
    out = torch.zeros_like(q)
    for head in range(h):
        shared = head // (h // h_kv)
        queries, keys = _turned(q[:, head], config), _turned(k[:, shared], config)
        for t in range(length):
            seen = slice(max(0, t + 1 - (window or t + 1)), t + 1)
            scores = keys[seen] @ queries[t] / math.sqrt(d)
            likelihood = (scores - scores.max()).exp()
            out[t, head] = likelihood @ v[seen, shared] / likelihood.sum()
    return out.reshape(length, h * d)


def _turned(x: Tensor, config: ModelConfig) -> Tensor:
    """The rotary positions of x [T, D] as complex numbers: (x_j + i x_{j+D/2}) e^{i p theta^(-2j/D)}."""
    if config.positions != "rotary":
        return x
    half = x.shape[1] // 2
    angle = torch.arange(len(x))[:, None] * config.rope_theta ** (
        -2 * torch.arange(half).double() / x.shape[1]
    )
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * angle)
    return torch.cat((turned.real, turned.imag), 1)


decoder: Op = Op("decoder", oracle=oracle, cost=cost, reference="transformer")
decoder.load(__name__, "transformer")

from perf_lab.model.transformer import Transformer  # noqa: E402  (it registers itself above)

__all__ = ["ModelConfig", "Transformer", "cost", "decoder", "oracle"]
