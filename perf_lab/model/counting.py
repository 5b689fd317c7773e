"""A task that a model learns in seconds: to count. After t comes t + 1, and after the last id comes 0.

It gives benchmarks of speculative decoding a target and a draft that are trained, and agree on every token.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perf_lab.model import ModelConfig, Transformer


def counting(start: int | Tensor, length: int, vocab_size: int) -> Tensor:
    """Rows start, start + 1, ... modulo vocab_size, [B, length] int64; start: [B, 1], or an int for one."""
    first = torch.as_tensor(start)
    return (first.reshape(-1, 1) + torch.arange(length, device=first.device)) % vocab_size


@torch.enable_grad()
def train_counting(
    model: Transformer,
    *,
    draft_layers: int = 2,
    steps: int = 10,
    batch: int = 8,
    length: int = 64,
    learning_rate: float = 3e-3,
    seed: int = 0,
) -> Transformer:
    """Train the model to count, and with it the model of its first layers; gives that one, the draft.

    Both are trained by one loss, the sum of theirs: the shared layers, norm and head serve two depths, as in
    Elhoushi et al., LayerSkip, arXiv:2404.16710. Starting points are drawn on the CPU from `seed`: every
    device sees the same sequences [batch, length + 1]. Two seconds for 6 layers x 256 on two CPU cores.

    Raises ValueError for sizes below 1, or draft_layers that the model does not have.
    """
    sizes = {"draft_layers": draft_layers, "steps": steps, "batch": batch, "length": length}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: got {size}, accepted are 1 and above")
    draft = model.first_layers(draft_layers)
    device, vocab = next(model.parameters()).device, model.config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), learning_rate)
    for _ in range(steps):
        start = torch.randint(vocab, (batch, 1), generator=generator)
        tokens = counting(start, length + 1, vocab).to(device)
        optimizer.zero_grad()
        (_loss(model, tokens) + _loss(draft, tokens)).backward()
        optimizer.step()
    model.zero_grad()
    return draft


@functools.cache
def counting_pair(device: str = "cpu") -> tuple[Transformer, Transformer]:
    """Target and draft that count modulo 256, trained once a process: 6 layers x 256, and its first two."""
    target = Transformer.seeded(ModelConfig(vocab_size=256, layers=6, width=256, heads=4), device=device)
    draft = train_counting(target)
    return target, draft


def _loss(model: Any, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of each next token of [B, T + 1]."""
    logits = model(tokens[:, :-1])  # [B, T, V]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
