"""What sampled speculation must never get wrong: the law of what comes out is exactly the target's.

No statistics: the numbers in [0, 1) that decide are enumerated. The true laws say at which edges a decision
changes; between two edges it is the same, so one number stands for the cell, with the cell's width as its
weight, and the weighted outcomes are the law. The number lies near one end of its cell, so that a decision
with an edge elsewhere shows.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from perf_lab.kv_cache import ContiguousCache
from perf_lab.model import ModelConfig, Transformer
from perf_lab.numerics import WrongError, eps
from perf_lab.op import Implementation
from perf_lab.pytest_plugin import implementations
from perf_lab.sampling import Sampling, law
from perf_lab.speculative import ModelDraft, Proposal, acceptance, speculative
from perf_lab.speculative.draft_verify import draft_verify

from .mutants.speculative_sampled import Rule

seeds = st.integers(0, 2**16)
Sequence = tuple[int, ...]
Law = Counter[Sequence]


def exact(device: str) -> torch.dtype:
    return torch.float32 if device == "mps" else torch.float64


def cells(edges: Iterable[float], seed: int, device: str) -> tuple[Tensor, Tensor]:
    """One number of each cell that the edges cut [0, 1) into, and the cells' widths. Cells of the size of
    rounding, between edges that are equal but for it, are left out.
    """
    cuts = torch.tensor([0.0, *sorted(e for e in edges if 0 < e < 1), 1.0], dtype=torch.float64)
    low, width = cuts[:-1], cuts.diff()
    high = torch.rand(len(low), generator=torch.Generator().manual_seed(seed)) < 0.5
    inset = (width / 4).clamp(max=1e-3)
    wide = width > 1e4 * eps(exact(device))
    return torch.where(high, low + width - inset, low + inset)[wide], width[wide]


def combined(axes: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """All combinations of the axes' numbers [rows, axes], and the products of their widths [rows]."""
    numbers = torch.cartesian_prod(*[points for points, _ in axes]).view(-1, len(axes))
    widths = torch.cartesian_prod(*[weights for _, weights in axes]).view(-1, len(axes))
    return numbers, widths.prod(1)


def edges_of(law: Tensor) -> list[float]:
    """Where a draw from a law, normalized or not, goes from one token to the next."""
    return (law.cumsum(-1) / law.sum(-1, keepdim=True)).flatten().tolist()


def residual(p: Tensor, q: Tensor) -> Tensor:
    rest = (p - q).clamp(min=0)
    return rest if rest.sum() > 1e-12 else p


def weights(seed: int, prefix: Sequence, vocab: int, salt: int) -> Tensor:
    """Of the tokens after this prefix, [vocab]: few whole numbers, zeros among them, or real ones."""
    g = torch.Generator().manual_seed(hash((seed, salt, *prefix)) % 2**31)
    few = torch.bincount(torch.randint(vocab, (3,), generator=g), minlength=vocab).double()
    return few if seed % 2 else few + torch.rand(vocab, generator=g, dtype=torch.float64)


@dataclass(frozen=True)
class Tree:
    """Target and draft laws of every prefix over a small vocabulary."""

    seed: int
    vocab: int
    certain: bool  # the draft has one proposal for each prefix

    def p(self, prefix: Sequence) -> Tensor:
        w = weights(self.seed, prefix, self.vocab, 1)
        return w / w.sum()

    def q(self, prefix: Sequence) -> Tensor:
        w = weights(self.seed, prefix, self.vocab, 2)
        return torch.eye(self.vocab, dtype=torch.float64)[w.argmax()] if self.certain else w / w.sum()

    def chance(self, sequence: Sequence, after: int = 0) -> float:
        """Of the tokens of a sequence behind the first `after`, given those, under the target."""
        return math.prod(self.p(sequence[:i])[sequence[i]].item() for i in range(after, len(sequence)))


def compare(laws: Any, came: Law, length: int, device: str, case: str) -> None:
    """The law of `length` tokens: those that came, and behind them the target's own."""
    allowed = 1e6 * eps(exact(device))  # what is left out: fewer than 100 cells of 1e4 eps
    for y in itertools.product(range(laws.vocab), repeat=length):
        got = sum(weight * laws.chance(y, len(e)) for e, weight in came.items() if y[: len(e)] == e)
        should_be = laws.chance(y)
        if abs(got - should_be) > allowed:
            raise WrongError(
                f"wrong law of {y}\n  got        {got:.6f}\n  should be  {should_be:.6f}\n  case       {case}"
            )


def counted(tokens: Tensor, kept: Tensor, weight: Tensor) -> Law:
    """The law of the first kept[b] + 1 tokens [B, n] of rows of these weights [B]."""
    outcomes, index = torch.cat((tokens.cpu(), kept.cpu()[:, None]), 1).unique(dim=0, return_inverse=True)
    total = torch.zeros(len(outcomes), dtype=torch.float64).index_add(0, index, weight.cpu())
    found: Law = Counter()
    for (*row, n), mass in zip(outcomes.tolist(), total.tolist(), strict=True):
        found[tuple(row[: n + 1])] += mass
    return found


@implementations(acceptance)
@given(seed=seeds, size=st.sampled_from([(4, 1), (3, 2), (3, 3), (2, 4), (2, 6)]), data=st.data())
def test_a_round_gives_exactly_the_law_of_the_target(device, impl, seed, size, data):
    (vocab, k), certain = size, data.draw(st.booleans(), label="certain")
    tree, count = Tree(seed, vocab, certain), data.draw(st.none() | st.integers(0, k), label="count")
    like: dict[str, Any] = {"device": device, "dtype": exact(device)}
    came: Law = Counter()
    for proposed in itertools.product(range(vocab), repeat=k):
        p = torch.stack([tree.p(proposed[:i]) for i in range(k + 1)])
        q = torch.stack([tree.q(proposed[:i]) for i in range(k)])
        chances = q[range(k), proposed]
        if not chances.all():
            continue
        draws = [e for i in range(k) for e in edges_of(residual(p[i], q[i]))]
        draws += edges_of(p[k if count is None else count])
        axes = [cells([p[i, x].item() / q[i, x].item()], seed + i, device) for i, x in enumerate(proposed)]
        numbers, widths = combined([*axes, cells(draws, seed, device)])
        tokens, accepted = impl(
            p.to(**like).expand(len(widths), -1, -1),
            torch.tensor(proposed, device=device).expand(len(widths), -1),
            numbers.to(**like),
            None if certain else q.to(**like).expand(len(widths), -1, -1),
            None if count is None else torch.full((len(widths),), count, device=device),
        )
        came.update(counted(tokens, accepted, widths * chances.prod()))
    compare(tree, came, k + 1, device, f"{tree}, {k=}, {count=}")


@implementations(acceptance)
@given(
    seed=seeds,
    vocab=st.integers(2, 40),
    nudge=st.sampled_from([0, 1, -1]),
    edge=st.sampled_from([0.0, 0.5, 1 - 2**-24]),
    zeros=st.integers(0, 3),
)
def test_where_the_residual_rounds_to_nothing_the_law_stands(device, impl, seed, vocab, nudge, edge, zeros):
    g = torch.Generator().manual_seed(seed)
    p = torch.softmax(3 * torch.randn(4, 3, vocab, generator=g), -1)
    p[..., vocab - min(zeros, vocab - 1) :] = 0.0  # of the target
    q = (p[:, :2] * (1 + nudge * torch.rand(4, 2, vocab, generator=g) * 2 * eps(torch.float32))).clamp(max=1)
    proposed = q.flatten(0, 1).multinomial(1, generator=g).view(4, 2)
    tokens, accepted = impl(
        p.to(device), proposed.to(device), torch.full((4, 3), edge, device=device), q.to(device)
    )
    tokens, accepted = tokens.cpu(), accepted.cpu()
    for row in range(4):
        for place, token in enumerate(tokens[row, : accepted[row] + 1].tolist()):
            assert p[row, place, token] > 0, f"token {token} of probability 0 at {place}"
    if nudge <= 0 or edge == 0:  # q <= p: nothing is to be rejected, whatever the number
        assert accepted.tolist() == [2] * 4


class Chain:
    """A model whose logits [V] depend on the place and the token there: the log of weights, times heat."""

    def __init__(self, seed: int, vocab: int, heat: float, salt: int, device: str) -> None:
        self.config = SimpleNamespace(vocab_size=vocab, max_length=8)
        self.like: dict[str, Any] = {"dtype": exact(device), "device": device}
        rows = [weights(seed, (i, t), vocab, salt) for i in range(8) for t in range(vocab)]
        self.logits = (heat * torch.stack(rows).log()).view(8, vocab, vocab).to(**self.like)

    def new_cache(self, batch: int, capacity: int) -> ContiguousCache:
        return ContiguousCache(layers=1, batch=batch, kv_heads=1, head_dim=1, capacity=capacity, **self.like)

    def __call__(self, tokens: Tensor, cache: Any = None, *, last_only: bool = False) -> Tensor:
        start, (batch, new) = 0 if cache is None else cache.length, tokens.shape
        if cache is not None:
            kv = torch.zeros(batch, 1, new, 1, **self.like)
            cache.append(0, kv, kv)
            cache.commit(new)
        places = torch.arange(start, start + new, device=tokens.device)
        logits = self.logits[places, tokens]  # [B, T, V]
        return logits[:, -1:] if last_only else logits

    def table(self, how: Sampling, vocab: int) -> Tensor:
        """The law after each place and token, by the oracle of sampling, cut or filled to [8, V, vocab]."""
        x = self.logits[..., :vocab].cpu().double()
        if how.greedy:
            laws = torch.nn.functional.one_hot(x.argmax(-1), x.shape[-1]).double()
        else:
            laws = law(x, how.temperature, how.top_k, how.top_p, how.min_p)
        return torch.nn.functional.pad(laws, (0, vocab - laws.shape[-1]))


class Pair:
    """The true laws p and q behind the prompt (0,), and the edges of every decision."""

    def __init__(self, target: Chain, draft: Chain, how: Sampling, drafts: Sampling) -> None:
        self.vocab = target.config.vocab_size
        read = torch.arange(self.vocab).clamp(max=draft.config.vocab_size - 1)
        self.p, self.q = target.table(how, self.vocab), draft.table(drafts, self.vocab)[:, read]

    def chance(self, sequence: Sequence, after: int = 0) -> float:
        path = (0, *sequence)
        return math.prod(self.p[i, path[i], path[i + 1]].item() for i in range(after, len(sequence)))

    def axes(self, start: int, k: int, seed: int, device: str) -> list[tuple[Tensor, Tensor]]:
        """The cells of a round's numbers, of k proposals behind `start` new tokens."""
        contexts = [(i, t) for i in range(start, start + k) for t in (range(self.vocab) if i else [0])]
        draws = [edges_of(residual(self.p[at], self.q[at])) for at in contexts]
        draws += [edges_of(self.p[start + k, t]) for t in (range(self.vocab) if start + k else [0])]
        found = [[e for at in contexts if at[0] == start + j for e in edges_of(self.q[at])] for j in range(k)]
        for j in range(k):
            ratios = [(self.p[at] / self.q[at]).tolist() for at in contexts if at[0] == start + j]
            found.append([e for row in ratios for e in row if e == e])
        found.append([e for row in draws for e in row])
        return [cells(edges, seed + i, device) for i, edges in enumerate(found)]


# (vocabulary, gamma, new tokens, rounds whose numbers are enumerated)
SIZES = [(3, 1, 2, 2), (2, 1, 3, 3), (2, 2, 3, 1), (2, 8, 3, 1), (2, 3, 4, 1), (3, 4, 2, 1), (3, 1, 1, 1)]
hows = st.builds(
    Sampling,
    st.sampled_from([0.5, 1.0, 3.0]),
    st.none() | st.integers(1, 3),
    st.sampled_from([None, 0.4, 0.6, 0.9]),
    st.sampled_from([None, 0.0, 0.4, 0.7]),
)


@implementations(speculative)
@given(
    seed=seeds,
    size=st.sampled_from(SIZES),
    how=hows,
    drafts=st.just(Sampling()) | st.none() | hows,
    draft_vocab=st.sampled_from([3, 2, 4]),
)
def test_what_comes_out_has_exactly_the_law_of_the_target(device, impl, seed, size, how, drafts, draft_vocab):
    vocab, gamma, new, rounds = size
    target = Chain(seed, vocab, how.temperature, 1, device)
    draft = Chain(seed, draft_vocab, (drafts or how).temperature or 1.0, 2, device)
    pair = Pair(target, draft, how, drafts or how)
    axes, places = [], []
    for index in range(rounds):
        k = min(gamma, new - index - 1)
        axes += pair.axes(index, k, seed, device)
        places += [(index, i) for i in (*range(k), *range(gamma, gamma + k), 2 * gamma)]
    numbers, widths = combined(axes)
    uniform = torch.full((new, len(numbers), 2 * gamma + 1), 0.25, dtype=torch.float64)
    for column, (index, i) in enumerate(places):
        uniform[index, :, i] = numbers[:, column]
    prompt = torch.zeros(len(numbers), 1, dtype=torch.int64, device=device)
    drawing = {"sampling": how, "uniform": uniform.to(**target.like)}
    result = impl(target, ModelDraft(draft, drafts), prompt, new, gamma=gamma, **drawing)
    came = counted(result.tokens[:, 1:], torch.tensor(emitted_in(result, rounds)) - 1, widths)
    compare(pair, came, new, device, f"{seed=}, {size=}, {how=}, {drafts=}, {draft_vocab=}")


def emitted_in(result: Any, rounds: int) -> list[int]:
    """How many tokens each row's first rounds gave."""
    given: list[list[int]] = [[] for _ in result.tokens]
    for r in result.rounds:
        given[r.row].append(r.emitted)
    return [sum(row[:rounds]) for row in given]


@implementations(speculative)
@given(seed=seeds, gamma=st.integers(1, 4), new=st.integers(0, 6), how=hows)
def test_the_same_seed_gives_the_same_tokens(device, impl, seed, gamma, new, how):
    target, draft = (Chain(seed, 3, how.temperature, salt, device) for salt in (1, 2))
    prompt = torch.zeros(4, 1, dtype=torch.int64, device=device)
    first, again = (
        impl(
            target,
            draft,
            prompt,
            new,
            gamma=gamma,
            sampling=how,
            generator=torch.Generator().manual_seed(seed),
        )
        for _ in range(2)
    )
    assert torch.equal(first.tokens, again.tokens)
    assert first.rounds == again.rounds


@implementations(speculative)
@given(
    seed=st.integers(0, 20),
    draft_seed=st.integers(0, 20),
    vocab=st.integers(3, 6),
    gamma=st.integers(1, 4),
    new=st.integers(0, 9),
    how=hows,
    drafts=st.just(Sampling()) | st.none() | hows,
    eos=st.none() | st.integers(0, 4),
)
def test_the_same_numbers_give_the_same_rounds_by_every_way(
    device, impl, seed, draft_seed, vocab, gamma, new, how, drafts, eos
):
    target, small = decoder(device, seed, 5), decoder(device, draft_seed, vocab)
    prompt = torch.tensor([[seed % 5, 1, 2]], device=device)
    uniform = torch.rand(new, 1, 2 * gamma + 1, generator=torch.Generator().manual_seed(seed)).to(device)
    ask: dict[str, Any] = {"gamma": gamma, "sampling": how, "uniform": uniform, "eos": eos}
    got = impl(target, ModelDraft(small, drafts), prompt, new, **ask)
    should_be = draft_verify(target, ModelDraft(small, drafts), prompt, new, **ask)
    assert got.tokens.tolist() == should_be.tokens.tolist()
    assert got.rounds == should_be.rounds


@functools.cache
def decoder(device: str, seed: int, vocab: int) -> Transformer:
    config = ModelConfig(vocab_size=vocab, layers=1, width=8, heads=2, max_length=32)
    return Transformer.seeded(config, seed, exact(device), device).requires_grad_(False)


@implementations(speculative)
@given(seed=seeds, gamma=st.integers(1, 4), new=st.integers(1, 6), how=hows)
def test_the_target_as_its_own_sampled_draft_is_always_accepted(device, impl, seed, gamma, new, how):
    target = Chain(seed, 3, how.temperature, 1, device)
    prompt = torch.zeros(3, 1, dtype=torch.int64, device=device)
    result = impl(target, target, prompt, new, gamma=gamma, sampling=how)
    assert result.accepted == result.drafted
    assert result.target_forwards == math.ceil(new / (gamma + 1))


@implementations(speculative)
@given(seed=seeds, gamma=st.integers(1, 4), heat=st.sampled_from([0.0, 1e-45, 1e-38, 1e-30, 1e-12]))
def test_a_temperature_near_zero_is_greedy(device, impl, seed, gamma, heat):
    target, draft = (Chain(seed, 4, 1.0, salt, device) for salt in (1, 2))
    # at ties a sample is one of them, greedy the first: make the lowest id the largest
    for model in (target, draft):
        model.logits = model.logits.clamp(min=-9) - 1e-3 * torch.arange(4, device=device)
    prompt = torch.zeros(2, 1, dtype=torch.int64, device=device)
    cold = impl(target, draft, prompt, 5, gamma=gamma, sampling=Sampling(heat))
    assert torch.equal(cold.tokens, impl(target, draft, prompt, 5, gamma=gamma).tokens)


@implementations(speculative)
@pytest.mark.parametrize("shape", [(1, 3, 4), (2, 2, 4), (1, 2, 5)])
def test_refuses_laws_that_do_not_fit(device, impl, shape):
    target, laws = Chain(0, 4, 1.0, 1, device), torch.full(shape, 0.25, device=device)
    draft = ModelDraft(target)
    draft.propose = lambda committed, k, *more: Proposal(committed.new_zeros(1, 2), laws)
    with pytest.raises(ValueError, match="draft: proposed by laws of shape"):
        impl(target, draft, torch.zeros(1, 1).long().to(device), 4, gamma=2, sampling=Sampling(1.0))


def test_the_rule_that_the_mutants_vary_is_right():
    right = Implementation(acceptance, "unmutated", Rule.call, ("cpu",), (torch.float64,))
    test_a_round_gives_exactly_the_law_of_the_target(device="cpu", impl=right)
    test_where_the_residual_rounds_to_nothing_the_law_stands(device="cpu", impl=right)
