"""Wrong decoders, each the right one but for one fault."""

import copy
from typing import Any

import torch
from torch import Tensor

from perf_lab.model import ModelConfig, Transformer, decoder

from . import mutant

DEFINITION = "test_model::test_logits_are_those_of_the_definition"
CHUNKS = "test_model::test_any_split_into_chunks_gives_the_logits_of_the_whole"
PADDED = "test_model::test_a_left_padded_row_is_as_if_alone"


def attending(model: Transformer, wrong: Any) -> None:
    """Put `wrong(right, q, k, v, causal, window, mask)` in the place of each layer's attention."""
    for layer in model.layers:
        right = layer.attention.attend
        layer.attention.attend = lambda q, k, v, right=right, **how: wrong(right, q, k, v, **how)


@mutant(decoder, killed_by=CHUNKS)
class PositionBehindByOne(Transformer):
    """With a cache, positions are one behind the number of cached tokens."""

    def _where(self, cache: Any, start: int, new: int, pads: Tensor | None) -> Any:
        return super()._where(cache, max(0, start - 1), new, pads)


@mutant(decoder, killed_by=CHUNKS)
class PositionsStartAgain(Transformer):
    """Each chunk's positions start at 0."""

    def _where(self, cache: Any, start: int, new: int, pads: Tensor | None) -> Any:
        return super()._where(cache, 0, new, pads)


@mutant(decoder, killed_by=CHUNKS)
class PositionsCountCalls(Transformer):
    """The position goes on by 1 a call, however many tokens the last call committed."""

    calls = 0

    def _where(self, cache: Any, start: int, new: int, pads: Tensor | None) -> Any:
        self.calls = self.calls + 1 if start else 0
        return super()._where(cache, self.calls, new, pads)


@mutant(decoder, killed_by=CHUNKS)
class LastLayerForgets(Transformer):
    """The last layer sees the chunk's own keys only."""

    def forward(self, tokens: Tensor, cache: Any = None, **how: Any) -> Tensor:
        return super().forward(tokens, cache and Forgetful(cache), **how)


class Forgetful:
    """A cache that gives its last layer's new tokens alone."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        views = self.cache.append(layer, k, v)
        return (k, v) if layer == self.cache.layers - 1 else views


@mutant(decoder, killed_by=CHUNKS)
class TopLeftCausal(Transformer):
    """The causal mask of a chunk is aligned to the first key."""

    def __init__(self, *args: Any, **like: Any) -> None:
        super().__init__(*args, **like)
        attending(self, self.wrong)

    @staticmethod
    def wrong(right: Any, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        new = q.shape[2]
        return (
            right(q, k[:, :, :new], v[:, :, :new], **how)
            if how["causal"] and not how["window"]
            else right(q, k, v, **how)
        )


@mutant(decoder, killed_by=CHUNKS)
class WindowOfOneMoreWithCache(Transformer):
    """With a cache, a window does not count the current token."""

    def __init__(self, *args: Any, **like: Any) -> None:
        super().__init__(*args, **like)
        attending(self, self.wrong)

    @staticmethod
    def wrong(right: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None, **how: Any) -> Tensor:
        return right(q, k, v, window=window + 1 if window and q.shape[2] < k.shape[2] else window, **how)


@mutant(decoder, killed_by=CHUNKS)
class KeysCachedUnturned(Transformer):
    """The cache holds keys before their rotation."""

    def forward(self, tokens: Tensor, cache: Any = None, **how: Any) -> Tensor:
        if cache is None or cache.length == 0 or self.rotary is None:
            return super().forward(tokens, cache, **how)
        kept = self.rotary.cos, self.rotary.sin
        self.rotary.cos, self.rotary.sin = torch.ones_like(kept[0]), torch.zeros_like(kept[1])
        try:
            return super().forward(tokens, cache, **how)
        finally:
            self.rotary.cos, self.rotary.sin = kept


@mutant(decoder, killed_by="test_model::test_after_a_truncate_the_cache_goes_on_from_what_is_kept")
class RemembersItsOwnLength(Transformer):
    """Positions go on from what the model was given, whatever the cache dropped."""

    given = 0

    def forward(self, tokens: Tensor, cache: Any = None, **how: Any) -> Tensor:
        self.at = self.given if cache is not None else 0
        out = super().forward(tokens, cache, **how)
        self.given += tokens.shape[1] if cache is not None else 0
        return out

    def _where(self, cache: Any, start: int, new: int, pads: Tensor | None) -> Any:
        return super()._where(cache, min(self.at, self.config.max_length - new), new, pads)


@mutant(decoder, killed_by=PADDED)
class OnePositionVector(Transformer):
    """All rows of a padded batch have the positions of the longest."""

    def _where(self, cache: Any, start: int, new: int, pads: Tensor | None) -> Any:
        return super()._where(cache, start, new, None)


@mutant(decoder, killed_by=PADDED)
class PaddingSeen(Transformer):
    """The padding is attended to."""

    def __init__(self, *args: Any, **like: Any) -> None:
        super().__init__(*args, **like)
        attending(self, lambda right, q, k, v, mask, **how: right(q, k, v, mask=None, **how))


@mutant(decoder, killed_by=PADDED)
class PaddingMaskedAtFirst(Transformer):
    """The padding is hidden from the first chunk only."""

    def forward(self, tokens: Tensor, cache: Any = None, *, pads: Tensor | None = None, **how: Any) -> Tensor:
        pads = None if pads is None or (cache is not None and cache.length) else pads
        return super().forward(tokens, cache, pads=pads, **how)


@mutant(decoder, killed_by="test_model::test_each_row_of_a_batch_is_as_if_alone")
class FirstRowForAll(Transformer):
    """All rows attend to the first row's values."""

    def __init__(self, *args: Any, **like: Any) -> None:
        super().__init__(*args, **like)
        attending(self, lambda right, q, k, v, **how: right(q, k, v[:1].expand_as(v), **how))


@mutant(decoder, killed_by="test_model::test_future_tokens_do_not_leak")
class SeesTheFuture(Transformer):
    """Nothing is hidden."""

    def __init__(self, *args: Any, **like: Any) -> None:
        super().__init__(*args, **like)
        attending(self, lambda right, q, k, v, mask=None, **how: right(q, k, v))


@mutant(decoder, killed_by="test_model::test_future_tokens_do_not_leak")
class NormOverTime(Transformer):
    """The last norm takes its mean over the tokens too."""

    def __init__(self, *args: Any, **like: Any) -> None:
        super().__init__(*args, **like)
        self.norm.forward = lambda x: x / x.square().mean((1, 2), keepdim=True).sqrt() * self.norm.weight


@mutant(decoder, killed_by="test_model::test_last_only_gives_the_last_of_all")
class LastOnlyIsFirst(Transformer):
    """last_only gives the first token's logits."""

    def forward(self, *args: Any, last_only: bool = False, **how: Any) -> Tensor:
        logits = super().forward(*args, **how)
        return logits[:, :1] if last_only else logits


@mutant(decoder, killed_by="test_model::test_rotary_positions_count_by_their_distances_only")
class OnlyQueriesTurned(Transformer):
    """Queries are turned by their position, keys are not."""

    def __init__(self, *args: Any, **like: Any) -> None:
        super().__init__(*args, **like)
        attending(self, self.wrong)

    def wrong(self, right: Any, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        cos, sin = self.turn
        half = torch.addcmul(k * cos, k.roll(k.shape[-1] // 2, -1), -sin)  # turned back
        return right(q, half, v, **how)

    def forward(
        self, tokens: Tensor, cache: Any = None, *, positions: Tensor | None = None, **how: Any
    ) -> Tensor:
        where = slice(0, tokens.shape[1]) if positions is None else positions
        self.turn = self.rotary.cos[where], self.rotary.sin[where]
        return super().forward(tokens, cache, positions=positions, **how)


@mutant(decoder, killed_by=DEFINITION)
class HeadsTiled(Transformer):
    """Query head h reads key head h % Hkv."""

    def __init__(self, *args: Any, **like: Any) -> None:
        super().__init__(*args, **like)
        attending(self, self.wrong)

    @staticmethod
    def wrong(right: Any, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        return right(q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), **how)


@mutant(decoder, killed_by=DEFINITION)
class TanhGelu(Transformer):
    """The MLP's GELU is its tanh approximation."""

    def __init__(self, *args: Any, **like: Any) -> None:
        super().__init__(*args, **like)
        for layer in self.layers:
            mlp = layer.mlp
            mlp.forward = lambda x, mlp=mlp: mlp.down(torch.nn.functional.gelu(mlp.up(x), approximate="tanh"))


@mutant(decoder, killed_by=DEFINITION)
class NormForgotten(Transformer):
    """The last norm is left out."""

    def __init__(self, *args: Any, **like: Any) -> None:
        super().__init__(*args, **like)
        self.norm.forward = lambda x: x


@mutant(decoder, killed_by=DEFINITION)
class WrongTheta(Transformer):
    """Rotary frequencies for a head twice as wide."""

    def __init__(self, config: ModelConfig, **like: Any) -> None:
        super().__init__(config, **like)
        if self.rotary is not None:
            half = config.head_dim // 2
            speed = config.rope_theta ** -(torch.arange(half).double() / config.head_dim)
            angle = torch.outer(torch.arange(config.max_length).double(), speed)
            self.rotary.cos.copy_(angle.cos().repeat(1, 2))
            self.rotary.sin.copy_(torch.cat((-angle.sin(), angle.sin()), -1))


@mutant(decoder, killed_by="test_model::test_the_first_layers_are_a_model_of_their_own")
class FirstLayersAreTheLast(Transformer):
    """first_layers gives the last ones."""

    def first_layers(self, n: int) -> Any:
        model = super().first_layers(n)
        model.layers = self.layers[-n:]
        for index, layer in enumerate(model.layers):
            layer.attention.index = index
        return model


@mutant(decoder, killed_by="test_model::test_the_first_layers_are_a_model_of_their_own")
class FirstLayersAreCopies(Transformer):
    """first_layers copies its weights."""

    def first_layers(self, n: int) -> Any:
        return copy.deepcopy(super().first_layers(n))


@mutant(decoder, killed_by="test_model::test_all_first_layers_are_the_model_itself")
class FirstLayersUnnormed(Transformer):
    """first_layers has a norm of its own."""

    def first_layers(self, n: int) -> Any:
        model = super().first_layers(n)
        model.norm = torch.nn.RMSNorm(self.config.width, self.config.norm_eps, dtype=self.norm.weight.dtype)
        return model


@mutant(decoder, killed_by="test_model::test_a_seed_gives_the_same_weights_everywhere")
class SeedIgnored(Transformer):
    """The weights are whatever torch.nn makes."""

    @classmethod
    def seeded(
        cls, config: ModelConfig, seed: int = 0, dtype: Any = torch.float32, device: Any = "cpu"
    ) -> Any:
        return cls(config, dtype=dtype, device=device)


@mutant(decoder, killed_by="test_model::test_seeding_a_model_leaves_the_global_random_state_alone")
class SeedForAll(Transformer):
    """The weights come from the global random state, seeded."""

    @classmethod
    def seeded(
        cls, config: ModelConfig, seed: int = 0, dtype: Any = torch.float32, device: Any = "cpu"
    ) -> Any:
        torch.manual_seed(seed)
        return cls(config, dtype=torch.float32).to(device, dtype)


@mutant(decoder, killed_by="test_model::test_the_cache_holds_keys_and_values_of_its_capacity")
class CacheOfAllHeads(Transformer):
    """The cache has a slot for every query head."""

    def new_cache(self, batch: int, capacity: int) -> Any:
        config, weight = self.config, self.embedding.weight
        sizes = {"layers": config.layers, "kv_heads": config.heads, "head_dim": config.head_dim}
        return type(super().new_cache(batch, 0))(batch=batch, capacity=capacity, dtype=weight.dtype, **sizes)


@mutant(decoder, killed_by="test_model::test_a_refused_call_leaves_the_cache_as_it_was")
class CommitsFirst(Transformer):
    """The tokens are committed before the arguments are checked."""

    def _check(self, tokens: Any, cache: Any, *rest: Any) -> None:
        try:
            super()._check(tokens, cache, *rest)
        except ValueError:
            if cache is not None and cache.length < cache.capacity:
                cache._settle(cache.length + 1)
            raise


@mutant(decoder, killed_by="test_model::test_no_tokens_give_no_logits")
class AlwaysOneToken(Transformer):
    """An empty chunk counts as a token."""

    def forward(self, tokens: Tensor, cache: Any = None, **how: Any) -> Tensor:
        logits = super().forward(tokens, cache, **how)
        if cache is not None and tokens.shape[1] == 0:
            cache._settle(cache.length + 1)
        return logits


@mutant(decoder, killed_by=DEFINITION)
class WindowInEveryLayer(Transformer):
    """The window holds in all layers."""

    def __init__(self, *args: Any, **like: Any) -> None:
        super().__init__(*args, **like)
        for layer in self.layers:
            layer.attention.window = self.config.window


@mutant(decoder, killed_by=DEFINITION)
class LastBiasForgotten(Transformer):
    """The MLP's last bias is left out."""

    def forward(self, *args: Any, **how: Any) -> Tensor:
        for layer in self.layers:
            layer.mlp.down.bias = None
        return super().forward(*args, **how)


@mutant(decoder, killed_by="test_model::test_a_seed_gives_the_same_weights_everywhere")
class BiasesUnseeded(Transformer):
    """Biases are whatever torch.nn makes."""

    @classmethod
    def seeded(
        cls, config: ModelConfig, seed: int = 0, dtype: Any = torch.float32, device: Any = "cpu"
    ) -> Any:
        model = super().seeded(config, seed, dtype, device)
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.uniform_(weight.data)
        return model


@mutant(decoder, killed_by="test_model::test_the_weights_of_a_seed_are_those_of_the_committed_results")
class AnotherSeed(Transformer):
    """The generator is seeded with one more."""

    @classmethod
    def seeded(cls, config: ModelConfig, seed: int = 0, *how: Any, **like: Any) -> Any:
        return super().seeded(config, seed + 1, *how, **like)
