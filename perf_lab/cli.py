"""The command line: `python -m perf_lab list` and `python -m perf_lab tables`."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from perf_lab import machine
from perf_lab.measure.results import ResultsError
from perf_lab.measure.tables import markdown_tables, rows_of
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
    asked = parser.parse_args(arguments)
    if asked.command == "list":
        print(list_text())
        return 0
    try:
        if asked.write:
            asked.write.write_text(
                renewed(asked.write.read_text(encoding="utf-8"), asked.write.parent), encoding="utf-8"
            )
        elif asked.files:
            print(tables_text(asked.files))
        else:
            parser.error("tables: give results files, or --write README")
    except (OSError, ResultsError) as error:
        print(f"perf-lab: {error}", file=sys.stderr)
        return 2
    return 0


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
