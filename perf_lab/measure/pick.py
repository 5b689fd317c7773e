"""A pytest plugin that leaves one implementation of each benchmark: `-p perf_lab.measure.pick`."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The one option."""
    parser.getgroup("perf_lab").addoption(
        "--pick-impl",
        required=True,
        metavar="[OP:]NAME",
        help="run only what has this value of its parameter `impl`; OP: an op, or part of a benchmark's name",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the others."""
    op, _, name = config.getoption("pick_impl").rpartition(":")
    kept = [item for item in items if _fits(item, op, name)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _fits(item: pytest.Item, op: str, name: str) -> bool:
    callspec = getattr(item, "callspec", None)
    impl = callspec.params.get("impl") if callspec else None
    if str(getattr(impl, "name", impl)) != name:
        return False
    of = getattr(impl, "op", None)
    return not op or op == getattr(of, "name", None) or (of is None and op in item.name.partition("[")[0])
