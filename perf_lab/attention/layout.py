"""What torch's fused kernels of `scaled_dot_product_attention` need of their inputs."""

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, of the CUDA kernels' loads
GRID = 65535  # the most blocks that a CUDA grid takes on the axes where the kernels put B and H


def laid_out(x: Tensor) -> Tensor:
    """The tensor, or a copy: a strided last axis would make torch fall back on O(Tq * Tk) memory, and on a
    GPU its memory-efficient kernel reads 16 bytes at a time wherever a view begins: a misaligned address.
    """
    batch, head, row, column = x.stride()
    aligned = column == 1
    if x.is_cuda:
        aligned = aligned and (x.data_ptr() | (batch | head | row) * x.element_size()) % ALIGNMENT == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)
