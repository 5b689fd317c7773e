"""What the Triton kernels over rows share: how a call is cut, the cut without tuning, the launch.

A kernel of this family takes tensors [R, C] whose columns are contiguous and
gives contiguous ones. It comes in two forms, chosen by the cut: `whole`, a row
(or several) in the registers of one program, read once; and `steps`, a row that
is longer than a block, read twice by one program, the second time mostly from
the L2 cache. Both take

    row inputs, vectors, outputs, [rows of `whole`,] columns, strides of the row inputs, scalars, constants

On GPUs that can (Hopper and later), a kernel is launched while the one before
it still ends (programmatic dependent launch): its programs are in place, and
`wait_for_inputs` holds them until all of the other's writes are there. Kernels
call that before they touch memory, and `let_next_start` once their loads are out.
"""

# ruff: noqa: ANN201 -- parameters of a kernel have Triton's types, not Python's
# mypy: disable-error-code="no-untyped-def"

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.errors import OutOfResources

from perf_lab import tuning

LARGEST = 32768  # columns of a row that 32 warps keep in registers, 32 float32 a thread
LOOP_BLOCK = 8192  # columns of one step through a longer row; two stages of it take 33 kB of shared memory
WARPS = (1, 2, 4, 8, 16, 32)
FULL = 4096  # rows from which a further one changes nothing about the best cut


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Wait for the kernels before this one; EARLY: it was launched before they ended."""
    if EARLY:
        gdc_wait()


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Let the next kernel take the places that become free; it waits for all of this one's writes."""
    if EARLY:
        gdc_launch_dependents()


class Cut(NamedTuple):
    """How a kernel is cut. Any cut gives the right result; they differ in time.

    block     columns of a block, a power of two; rows up to it are taken whole, longer ones in steps.
    warps     of a program.
    rows      of a block, a power of two; of whole rows alone.
    stages    of a row in steps: blocks loaded ahead, plus one.
    split     0, or: the blocks of longer rows go to programs of their own, so many KiB of rows at a time
              (where the op can).
    """

    block: int
    warps: int
    rows: int = 1
    stages: int = 1
    split: int = 0

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "Cut":
        """The cut of a table's entry. Raises ValueError for what is none, with the field's name."""
        if unknown := set(config) - set(cls._fields):
            raise ValueError(f"config: got {sorted(unknown)}, accepted are {cls._fields}")
        if wrong := [name for name, value in config.items() if type(value) is not int]:
            raise ValueError(f"{wrong[0]}: got {config[wrong[0]]!r}, accepted is a whole number")
        if missing := {"block", "warps"} - set(config):
            raise ValueError(f"config: has no {sorted(missing)}")
        return cls(**config).checked()

    def checked(self) -> "Cut":
        """Itself; raises ValueError for a field that no kernel takes."""
        accepted = {
            "block": _power_of_two(self.block) and 16 <= self.block <= 2 * LARGEST,
            "warps": self.warps in WARPS,
            "rows": _power_of_two(self.rows) and self.rows * self.block <= 2 * LARGEST,
            "stages": 1 <= self.stages <= 8,
            "split": 0 <= self.split <= 2**20,
        }
        if wrong := [name for name, right in accepted.items() if not right]:
            raise ValueError(f"{wrong[0]}: got {getattr(self, wrong[0])} in {self}")
        return self


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def default_cut(columns: int, rows: int) -> Cut:
    """The cut for `rows` rows of `columns` columns, from sizes alone: 16 elements a thread, two loads of
    16 bytes in 16 bits, which on one H200 was within 3 % of the best at every size tried.
    """
    if columns > LARGEST:
        return Cut(LOOP_BLOCK, 16, stages=2)
    block = max(16, triton.next_power_of_2(columns))
    packed = max(1, min(1024 // block, rows // 256))  # keep 256 programs, for as many processors
    packed = 1 << (packed.bit_length() - 1)
    return Cut(block, min(max(block * packed // 512, 4), 32), packed)


def tuning_key(columns: int, rows: int, dtypes: Sequence[torch.dtype]) -> dict[str, Any]:
    """What a tuned cut holds for: exact columns, the dtypes, and rows from one power of four to the next
    (from FULL on, all).
    """
    power = min(rows, FULL).bit_length() - 1
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return {"columns": columns, "rows": 1 << (power - power % 2), "dtypes": " ".join(names)}


@dataclass(frozen=True, eq=False)
class RowOp:
    """The kernels of one op over rows, with their place in the tables of tuned cuts.

    dtypes: those that are tuned for: of x, and of the weight where there is one.
    default: the cut without tuning, from columns and rows.
    revision: raise it when a change of a kernel makes tuned cuts meaningless.
    """

    name: str
    whole: Any
    steps: Any
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    default: Callable[[int, int], Cut] = default_cut
    revision: int = 1

    def tuned(self, launch: Callable[[Cut], None], x: Tensor, *dtypes: torch.dtype) -> None:
        """Launch with the tuned cut for a call on x [R, C] with these dtypes, else with the default.
        A tuned cut that this GPU has no room for (registers, shared memory) is not tried again.
        """
        columns, rows = x.shape[1], x.shape[0]
        cut = _cut(self, x.device, columns, rows, dtypes)
        try:
            launch(cut)
        except OutOfResources:
            default = self.default(columns, rows)
            if cut == default:
                raise
            _too_large.add((self, x.device, cut))
            _cut.cache_clear()
            launch(default)

    def run(
        self,
        inputs: Sequence[Tensor],
        vectors: Sequence[Tensor],
        outputs: Sequence[Tensor],
        scalars: Sequence[Any],
        cut: Cut,
    ) -> None:
        """Launch on inputs [R, C] (see `as_rows`), vectors [C] and contiguous outputs of R * C elements."""
        rows, columns = inputs[0].shape
        tensors = (*inputs, *vectors, *outputs)
        strides = [tensor.stride(0) for tensor in inputs]
        start_early = early(inputs[0].device)
        how = {"num_warps": cut.warps, **({"launch_pdl": True} if start_early else {})}
        with torch.cuda.device_of(inputs[0]):
            if columns > cut.block:
                constants = (cut.block, cut.stages, start_early)
                self.steps[(rows,)](*tensors, columns, *strides, *scalars, *constants, **how)
            else:
                constants = (cut.block, cut.rows, start_early)
                grid = (math.ceil(rows / cut.rows),)
                self.whole[grid](*tensors, rows, columns, *strides, *scalars, *constants, **how)


_too_large: set[tuple[RowOp, torch.device, Cut]] = set()


@functools.lru_cache(maxsize=4096)
def _cut(op: RowOp, device: torch.device, columns: int, rows: int, dtypes: tuple[torch.dtype, ...]) -> Cut:
    key = tuning_key(columns, rows, dtypes)
    tuned = tuning.find(op.name, key, op.revision, device, Cut.read)
    if tuned is None or (op, device, tuned) in _too_large:
        return op.default(columns, rows)
    return tuned


tuning.on_change(_cut.cache_clear)


@functools.cache
def early(device: torch.device) -> bool:
    """Whether kernels on this device can be launched before the one before them has ended."""
    return (
        device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9,)
    )


def as_rows(x: Tensor) -> Tensor:
    """The non-empty x [..., C] as [R, C] with contiguous columns: a view where the strides allow one."""
    flat = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def candidates(columns: int, rows: int, split: bool) -> list[Cut]:
    """Cuts worth measuring, of 8 to 32 elements a thread; `split`: where the op can split rows."""
    cuts = []
    block = max(16, triton.next_power_of_2(columns))
    for warps, packed in itertools.product(WARPS, (1, 2)):
        fits = columns <= LARGEST and packed * 256 <= max(rows, 256)
        if fits and 8 <= block * packed // (32 * warps) <= 32:
            cuts.append(Cut(block, warps, packed))
    for step, warps in itertools.product((4096, 8192, 16384), (4, 8, 16, 32)):
        if columns <= LARGEST or not 8 <= step // (32 * warps) <= 32:
            continue
        if split:
            cuts += [Cut(step, warps, split=mib * 1024) for mib in (4, 8, 12, 16, 24, 1024)]
        else:
            cuts += [Cut(step, warps, stages=stages) for stages in (1, 2, 3)]
    return cuts


def register(
    kernels: RowOp,
    shapes: Sequence[tuple[int, int]],
    tensors: Callable[[int, int], tuple[tuple[int, ...], ...]],
    run: Callable[..., Any],
    split: bool = False,
) -> None:
    """Have `perf-lab tune` tune an op's kernels, in bfloat16.

    shapes: (rows, columns) worth tuning. tensors: the shapes of a call's arguments, from rows and columns.
    run: the call, with `cut=` last. split: the op has a kernel that splits rows.
    """
    keys = [tuning_key(columns, rows, kernels.dtypes) for rows, columns in shapes]
    tuning.register(
        tuning.Tunable(
            op=kernels.name,
            revision=kernels.revision,
            keys=list({tuning.text(key): key for key in keys}.values()),
            inputs=lambda key: [(shape, "bfloat16") for shape in tensors(key["rows"], key["columns"])],
            default=lambda key: kernels.default(key["columns"], key["rows"])._asdict(),
            candidates=lambda key: [cut._asdict() for cut in candidates(key["columns"], key["rows"], split)],
            run=lambda config, *args: run(*args, cut=Cut.read(config)),
            read=Cut.read,
        )
    )
