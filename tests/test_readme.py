"""README's first steps are commands that work, in a copy of the checkout."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .checkout import ROOT, in_checkout

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "results", "__pycache__", ".*cache", ".hypothesis", "dist")


def steps() -> list[str]:
    """The commands of each step, as README has them."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## First steps\n")[2]
    return re.findall(r"^```\n(.*?)^```$", section.partition("\n## ")[0], re.DOTALL | re.MULTILINE)


def run(commands: str, folder: Path) -> str:
    """What the commands print, in a shell that ends at the first failure."""
    environment = {
        **os.environ,
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": str(folder),
        "PERF_LAB_CEILINGS": str(folder / "ceilings.json"),  # measured once for all steps
    }
    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}"
    return done.stdout


@in_checkout
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_first_steps_do_what_they_say(tmp_path):
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    read, add, bring = (run(step, copy) for step in steps())
    assert "test_matches_the_oracle" in read and re.search(r"\[\d+-cpu-eager\]", read)
    assert re.search(r"\[\d+-cpu-plain\]", add) and "failed" not in add
    assert "should be" in bring and "reproduce" in bring and bring.endswith("refused\n")
