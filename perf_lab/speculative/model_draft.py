"""A model as a draft: its own next tokens, one forward each, nothing of it read by the host."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perf_lab.sampling import Sampling, pick
from perf_lab.speculative import GREEDY, Proposal


class ModelDraft:
    """A `Draft` around a model as perf_lab.speculative describes it, with a cache of its own.

    sampling: how it draws its proposals where the target samples; default: as the target does. A repetition
    penalty is not applied. Where the target is greedy, so is the draft. It need not be like the target's: a
    draft of any law changes no law of what comes out, only how often it is right.

    An id that the model lacks is read as its last one: a guess made from that may be wrong, no more.
    Past the model's max_length nothing is proposed.
    """

    def __init__(self, model: Any, sampling: Sampling | None = None) -> None:
        self.model, self.own = model, sampling

    def start(
        self,
        vocab_size: int,
        capacity: int,
        batch: int = 1,
        pads: Tensor | None = None,
        sampling: Sampling = GREEDY,
    ) -> None:
        """New sequences; ids from vocab_size on will never be proposed."""
        config = self.model.config
        self.vocab_size, self.known = vocab_size, config.vocab_size
        self.sampling = sampling if sampling.greedy or self.own is None else self.own
        self.how: dict[str, Any] = {} if pads is None else {"pads": pads}
        self.cache = self.model.new_cache(batch, min(capacity, config.max_length))

    @torch.no_grad()
    def propose(
        self,
        committed: Tensor,
        k: int,
        lengths: Sequence[int] | None = None,
        uniform: Tensor | None = None,
    ) -> Tensor | Proposal:
        """The model's k next tokens after the first lengths[b] of each row of committed [B, n], fewer where
        its context ends; with their laws where they are drawn, by the numbers uniform [B, k].
        """
        lengths = lengths or [committed.shape[1]] * committed.shape[0]
        k = max(0, min(k, self.cache.capacity + 1 - max(lengths)))
        base = self.cache.length  # the columns before it were read, and hold for every row
        tokens = torch.nn.functional.pad(committed[:, base:], (0, k))  # [B, n - base + k]
        ends = torch.tensor([[n - base] for n in lengths]).to(tokens.device) if len(lengths) > 1 else None
        laws: list[Tensor] = []
        for step in range(k):
            logits = self._read(tokens, base, [n + step for n in lengths])[..., : self.vocab_size]  # [B, Vq]
            if self.sampling.greedy or uniform is None:
                chosen = logits.argmax(-1)  # [B]
            else:
                laws.append(self.sampling.law(logits))
                chosen = pick(laws[-1], uniform[:, step : step + 1])
            if ends is None:
                tokens[:, lengths[0] - base + step] = chosen
            else:
                tokens.scatter_(1, ends + step, chosen[:, None])
        if ends is None:
            proposed = tokens[:, lengths[0] - base : lengths[0] - base + k]
        else:
            proposed = tokens.gather(1, ends + torch.arange(k, device=tokens.device))  # [B, k]
        return Proposal(proposed, torch.stack(laws, 1)) if laws else proposed

    @torch.no_grad()
    def read(self, tokens: Tensor) -> None:
        """Put tokens [B, n] that follow what the cache holds into it."""
        self.model(self._readable(tokens), self.cache, last_only=True, **self.how)

    def rewind(self, length: int) -> None:
        """Keep what of the cache lies within the first `length` tokens."""
        self.cache.truncate(min(length, self.cache.length))

    def _read(self, tokens: Tensor, base: int, ends: Sequence[int]) -> Tensor:
        """Logits [B, V] after the first ends[b] tokens of each row; column 0 of `tokens` is the row's `base`.

        Of rows of unequal length the cache keeps what all of them know; the rest is read again.
        """
        start = self.cache.length
        feed = self._readable(tokens[:, start - base : max(ends) - base])
        if min(ends) == max(ends):
            return self.model(feed, self.cache, last_only=True, **self.how)[:, 0]
        logits = self.model(feed, self.cache, **self.how)  # [B, max - start, V]
        place = torch.tensor([end - 1 - start for end in ends]).to(logits.device)
        self.cache.truncate(min(ends))
        return logits[torch.arange(len(ends), device=logits.device), place]

    def _readable(self, tokens: Tensor) -> Tensor:
        return tokens if self.known >= self.vocab_size else tokens.clamp(max=self.known - 1)


def first_layers(model: Any, n: int) -> Any:
    """The model of the first n layers, with the same embeddings, norm and head: shared, not copied.

    Raises ValueError unless 1 <= n <= layers, TypeError for a model without the method `first_layers`.
    """
    if not hasattr(model, "first_layers"):
        raise TypeError(f"model: got {type(model).__name__}, accepted is one with the method first_layers")
    return model.first_layers(n)


def quantized_copy(model: Any, format: str = "int8", skip: Any = ()) -> Any:
    """A copy of the model with the weights of its Linear layers in fewer bits; arguments and errors are those
    of perf_lab.quant.quantize_.
    """
    from perf_lab.quant import quantize_

    return quantize_(copy.deepcopy(model), format, skip)
