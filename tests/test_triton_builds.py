"""Every kernel compiles for real GPUs, on machines that have none: the interpreter does not see
what the compiler refuses. Runs itself as a script, because this process interprets kernels."""

import functools
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import perf_lab

ROOMS = ("rms_norm", "add_rms_norm", "softmax")
FORMS = {  # columns, and what the cut without tuning is changed by
    "several rows": (64, {}),
    "one row": (4096, {}),
    "steps": (262144, {"block": 8192, "warps": 16, "stages": 2, "split": 0}),
    "split": (262144, {"block": 8192, "warps": 16, "split": 1024}),
}
CASES = [(room, form) for room in ROOMS for form in FORMS if form != "split" or room == "softmax"]
TARGETS = {"sm_90": 90, "sm_80": 80}
COUNTS = {"rows", "parts", "read_first", "read_count", "write_first", "write_count"}
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}

each = [
    pytest.mark.parametrize("target", TARGETS),
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize(("room", "form"), CASES),
]


def on_each(test: Any) -> Any:
    """Parametrize over rooms, forms of their kernels, dtypes and targets."""
    return functools.reduce(lambda decorated, mark: mark(decorated), each, test)


@on_each
def test_kernel_compiles_to_a_cubin(room, form, dtype, target):
    assert built(room, form, dtype, target)["cubin_bytes"] > 0


@on_each
def test_memory_moves_16_bytes_at_a_time(room, form, dtype, target):
    moves = {tuple(move) for move in built(room, form, dtype, target)["moves"]}
    assert {"ld", "st"} <= {name for name, _ in moves}
    few = {("ld", 4), ("st", 4)} if form == "split" else set()  # a maximum and a sum of a block
    assert {16} == {width for _, width in moves - few}, f"loads and stores are of {moves}"


def built(room: str, form: str, dtype: str, target: str) -> dict[str, Any]:
    """What one build gave; a skip where triton cannot build, a failure where it refuses the kernel."""
    result = builds()[f"{room} {form} {dtype} {target}"]
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
    results = {}
    for room, form in CASES:
        for dtype in DTYPES:
            for target in TARGETS:
                results[f"{room} {form} {dtype} {target}"] = attempt(room, form, dtype, target)
    print(json.dumps(results))  # noqa: T201 -- the answer to the process that asked


def attempt(room: str, form: str, dtype: str, target: str) -> dict[str, Any]:
    """One build: its size and memory instructions, or why there is none."""
    try:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, CompilationError, compile
        from triton.runtime.errors import PTXASError
    except ImportError as error:
        return {"cannot": f"this triton cannot compile ahead of time: {error}"}
    kernel, constants, warps = cut(room, form)
    constants["EARLY"] = TARGETS[target] >= 90
    signature = {name: kind(name, constants, DTYPES[dtype]) for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]  # of pointers and row lengths, as in a model
        for place, name in enumerate(kernel.arg_names)
        if signature[name] not in ("constexpr", "fp32") and name not in COUNTS
    }
    try:
        source = ASTSource(kernel, signature, constants, aligned)
        options = {"num_warps": warps, "launch_pdl": constants["EARLY"]}
        assembly = compile(source, target=GPUTarget("cuda", TARGETS[target], 32), options=options).asm
    except FileNotFoundError as error:
        return {"cannot": f"triton's assembler is missing: {error}"}
    except (CompilationError, PTXASError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"cubin_bytes": len(assembly["cubin"]), "moves": memory_moves(assembly["ptx"])}


def cut(room: str, form: str) -> tuple[Any, dict[str, int], int]:
    """The kernel, its constants and its warps for many rows in this form."""
    module = importlib.import_module(f"perf_lab.{room}.triton")
    columns, changes = FORMS[form]
    how = module.KERNELS.default(columns, 8192)._replace(**changes)
    if how.split:
        parts = -(-columns // how.block)
        return module.split_rows, {"BLOCK": how.block, "PADDED": parts}, how.warps
    if columns > how.block:
        return module.long_rows, {"BLOCK": how.block, "STAGES": how.stages}, how.warps
    return module.whole_rows, {"BLOCK": how.block, "ROWS": how.rows}, how.warps


def kind(name: str, constants: dict[str, int], element: str) -> str:
    """The type of a kernel's parameter."""
    if name in constants:
        return "constexpr"
    if name in ("tops_ptr", "sums_ptr"):
        return "*fp32"
    return f"*{element}" if name.endswith("_ptr") else "fp32" if name == "eps" else "i32"


def memory_moves(ptx: str) -> list[tuple[str, int]]:
    """Each kind of load (ld, or cp.async into shared memory) and store (st) of global memory, with
    its bytes a thread.
    """
    found = re.findall(r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx)
    moves = {(name, int(count or 1) * int(bits) // 8) for name, count, bits in found}
    copied = re.findall(r"\bcp\.async\.c[ag]\.shared\.global.*?\],\s*(0x[0-9a-f]+|\d+)", ptx)
    return sorted(moves | {("ld", int(size, 0)) for size in copied})


if __name__ == "__main__":
    main()
