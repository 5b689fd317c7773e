"""The paged kernels compile for real GPUs, on machines that have none. Runs itself as a script, because this
process interprets kernels.
"""

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
SHARED = {"sm_90": 232448, "sm_80": 166912}  # bytes of shared memory that a program can have
CASES = (  # kernel, packed queries, padded head dim, dtype, target
    ("attend", 4, 128, "bf16", "sm_90"),
    ("attend", 512, 128, "bf16", "sm_90"),
    ("attend", 4, 256, "bf16", "sm_80"),
    ("join", 4, 128, "bf16", "sm_90"),
    ("put", 1, 128, "bf16", "sm_90"),
    ("turn", 1, 128, "bf16", "sm_90"),
)
each = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))


@each
def test_kernel_compiles_to_a_cubin_that_fits(case):
    result = built(case)
    assert result["cubin_bytes"] > 0 and result["shared"] <= SHARED[case[-1]]


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: "-".join(map(str, case)))
def test_keys_are_copied_16_bytes_at_a_time_and_multiplied_by_the_tensor_cores(case):
    """Copied while others are computed: cp.async. Queries of one token are too few for wgmma."""
    result = built(case)
    assert set(result["copied"]) <= {16, 4}, f"cp.async of {result['copied']} bytes; 4 are a table's entry"
    assert 16 in result["copied"]
    assert result["tensor_cores"] == ("wgmma" if case[1] >= 64 and case[-1] == "sm_90" else "mma.sync")


def built(case: tuple[Any, ...]) -> dict[str, Any]:
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
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Build everything, and print the results as one line of JSON."""
    print(json.dumps({str(case): attempt(*case) for case in CASES}))  # noqa: T201 -- the answer


def attempt(kernel: str, rows: int, dim: int, dtype: str, target: str) -> dict[str, Any]:
    """One build: its size, shared memory, copies and matrix instructions, or why there is none."""
    try:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, CompilationError, compile
        from triton.runtime.errors import PTXASError

        from perf_lab.paged_attention import triton as paged
    except ImportError as error:
        return {"cannot": f"this triton cannot compile ahead of time: {error}"}
    fn, cut = getattr(paged, kernel), paged.launch(rows, dim, 4096, 64, 2, 132)
    constants = {
        **{"SIZE": 16, "ROWS": cut.rows, "KEYS": cut.keys, "DIM": dim, "SPLITS": 2, "PARTS": 2, "HEADS": 8},
        **{"D": dim, "WINDOW": False, "EVEN": True, "TURN": True, "UNIT": 16},
    }
    constants = {name: constants[name] for name in fn.arg_names if name in constants}
    signature = {name: kind(name, constants, dtype) for name in fn.arg_names}
    still = {*paged.STILL, "kv_heads", "start_b", "new"} if kernel == "attend" else {"size", "start_b"}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(fn.arg_names)
        if signature[name] not in ("constexpr", "fp32") and name not in still
    }
    try:
        options = {"num_warps": cut.warps, "num_stages": cut.stages}
        made = compile(
            ASTSource(fn, signature, constants, aligned),
            target=GPUTarget("cuda", TARGETS[target], 32),
            options=options,
        )
    except FileNotFoundError as error:
        return {"cannot": f"triton's assembler is missing: {error}"}
    except (CompilationError, PTXASError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    ptx = made.asm["ptx"]
    copied = re.findall(r"\bcp\.async\.c[ag]\.shared\.global.*?\],\s*(0x[0-9a-f]+|\d+)", ptx)
    cores = "wgmma" if "wgmma.mma" in ptx else "mma.sync" if "mma.sync" in ptx else "none"
    return {
        "cubin_bytes": len(made.asm["cubin"]),
        "shared": made.metadata.shared,
        "copied": sorted({int(size, 0) for size in copied}),
        "tensor_cores": cores,
    }


def kind(name: str, constants: dict[str, Any], element: str) -> str:
    """The type of a kernel's parameter."""
    if name in constants:
        return "constexpr"
    if name.endswith("_ptr"):
        whole = {"table_ptr": "*i32", "length_ptr": "*i32", "start_ptr": "*i32"}
        return whole.get(name, "*fp32" if name in ("part_ptr", "top_ptr") else f"*{element}")
    return "fp32" if name == "scale" else "i32"


if __name__ == "__main__":
    main()
