"""Which devices are here, what they are called, and how fast they can be.

Nothing here imports triton: whether its kernels are compiled or interpreted
is decided by an environment variable that must be set before that import.
"""

import functools
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

DEVICES = ("cpu", "cuda", "mps")


@functools.cache
def devices() -> tuple[str, ...]:
    """The device types that work here, cpu first."""
    here = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    return tuple(device for device in DEVICES if here[device])


def why_missing(device: str) -> str:
    """Why `device` is not one of `devices()`."""
    if device == "cuda":
        built = torch.version.cuda or torch.version.hip
        return "no GPU is visible to torch" if built else "this torch is built without CUDA"
    if device == "mps":
        return "no Metal device here" if sys.platform == "darwin" else "only on macOS"
    return f"not a device; there are {DEVICES}"


def interpreting() -> bool:
    """Whether Triton kernels run under the interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def interpret_without_gpu() -> None:
    """Have Triton kernels run under the interpreter when no GPU is visible.

    Raises RuntimeError when triton was imported too early for that to work.
    """
    if "cuda" in devices() or interpreting():
        return
    if "triton" in sys.modules:
        raise RuntimeError(
            "triton was imported before TRITON_INTERPRET was set: without a GPU its kernels "
            "cannot run; call perf_lab.machine.interpret_without_gpu() first, or set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"


@functools.cache
def cpu_name() -> str:
    """The processor's model name, as the system gives it."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def device_name(device: str) -> str:
    """The model name of a device: "NVIDIA H200", "AMD EPYC", "Apple M3"."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return cpu_name()


def slug() -> str:
    """A folder name for this machine's results: the GPU's name where there is one,
    else the CPU's with its number of cores.
    """
    name = device_name("cuda") if "cuda" in devices() else f"{cpu_name()} {os.cpu_count()} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def package_version(name: str) -> str | None:
    """The installed version of a package, None without it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def driver_version() -> str | None:
    """The NVIDIA driver's version, None without one."""
    return _nvidia_smi("driver_version")


def clocks_mhz() -> dict[str, str] | None:
    """The GPU's clocks of this moment and its highest, in MHz, by nvidia-smi; None without it."""
    fields = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem")
    answer = _nvidia_smi(",".join(fields))
    return dict(zip(fields, answer.split(", "), strict=True)) if answer else None


def _nvidia_smi(query: str) -> str | None:
    if "cuda" not in devices() or not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() or None
