"""What speculation should bring, from how often the draft is right and what it costs.

a = agreement, the chance that a proposal is right when those before it are; c = the cost of one draft step in
target forwards. A target forward over gamma + 1 tokens is taken to cost what one over a single token does.

Source: Leviathan et al., arXiv:2211.17192, equation 1 and theorem 3.8.
"""


def expected_tokens(agreement: float, gamma: int) -> float:
    """Tokens of one round: 1 + a + ... + a^gamma, which is (1 - a^(gamma+1)) / (1 - a) below a = 1."""
    return sum(agreement**i for i in range(gamma + 1))


def predicted_speedup(agreement: float, gamma: int, cost_ratio: float) -> float:
    """Time of plain over time of speculative decoding: the tokens of a round over its cost, gamma c + 1."""
    return expected_tokens(agreement, gamma) / (gamma * cost_ratio + 1)
