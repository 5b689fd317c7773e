"""Results on disk: a folder a machine, written as the results come in.

The files are pytest-benchmark's, so that its `compare` and every tool that
reads them work unchanged.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from perf_lab import machine
from perf_lab.measure.ceilings import ceilings

UNFINISHED = "unfinished_"


class ResultsError(ValueError):
    """A file that holds no benchmark results; the message names the file and what is wrong."""


def machine_info() -> dict[str, Any]:
    """What results are only comparable within: devices, versions, driver, clocks, measured ceilings."""
    return {
        "name": machine.slug(),
        "devices": {device: machine.device_name(device) for device in machine.devices()},
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": machine.package_version("triton"),
        "cuda": torch.version.cuda,
        "driver": machine.driver_version(),
        "clocks_mhz": machine.clocks_mhz(),
        "ceilings": {device: ceilings(device).as_dict() for device in machine.devices()},
    }


def write_atomically(path: Path, content: dict[str, Any]) -> None:
    """Write JSON so that a kill at any moment leaves the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
    scratch.replace(path)


def leftovers(folder: Path) -> list[Path]:
    """Files of earlier runs that were killed before they could save under their own name."""
    return [path for path in sorted(folder.glob(f"{UNFINISHED}*.json")) if not _running(path)]


def _running(path: Path) -> bool:
    pid = path.stem.rpartition("-")[2]
    with contextlib.suppress(ValueError, ProcessLookupError):
        os.kill(int(pid), 0)
        return True
    return False


def load(path: Path) -> dict[str, Any]:
    """Read a results file. Raises ResultsError, naming the file, for one that is missing,
    empty, cut short, or not a pytest-benchmark file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path}: cannot be read: {error}") from error
    if not text.strip():
        raise ResultsError(f"{path}: is empty")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ResultsError(f"{path}: not JSON (cut short?): {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("benchmarks"), list):
        raise ResultsError(f"{path}: no pytest-benchmark file: it has no list of benchmarks")
    return content
