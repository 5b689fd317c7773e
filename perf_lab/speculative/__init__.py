"""Speculative decoding: exactly the target's tokens, or tokens of exactly its law, several for one forward.

    speculative_generate(target, draft, prompt, max_new_tokens, gamma=4, eos=None) -> Result

A round: the draft proposes k = min(gamma, budget left - 1) tokens after the committed ones. One forward of
the target, over [last committed, proposals], gives its logits after each of them. Greedy: the longest prefix
of the proposals that equals the target's choices is committed, and then the choice behind it, the bonus: the
correction where a proposal was wrong, one token more where none was. Sampled: by the rule of
perf_lab.speculative.acceptance. Both caches go back to committed[:-1].

target     a model: config.vocab_size, config.max_length, new_cache(batch, capacity), and
           model(tokens [B, T], cache, last_only=False) -> logits [B, T or 1, V] as in perf_lab.model, with
           pads=[B] too where `lengths` are given.
draft      a `Draft`, or a model, which `ModelDraft` makes one; `first_layers(target, n)`,
           `quantized_copy(target)` and `PromptLookup()` need no second model. It may be wrong, shorter of
           context, and of another vocabulary: that costs speed and changes no token, nor any law. Ids that
           the target lacks are never proposed by `ModelDraft`, and refused from others.
prompt     [B, T] int64, T >= 1, on the target's device.
tokens     [B, T + n]: the prompt and n new tokens. n = max_new_tokens, or fewer when every row gave eos: a
           row that gave it ends with it, and is filled up with it.
sampling   a `Sampling`; default: greedy, the largest logit, the lowest id of equal ones, as in
           perf_lab.generate. Otherwise each token is drawn from the target's law under these arguments, given
           all before it and whatever the draft: exactly, but for the rounding of the two laws.
generator  2 gamma + 1 numbers a round and row are drawn from it before the first round: the same seed gives
           the same tokens. uniform: these numbers, [max_new_tokens, B, 2 gamma + 1] in [0, 1): of a round,
           the first gamma draw the proposals, the next gamma test them, the last draws the token behind.
lengths    [B], for prompts of unequal length, left padded, as in perf_lab.generate.
batch      rows accept different numbers, and each goes on from its own end: greedy, each row gets the tokens
           that it gets alone. A row that is ahead of the slowest proposes less, so that a forward computes
           2 gamma + 1 tokens a row at most.
exactness  greedy: equal to greedy decoding token for token where the target's logits do not depend on how
           many tokens share a forward. A matrix product of one row and one of k + 1 rows round differently:
           with float64 weights the difference (about 1e-15) meets no margin in practice; in lower precision a
           token may differ where the two largest logits are closer than twice the error of a logit, and only
           there.
caches     after each round, and at the end, the target's holds committed[:-1]: its next position is the
           number of committed tokens less one, of the row that has fewest. The draft's holds the same, or one
           token less where all k were accepted, as it never read the last of them; it reads that one first in
           the next round. Of a cache only append, commit and truncate are used: any of this interface serves.
rounds     k = 0 in the last one if a single token is left: then the draft is not asked. The first round
           computes the prompt too, so n tokens of an always right draft take ceil(n / (gamma + 1)) forwards;
           and one more, which is not counted, where rounds are recorded or the prompt's logits would be 2^26
           numbers or more.
graph      None: one row's rounds run from a CUDA graph (perf_lab.speculative.recorded), where
           device, models and caches can; False: they never do; True: the same rounds wherever models and
           caches can, recorded on a CUDA device and run as they are elsewhere.
waits      the host waits for the device once a round, whatever gamma is, and once before (the prompt's ids).

FLOPs        of a round: a target forward over k + 1 tokens and k draft forwards over one.
least bytes  of a round: the target's weights and cache once, the draft's k times.
speed-up     to expect from how often the draft is right: perf_lab.speculative.cost_model; which gamma, and
             whether it pays to speculate at all: perf_lab.speculative.planner.

Sources: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192; Chen
et al., arXiv:2302.01318; Stern et al., Blockwise Parallel Decoding for Deep Autoregressive Models,
arXiv:1811.03115 (greedy acceptance).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from perf_lab.op import FLOATS, Op
from perf_lab.sampling import Sampling

GREEDY: Sampling = Sampling()


@dataclass(frozen=True)
class Proposal:
    """tokens [B, k] int64, what a draft proposes.

    law     [B, k, V' <= target's V]: the laws that they were drawn from, each given those before it. None
            where nothing was drawn: the draft is certain of them.
    counts  of row b, only the first counts[b] are proposed; None: all k.
    """

    tokens: Tensor
    law: Tensor | None = None
    counts: list[int] | None = None

    def first(self, k: int) -> "Proposal":
        """The first k tokens of each row."""
        if k == self.tokens.shape[1]:
            return self
        return Proposal(self.tokens[:, :k], None if self.law is None else self.law[:, :k])


@runtime_checkable
class Draft(Protocol):
    """What guesses the next tokens: a smaller model, n-grams of the prompt, a script of a test."""

    def start(self, vocab_size: int, capacity: int, *more: Any) -> None:
        """New sequences begin: of ids below vocab_size, of at most `capacity` tokens. More arguments come
        where they are not the defaults: batch=1, pads=None ([B], as in perf_lab.model), sampling=GREEDY, the
        target's.
        """

    def propose(self, committed: Tensor, k: int, *more: Any) -> Tensor | Proposal:
        """Up to k >= 1 ids [B, <= k] int64 in 0..vocab_size-1, to follow committed [B, n] on its device.

        `committed` is a view of the sequences; it is not to be written. More arguments come in a batch, and
        where the target samples: lengths, how many columns of each row hold (what follows those is for the
        draft to ignore), and uniform [B, k] in [0, 1), or None: the numbers to draw by.
        """

    def rewind(self, length: int) -> None:
        """Of what was committed and proposed so far, only the first `length` columns hold from now on."""


@dataclass(frozen=True)
class Round:
    """One target forward on a row: tokens proposed, how many of those were emitted, and all it emitted.

    emitted = accepted + 1 (the bonus), except in a round that eos ends at an accepted token: then the
    proposals behind it count as drafted, not as accepted, and there is no bonus.
    """

    drafted: int
    accepted: int
    emitted: int
    row: int = 0


@dataclass(frozen=True)
class Result:
    """tokens [B, T + n] int64, the prompt first, and the rounds of all rows that made the new ones.

    forwards: of the target; None, for one row: as many as rounds.
    """

    tokens: Tensor
    rounds: tuple[Round, ...]
    forwards: int | None = None

    @property
    def target_forwards(self) -> int:
        """Forwards of the target, the one that computes the prompt included."""
        return len(self.rounds) if self.forwards is None else self.forwards

    @property
    def drafted(self) -> int:
        """Tokens that the draft proposed."""
        return sum(r.drafted for r in self.rounds)

    @property
    def accepted(self) -> int:
        """Tokens of the result that the draft proposed."""
        return sum(r.accepted for r in self.rounds)

    @property
    def emitted(self) -> int:
        """New tokens of all rows; for one row n."""
        return sum(r.emitted for r in self.rounds)

    @property
    def acceptance(self) -> float:
        """Accepted / drafted, 0.0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def agreement(self) -> float:
        """The share of right proposals among those whose predecessors in the round were right: the `a` of
        the cost model. At least `acceptance`, which counts those behind a wrong one too. 0.0 without any.
        """
        wrong = sum(r.accepted < r.drafted and r.emitted > r.accepted for r in self.rounds)
        return self.accepted / (self.accepted + wrong) if self.drafted else 0.0

    @property
    def tokens_per_target_forward(self) -> float:
        """Emitted / target_forwards, of all rows together; 0.0 without a forward."""
        return self.emitted / self.target_forwards if self.rounds else 0.0


@torch.no_grad()
def oracle(
    target: Any, draft: Any, prompt: Tensor, max_new_tokens: int, *, gamma: int = 4, eos: int | None = None
) -> Tensor:
    """Greedy decoding of one row as it is defined, [1, T + n]: no cache, no draft, all of it every time."""
    tokens = prompt
    for _ in range(max_new_tokens):
        best = target(tokens)[:, -1].argmax(-1, keepdim=True)  # [1, 1]
        tokens = torch.cat((tokens, best), 1)
        if eos is not None and int(best) == eos:
            break
    return tokens


def validate(
    target: Any,
    draft: Any,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    gamma: int = 4,
    eos: int | None = None,
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
    uniform: Tensor | None = None,
    lengths: Sequence[int] | Tensor | None = None,
    graph: bool | None = None,
) -> None:
    """Raise TypeError or ValueError for what the contract refuses."""
    _check_model("target", target)
    if not isinstance(draft, Draft):
        _check_model("draft", draft)
    vocab = target.config.vocab_size
    _check_int("max_new_tokens", max_new_tokens, 0)
    _check_int("gamma", gamma, 1)
    if eos is not None:
        _check_int("eos", eos, 0, vocab - 1)
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling: got {type(sampling).__name__}, accepted is a Sampling")
    _check_prompt(prompt, vocab)
    room = target.config.max_length + 1 - prompt.shape[1]
    if max_new_tokens > max(0, room):
        raise ValueError(
            f"max_new_tokens: got {max_new_tokens} after a prompt of {prompt.shape[1]}, accepted are at most "
            f"{max(0, room)}: the target takes {target.config.max_length} tokens (max_length)"
        )
    shape = (prompt.shape[0], 2 * gamma + 1)
    if uniform is not None and (uniform.shape[0] < max_new_tokens or uniform.shape[1:] != shape):
        accepted = f"[{max_new_tokens} or more, {shape[0]}, {shape[1]}]"
        raise ValueError(f"uniform: got shape {tuple(uniform.shape)}, accepted is {accepted}")


def _check_model(name: str, model: Any) -> None:
    if not (callable(model) and hasattr(model, "new_cache") and hasattr(model, "config")):
        accepted = "a model (callable, with config and new_cache)"
        if name == "draft":
            accepted += " or a Draft (start, propose, rewind)"
        raise TypeError(f"{name}: got {type(model).__name__}, accepted is {accepted}")


def _check_prompt(prompt: Tensor, vocab: int) -> None:
    if not isinstance(prompt, Tensor) or prompt.dtype != torch.int64:
        got = prompt.dtype if isinstance(prompt, Tensor) else type(prompt).__name__
        raise TypeError(f"prompt: got {got}, accepted is a Tensor of torch.int64")
    if prompt.ndim != 2 or 0 in prompt.shape:
        raise ValueError(f"prompt: got shape {tuple(prompt.shape)}, accepted is [B, T], neither of them 0")
    low, high = torch.stack(prompt.aminmax()).tolist()
    if low < 0 or high >= vocab:
        raise ValueError(f"prompt: got ids from {low} to {high}, accepted are 0 to {vocab - 1}")


def _check_int(name: str, got: int, least: int, most: int | None = None) -> None:
    if not isinstance(got, int) or isinstance(got, bool):
        raise TypeError(f"{name}: got {got!r}, accepted is an int")
    if got < least or (most is not None and got > most):
        upper = " and above" if most is None else f" to {most}"
        raise ValueError(f"{name}: got {got}, accepted are {least}{upper}")


speculative = Op("speculative", oracle=oracle, validate=validate, reference="draft_verify")

DTYPES = (*FLOATS, torch.float64)

from perf_lab.speculative.acceptance import accept, acceptance  # noqa: E402
from perf_lab.speculative.cost_model import break_even, expected_tokens, predicted_speedup  # noqa: E402
from perf_lab.speculative.model_draft import ModelDraft, first_layers, quantized_copy  # noqa: E402
from perf_lab.speculative.planner import Costs, Plan, measured_costs, plan, planner  # noqa: E402
from perf_lab.speculative.prompt_lookup import PromptLookup, prompt_lookup  # noqa: E402

speculative.load(__name__, "draft_verify")


def speculative_generate(
    target: Any,
    draft: Any,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    gamma: int = 4,
    eos: int | None = None,
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
    uniform: Tensor | None = None,
    lengths: Sequence[int] | Tensor | None = None,
    graph: bool | None = None,
) -> Result:
    """The prompt [B, T] and up to max_new_tokens more, the target's greedy ones or of its law, and how they
    came about.

    The module's docstring is the contract. Raises ValueError or TypeError that names the argument, before a
    model is run; and the same for a draft that proposes more than it was asked for, something else than rows
    of ids, or an id that the target does not have.
    """
    result: Result = speculative["draft_verify"](
        target,
        draft,
        prompt,
        max_new_tokens,
        gamma=gamma,
        eos=eos,
        sampling=sampling,
        generator=generator,
        uniform=uniform,
        lengths=lengths,
        graph=graph,
    )
    return result


__all__ = [
    "GREEDY",
    "Costs",
    "Draft",
    "ModelDraft",
    "Plan",
    "PromptLookup",
    "Proposal",
    "Result",
    "Round",
    "accept",
    "acceptance",
    "break_even",
    "expected_tokens",
    "first_layers",
    "measured_costs",
    "plan",
    "planner",
    "predicted_speedup",
    "prompt_lookup",
    "quantized_copy",
    "speculative",
    "speculative_generate",
]
