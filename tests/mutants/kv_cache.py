"""Wrong key/value caches, each the contiguous one but for one fault."""

import torch
from torch import Tensor

from perf_lab.kv_cache import ContiguousCache, kv_cache
from perf_lab.kv_cache.checks import check_append

from . import mutant

LIST = "test_kv_cache::test_behaves_like_a_plain_list"
REFUSED = "test_kv_cache::test_a_refused_call_changes_nothing"


@mutant(kv_cache, killed_by=LIST)
class NegativeTruncateGrows(ContiguousCache):
    """truncate(-n) drops nothing and adds n slots that nothing wrote."""

    def truncate(self, length: int) -> None:
        if length < 0:
            return self._settle(min(self.capacity, self._length - length))
        return super().truncate(length)


@mutant(kv_cache, killed_by=LIST)
class NegativeRollbackGrows(ContiguousCache):
    """rollback(-n) adds n slots that nothing wrote."""

    def rollback(self, n: int) -> None:
        if n < 0:
            return self._settle(min(self.capacity, self._length - n))
        return super().rollback(n)


@mutant(kv_cache, killed_by=LIST)
class TruncateOffByOne(ContiguousCache):
    """truncate keeps one token too many."""

    def truncate(self, length: int) -> None:
        super().truncate(min(length + 1, self._length) if length >= 0 else length)


@mutant(kv_cache, killed_by=LIST)
class RollbackOneTooMany(ContiguousCache):
    """rollback drops one token more than asked."""

    def rollback(self, n: int) -> None:
        super().rollback(min(n + 1, self._length) if 0 < n < self._length else n)


@mutant(kv_cache, killed_by=LIST)
class CommitUnchecked(ContiguousCache):
    """commit does not look at what is pending."""

    def commit(self, n: int) -> None:
        self._settle(max(0, min(self.capacity, self._length + n)))


@mutant(kv_cache, killed_by="test_kv_cache::test_commit_takes_only_what_every_layer_has")
class CommitAsksOneLayer(ContiguousCache):
    """commit looks at what is pending in the first layer only."""

    def commit(self, n: int) -> None:
        self._pending = self._pending[:1] * self.layers
        super().commit(n)


@mutant(kv_cache, killed_by=LIST)
class CommitTakesAll(ContiguousCache):
    """commit(n) commits everything that is pending."""

    def commit(self, n: int) -> None:
        super().commit(min(self._pending) if 0 < n <= min(self._pending) else n)


@mutant(kv_cache, killed_by="test_kv_cache::test_pending_tokens_do_not_outlive_a_cut")
class PendingOutlivesTruncate(ContiguousCache):
    """What was pending before a truncate can still be committed after it."""

    def truncate(self, length: int) -> None:
        pending = self._pending
        super().truncate(length)
        self._pending = [min(n, self.capacity - length) for n in pending]


@mutant(kv_cache, killed_by=LIST)
class AppendsAfterPending(ContiguousCache):
    """A second append at a layer goes on after the pending tokens instead of replacing them."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        check_append(self, layer, k, v)
        start = self._length + self._pending[layer]
        end = min(self.capacity, start + k.shape[2])
        self._k[layer][:, :, start:end] = k[:, :, : end - start]
        self._v[layer][:, :, start:end] = v[:, :, : end - start]
        self._pending[layer] = end - self._length
        return self._k[layer][:, :, :end], self._v[layer][:, :, :end]


@mutant(kv_cache, killed_by=LIST)
class PendingUnseen(ContiguousCache):
    """append gives the committed tokens only."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().append(layer, k, v)
        return keys[:, :, : self._length], values[:, :, : self._length]


@mutant(kv_cache, killed_by=LIST)
class SlackSeen(ContiguousCache):
    """The views reach one slot past the pending tokens."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, _ = super().append(layer, k, v)
        end = keys.shape[2] + 1
        return self._k[layer][:, :, :end], self._v[layer][:, :, :end]


@mutant(kv_cache, killed_by=LIST)
class LastLayerShared(ContiguousCache):
    """The last layer is kept where the first one is."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        views = super().append(layer, k, v)
        if layer != self.layers - 1:
            return views
        super().append(0, k, v)
        return tuple(store[0][:, :, : views[0].shape[2]] for store in (self._k, self._v))


@mutant(kv_cache, killed_by=LIST)
class OverflowWraps(ContiguousCache):
    """Past the capacity it silently starts again at slot 0."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        fits = self.capacity - self._length
        if layer < self.layers and 0 < k.shape[2] - fits <= self.capacity:
            self._k[layer][:, :, : k.shape[2] - fits] = k[:, :, fits:]
            self._v[layer][:, :, : k.shape[2] - fits] = v[:, :, fits:]
            k, v = k[:, :, :fits], v[:, :, :fits]
        return super().append(layer, k, v)


@mutant(kv_cache, killed_by=REFUSED)
class WritesBeforeItChecks(ContiguousCache):
    """The keys are written before the values are looked at."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        check_append(self, layer, k, k)
        self._k[layer][:, :, self._length : self._length + k.shape[2]] = k
        return super().append(layer, k, v)


@mutant(kv_cache, killed_by=REFUSED)
class ForgetsOnError(ContiguousCache):
    """A refused call drops what is pending."""

    def truncate(self, length: int) -> None:
        try:
            super().truncate(length)
        except (TypeError, ValueError):
            self._pending = [0] * self.layers
            raise


@mutant(kv_cache, killed_by=REFUSED)
class NegativeLayer(ContiguousCache):
    """Layer -1 is the last one."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return super().append(layer % self.layers if isinstance(layer, int) and layer < 0 else layer, k, v)


@mutant(kv_cache, killed_by=REFUSED)
class BroadcastsHeads(ContiguousCache):
    """One head of keys fills all."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if k.ndim == 4 and k.shape[1] == 1:
            k, v = (x.expand(-1, self.kv_heads, -1, -1) for x in (k, v))
        return super().append(layer, k, v)


@mutant(kv_cache, killed_by="test_kv_cache::test_another_dtype_is_refused_not_cast")
class Casts(ContiguousCache):
    """Keys and values of another dtype are rounded to the cache's."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return super().append(layer, k.to(self.dtype), v.to(self.dtype))


@mutant(kv_cache, killed_by="test_kv_cache::test_what_comes_out_is_what_went_in")
class KeptInHalf(ContiguousCache):
    """Keys pass through bfloat16 on their way."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return super().append(layer, k.bfloat16().to(k.dtype) if k.is_floating_point() else k, v)


@mutant(kv_cache, killed_by="test_kv_cache::test_append_gives_views_of_one_memory")
class Concatenates(ContiguousCache):
    """Each append copies everything into new memory."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().append(layer, k, v)
        self.kept = [*getattr(self, "kept", ()), keys.clone(), values.clone()]  # so that none is used again
        return self.kept[-2], self.kept[-1]


@mutant(kv_cache, killed_by="test_kv_cache::test_appending_costs_the_same_at_every_length")
class RewritesThePast(ContiguousCache):
    """Each append writes all tokens again, in place."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().append(layer, k, v)
        return keys.copy_(keys.clone()), values


@mutant(kv_cache, killed_by="test_kv_cache::test_memory_is_linear_in_the_capacity")
class Quadratic(ContiguousCache):
    """A row of slots for every slot."""

    def __init__(self, **sizes) -> None:
        super().__init__(**sizes)
        k = self._k
        self._k, self._v = (
            torch.empty((*k.shape[:3], k.shape[3] ** 2, k.shape[4]), dtype=k.dtype) for _ in "kv"
        )


@mutant(kv_cache, killed_by="test_kv_cache::test_memory_is_linear_in_the_capacity")
class CountsHalf(ContiguousCache):
    """nbytes counts the keys only."""

    @property
    def nbytes(self) -> int:
        return self._k.nbytes


@mutant(kv_cache, killed_by="test_kv_cache::test_reset_is_as_new")
class ResetKeepsLength(ContiguousCache):
    """reset fills with zeros and leaves the length."""

    def reset(self) -> None:
        self._k.zero_()
        self._v.zero_()


@mutant(kv_cache, killed_by="test_kv_cache::test_impossible_sizes_are_refused")
class AnySize(ContiguousCache):
    """A size of 0 is taken for 1."""

    def __init__(self, **sizes) -> None:
        super().__init__(**{name: size or 1 if name != "capacity" else size for name, size in sizes.items()})


WRITTEN = "test_kv_cache::test_slots_written_by_the_device_are_as_appended"


@mutant(kv_cache, killed_by=WRITTEN)
class WritesOneSlotLate(ContiguousCache):
    """write puts the tokens one slot after the one it is told."""

    def write(self, layer: int, k: Tensor, v: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        return super().write(layer, k, v, (at + 1).clamp(max=self.capacity - 1))


@mutant(kv_cache, killed_by=WRITTEN)
class WritesAlwaysAtTheEnd(ContiguousCache):
    """write takes the host's length for the slot, which a recorded step does not move."""

    def write(self, layer: int, k: Tensor, v: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        self.append(layer, k, v)
        return self._k[layer], self._v[layer]

    def advance(self, n: int) -> None:
        """Commits what is pending, as if it had been appended."""
        self.commit(max(0, n - 1))


@mutant(kv_cache, killed_by=REFUSED)
class AdvancesPastTheCapacity(ContiguousCache):
    """advance does not look at the capacity."""

    def advance(self, n: int) -> None:
        self._settle(self._length + max(0, n))


FIRST = "test_kv_cache::test_a_cut_keeps_exactly_the_first_tokens"


@mutant(kv_cache, killed_by=FIRST)
class ShortTruncateDropsOneMore(ContiguousCache):
    """truncate drops one token too many, unless it is to drop none or all."""

    def truncate(self, length: int) -> None:
        super().truncate(length - 1 if 0 < length < self.length else length)


@mutant(kv_cache, killed_by=FIRST)
class RollbackToTheLength(ContiguousCache):
    """rollback(n) keeps n tokens: it is taken for truncate."""

    def rollback(self, n: int) -> None:
        super().rollback(self.length - n if 0 <= n <= self.length else n)


OVER_EVERY_CACHE = (
    "test_paged_serving::test_generation_over_every_cache_gives_the_same_tokens",
    "test_paged_serving::test_padded_rows_over_every_cache_are_as_if_alone",
)


@mutant(kv_cache, killed_by=OVER_EVERY_CACHE)
class FirstKeyOverwritten(ContiguousCache):
    """A token that comes alone is put into slot 0 as well."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        views = super().append(layer, k, v)
        if k.shape[2] == 1:
            self._k[layer][:, :, :1], self._v[layer][:, :, :1] = k, v
        return views

    def write(self, layer: int, k: Tensor, v: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        views = super().write(layer, k, v, at)
        return super().write(layer, k, v, at * 0) if k.shape[2] == 1 else views


@mutant(
    kv_cache,
    killed_by=(
        "test_paged_serving::test_speculation_over_every_cache_gives_the_same_tokens",
        "test_speculative_drafts::test_any_cache_of_the_interface_serves",
    ),
)
class ClearsTheLastKept(ContiguousCache):
    """A truncate clears the slot before its cut as well."""

    def truncate(self, length: int) -> None:
        super().truncate(length)
        if length:
            self._k[:, :, :, length - 1] = 0
