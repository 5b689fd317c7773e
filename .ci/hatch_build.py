"""The wheel carries both suites as packages of perf_lab.suite; a development install has the repository's."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Suites(BuildHookInterface):
    """Adds tests/ and bench/, without the committed results."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds; what is forced in is the wheel's, not the sdist's."""
        if version == "editable":
            return
        root = Path(self.root)
        for suite in ("tests", "bench"):
            for file in sorted((root / suite).rglob("*.py")):
                build_data["force_include"][str(file)] = f"perf_lab/suite/{file.relative_to(root)}"
