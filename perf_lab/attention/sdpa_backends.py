"""Peers: each of torch's fused CUDA kernels of `scaled_dot_product_attention`, on its own.

`sdpa` takes the one that torch chooses; these show what each would have given. They are held to the
contract only for the calls that the kernel itself knows: what `sdpa` does around it (masks, windows,
lengths, alignment) is not done here, and a limit says so.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from perf_lab.attention import attention
from perf_lab.attention.layout import ALIGNMENT, GRID, laid_out
from perf_lab.op import Limit

HALF = (torch.float16, torch.bfloat16)

PLAIN = (
    Limit("no mask tensor here", lambda *_, mask=None, **__: mask is not None),
    Limit("no lengths by row", lambda *_, lengths=None, **__: lengths is not None),
    Limit("no window", lambda *_, window=None, **__: window is not None),
    Limit(
        "its causal alignment is top-left: only with as many queries as keys, or one query",
        lambda q, k, *_, causal=False, **__: causal and q.shape[2] not in (1, k.shape[2]),
    ),
    Limit("v has the head dim of q and k", lambda q, k, v, **_: q.shape[3] != v.shape[3]),
    Limit(
        f"rows of {ALIGNMENT} bytes' multiples",
        lambda q, *_, **__: q.shape[3] * q.element_size() % ALIGNMENT != 0,
    ),
    Limit(f"up to {GRID} rows and heads", lambda q, *_, **__: max(q.shape[:2]) > GRID),
)
NO_FLOAT32 = Limit("half precision only", lambda q, *_, **__: q.dtype not in HALF)


def _run(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    """One kernel call; views that it cannot read are copied."""
    if not (q.numel() and k.numel()):
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    q, k, v = (laid_out(x) for x in (q, k, v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal and q.shape[2] > 1, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def _peer(backend: SDPBackend) -> Callable[..., Tensor]:
    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: None = None,
        mask: None = None,
        lengths: None = None,
    ) -> Tensor:
        """Attention [B, Hq, Tq, D] of q [B, Hq, Tq, D], k and v [B, Hkv, Tk, D] by this backend."""
        return _run(backend, q, k, v, causal, scale)

    return attend


def _float64(q: Tensor, *_: object, **__: object) -> bool:
    return q.dtype is torch.float64


attention.register(
    "sdpa_flash",
    devices=("cuda",),
    dtypes=HALF,
    limits=(*PLAIN, NO_FLOAT32, Limit("head dims up to 256", lambda q, *_, **__: q.shape[3] > 256)),
)(_peer(SDPBackend.FLASH_ATTENTION))

attention.register(
    "sdpa_cudnn",
    devices=("cuda",),
    dtypes=HALF,
    limits=(*PLAIN, NO_FLOAT32, Limit("head dims up to 128", lambda q, *_, **__: q.shape[3] > 128)),
)(_peer(SDPBackend.CUDNN_ATTENTION))

attention.register(
    "sdpa_efficient",
    devices=("cuda",),
    limits=(
        *PLAIN,
        Limit("no float64", _float64),
        Limit("no grouped heads", lambda q, k, *_, **__: q.shape[1] != k.shape[1]),
    ),
)(_peer(SDPBackend.EFFICIENT_ATTENTION))
