"""Which proposals a round keeps, and the token behind them: modified rejection sampling.

accept(p, proposed, uniform, q, counts) -> (tokens [B, k+1], accepted [B])

p         [B, k+1, V], the target's law after each prefix: p[:, i] follows i proposals
proposed  [B, k] int64 in 0..V-1, each drawn from q[:, i].
q         [B, k, Vq <= V], the draft's laws; an id past Vq has probability 0 there. None: the draft was
          certain of its proposals (greedy, a look-up), and q is 1 for them. To take another law for such a
          draft, its softmax for one, changes the law of what comes out.
uniform   [B, k+1] in [0, 1), independent of each other and of the proposals: k tests, and one draw.
counts    [B] int64 from 0 to k: row b made the first counts[b] proposals only. Default: k.

Proposal x at place i is kept with chance min(1, p_i(x) / q_i(x)), as long as all before it were. At the
first place that is not kept, a token is drawn from the residual max(p - q, 0), normalized; behind counts[b]
kept ones, from p itself. tokens[b, : accepted[b] + 1] are the row's, and their law is exactly that of as many
draws from the target: q(x) min(1, p(x) / q(x)) + P(rejected) residual(x) = min(q, p) + max(p - q, 0) = p(x).

rounding  where q > p at one id only by rounding, so that the residual is nothing (below eps^2 in all), the
          token is drawn from p; that happens with a chance of the size of the rounding.
zero      a token that the target gives probability 0 is never emitted.

FLOPs: about 6 V a row. Least bytes: the k laws of p and q once at the proposed ids, one row of each whole.

Sources: Leviathan et al., arXiv:2211.17192, section 2.3 and appendix A.1; Chen et al., arXiv:2302.01318.
"""

import torch
from torch import Tensor

from perf_lab.op import Op
from perf_lab.sampling import pick

acceptance: Op = Op("acceptance", reference="torch")


@acceptance.register("torch")
def accept(
    p: Tensor, proposed: Tensor, uniform: Tensor, q: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(tokens [B, k+1], accepted [B]) by the module's docstring. Nothing waits for the device."""
    k = proposed.shape[1]
    if q is not None and q.shape[-1] < p.shape[-1]:
        q = torch.nn.functional.pad(q, (0, p.shape[-1] - q.shape[-1]))
    drawn = proposed[..., None]  # [B, k, 1]
    at_p = p[:, :k].gather(-1, drawn).squeeze(-1)  # [B, k]
    at_q = torch.ones_like(at_p) if q is None else q.gather(-1, drawn).squeeze(-1).to(at_p)
    accepted = leading(uniform[:, :k].to(at_p) * at_q < at_p, counts)  # q <= p: for every number below 1
    law = _behind(p, proposed, q, accepted, counts)
    tokens = torch.nn.functional.pad(proposed, (0, 1))
    return tokens.scatter(1, accepted[:, None], pick(law, uniform[:, k:])[:, None]), accepted


def accept_greedy(choices: Tensor, proposed: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same where the target is certain of its choices [B, k+1]: (choices, accepted [B])."""
    return choices, leading(proposed == choices[:, :-1], counts)


def leading(kept: Tensor, counts: Tensor | None = None) -> Tensor:
    """How many of kept [B, k] are True before the first that is not, of row b's first counts[b]: [B]."""
    if counts is not None:
        kept = kept & (torch.arange(kept.shape[1], device=kept.device) < counts[:, None])
    return kept.long().cumprod(1).sum(1)


def _behind(p: Tensor, proposed: Tensor, q: Tensor | None, accepted: Tensor, counts: Tensor | None) -> Tensor:
    """The law [B, V] of the token behind the accepted ones, not normalized."""
    k = proposed.shape[1]
    law = _at(p, accepted)  # [B, V]
    if k == 0:
        return law
    place = accepted.clamp(max=k - 1)
    if q is None:
        guess = torch.zeros_like(law).scatter(1, proposed.gather(1, place[:, None]), 1.0)
    else:
        guess = _at(q, place).to(law)
    rejected = accepted < (k if counts is None else counts)  # [B]
    residual = (law - guess).clamp(min=0)
    enough = residual.sum(-1) > torch.finfo(law.dtype).eps ** 2
    return torch.where((rejected & enough)[:, None], residual, law)


def _at(laws: Tensor, place: Tensor) -> Tensor:
    """Row b's law at place[b], of laws [B, n, V]: [B, V]."""
    return laws.gather(1, place[:, None, None].expand(-1, 1, laws.shape[-1])).squeeze(1)
