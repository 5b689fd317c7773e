"""What greedy speculative decoding must never get wrong: it gives the target's greedy tokens, for less."""

import functools
import inspect
import math
from collections.abc import Callable, Container
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perf_lab.generate import generate
from perf_lab.kv_cache import ContiguousCache
from perf_lab.model import ModelConfig, Transformer
from perf_lab.model.counting import counting, counting_pair, train_counting
from perf_lab.numerics import ULPS, WrongError, assert_close, eps
from perf_lab.op import Implementation
from perf_lab.pytest_plugin import implementations, on_devices
from perf_lab.speculative import (
    ModelDraft,
    Result,
    Round,
    expected_tokens,
    predicted_speedup,
    speculative,
    speculative_generate,
)

from .mutants import MUTANTS, audit
from .mutants.speculative import Loop

VOCAB = 5  # so few that a draft is often right by chance
MOST = 20  # new tokens
ALL = frozenset(range(MOST))


def exact(device: str) -> torch.dtype:
    """The dtype in which greedy decoding is compared token for token; Metal has no float64."""
    return torch.float32 if device == "mps" else torch.float64


@functools.cache
def model(
    device: str, seed: int, dtype: torch.dtype, vocab: int = VOCAB, layers: int = 2, max_length: int = 64
) -> Transformer:
    """Learned positions: the next token depends on the place too, and sequences do not become periodic."""
    config = ModelConfig(
        vocab_size=vocab, layers=layers, width=8, heads=2, positions="learned", max_length=max_length
    )
    return Transformer.seeded(config, seed, dtype, device).requires_grad_(False)


@dataclass(frozen=True)
class Case:
    """A target, a prompt, how much to generate, and at which of the new tokens a scripted draft is wrong."""

    seed: int = 0
    prompt: tuple[int, ...] = (1, 2, 0)
    new: int = MOST
    gamma: int = 4
    wrong: frozenset[int] = frozenset()

    def target(self, device: str) -> Transformer:
        return model(device, self.seed, exact(device))

    def ids(self, device: str) -> Tensor:
        return torch.tensor([self.prompt], device=device)

    def truth(self, device: str) -> Tensor:
        """The prompt and its greedy continuation [1, T + new], by the oracle."""
        return speculative.oracle(self.target(device), None, self.ids(device), self.new)

    def draft(self, device: str) -> "Scripted":
        return Scripted(self.truth(device), len(self.prompt), self.wrong)

    def run(
        self, impl: Any, device: str, target: Any = None, draft: Any = None, eos: int | None = None
    ) -> Result:
        target, draft = target or self.target(device), draft or self.draft(device)
        return impl(target, draft, self.ids(device), self.new, gamma=self.gamma, eos=eos)


class Scripted:
    """A draft that knows the truth, and says another id at the places `wrong`, 0 being the first new one."""

    def __init__(self, truth: Tensor, given: int, wrong: Container[int] = (), at_most: int = 99) -> None:
        self.truth, self.at_most = truth, at_most
        places = range(-given, truth.shape[1] - given)
        off = torch.tensor([[place in wrong for place in places]], device=truth.device)
        self.script = (truth + off) % VOCAB

    def start(self, vocab_size: int, capacity: int, *more) -> None:
        pass

    def propose(self, committed: Tensor, k: int, *more) -> Tensor:
        n = committed.shape[1]
        return self.script[:, n : n + min(k, self.at_most)]

    def rewind(self, length: int) -> None:
        pass


class Watched:
    """A model that shows the cache it was asked for, and calls `before` ahead of each forward."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.config = model, model.config
        self.before: Callable[[], None] = lambda: None
        self.cache: Any = None
        self.forwards = 0
        self.read = 0  # tokens in the cache after its latest forward

    @property
    def length(self) -> int:
        return 0 if self.cache is None else self.cache.length

    def new_cache(self, batch: int, capacity: int) -> ContiguousCache:
        self.cache = self.model.new_cache(batch, capacity)
        return self.cache

    def __call__(self, tokens: Tensor, cache: Any = None, **kwargs: Any) -> Tensor:
        self.before()
        logits = self.model(tokens, cache, **kwargs)
        self.forwards, self.read = self.forwards + 1, self.length
        return logits

    def assert_holds(self, truth: Tensor, length: int, when: str) -> None:
        """The cache holds keys and values of exactly truth[:, :length], as a fresh forward computes them."""
        assert_equal("number of tokens in the cache", self.length, length, when)
        if length:
            fresh = self.model.new_cache(1, length)
            self.model(truth[:, :length], fresh)
            for layer in range(self.config.layers):
                for kept, right in zip(held(self.cache, layer), held(fresh, layer), strict=True):
                    # the decoder's own bound for cached against whole: float64 1e-10, float32 1e-4
                    allowed = 1e-10 if kept.dtype is torch.float64 else 1e-4
                    assert_close(kept, right.cpu().double(), allowed, when)


def held(cache: Any, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the committed tokens: what an append of none gives."""
    nothing = torch.empty(1, cache.kv_heads, 0, cache.head_dim, dtype=cache.dtype, device=cache.device)
    return cache.append(layer, nothing, nothing)


def assert_tokens(got: Tensor, should_be: Tensor, case: Any) -> None:
    assert_equal("tokens", got.tolist(), should_be.tolist(), case)


def assert_equal(what: str, got: Any, should_be: Any, case: Any) -> None:
    if got != should_be:
        raise WrongError(f"wrong {what}\n  got        {got}\n  should be  {should_be}\n  case       {case}")


seeds = st.integers(0, 20)
gammas = st.integers(1, 8)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9).map(tuple)
places = st.integers(0, MOST - 1)
mistakes = st.one_of(
    st.sampled_from([frozenset(), ALL]),
    places.map(lambda i: frozenset({i})),
    places.map(lambda i: frozenset(range(i, MOST))),  # right until i
    st.frozensets(places),
)
cases = st.builds(Case, seeds, prompts, st.integers(0, MOST), gammas, mistakes)
long_cases = st.builds(Case, seeds, prompts, st.just(MOST), gammas, mistakes)


@implementations(speculative)
@given(case=cases)
def test_emits_the_tokens_of_greedy_decoding(device, impl, case):
    assert_tokens(case.run(impl, device).tokens, case.truth(device), case)


@implementations(speculative)
@given(case=cases, layers=st.integers(1, 2), vocab=st.sampled_from([2, 3, 5, 8]), seed=seeds)
def test_a_draft_of_any_size_and_vocabulary_changes_no_token(device, impl, case, layers, vocab, seed):
    draft = model(device, seed, exact(device), vocab, layers)
    should_be = generate(case.target(device), case.ids(device), case.new)
    assert_tokens(case.run(impl, device, draft=draft).tokens, should_be, (case, layers, vocab, seed))


@implementations(speculative)
@given(case=cases)
def test_the_target_as_its_own_draft_is_always_accepted(device, impl, case):
    result = case.run(impl, device, draft=case.target(device))
    full, rest = divmod(case.new, case.gamma + 1)
    should_be = [Round(case.gamma, case.gamma, case.gamma + 1)] * full + [
        Round(rest - 1, rest - 1, rest)
    ] * bool(rest)
    assert_equal("rounds", list(result.rounds), should_be, case)
    assert_equal("number of forwards", result.target_forwards, math.ceil(case.new / (case.gamma + 1)), case)
    assert_equal("acceptance", result.acceptance, 1.0 if result.drafted else 0.0, case)


@implementations(speculative)
@given(seed=seeds, prompt=prompts, gamma=gammas)
def test_an_always_wrong_draft_is_never_believed(device, impl, seed, prompt, gamma):
    case = Case(seed, prompt, MOST, gamma, wrong=ALL)
    result = case.run(impl, device)
    assert_tokens(result.tokens, case.truth(device), case)
    assert_equal("accepted, forwards", (result.accepted, result.target_forwards), (0, MOST), case)


@implementations(speculative)
@given(case=cases)
def test_rounds_say_what_happened(device, impl, case):
    should_be, done = [], 0
    while done < case.new:
        drafted = min(case.gamma, case.new - done - 1)
        accepted = next((i for i in range(drafted) if done + i in case.wrong), drafted)
        should_be.append(Round(drafted, accepted, accepted + 1))
        done += accepted + 1
    assert_equal("rounds", list(case.run(impl, device).rounds), should_be, case)


@implementations(speculative)
@given(case=long_cases, place=places)
def test_ends_with_the_first_eos_wherever_it_falls(device, impl, case, place):
    truth = case.truth(device)
    new = truth[0, len(case.prompt) :].tolist()
    emitted = new.index(new[place]) + 1
    result = case.run(impl, device, eos=new[place])
    assert_tokens(result.tokens, truth[:, : len(case.prompt) + emitted], (case, place))
    assert_equal("number of emitted tokens", result.emitted, emitted, (case, place))


@implementations(speculative)
@given(case=cases, extra=st.integers(1, 2))
def test_an_eos_that_never_comes_ends_nothing(device, impl, case, extra):
    unused = sorted(set(range(VOCAB)) - set(case.truth(device)[0, len(case.prompt) :].tolist()))
    for eos in unused[:extra]:
        assert_tokens(case.run(impl, device, eos=eos).tokens, case.truth(device), (case, eos))


@implementations(speculative)
@given(case=long_cases, beyond=st.integers(-8, 2))
def test_never_more_tokens_than_asked_for(device, impl, case, beyond):
    new = max(0, case.gamma + beyond)
    result = impl(case.target(device), case.draft(device), case.ids(device), new, gamma=case.gamma)
    assert_equal("number of tokens", result.tokens.shape[1], len(case.prompt) + new, (case, new))
    assert_equal("emitted", result.emitted, new, (case, new))


@implementations(speculative)
@given(case=cases)
def test_the_target_cache_holds_all_but_the_last_committed_token(device, impl, case):
    target, draft, truth = Watched(case.target(device)), case.draft(device), case.truth(device)
    plain = draft.propose

    def propose(committed: Tensor, k: int) -> Tensor:
        length = committed.shape[1] - 1
        assert_tokens(committed, truth[:, : length + 1], case)
        # before the first forward the prompt is still to come
        target.assert_holds(truth, length if target.forwards else 0, f"before a round of {case}")
        return plain(committed, k)

    draft.propose = propose
    case.run(impl, device, target, draft)
    target.assert_holds(truth, truth.shape[1] - 1 if case.new else 0, f"after {case}")


@implementations(speculative)
@given(case=cases, seed=st.none() | seeds)
def test_the_draft_cache_holds_what_was_read_and_committed(device, impl, case, seed):
    small = case.target(device).first_layers(1) if seed is None else model(device, seed, exact(device))
    target, draft, truth, checked = Watched(case.target(device)), Watched(small), case.truth(device), set()

    def follows() -> None:
        if target.forwards not in checked:  # a round begins
            checked.add(target.forwards)
            draft.assert_holds(truth, min(draft.read, target.length), f"of the draft, {case}, seed={seed}")

    draft.before = follows
    case.run(impl, device, target, draft)
    follows()


@implementations(speculative)
@given(case=cases, at_most=st.integers(0, 3))
def test_a_draft_may_propose_fewer_tokens_than_asked(device, impl, case, at_most):
    draft = Scripted(case.truth(device), len(case.prompt), case.wrong, at_most)
    result = case.run(impl, device, draft=draft)
    assert_tokens(result.tokens, case.truth(device), (case, at_most))
    assert max((r.drafted for r in result.rounds), default=0) <= at_most


@implementations(speculative)
@given(case=cases, context=st.integers(1, 28))
def test_a_draft_of_shorter_context_changes_no_token(device, impl, case, context):
    draft = model(device, case.seed, exact(device), max_length=context)
    result = case.run(impl, device, draft=draft)
    assert_tokens(result.tokens, case.truth(device), (case, context))
    used = sum(r.drafted for r in result.rounds)
    assert bool(used) == (len(case.prompt) <= context and case.new > 1)


@implementations(speculative)
@given(case=cases)
def test_a_draft_can_serve_one_sequence_after_another(device, impl, case):
    draft = ModelDraft(case.target(device))
    for prompt in (case.prompt, case.prompt[::-1], case.prompt[:1]):
        again = Case(case.seed, prompt, case.new, case.gamma)
        result = again.run(impl, device, draft=draft)
        assert_tokens(result.tokens, again.truth(device), again)
        assert_equal("accepted", result.accepted, result.drafted, again)


class Table:
    """A target of few distinct logits, the same in every forward: row p of [N, V] follows position p."""

    def __init__(self, logits: Tensor) -> None:
        self.logits, (length, vocab) = logits, logits.shape
        self.config = SimpleNamespace(vocab_size=vocab, max_length=length)

    def new_cache(self, batch: int, capacity: int) -> ContiguousCache:
        like: dict[str, Any] = {"dtype": self.logits.dtype, "device": self.logits.device}
        return ContiguousCache(layers=1, batch=batch, kv_heads=1, head_dim=1, capacity=capacity, **like)

    def __call__(self, tokens: Tensor, cache: Any = None, *, last_only: bool = False) -> Tensor:
        start, new = 0 if cache is None else cache.length, tokens.shape[1]
        if cache is not None:
            kv = self.logits.new_zeros(1, 1, new, 1)
            cache.append(0, kv, kv)
            cache.commit(new)
        rows = self.logits[None, start : start + new]  # [1, T, V]
        return rows[:, -1:] if last_only else rows


@implementations(speculative)
@given(
    logits=st.lists(st.lists(st.integers(0, 2), min_size=VOCAB, max_size=VOCAB), min_size=1, max_size=MOST),
    gamma=gammas,
)
def test_of_equal_logits_the_lowest_id_wins(device, impl, logits, gamma):
    target = Table(torch.tensor(logits, dtype=torch.float32, device=device))
    result = impl(
        target, target, torch.zeros(1, 1, dtype=torch.int64, device=device), len(logits), gamma=gamma
    )
    assert_equal("tokens", result.tokens[0, 1:].tolist(), [row.index(max(row)) for row in logits], logits)


@implementations(speculative, dtypes=True)
@given(
    case=st.builds(Case, seeds, prompts, st.integers(1, 5), st.integers(1, 3), mistakes),
    layers=st.integers(1, 2),
)
def test_in_any_dtype_a_token_is_the_best_within_rounding(device, impl, dtype, case, layers):
    target = model(device, case.seed, dtype)
    tokens = case.run(impl, device, target, target.first_layers(layers)).tokens
    exact_logits = widened(target)(tokens[:, :-1].cpu()).double()  # [1, N, V]
    plain = target(tokens[:, :-1]).cpu().double()
    # a logit of any forward in this dtype: at most twice the error of the plain one, and ULPS roundings
    off = 2 * (plain - exact_logits).abs().max() + ULPS * eps(dtype) * exact_logits.abs().max()
    chosen = exact_logits.gather(-1, tokens[:, 1:, None].cpu()).squeeze(-1)
    short = (exact_logits.amax(-1) - chosen)[:, len(case.prompt) - 1 :]  # [1, new]
    assert_close(short, torch.zeros_like(short), 2 * off, f"{case} in {dtype}, draft of {layers} layers")


def widened(narrow: Transformer) -> Transformer:
    """The same weights in float64, on the CPU."""
    wide = Transformer(narrow.config, dtype=torch.float64)
    wide.load_state_dict(narrow.state_dict())
    return wide.requires_grad_(False)


class Waits(TorchDispatchMode):
    """Counts the operations for which the host waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        elif func is torch.ops.aten._to_copy.default:
            self.count += args[0].device != result.device
        return result


@implementations(speculative)
@given(case=long_cases)
def test_the_host_waits_once_a_round(device, impl, case):
    target, prompt = case.target(device), case.ids(device)
    with Waits() as waits:
        result = impl(target, target.first_layers(1), prompt, case.new, gamma=case.gamma, eos=0)
    allowed = result.target_forwards + 1  # and once for the prompt's ids
    assert waits.count <= allowed, f"got {waits.count} waits, should be at most {allowed}: {case}"


@implementations(speculative)
@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        (torch.tensor([[0, VOCAB]]), f"draft: proposed the id {VOCAB}, accepted are 0 to {VOCAB - 1}"),
        (torch.tensor([[-1, 0]]), "draft: proposed the id -1, accepted are"),
        (torch.zeros(1, 4, dtype=torch.int64), r"draft: proposed shape \(1, 4\), accepted is \[1, up to 3\]"),
        (torch.zeros(2, dtype=torch.int64), r"draft: proposed shape \(2,\), accepted is"),
        (torch.zeros(1, 2), "draft: proposed torch.float32, accepted is"),
    ],
)
def test_refuses_what_no_draft_may_propose(device, impl, proposal, message):
    case = Case(gamma=3)
    draft = case.draft(device)
    draft.propose = lambda committed, k: proposal.to(device)
    with pytest.raises((ValueError, TypeError), match=message):
        case.run(impl, device, draft=draft)


@implementations(speculative)
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"gamma": 0}, ValueError, "gamma: got 0, accepted are 1 and above"),
        ({"gamma": 2.0}, TypeError, "gamma: got 2.0, accepted is an int"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens: got -1, accepted are 0 and above"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens: got True, accepted is an int"),
        (
            {"max_new_tokens": 63},
            ValueError,
            "max_new_tokens: got 63 after a prompt of 3, accepted are at",
        ),
        ({"eos": VOCAB}, ValueError, f"eos: got {VOCAB}, accepted are 0 to {VOCAB - 1}"),
        ({"eos": "."}, TypeError, "eos: got '.', accepted is an int"),
        (
            {"prompt": torch.zeros(1, 0, dtype=torch.int64)},
            ValueError,
            r"prompt: got shape \(1, 0\), accepted is",
        ),
        (
            {"prompt": torch.zeros(0, 3, dtype=torch.int64)},
            ValueError,
            r"prompt: got shape \(0, 3\), accepted is",
        ),
        ({"prompt": torch.zeros(3, dtype=torch.int64)}, ValueError, r"prompt: got shape \(3,\), accepted is"),
        ({"sampling": 0.7}, TypeError, "sampling: got float, accepted is a Sampling"),
        (
            {"uniform": torch.zeros(8, 1, 9)},
            ValueError,
            r"uniform: got shape \(8, 1, 9\), accepted is \[9 or more, 1, 9\]",
        ),
        (
            {"prompt": torch.zeros(1, 3)},
            TypeError,
            "prompt: got torch.float32, accepted is a Tensor of torch.int64",
        ),
        ({"prompt": [[1, 2]]}, TypeError, "prompt: got list, accepted is a Tensor of torch.int64"),
        (
            {"prompt": torch.tensor([[0, VOCAB]])},
            ValueError,
            f"prompt: got ids from 0 to {VOCAB}, accepted are 0 to",
        ),
        ({"target": "a model"}, TypeError, "target: got str, accepted is a model"),
        ({"draft": 3}, TypeError, "draft: got int, accepted is a model .* or a Draft"),
    ],
)
def test_refuses_bad_arguments_by_name(device, impl, changed, error, message):
    case = Case()
    right = {
        "target": case.target(device),
        "draft": case.draft(device),
        "prompt": case.ids(device),
        "max_new_tokens": 9,
    }
    with pytest.raises(error, match=message):
        impl(**{**right, **changed})


@implementations(speculative)
def test_fills_the_context_to_its_end(device, impl):
    case = Case(new=62)  # and the last token is never computed: 3 + 62 - 1 = max_length
    result = case.run(impl, device, draft=case.target(device))
    assert_tokens(result.tokens, case.truth(device), case)


@given(agreement=st.floats(0, 1), gamma=gammas)
def test_expected_tokens_are_the_mean_over_all_outcomes(agreement, gamma):
    stops = [agreement**i * (1 - agreement) * (i + 1) for i in range(gamma)]  # the first mistake at place i
    mean = sum(stops) + agreement**gamma * (gamma + 1)
    # each side sums gamma + 1 terms of at most gamma + 1
    assert abs(expected_tokens(agreement, gamma) - mean) <= 2 * (gamma + 1) ** 2 * eps(torch.float64)
    if agreement < 1 - 1e-3:
        closed = (1 - agreement ** (gamma + 1)) / (1 - agreement)
        assert math.isclose(expected_tokens(agreement, gamma), closed, rel_tol=1e3 * 4 * eps(torch.float64))


@given(gamma=gammas)
def test_the_predicted_speedup_has_the_right_ends(gamma):
    assert predicted_speedup(1.0, gamma, 0.0) == gamma + 1
    assert predicted_speedup(0.0, gamma, 0.0) == 1
    assert predicted_speedup(1.0, gamma, 1.0) == 1  # as dear as the target: nothing is won
    assert predicted_speedup(0.0, gamma, 1.0) == 1 / (gamma + 1)


def test_agreement_counts_only_proposals_that_were_up_for_it():
    result = Result(
        torch.zeros(1, 9), (Round(4, 1, 2), Round(4, 4, 5), Round(4, 2, 2))
    )  # the last one ended by eos
    assert (result.accepted, result.drafted, result.acceptance) == (7, 12, 7 / 12)
    assert result.agreement == 7 / 8
    assert (result.emitted, result.tokens_per_target_forward) == (9, 3.0)


@on_devices()
def test_target_and_draft_learn_to_count(device):
    with torch.no_grad():
        for net in counting_pair(device):
            rows = counting(torch.arange(0, 256, 32)[:, None], 300, 256).to(device)
            wrong = int((net(rows[:, :-1]).argmax(-1) != rows[:, 1:]).sum())
            assert wrong == 0, (
                f"{wrong} of {rows[:, 1:].numel()} tokens of a model of {net.config.layers} layers"
            )


@on_devices()
@pytest.mark.parametrize("gamma", [2, 4, 8])
def test_the_trained_draft_is_always_right(device, gamma):
    target, draft = counting_pair(device)
    prompt = counting(250, 8, 256).to(device)
    result = speculative_generate(target, draft, prompt, 5 * (gamma + 1), gamma=gamma)
    assert_tokens(result.tokens, counting(250, 8 + 5 * (gamma + 1), 256).to(device), gamma)
    assert_equal("acceptance, forwards", (result.acceptance, result.target_forwards), (1.0, 5), gamma)


@pytest.mark.parametrize("size", ["steps", "batch", "length", "draft_layers"])
def test_training_refuses_empty_sizes(size):
    with pytest.raises(ValueError, match=f"{size}: got 0, accepted are 1 and above"):
        train_counting(model("cpu", 0, torch.float32), **{size: 0})


def test_training_is_the_same_for_the_same_seed():
    pair = [Transformer.seeded(ModelConfig(vocab_size=16, layers=2, width=16, heads=2)) for _ in range(2)]
    for net in pair:
        train_counting(net, draft_layers=1, steps=3, batch=2, length=8)
    for name, weight in pair[0].named_parameters():
        assert torch.equal(weight, pair[1].get_parameter(name)), name


@pytest.mark.parametrize(
    "name",
    sorted({m.killed_by.partition("::")[2] for m in MUTANTS if hasattr(m.impl.fn, "of_the_loop")}),
)
def test_the_loop_that_the_mutants_vary_is_right(name):
    right = Implementation(speculative, "unmutated", Loop.call, ("cpu",), (torch.float64,))
    test = globals()[name]
    dtype = {"dtype": torch.float64} if "dtype" in inspect.signature(test).parameters else {}
    if audit.cases(test) == [{}]:  # the refusals stand before the loop
        test(device="cpu", impl=right, **dtype)
