"""The attention kernels compile for real GPUs, on machines that have none, and use what those GPUs have.
Runs itself as a script, because this process interprets kernels."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import perf_lab

TARGETS = {"sm_90": 90, "sm_80": 80}
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
SHARED = {"sm_90": 232448, "sm_80": 166912}  # bytes of shared memory that a program can have
CASES = (  # kernel, padded head dim, dtype, target; the largest head dims have the largest tiles
    ("flash", 128, "bfloat16", "sm_90"),
    ("flash", 256, "bfloat16", "sm_80"),
    ("flash", 256, "float32", "sm_80"),
    ("flash by descriptor", 128, "bfloat16", "sm_90"),
    ("flash by descriptor", 256, "bfloat16", "sm_90"),
    ("split", 128, "bfloat16", "sm_80"),
    ("split", 256, "float32", "sm_80"),
    ("split by descriptor", 128, "bfloat16", "sm_90"),
    ("split of 128 rows by descriptor", 256, "bfloat16", "sm_90"),
    ("split of 128 rows", 256, "bfloat16", "sm_80"),
    ("merge", 128, "bfloat16", "sm_90"),
    ("merge", 128, "bfloat16", "sm_80"),
)


def on(*kernels: str) -> Any:
    """Parametrize over the cases of these kernels."""
    chosen = [case for case in CASES if case[0].replace(" of 128 rows", "") in kernels]
    return pytest.mark.parametrize("case", chosen, ids=lambda case: "-".join(map(str, case)))


@on("flash", "flash by descriptor", "split", "split by descriptor", "merge")
def test_kernel_compiles_to_a_cubin_that_fits(case):
    result = built(case)
    assert result["cubin_bytes"] > 0
    assert result["shared"] <= SHARED[case[3]]


@on("flash", "split")
def test_keys_are_loaded_16_bytes_at_a_time(case):
    assert built(case)["widths"] == [16]


@on("flash by descriptor", "split by descriptor")
def test_descriptors_are_loaded_by_the_copy_engine(case):
    assert built(case)["copy_engine"]


@on("flash", "flash by descriptor", "split", "split by descriptor")
def test_products_use_the_tensor_cores(case):
    """float32 too, in three products of its parts. A tile of 16 rows is too few for wgmma."""
    kernel, _, dtype, target = case
    many = kernel.startswith("flash") or "128 rows" in kernel
    wide = many and target == "sm_90" and dtype != "float32"
    assert built(case)["tensor_cores"] == ("wgmma" if wide else "mma.sync")


def built(case: tuple[str, int, str, str]) -> dict[str, Any]:
    """What one build gave; a skip where triton cannot build, a failure where it refuses the kernel."""
    result = builds()[str(case)]
    if "cannot" in result:
        pytest.skip(result["cannot"])
    assert "error" not in result, result["error"]
    return result


@functools.cache
def builds() -> dict[str, dict[str, Any]]:
    """All builds, made by this file as a script without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(perf_lab.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Build everything, and print the results as one line of JSON."""
    print(json.dumps({str(case): attempt(*case) for case in CASES}))  # noqa: T201 -- the answer


def attempt(name: str, block: int, dtype: str, target: str) -> dict[str, Any]:
    """One build: its size, shared memory and instructions, or why there is none."""
    try:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, CompilationError, compile
        from triton.runtime.errors import PTXASError
    except ImportError as error:
        return {"cannot": f"this triton cannot compile ahead of time: {error}"}
    element = DTYPES[dtype]
    kernel, constants, descriptors, options = launch(name, block, dtype, target)
    signature = {argument: kind(argument, constants, descriptors, element) for argument in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, argument in enumerate(kernel.arg_names)
        if signature[argument].startswith("*")
    }
    try:
        source = ASTSource(kernel, signature, constants, aligned)
        made = compile(source, target=GPUTarget("cuda", TARGETS[target], 32), options=options)
    except FileNotFoundError as error:
        return {"cannot": f"triton's assembler is missing: {error}"}
    except (CompilationError, PTXASError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    ptx = made.asm["ptx"]
    widths = {
        int(size, 0)
        for size in re.findall(r"cp\.async\.c[ag]\.shared\.global.*?\],\s*(0x[0-9a-f]+|\d+)", ptx)
    }
    loads = re.findall(r"\bld\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx)
    widths |= {int(count or 1) * int(bits) // 8 for count, bits in loads}
    return {
        "cubin_bytes": len(made.asm["cubin"]),
        "shared": made.metadata.shared,
        "widths": sorted(widths),
        "copy_engine": "cp.async.bulk.tensor" in ptx,
        "tensor_cores": next((name for name in ("wgmma", "mma.sync") if name in ptx), "none"),
    }


def launch(name: str, block: int, dtype: str, target: str) -> tuple[Any, dict[str, Any], dict[str, str], Any]:
    """The kernel of a causal call with this padded head dim, its constants, descriptors and options."""
    import torch

    from perf_lab.attention import triton_flash, triton_split

    tma = "descriptor" in name
    q = torch.empty(0, dtype=getattr(torch, dtype))
    common = {"BLOCK": block, "WINDOW": False, "RAGGED": False}
    loads = {"CAUSAL": True, "FULL": True, "VEC": 16 // q.element_size(), "TMA": tma, "UPCAST": False}
    pdl = target == "sm_90"
    if name.startswith("flash"):
        tiles = triton_flash.tiles_for(q, 8192, block, True, tma)
        constants = {"M": tiles.queries, "N": tiles.keys}
        rows = {"q": tiles.queries, "k": tiles.keys, "v": tiles.keys, "o": tiles.queries}
        kernel, cut, extra = triton_flash.flash_kernel, tiles, common | loads | constants
    else:
        R = triton_split.MOST_ROWS[q.dtype] if "128 rows" in name or dtype == "float32" else 16
        parts = triton_split.cut_for(q.dtype, 8192, block, R, TARGETS[target] // 10)
        tile = {"N": parts.keys, "LEAST": triton_split.LEAST_KEYS, "PDL": pdl}
        rows = {"k": parts.keys, "v": parts.keys}
        kernel, cut = triton_split.split_kernel, parts
        extra = common | loads | tile | {"R": R, "WHOLE": False, "MASK": 0}
        if name == "merge":
            kernel, extra = triton_split.merge_kernel, common | tile | {"BLOCK_S": 32}
    descriptors = {place: f"[1, 1, {n}, {block}]" for place, n in rows.items()} if tma else {}
    options = {"num_warps": cut.warps, "num_stages": cut.stages} | (
        {"launch_pdl": True} if extra.get("PDL") else {}
    )
    return kernel, extra, descriptors, options


def kind(name: str, constants: dict[str, Any], descriptors: dict[str, str], element: str) -> str:
    """The type of a kernel's parameter."""
    if name in constants:
        return "constexpr"
    if name in descriptors:
        return f"tensordesc<{element}{descriptors[name]}>"
    if name in ("acc_ptr", "sums_ptr"):
        return "*fp32"
    if name in ("q", "k", "v", "o") or name.endswith("_ptr"):
        return f"*{element}"
    return "fp32" if name == "scale" else "i32"


if __name__ == "__main__":
    main()
