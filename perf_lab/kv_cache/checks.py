"""The checks that caches share: each raises ValueError or TypeError "argument: got ..., accepted ..."."""

from typing import Any

import torch
from torch import Tensor


def check_count(name: str, got: Any, least: int, most: int | None = None, what: str = "") -> None:
    """Raise unless `got` is an int from least to most."""
    if not isinstance(got, int) or isinstance(got, bool):
        raise TypeError(f"{name}: got {got!r}, accepted is an int")
    if got < least or (most is not None and got > most):
        upper = "" if most is None else f" to {most} ({what})"
        raise ValueError(f"{name}: got {got}, accepted are {least}{upper or ' and above'}")


def check_dtype(dtype: torch.dtype) -> None:
    """Raise unless keys and values can be of this dtype."""
    if not dtype.is_floating_point:
        raise TypeError(f"dtype: got {dtype}, accepted are floating dtypes")


def check_new(k: Tensor, v: Tensor, shape: tuple[int, int, int], like: Any) -> None:
    """Raise unless k and v are [B, Hkv, T, D] of one T, of the dtype and on the device of `like`, without
    gradients. `shape`: B, Hkv, D.
    """
    b, h, d = shape
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, accepted is a Tensor")
        if x.dtype != like.dtype:
            raise TypeError(f"{name}: got {x.dtype}, accepted is the cache's {like.dtype}")
        if x.device != like.device:
            raise ValueError(f"{name}: got a tensor on {x.device}, accepted is the cache's {like.device}")
        if x.ndim != 4 or (x.shape[0], x.shape[1], x.shape[3]) != shape:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, accepted is [{b}, {h}, T, {d}]")
        if x.requires_grad:
            raise ValueError(
                f"{name}: got a tensor that requires a gradient, accepted are those without: "
                "the cache keeps no gradients, call under torch.no_grad()"
            )
    if v.shape != k.shape:
        raise ValueError(f"v: got {tuple(v.shape)}, accepted is the shape of k, {tuple(k.shape)}")


def check_append(cache: Any, layer: int, k: Tensor, v: Tensor) -> None:
    """Raise unless a cache has such a layer, k and v are new tokens for it, and they fit in."""
    check_count("layer", layer, 0, cache.layers - 1, "the last layer")
    check_new(k, v, (cache.batch, cache.kv_heads, cache.head_dim), cache)
    if k.shape[2] > cache.capacity - cache.length:
        raise ValueError(
            f"k: got {k.shape[2]} tokens, accepted are at most {cache.capacity - cache.length}: "
            f"{cache.length} of the cache's {cache.capacity} slots are taken"
        )
