"""What speculation should bring, from how often the draft is right and what a round costs.

a = agreement, the chance that a proposal is right when those before it are; gamma proposals a round. Costs
are in forwards of the target over one token:

c = cost_ratio    one step of the draft
v = verify_ratio  one forward of the target over gamma + 1 tokens. The paper takes 1, which holds while
                  reading the weights is what takes the time; a CPU's v is above it.

tokens of a round  1 + a + ... + a^gamma = (1 - a^(gamma+1)) / (1 - a)
speed-up           tokens of a round / (gamma c + v)

Source: Leviathan et al., arXiv:2211.17192, equation 1 and theorem 3.8; there v = 1.
"""


def expected_tokens(agreement: float, gamma: int) -> float:
    """Tokens of one round: 1 + a + ... + a^gamma, which is (1 - a^(gamma+1)) / (1 - a) below a = 1."""
    return sum(agreement**i for i in range(gamma + 1))


def predicted_speedup(agreement: float, gamma: int, cost_ratio: float, verify_ratio: float = 1.0) -> float:
    """Time of plain over time of speculative decoding: the tokens of a round over its cost, gamma c + v."""
    return expected_tokens(agreement, gamma) / (gamma * cost_ratio + verify_ratio)


def break_even(gamma: int, cost_ratio: float, verify_ratio: float = 1.0) -> float | None:
    """The agreement from which on speculation is not slower; None where even 1 is not enough."""
    if predicted_speedup(1.0, gamma, cost_ratio, verify_ratio) < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):  # each halves the interval, down to 1e-18
        middle = (low + high) / 2
        if predicted_speedup(middle, gamma, cost_ratio, verify_ratio) < 1:
            low = middle
        else:
            high = middle
    return high
