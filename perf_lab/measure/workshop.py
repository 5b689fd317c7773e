"""Where the sessions of `perf-lab ab` run: a worktree for each kind, a fresh process for each session."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf_lab.measure import results
from perf_lab.measure.ceilings import VARIABLE
from perf_lab.measure.results import ResultsError

KINDS = BASE, CONTROL, HEAD = "base", "ctrl", "head"  # of one length: a path's length can cost time
PAIRS = 8

PREFIX = "perf-lab-ab-"
OURS = (".", ":(exclude,glob)**/.benchmarks/**")  # all of a repository but what runs leave behind
MOST_UNTRACKED = 100 * 2**20  # bytes that a snapshot may have to copy
AUTHOR = {"NAME": "perf-lab ab", "EMAIL": "ab@localhost", "DATE": "2000-01-01T00:00:00Z"}
NOTHING_COLLECTED = 5  # pytest's exit code


class BrokenRunError(ResultsError):
    """A run that could not decide; the message says which session broke, and how."""


@dataclass(frozen=True)
class Variant:
    """One side: a commit of the repository, run by an interpreter. impl: of benchmarks with a
    parameter `impl` this value only. installed: perf_lab as the interpreter has it installed.
    """

    title: str
    commit: str
    python: str = sys.executable
    impl: str = ""
    installed: bool = False


@dataclass(frozen=True)
class Plan:
    """What is compared, and how. paths and options go to pytest; prefix: the folder to run in, from
    the top of the repository; pairs: how many what moved gets; max_pairs: and what is then unclear.
    """

    base: Variant
    head: Variant
    paths: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    prefix: str = ""
    pairs: int = PAIRS
    max_pairs: int = PAIRS

    def variant(self, kind: str) -> Variant:
        """What the sessions of this kind run."""
        return self.head if kind == HEAD else self.base

    def as_dict(self) -> dict[str, Any]:
        """As it comes back from JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


def git(*arguments: str, cwd: Path | None = None, **env: str) -> str:
    """What git prints. Raises ResultsError with its complaint."""
    command = ["git", "-c", "core.hooksPath=/dev/null", *arguments]
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ResultsError(f"git {arguments[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def snapshot(top: Path) -> str:
    """A commit of the working tree as it is, with what is not committed or not yet added: the
    checked-out one where there is no such thing. No file, index or branch changes.

    Raises ValueError when more than MOST_UNTRACKED would have to be copied.
    """
    untracked = git("ls-files", "--others", "--exclude-standard", "-z", "--", *OURS, cwd=top).split("\0")
    size = sum((top / name).lstat().st_size for name in untracked if name)
    if size > MOST_UNTRACKED:
        raise ValueError(
            f"{size / 2**20:.0f} MiB of files are neither committed nor ignored by git: do either"
        )
    with tempfile.TemporaryDirectory() as scratch:
        index, kept = Path(scratch) / "index", top / git("rev-parse", "--git-path", "index", cwd=top)
        if kept.exists():
            shutil.copy2(kept, index)  # with its time, by which git knows what changed since
        git("add", "--all", "--", *OURS, cwd=top, GIT_INDEX_FILE=str(index))
        tree = git("write-tree", cwd=top, GIT_INDEX_FILE=str(index))
    if tree == git("rev-parse", "HEAD^{tree}", cwd=top):
        return git("rev-parse", "HEAD", cwd=top)
    who = {f"GIT_{role}_{what}": text for role in ("AUTHOR", "COMMITTER") for what, text in AUTHOR.items()}
    return git("commit-tree", tree, "-p", "HEAD", "-m", "the working tree", cwd=top, **who)


def plan_for(
    base: str,
    paths: Sequence[str] = (),
    options: Sequence[str] = (),
    *,
    pairs: int = PAIRS,
    max_pairs: int | None = None,
) -> Plan:
    """The plan that a command line asks for, from the working directory.

    base: a git revision; "installed"; a Python interpreter; or IMPL_A=IMPL_B, optionally with "OP:"
    before it. paths: default is bench/ where there is one. Raises ValueError or ResultsError for
    what cannot be.
    """
    most = pairs if max_pairs is None else max_pairs
    if not 1 <= pairs <= most:
        raise ValueError(
            f"--pairs: got {pairs}, at most {most}; accepted are 1 or more, and no fewer at most"
        )
    top, prefix = Path(git("rev-parse", "--show-toplevel")), git("rev-parse", "--show-prefix")
    tree = snapshot(top)
    old, new = _variants(base, tree)
    inside = tuple(map(_relative, paths)) or (("bench",) if Path("bench").is_dir() else ())
    return Plan(old, new, inside, tuple(options), prefix, pairs, most)


def _variants(base: str, tree: str) -> tuple[Variant, Variant]:
    head = Variant("the working tree", tree)
    if "=" in base:
        return _implementations(base, tree)
    if base == "installed":
        return Variant("the installed perf_lab", tree, installed=True), head
    if Path(base).is_file() and os.access(base, os.X_OK):
        return Variant(base, tree, python=str(Path(base).absolute())), head
    try:
        commit = git("rev-parse", "--verify", "--end-of-options", f"{base}^{{commit}}")
    except ResultsError as error:
        accepted = "a git revision, 'installed', a Python interpreter, or OP:IMPL_A=IMPL_B"
        raise ValueError(f"BASE: got {base!r}, accepted are {accepted}") from error
    return Variant(base, commit), head


def _implementations(text: str, tree: str) -> tuple[Variant, Variant]:
    op, _, names = text.rpartition(":")
    first, _, second = names.partition("=")
    if not first or not second or first == second:
        raise ValueError(f"BASE: got {text!r}, accepted are IMPL_A=IMPL_B and OP:IMPL_A=IMPL_B")
    one, two = (Variant(name, tree, impl=f"{op}:{name}") for name in (first, second))
    return one, two


def _relative(path: str) -> str:
    file, colons, name = path.partition("::")
    if not Path(file).exists():
        raise ValueError(f"PATH: got {path!r}, there is no {file} here")
    return os.path.relpath(file) + colons + name


class Workshop:
    """One run at a time of all that share the folder `home`: a lock, three worktrees, sessions.

    The lock is handed on to the sessions, so that it also waits for one whose run was killed.
    """

    def __init__(self, home: Path, say: Callable[[str], None]) -> None:
        self.home, self.say = home, say

    def __enter__(self) -> "Workshop":
        import fcntl  # of POSIX, and nothing else here needs it

        self.home.mkdir(parents=True, exist_ok=True)
        self.lock = (self.home / "lock").open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.say("waiting for another run here, or for the session that a killed one left behind")
            fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.clear()
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()
        self.lock.close()

    def clear(self) -> None:
        """Remove the worktrees of this run, or of one that was killed."""
        note = self.home / "places"
        if not note.exists():
            return
        places = Path(note.read_text(encoding="utf-8"))
        if places.name.startswith(PREFIX):
            shutil.rmtree(places, ignore_errors=True)
        git("worktree", "prune")
        note.unlink()

    def lay(self, plan: Plan) -> None:
        """Make the worktrees of a plan. Raises BrokenRunError when a side would run other code."""
        self.plan = plan
        self.places = Path(tempfile.mkdtemp(prefix=PREFIX))
        (self.home / "places").write_text(str(self.places), encoding="utf-8")
        for kind in KINDS:
            git("worktree", "add", "--detach", str(self.places / kind), plan.variant(kind).commit)
            self.cwd(kind).mkdir(parents=True, exist_ok=True)
            if plan.variant(kind).installed:
                shutil.rmtree(self.cwd(kind) / "perf_lab", ignore_errors=True)
            self._check_import(kind)

    def _check_import(self, kind: str) -> None:
        variant, cwd = self.plan.variant(kind), self.cwd(kind)
        if not variant.installed and not (cwd / "perf_lab" / "__init__.py").exists():
            return
        command = [variant.python, "-c", "import perf_lab; print(perf_lab.__file__)"]
        done = subprocess.run(
            command, cwd=cwd, env=self.env(kind), capture_output=True, text=True, check=False
        )
        found = Path(done.stdout.strip())
        right = not found.is_relative_to(Path.cwd()) if variant.installed else found.is_relative_to(cwd)
        if done.returncode or not right:
            complaint = done.stderr.strip().rpartition("\n")[2] or f"it imports {found}"
            raise BrokenRunError(f"{kind} ({variant.title}): not the perf_lab of that side: {complaint}")

    def cwd(self, kind: str) -> Path:
        """Where sessions of this kind run."""
        return self.places / kind / self.plan.prefix

    def env(self, kind: str) -> dict[str, str]:
        """The environment of a session: its worktree's code comes before any other."""
        own = [] if self.plan.variant(kind).installed else [str(self.cwd(kind))]
        paths = [*own, *filter(None, [os.environ.get("PYTHONPATH")])]
        shared = {VARIABLE: str(self.home.resolve() / "ceilings.json")}  # so that sessions share them
        return {**os.environ, **shared, "PYTHONPATH": os.pathsep.join(paths)}

    def command(self, kind: str, names: Sequence[str], into: Path) -> list[str]:
        """The pytest call of a session that runs these benchmarks, or all without names."""
        variant, plan = self.plan.variant(kind), self.plan
        pick = ["-p", "perf_lab.measure.pick", f"--pick-impl={variant.impl}"] if variant.impl else []
        own = ["-rfE", "-p", "no:cacheprovider", f"--benchmark-json={into}", *pick]
        return [variant.python, "-m", "pytest", *own, *plan.options, *(names or self.paths(kind))]

    def paths(self, kind: str) -> list[str]:
        """Those of the plan's paths that this side has."""
        return [path for path in self.plan.paths if (self.cwd(kind) / path.partition("::")[0]).exists()]

    def session(self, folder: Path, kind: str, pair: int, names: Sequence[str]) -> dict[str, Any]:
        """Run one session; gives what its results file holds. `folder`: where its output is kept.

        Raises BrokenRunError, naming what failed, for one that is not a clean pass.
        """
        if self.plan.paths and not self.paths(kind):
            return {"benchmarks": []}
        log, into = folder / "log" / f"{pair:04}_{kind}.txt", folder / "running"
        log.parent.mkdir(parents=True, exist_ok=True)
        into.unlink(missing_ok=True)
        code = self._wait(self.command(kind, names, into.absolute()), kind, log)
        if code not in (0, NOTHING_COLLECTED):
            raise BrokenRunError(
                f"pair {pair}, {kind} ({self.plan.variant(kind).title}): {what_broke(code, log)}"
            )
        nothing = not into.exists() or not into.stat().st_size  # nothing collected, or all of it skipped
        content = {"benchmarks": []} if nothing else results.load(into)
        into.unlink(missing_ok=True)
        return content

    def _wait(self, command: Sequence[str], kind: str, log: Path) -> int:
        keep = [self.lock.fileno()]
        with log.open("w") as out:
            process = subprocess.Popen(
                command, cwd=self.cwd(kind), env=self.env(kind), stdout=out, stderr=out, pass_fds=keep
            )
            try:
                return process.wait()
            except BaseException:
                process.terminate()
                process.wait()
                raise


def what_broke(code: int, log: Path) -> str:
    """The failed benchmarks of a session by name, or how it died."""
    if code < 0:
        return f"it died of signal {-code}; its output is in {log}"
    text = log.read_text(encoding="utf-8", errors="replace")
    failed = [line for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return "\n  ".join([f"pytest gave exit code {code}; its output is in {log}", *failed])
