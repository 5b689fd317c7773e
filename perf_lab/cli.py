"""The command line: `perf-lab list`, `tables`, `report`, `tune`, `ab`, `gate`."""

import argparse
import functools
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perf_lab import machine
from perf_lab.measure.ab import ab
from perf_lab.measure.report import MissingExtraError, report
from perf_lab.measure.results import ResultsError
from perf_lab.measure.tables import markdown_tables, rows_of
from perf_lab.measure.tune import tune
from perf_lab.measure.verdicts import gate
from perf_lab.measure.workshop import PAIRS, plan_for
from perf_lab.op import load_all
from perf_lab.strategies import dtype_name

BEGIN = re.compile(r"<!-- tables: (?P<files>[^>]*?) -->")
END = "<!-- end of tables -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code: 0, or 2 for arguments or files that cannot be used."""
    parser = argparse.ArgumentParser(prog="perf-lab", description="A laboratory for LLM inference speed.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="every op and implementation, and why one cannot run here")
    tables = commands.add_parser("tables", help="Markdown tables of saved results")
    tables.add_argument("files", nargs="*", type=Path, help="results files (pytest-benchmark JSON)")
    tables.add_argument(
        "--write", type=Path, metavar="README", help="renew the tables in this file, between its markers"
    )
    page = commands.add_parser("report", help="tables, a page and pictures of saved results")
    page.add_argument(
        "runs",
        nargs="*",
        type=Path,
        help="results files, or folders of them (default: bench/results, else .benchmarks)",
    )
    page.add_argument("--html", type=Path, metavar="PAGE", help="write one self-contained HTML page")
    page.add_argument("--pictures", type=Path, metavar="FOLDER", help="write each plot as an SVG file")
    _add_tune(commands)
    _add_ab(commands)
    _add_gate(commands)
    asked, left = parser.parse_known_args(arguments)
    if left and (asked.command != "ab" or any(path.startswith("-") for path in left)):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if asked.command == "list":
        print(list_text())
        return 0
    try:
        if asked.command == "ab":
            return _ab(asked, [*asked.paths, *left])  # argparse leaves paths that come after options
        if asked.command == "gate":
            return _gate(asked)
        if asked.command == "tune":
            print(tune(asked.ops, functools.partial(print, flush=True), asked.file, asked.only))
        elif asked.command == "report":
            print(report(asked.runs, asked.html, asked.pictures))
        elif asked.write:
            asked.write.write_text(
                renewed(asked.write.read_text(encoding="utf-8"), asked.write.parent), encoding="utf-8"
            )
        elif asked.files:
            print(tables_text(asked.files))
        else:
            parser.error("tables: give results files, or --write README")
    except KeyboardInterrupt:
        print("perf-lab: stopped", file=sys.stderr)
        return 2
    except (OSError, ValueError, MissingExtraError) as error:
        print(f"perf-lab: {error}", file=sys.stderr)
        return 2
    return 0


EXIT_CODES = (
    "exit code: 0 nothing is slower; 1 something is; 2 no verdict, because something broke or the machine is"
    " not steady; 3 nothing is slower, but something has no baseline (0 with --new-ok)"
)


def _add_tune(commands: Any) -> None:
    parser = commands.add_parser(
        "tune", help="measure how kernels run best on this GPU, and write the table that calls then use"
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="tune these ops (default: all that can be)")
    parser.add_argument("--file", type=Path, metavar="TABLE", help="write here (default: the user's table)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="of the keys, those that contain this"
    )


def _add_ab(commands: Any) -> None:
    parser = commands.add_parser(
        "ab", help="base against the working tree, in fresh processes side by side", epilog=EXIT_CODES
    )
    parser.add_argument(
        "base",
        metavar="BASE",
        help="a git revision; 'installed'; a Python interpreter (another torch, say);"
        " or OP:IMPL_A=IMPL_B, one implementation against another",
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="what pytest runs (default: bench)")
    parser.add_argument("-k", metavar="EXPR", help="pytest's -k")
    parser.add_argument("--device", action="append", default=[], help="pytest's --device")
    parser.add_argument("--length", action="append", default=[], help="pytest's --length")
    parser.add_argument("--pytest", default="", metavar="OPTIONS", help="more for pytest: --pytest='-x -v'")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs of what moved (default: %(default)s)")
    parser.add_argument("--max-pairs", type=int, help="pairs of what is then unclear (default: no more)")
    parser.add_argument("--fresh", action="store_true", help="do not go on with a run that was stopped")
    _add_output(parser)


def _add_gate(commands: Any) -> None:
    parser = commands.add_parser("gate", help="verdicts from saved results", epilog=EXIT_CODES)
    parser.add_argument("files", nargs="*", type=Path, metavar="BASE HEAD", help="one file or folder a side")
    parser.add_argument("--base", nargs="+", type=Path, default=[], help="further sessions of the base")
    parser.add_argument("--head", nargs="+", type=Path, default=[], help="further sessions of the head")
    parser.add_argument("--across-machines", action="store_true", help="compare files of different machines")
    _add_output(parser)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--new-ok", action="store_true", help="pass what has no baseline")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="append the verdicts here, in Markdown")


def _ab(asked: argparse.Namespace, paths: Sequence[str]) -> int:
    options = ["-k", asked.k] if asked.k else []
    options += [f"--device={device}" for device in asked.device]
    options += [f"--length={length}" for length in asked.length]
    options += shlex.split(asked.pytest)
    plan = plan_for(asked.base, paths, options, pairs=asked.pairs, max_pairs=asked.max_pairs)
    say = functools.partial(print, file=sys.stderr, flush=True)
    return ab(plan, say, print, fresh=asked.fresh, new_ok=asked.new_ok, to=asked.summary)


def _gate(asked: argparse.Namespace) -> int:
    if len(asked.files) not in (0, 2) or not (asked.files or (asked.base and asked.head)):
        raise ValueError(
            "gate: give BASE and HEAD, a file or folder each, or --base FILES... --head FILES..."
        )
    base, head = [*asked.files[:1], *asked.base], [*asked.files[1:], *asked.head]
    across, to = asked.across_machines, asked.summary
    return gate(base, head, print, across_machines=across, new_ok=asked.new_ok, to=to)


def list_text() -> str:
    """The table of what exists: op, implementation, devices, dtypes, and why it is unavailable here."""
    machine.interpret_without_gpu()
    lines = [("op", "implementation", "devices", "dtypes", "here")]
    for op in load_all().values():
        for impl in op:
            reasons = {device: impl.why_not(device) for device in impl.candidates}
            runs = [device for device, reason in reasons.items() if reason is None]
            here = (
                ", ".join(runs) if runs else "no: " + "; ".join(dict.fromkeys(filter(None, reasons.values())))
            )
            if impl.interpreted and "cpu" in runs:
                here += " (interpreted)"
            lines.append(
                (op.name, impl.name, " ".join(impl.devices), " ".join(map(dtype_name, impl.dtypes)), here)
            )
        lines += [(op.name, module, "", "", f"no: {reason}") for module, reason in op.missing.items()]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    return "\n".join(
        "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[4]]) for line in lines
    )


def tables_text(files: Sequence[Path]) -> str:
    """The Markdown tables of these files, one after the other."""
    return "\n\n".join(markdown_tables(rows_of(path)) for path in files)


def renewed(text: str, root: Path) -> str:
    """`text` with the tables between `<!-- tables: FILE... -->` and `<!-- end of tables -->` made anew.

    The files are looked up from `root`. Raises ResultsError for a file without results.
    """

    def block(match: re.Match[str]) -> str:
        files = [root / name for name in match["files"].split()]
        return f"{match[0]}\n\n{tables_text(files)}\n\n"

    parts = []
    for index, piece in enumerate(text.split(END)):
        start = BEGIN.search(piece)
        parts.append(piece if start is None else piece[: start.start()] + block(start))
        if start is None and index < text.count(END):
            raise ResultsError(f"the {index + 1}. '{END}' has no '<!-- tables: FILE... -->' before it")
    return END.join(parts)
