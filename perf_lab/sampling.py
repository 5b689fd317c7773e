"""Choosing a token from logits: the law that sampling draws from, and the draw.

probabilities(logits, temperature, top_k, top_p, min_p, repetition_penalty, seen) gives the law [..., V] of
the next token from logits [..., V]. The steps, in the order of transformers' generate:

repetition_penalty  > 0: the logit of a token that was seen is divided by it where it is above 0, and
                    multiplied elsewhere. seen: [..., V] bool, the ids so far. 1 changes nothing.
temperature         the logits are divided by it; >= GREEDY_BELOW here. Below that the law is its limit, all
                    on the largest logit, the lowest id of equal ones: that takes no sampling, see `Sampling`.
top_k               >= 1: exactly the k largest stay, of equal ones the lower ids. (transformers keeps every
                    token that equals the k-th.)
top_p               0 to 1: a token stays when the mass of those before it, in the order of falling logits
                    and, among equal ones, of rising ids, is below top_p; the mass is of what top_k left. So
                    it is the least set of that order whose mass reaches top_p. The first token always stays,
                    for 0 too; 1 drops nothing.
min_p               0 to 1: a token stays when its probability is at least min_p times the largest. Of what is
                    left, so that the largest always stays; 0 drops nothing, 1 keeps what equals the largest.

What stays is normalized; what does not has probability 0. A step whose argument is None is left out. At least
one token always survives. Logits are finite or -inf, one of a row finite. Computed in float32 at the least,
so that a top_p or min_p within its rounding (V * 2^-24) of a boundary may fall on either side of it.

FLOPs        about 6 V a row, and a sort with top_k or top_p; least bytes: the logits once, the law once.

Sources: Holtzman et al., arXiv:1904.09751 (top-p); Nguyen et al., arXiv:2407.01082 (min-p); Keskar et al.,
CTRL, arXiv:1909.05858 (repetition penalty).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from perf_lab.op import Op

GREEDY_BELOW = torch.finfo(torch.float32).tiny
"""1.2e-38: the least temperature whose reciprocal is finite, in every dtype from bfloat16 on.
Down to it, a sample is a sample; below, it is its limit."""


def law(
    logits: Tensor,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """The oracle of `probabilities`: the definition, one row at a time, in the float64 of its argument."""
    rows = logits.reshape(-1, logits.shape[-1]).tolist()
    marks = torch.zeros_like(logits, dtype=torch.bool) if seen is None else seen.expand(logits.shape)
    out = torch.zeros(len(rows), logits.shape[-1], dtype=logits.dtype, device=logits.device)
    for result, row, known in zip(out, rows, marks.reshape(-1, logits.shape[-1]).tolist(), strict=True):
        for i, was_seen in enumerate(known):
            if was_seen and repetition_penalty is not None:
                row[i] = row[i] / repetition_penalty if row[i] > 0 else row[i] * repetition_penalty
        order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:top_k]
        weight = {i: math.exp((row[i] - row[order[0]]) / temperature) for i in order}
        if top_p is not None and top_p < 1:
            least = top_p * math.fsum(weight.values())
            order = [
                i for n, i in enumerate(order) if n == 0 or math.fsum(weight[j] for j in order[:n]) < least
            ]
        order = [i for i in order if weight[i] >= (min_p or 0.0)]  # the largest weighs 1
        total = math.fsum(weight[i] for i in order)
        for i in order:
            result[i] = weight[i] / total
    return out.view(logits.shape)


def law_magnitude(
    logits: Tensor,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """With z = (logits - max) / temperature: p (1 + |z| + sum p |z|). An exponential has the relative error
    of its own rounding and the absolute one of its exponent, and so has the sum that it is divided by.
    A penalty rounds each logit by itself: then |z| is (|logit| + |max|) / temperature, of the penalized ones.
    """
    p = law(logits, temperature, top_k, top_p, min_p, repetition_penalty, seen)
    z = ((logits - logits.amax(-1, keepdim=True)) / temperature).abs()
    if repetition_penalty is not None:
        largest = logits.abs() * max(repetition_penalty, 1 / repetition_penalty)
        z = (largest + largest.amax(-1, keepdim=True)) / temperature
    return p * (1 + z + (p * z).sum(-1, keepdim=True))


sampling = Op(
    "sampling",
    oracle=law,
    magnitude=law_magnitude,
    reduction=lambda logits, *args, **kwargs: logits.shape[-1],
    reference="softmax",
)


@sampling.register("softmax")
def probabilities(
    logits: Tensor,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """The law [..., V] of the next token, in float32 at the least, from logits [..., V].

    The module's docstring is the contract. The largest logit is subtracted before the division, so that
    0 / temperature is what the largest becomes and nothing overflows to NaN. Nothing waits for the device.
    """
    logits = penalized(logits, repetition_penalty, seen)
    z = (logits - logits.amax(-1, keepdim=True)) / temperature  # [..., V], the largest is 0
    if (top_k is not None and top_k < logits.shape[-1]) or (top_p is not None and top_p < 1):
        order = logits.argsort(dim=-1, descending=True, stable=True)
        z = z.masked_fill(_unsorted(_past(z.gather(-1, order), top_k, top_p), order), -math.inf)
    if min_p is not None:
        z = z.masked_fill(z.exp() < min_p, -math.inf)
    return torch.softmax(z, -1)


def _past(z: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Which of z [..., V], in falling order, top_k and then top_p drop; never the first."""
    rank = torch.arange(z.shape[-1], device=z.device)
    past = (rank >= (z.shape[-1] if top_k is None else top_k)).expand(z.shape)
    if top_p is None or top_p >= 1:
        return past
    mass = torch.softmax(z.masked_fill(past, -math.inf), -1).cumsum(-1)
    before = torch.nn.functional.pad(mass[..., :-1], (1, 0))  # [..., V], of the tokens ahead of each
    return past | ((before >= top_p) & (rank > 0))


def _unsorted(values: Tensor, order: Tensor) -> Tensor:
    """The values [..., V], given by rank, by id."""
    return torch.empty_like(values).scatter(-1, order, values)


def penalized(logits: Tensor, repetition_penalty: float | None, seen: Tensor | None) -> Tensor:
    """The logits [..., V] in float32 at the least, those of seen tokens made less likely."""
    logits = logits if logits.dtype is torch.float64 else logits.float()
    if repetition_penalty is None or seen is None:
        return logits
    less = torch.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
    return torch.where(seen, less, logits)


def pick(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The token in whose share of [0, 1) the number lies: probabilities [..., V], uniform [..., 1] -> [...].

    The shares lie in the order of the ids; a token of probability 0 has none. Each share is right within the
    rounding of the running sum, V * 2^-24 at most. The probabilities need not add up to 1.
    """
    edges = probabilities.cumsum(-1)
    target = uniform.to(edges) * edges[..., -1:]
    return torch.searchsorted(edges, target, right=True).squeeze(-1).clamp(max=edges.shape[-1] - 1)


@dataclass(frozen=True)
class Sampling:
    """The arguments of `probabilities` as one value. Raises ValueError or TypeError that names the field."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, "finite numbers from 0 on", lambda x: x >= 0)
        if self.top_k is not None and (not isinstance(self.top_k, int) or isinstance(self.top_k, bool)):
            raise TypeError(f"top_k: got {self.top_k!r}, accepted is an int")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: got {self.top_k}, accepted are 1 and above")
        for name in ("top_p", "min_p"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), "numbers from 0 to 1", lambda x: 0 <= x <= 1)
        if self.repetition_penalty is not None:
            _check_number(
                "repetition_penalty", self.repetition_penalty, "finite numbers above 0", lambda x: x > 0
            )

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is taken: then only the penalty has a say."""
        return self.temperature < GREEDY_BELOW

    def law(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """`probabilities` with these arguments, of logits [..., V]; greedy: 1 for the token that is taken."""
        if not self.greedy:
            return probabilities(
                logits, self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty, seen
            )
        best = self.best(logits, seen)
        certain = torch.zeros_like(logits, dtype=torch.promote_types(logits.dtype, torch.float32))
        return certain.scatter(-1, best[..., None], 1.0)

    def best(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """The token of the largest (penalized) logit, the lowest id of equal ones: [..., V] -> [...]."""
        return (logits if seen is None else penalized(logits, self.repetition_penalty, seen)).argmax(-1)


def _check_number(name: str, got: float, accepted: str, within: Callable[[float], bool]) -> None:
    if not (isinstance(got, int | float) and math.isfinite(got) and within(got)):
        raise ValueError(f"{name}: got {got!r}, accepted are {accepted}")


def seen_ids(tokens: Tensor, vocab_size: int, pads: Tensor | None = None) -> Tensor:
    """Which ids stand in the rows of tokens [B, T], the first pads[b] of row b left out: [B, V] bool."""
    seen = torch.zeros(tokens.shape[0], vocab_size, dtype=torch.bool, device=tokens.device)
    if pads is None:
        return seen.scatter(1, tokens, True)
    count = torch.zeros(seen.shape, dtype=torch.int64, device=tokens.device)
    real = (torch.arange(tokens.shape[1], device=tokens.device) >= pads[:, None]).long()  # [B, T]
    return count.scatter_add(1, tokens, real) > 0


class Chooser:
    """choose(step, logits [B, V]) -> tokens [B], for steps 0, 1, ...; nothing waits for the device.

    The step is a number, or a tensor [1] that the host need not know, as in a CUDA graph.
    All numbers are drawn here, one a step and row, on the generator's own device (default: the CPU's global
    generator). With a repetition penalty the chooser keeps which ids `prompt` [B, T] (its first pads[b] left
    out) and the tokens it chose hold.
    """

    def __init__(
        self,
        how: Sampling,
        prompt: Tensor,
        steps: int,
        vocab_size: int,
        generator: torch.Generator | None = None,
        pads: Tensor | None = None,
    ) -> None:
        self.how = how
        self.seen = None if how.repetition_penalty is None else seen_ids(prompt, vocab_size, pads)
        if not how.greedy:
            source = generator.device if generator is not None else "cpu"
            shape = (steps, prompt.shape[0], 1)
            self.uniform = torch.rand(shape, generator=generator, device=source).to(prompt.device)

    def __call__(self, step: int | Tensor, logits: Tensor) -> Tensor:
        """The tokens [B] of this step."""
        if self.how.greedy:
            tokens = self.how.best(logits, self.seen)
        else:
            number = self.uniform[step] if isinstance(step, int) else self.uniform.index_select(0, step)[0]
            tokens = pick(self.how.law(logits, self.seen), number)
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        return tokens
