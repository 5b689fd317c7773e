"""A causal language model of transformers behind the interface of `Transformer`: generate, and every cache,
work on it as on the lab's own decoder.

    model = HuggingFaceDecoder(AutoModelForCausalLM.from_pretrained(...))
    generate(model, prompt, 20)

Its layers keep their keys and values in the lab's cache: what transformers calls `update` is our `append`,
and all that a forward appended is committed at its end.
"""

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from perf_lab.kv_cache import ContiguousCache


class HuggingFaceDecoder:
    """`model` with attention layers of one kind (no sliding windows); it is used as it is, not copied."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"  # its older name
        self.config = SimpleNamespace(
            vocab_size=config.vocab_size,
            max_length=config.max_position_embeddings,
            layers=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        )

    def new_cache(self, batch: int, capacity: int) -> ContiguousCache:
        """An empty cache for `batch` sequences of up to `capacity` tokens, as the weights are."""
        config = self.config
        return ContiguousCache(
            layers=config.layers,
            batch=batch,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            capacity=capacity,
            dtype=self.model.dtype,
            device=self.model.device,
        )

    def __call__(
        self,
        tokens: Tensor,
        cache: Any = None,
        *,
        pads: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits [B, T, V] of tokens [B, T] (with last_only [B, 1, V]), which follow those in the cache.

        pads: [B] int64, the left padding of each row. The contract is that of perf_lab.model.
        """
        start = 0 if cache is None else cache.length
        slots = torch.arange(start + tokens.shape[1], device=tokens.device)
        where = slots[None, start:] if pads is None else (slots[start:] - pads[:, None]).clamp(min=0)
        seen = None if pads is None else (slots >= pads[:, None]).long()  # [B, start + T]
        kept = None if cache is None else Cache(layers=[_Layer(cache, i) for i in range(self.config.layers)])
        logits = self.model(
            input_ids=tokens,
            attention_mask=seen,
            position_ids=where.expand(tokens.shape),
            use_cache=cache is not None,
            logits_to_keep=int(last_only),
            **{self._cache_argument: kept},
        ).logits
        if cache is not None:
            cache.commit(tokens.shape[1])
        return logits


class _Layer(CacheLayerMixin):
    """One layer of the lab's cache, as transformers asks for it."""

    is_sliding = False

    def __init__(self, cache: Any, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do: the cache is allocated."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append; gives all keys and values of this layer."""
        keys, values = self.cache.append(self.index, key_states, value_states)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a forward over so many tokens sees, and the offset of the first."""
        return self.cache.length + query_length, 0

    def get_seq_length(self) -> int:
        """Committed tokens."""
        return int(self.cache.length)

    def get_max_length(self) -> int:
        """The capacity."""
        return int(self.cache.capacity)

    def get_max_cache_shape(self) -> int:
        """The capacity, by the name that transformers before 5.20 asks for."""
        return int(self.cache.capacity)
