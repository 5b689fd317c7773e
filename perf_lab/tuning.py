"""Tables of tuned configurations: one committed a GPU model, one of the user's own that goes before it.

A kernel asks `find` for the configuration of a call: the op's name, and a key
of everything in the call that the choice depends on. A table is of one GPU
model and one release of Triton, an entry of one revision of the kernel; what is
of another, unreadable, or refused by the kernel's own check is left out, and
the caller takes its default, which works everywhere. No table can make a
result wrong or a call fail: a configuration only says how the work is cut.

Nothing is ever tuned during a call. `perf-lab tune` measures on inputs of its
own and writes the user's table:

    $PERF_LAB_TUNED/<gpu>.json, by default ~/.cache/perf_lab/tuned/<gpu>.json

    {"device": "NVIDIA H200", "triton": "3.6",
     "ops": {"softmax": {"revision": 1, "entries": [
         {"key": {"columns": 4096, ...}, "config": {"block": 4096, ...}, "us": 17.9, "default_us": 18.4}]}}}
"""

import dataclasses
import functools
import importlib.resources
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

FOLDER_VARIABLE = "PERF_LAB_TUNED"

Key = Mapping[str, Any]
Config = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Tunable:
    """What `perf-lab tune` needs to know of one op's kernel.

    op          name of the op, as in op.OPS; `impl` of it is what is tuned.
    revision    of the kernel: entries of another are stale.
    keys        the calls worth tuning, as keys.
    inputs      shape and dtype of each argument of a call with this key.
    default     the configuration that the call has without a table.
    candidates  further configurations to try; one that cannot run here is left out.
    run         (config, *arguments): calls the kernel so; results are new tensors, never the arguments.
    read        checks a configuration, as by `find`.
    """

    op: str
    revision: int
    keys: Sequence[Key]
    inputs: Callable[[Key], Sequence[tuple[tuple[int, ...], str]]]
    default: Callable[[Key], Config]
    candidates: Callable[[Key], Sequence[Config]]
    run: Callable[..., Any]
    read: Callable[[Config], Any] = dict
    impl: str = "triton"


@dataclass(frozen=True)
class Entry:
    """What tuning found for one key: the configuration, and microseconds of a call with it and with the
    default.
    """

    op: str
    revision: int
    key: Key
    config: Config
    us: float
    default_us: float


TUNABLES: dict[str, Tunable] = {}
_forget: list[Callable[[], None]] = []


def register(tunable: Tunable) -> None:
    """Have `perf-lab tune` know this kernel."""
    TUNABLES[tunable.op] = tunable


def on_change(forget: Callable[[], None]) -> None:
    """Have this called when tables may have changed: for caches of what `find` said."""
    _forget.append(forget)


def changed() -> None:
    """Read the tables anew from now on."""
    _tables.cache_clear()
    for forget in _forget:
        forget()


def find(op: str, key: Key, revision: int, device: torch.device, read: Callable[[Config], T]) -> T | None:
    """The tuned configuration of a call as `read` gives it, from the user's table, else the committed one.

    None without one, and for one that `read` refuses with a ValueError or TypeError.
    """
    if device.type != "cuda":
        return None
    return look_up(torch.cuda.get_device_name(device), op, key, revision, read)


def look_up(device_name: str, op: str, key: Key, revision: int, read: Callable[[Config], T]) -> T | None:
    """`find` for a GPU model by name."""
    for table in _tables(device_name):
        config = table.get((op, revision, text(key)))
        if config is None:
            continue
        try:
            return read(config)
        except (ValueError, TypeError):  # an entry of other code, or edited by hand
            continue
    return None


def text(key: Key) -> str:
    """One spelling of a key, whatever the order of its fields."""
    return json.dumps(dict(key), sort_keys=True)


def triton_release() -> str | None:
    """Major and minor version of the installed Triton, None without it."""
    try:
        import triton  # not at the top: whether it interprets is decided before its first import
    except ModuleNotFoundError:
        return None
    return ".".join(triton.__version__.split(".")[:2])


def user_file(device_name: str) -> Path:
    """Where the user's table of a GPU model is, or would be."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = os.environ.get(FOLDER_VARIABLE) or Path(home, "perf_lab", "tuned")
    return Path(folder, f"{slug(device_name)}.json")


def package() -> Any:
    """Where the committed tables lie: a folder, or the inside of an archive."""
    return importlib.resources.files("perf_lab")


def slug(device_name: str) -> str:
    """A file name for a GPU model."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


@functools.cache
def _tables(device_name: str) -> tuple[dict[tuple[str, int, str], Config], ...]:
    """The user's table of this GPU model, then the committed one."""
    committed = package() / "tuned" / f"{slug(device_name)}.json"
    found = []
    for file in (user_file(device_name), committed):
        try:
            found.append(parsed(file.read_text(encoding="utf-8"), device_name))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            warnings.warn(f"{file}: tuned configurations are not used: {error}", stacklevel=2)
    return tuple(found)


def parsed(content: str, device_name: str) -> dict[tuple[str, int, str], Config]:
    """The configurations of a table, by op, revision and key; none if it is of another GPU or Triton.

    Raises ValueError where the content is no table.
    """
    table = json.loads(content)
    try:
        if table["device"] != device_name or table["triton"] != triton_release():
            return {}
        return {
            (op, found["revision"], text(entry["key"])): dict(entry["config"])
            for op, found in table["ops"].items()
            for entry in found["entries"]
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a table of tuned configurations ({type(error).__name__}: {error})") from error


def save(entries: Sequence[Entry], device_name: str, file: Path | None = None) -> Path:
    """Merge entries into a table (default: the user's), and have calls use it; gives its path.

    Entries of the same key are replaced; what is there of another GPU, Triton or revision is dropped.
    """
    file = file or user_file(device_name)
    kept = _still_good(file, device_name)
    ops: dict[str, Any] = {}
    for op in sorted({*kept, *(entry.op for entry in entries)}):
        new = [entry for entry in entries if entry.op == op]
        old = kept.get(op)
        ops[op] = _merged(old, new) if new else old
    table = {"device": device_name, "triton": triton_release(), "ops": ops}
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(".new")
    scratch.write_text(_lines(table), encoding="utf-8")
    scratch.replace(file)  # a reader sees the old table or the new one
    changed()
    return file


def _still_good(file: Path, device_name: str) -> dict[str, Any]:
    try:
        content = file.read_text(encoding="utf-8")
        return json.loads(content)["ops"] if parsed(content, device_name) else {}
    except (OSError, ValueError):
        return {}


def _merged(old: dict[str, Any] | None, new: Sequence[Entry]) -> dict[str, Any]:
    revision = new[0].revision
    found = {text(e["key"]): e for e in (old["entries"] if old and old["revision"] == revision else [])}
    for entry in new:
        fields = dataclasses.asdict(entry)
        found[text(entry.key)] = {name: fields[name] for name in ("key", "config", "us", "default_us")}
    return {"revision": revision, "entries": [found[key] for key in sorted(found)]}


def _lines(table: dict[str, Any]) -> str:
    """JSON with one entry a line, for people and for git."""
    ops = []
    for op, found in table["ops"].items():
        entries = ",\n".join("   " + json.dumps(entry) for entry in found["entries"])
        ops.append(f'  {json.dumps(op)}: {{"revision": {found["revision"]}, "entries": [\n{entries}]}}')
    head = f' "device": {json.dumps(table["device"])},\n "triton": {json.dumps(table["triton"])},\n'
    return "{\n" + head + ' "ops": {\n' + ",\n".join(ops) + "}}\n"
