"""The text itself as a draft: what followed the last time that these tokens stood here.

Source: Saxena, Prompt Lookup Decoding, 2023, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perf_lab.op import Op
from perf_lab.speculative import Proposal

prompt_lookup: Op = Op("prompt_lookup", reference="index")


@prompt_lookup.register("index")
class PromptLookup:
    """A `Draft` that looks the last tokens up in the row so far, and proposes what followed them.

    Of the suffixes of `longest` down to `shortest` tokens the longest that stands in the row before is taken,
    at its latest place; where none does, nothing is proposed. It is certain of its proposals: where the
    target samples they count as one-hot laws. Each row is read by the host, its new tokens once.

    Raises ValueError unless 1 <= shortest <= longest, TypeError for no ints.
    """

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        for name, got, least in (("shortest", shortest, 1), ("longest", longest, shortest)):
            if not isinstance(got, int) or isinstance(got, bool):
                raise TypeError(f"{name}: got {got!r}, accepted is an int")
            if got < least:
                raise ValueError(f"{name}: got {got}, accepted are {least} and above")
        self.longest, self.shortest = longest, shortest

    def start(
        self, vocab_size: int, capacity: int, batch: int = 1, pads: Tensor | None = None, *more: Any
    ) -> None:
        """New sequences begin."""
        self.pads = [0] * batch if pads is None else pads.tolist()
        self.texts: list[list[int]] = [[] for _ in self.pads]
        self.places: list[dict[tuple[int, ...], int]] = [{} for _ in self.pads]

    def propose(
        self, committed: Tensor, k: int, lengths: Sequence[int] | None = None, uniform: Tensor | None = None
    ) -> Proposal:
        """What followed in each row, up to k tokens [B, <= k]."""
        lengths = lengths or [committed.shape[1]] * len(committed)
        found = []
        for row, length in enumerate(lengths):
            self._learn(row, committed[row, self.pads[row] + len(self.texts[row]) : length].tolist())
            found.append(self._follows(row, k))
        most = max(map(len, found))
        tokens = [tokens + [0] * (most - len(tokens)) for tokens in found]
        ids = torch.tensor(tokens, dtype=torch.int64).view(len(found), most).to(committed.device)
        return Proposal(ids, counts=[len(tokens) for tokens in found])

    def rewind(self, length: int) -> None:
        """What was committed stays committed, and proposals were never kept."""

    def _learn(self, row: int, new: list[int]) -> None:
        """Note where each run of tokens ended last, but for those at the row's end, which are asked for."""
        text, places = self.texts[row], self.places[row]
        for token in new:
            for size in range(self.shortest, min(self.longest, len(text)) + 1):
                places[tuple(text[-size:])] = len(text)
            text.append(token)

    def _follows(self, row: int, k: int) -> list[int]:
        text = self.texts[row]
        for size in range(min(self.longest, len(text)), self.shortest - 1, -1):
            place = self.places[row].get(tuple(text[-size:]))
            if place is not None:
                return text[place : place + k]
        return []
