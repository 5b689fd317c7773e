"""The loop: propose, verify in one forward of the target, keep the agreeing prefix and the bonus, rewind."""

from typing import Any

import torch
from torch import Tensor

from perf_lab.speculative import DTYPES, Draft, ModelDraft, Result, Round, speculative


@speculative.register("draft_verify", dtypes=DTYPES)
@torch.no_grad()
def draft_verify(
    target: Any, draft: Any, prompt: Tensor, max_new_tokens: int, *, gamma: int = 4, eos: int | None = None
) -> Result:
    """Greedy speculative decoding of prompt [1, T], as the contract in perf_lab.speculative says."""
    vocab, length = target.config.vocab_size, prompt.shape[1]
    end = length + max_new_tokens
    capacity = max(0, end - 1)  # the last token is never computed
    draft = draft if isinstance(draft, Draft) else ModelDraft(draft)
    draft.start(vocab, capacity)
    cache = target.new_cache(1, capacity)
    tokens = torch.cat((prompt, prompt.new_empty(1, max_new_tokens)), 1)  # [1, T + max_new_tokens]
    rounds: list[Round] = []
    while length < end:
        proposed = propose(draft, tokens[:, :length], min(gamma, end - length - 1))  # [1, k]
        choices = verify(target, cache, tokens[:, cache.length : length], proposed)  # [1, k + 1]
        guesses, chosen = read(proposed, choices, vocab)
        emitted, accepted = accept(guesses, chosen, eos)
        tokens[:, length : length + emitted] = choices[:, :emitted]
        rounds.append(Round(len(guesses), accepted, emitted))
        length += emitted
        cache.truncate(length - 1)
        draft.rewind(length - 1)
        if chosen[emitted - 1] == eos:
            break
    return Result(tokens[:, :length], tuple(rounds))


def propose(draft: Draft, committed: Tensor, k: int) -> Tensor:
    """Up to k proposals [1, <= k] after committed [1, n]. Raises TypeError or ValueError for any other."""
    if k == 0:
        return committed[:, :0]
    proposed = draft.propose(committed, k)
    if not isinstance(proposed, Tensor) or proposed.dtype != torch.int64:
        got = proposed.dtype if isinstance(proposed, Tensor) else type(proposed).__name__
        raise TypeError(f"draft: proposed {got}, accepted is a Tensor of torch.int64")
    if proposed.ndim != 2 or proposed.shape[0] != 1 or proposed.shape[1] > k:
        raise ValueError(f"draft: proposed shape {tuple(proposed.shape)}, accepted is [1, up to {k}]")
    if proposed.device != committed.device:
        raise ValueError(
            f"draft: proposed a tensor on {proposed.device}, accepted is the prompt's {committed.device}"
        )
    return proposed


def verify(target: Any, cache: Any, new: Tensor, proposed: Tensor) -> Tensor:
    """The target's choices after the last of the new tokens [1, m] and each proposal [1, k]: [1, k + 1].

    A proposal outside the vocabulary is read as one inside it, since a GPU must not be asked to look it up;
    `read` refuses it, with the round's one wait.
    """
    readable = proposed.clamp(0, target.config.vocab_size - 1)
    logits = target(torch.cat((new, readable), 1), cache)  # [1, m + k, V]
    return logits[:, new.shape[1] - 1 :].argmax(-1)


def read(proposed: Tensor, choices: Tensor, vocab: int) -> tuple[list[int], list[int]]:
    """Both on the host, in one copy: a round's only wait for the device.

    Raises ValueError for a proposal outside 0..vocab-1.
    """
    both = torch.cat((proposed, choices), 1)[0].tolist()
    guesses, chosen = both[: proposed.shape[1]], both[proposed.shape[1] :]
    for guess in guesses:
        if not 0 <= guess < vocab:
            raise ValueError(
                f"draft: proposed the id {guess}, accepted are 0 to {vocab - 1}, the target's vocabulary"
            )
    return guesses, chosen


def accept(guesses: list[int], chosen: list[int], eos: int | None) -> tuple[int, int]:
    """How many of the target's choices a round emits, and how many of these the draft had guessed."""
    agreed = 0
    while agreed < len(guesses) and guesses[agreed] == chosen[agreed]:
        agreed += 1
    emitted = agreed + 1
    if eos in chosen[:emitted]:
        emitted = chosen.index(eos) + 1
    return emitted, min(agreed, emitted)
