"""The cache as one preallocated block of memory a layer: appending is one copy, reading is a slice."""

from typing import Any

import torch
from torch import Tensor

from perf_lab.kv_cache import kv_cache
from perf_lab.kv_cache.checks import check_append, check_count, check_dtype


@kv_cache.register("contiguous")
class ContiguousCache:
    """Keys and values [layers, B, Hkv, capacity, D]; the contract is the docstring of perf_lab.kv_cache.

    Raises ValueError for a size below 1 (capacity: below 0), TypeError for one that is no int or a
    dtype that is not floating.
    """

    def __init__(
        self,
        *,
        layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        for name, size in (
            ("layers", layers),
            ("batch", batch),
            ("kv_heads", kv_heads),
            ("head_dim", head_dim),
        ):
            check_count(name, size, 1)
        check_count("capacity", capacity, 0)
        check_dtype(dtype)
        shape = (layers, batch, kv_heads, capacity, head_dim)
        self.layers, self.batch, self.kv_heads, self.head_dim = layers, batch, kv_heads, head_dim
        self.capacity = capacity
        self._k = torch.empty(shape, dtype=dtype, device=device)  # [layers, B, Hkv, capacity, D]
        self._v = torch.empty(shape, dtype=dtype, device=device)
        self._length = 0
        self._pending = [0] * layers  # tokens, by layer
        self.recorded: Any = None  # a decode step over this memory, for those who use it again

    @property
    def length(self) -> int:
        """The number of committed tokens: also the position of the next one."""
        return self._length

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self._k.dtype

    @property
    def device(self) -> torch.device:
        """Where keys and values lie."""
        return self._k.device

    @property
    def nbytes(self) -> int:
        """Bytes held, linear in the capacity."""
        return self._k.nbytes + self._v.nbytes

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v [B, Hkv, T, D] after the committed tokens of `layer`; gives views of all its keys and
        values, [B, Hkv, length + T, D].

        Raises ValueError for a layer, shape, device or number of tokens that does not fit, or for a tensor
        that needs a gradient; TypeError for another dtype. Nothing is written then.
        """
        check_append(self, layer, k, v)
        start, end = self._length, self._length + k.shape[2]
        keys, values = self._k[layer], self._v[layer]  # [B, Hkv, capacity, D]
        keys[:, :, start:end].copy_(k)
        values[:, :, start:end].copy_(v)
        self._pending[layer] = end - start
        return keys[:, :, :end], values[:, :, :end]

    def write(self, layer: int, k: Tensor, v: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Put k, v [B, Hkv, T, D] into the slots `at`, [T] int64 on the cache's device; gives all of the
        layer's memory, [B, Hkv, capacity, D].

        Raises as `append` does, and ValueError for `at` of another shape, dtype or device. Whether the slots
        are free ones is the caller's to know: to look would wait for the device.
        """
        check_append(self, layer, k, v)
        if at.shape != k.shape[2:3] or at.dtype != torch.int64 or at.device != self._k.device:
            raise ValueError(
                f"at: got {at.dtype} {tuple(at.shape)} on {at.device}, accepted is torch.int64 "
                f"({k.shape[2]},) on {self._k.device}"
            )
        keys, values = self.memory(layer)
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        return keys, values

    def memory(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, [B, Hkv, capacity, D], for a kernel that writes by itself what
        `advance` then commits.
        """
        return self._k[layer], self._v[layer]

    def advance(self, n: int) -> None:
        """Commit the n slots after the committed tokens, filled by `write` in every layer.

        Raises ValueError unless 0 <= n <= capacity - length, TypeError when it is no int.
        """
        check_count("n", n, 0, self.capacity - self._length, "free")
        self._settle(self._length + n)

    def commit(self, n: int) -> None:
        """Make the first n pending tokens count; the other pending ones are dropped.

        Raises ValueError when n is negative or more than some layer has pending, TypeError for no int.
        """
        check_count("n", n, 0, min(self._pending), "pending in every layer")
        self._settle(self._length + n)

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed tokens; the others and the pending ones are dropped.

        Raises ValueError unless 0 <= length <= self.length, TypeError when it is no int.
        """
        check_count("length", length, 0, self._length, "committed")
        self._settle(length)

    def rollback(self, n: int) -> None:
        """Drop the last n committed tokens, and the pending ones.

        Raises ValueError unless 0 <= n <= self.length, TypeError when it is no int.
        """
        check_count("n", n, 0, self._length, "committed")
        self._settle(self._length - n)

    def reset(self) -> None:
        """Drop every token."""
        self._settle(0)

    def _settle(self, length: int) -> None:
        self._length = length
        self._pending = [0] * self.layers
