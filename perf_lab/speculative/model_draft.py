"""A smaller model as a draft: its own greedy tokens, one forward each, nothing of it read by the host."""

from typing import Any

import torch
from torch import Tensor


class ModelDraft:
    """A `Draft` around a model as perf_lab.speculative describes it, with a cache of its own.

    An id that the model lacks is read as its last one: a guess made from that may be wrong, no more.
    Past the model's max_length nothing is proposed.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def start(self, vocab_size: int, capacity: int) -> None:
        """A new sequence; ids from vocab_size on will never be proposed."""
        config = self.model.config
        self.vocab_size, self.known = vocab_size, config.vocab_size
        self.cache = self.model.new_cache(1, min(capacity, config.max_length))

    @torch.no_grad()
    def propose(self, committed: Tensor, k: int) -> Tensor:
        """The model's k greedy tokens after committed [1, n]; [1, k], fewer where its context ends."""
        k = min(k, self.cache.capacity + 1 - committed.shape[1])
        tokens = committed[:, self.cache.length :]  # [1, 2] after all k were accepted, else [1, 1]
        proposed = [committed[:, :0]]
        for _ in range(k):
            logits = self.model(self._readable(tokens), self.cache, last_only=True)  # [1, 1, V]
            tokens = logits[..., : self.vocab_size].argmax(-1)
            proposed.append(tokens)
        return torch.cat(proposed, 1)

    def rewind(self, length: int) -> None:
        """Keep what of the cache lies within the first `length` tokens."""
        self.cache.truncate(min(length, self.cache.length))

    def _readable(self, tokens: Tensor) -> Tensor:
        return tokens if self.known >= self.vocab_size else tokens.clamp(max=self.known - 1)
