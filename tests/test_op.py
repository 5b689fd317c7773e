"""The table of what exists, the options that narrow it, and the command line."""

import subprocess
import sys
from importlib import metadata

import pytest
import torch

from perf_lab import machine
from perf_lab.cli import END, list_text, main, renewed
from perf_lab.measure.results import ResultsError
from perf_lab.op import ENTRY_POINTS, FLOATS, OPS, Implementation, Limit, LimitError, Op, load_all, outside
from perf_lab.pytest_plugin import Selection, _params

from .checkout import ROOT, in_checkout


@pytest.fixture
def op():
    made = Op("an_op_of_this_test", validate=lambda x: None)
    yield made
    del OPS[made.name]


def test_registering_gives_the_function_back_unchanged(op):
    def double(x):
        return 2 * x

    assert op.register("double", devices=("cpu",))(double) is double
    assert op["double"](21) == 42
    assert [impl.name for impl in op] == ["double"]


def test_a_name_is_taken_once(op):
    op.register("one")(abs)
    with pytest.raises(ValueError, match="name: an_op_of_this_test has an implementation called 'one'"):
        op.register("one")(abs)
    with pytest.raises(ValueError, match="name: an op called 'an_op_of_this_test' exists"):
        Op("an_op_of_this_test")


def test_an_unknown_device_is_refused(op):
    with pytest.raises(ValueError, match=r"devices: got \['tpu'\], accepted are"):
        op.register("one", devices=("tpu",))


def test_an_unknown_implementation_names_the_known(op):
    op.register("one")(abs)
    with pytest.raises(KeyError, match="no implementation 'two'; it has \\['one'\\]"):
        op["two"]


def test_a_missing_package_is_noted_with_its_name(op, tmp_path, monkeypatch):
    package = tmp_path / "rooms_of_this_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "kernel.py").write_text("import a_package_that_is_not_there")
    (package / "broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    op.load("rooms_of_this_test", "kernel")
    assert op.missing == {"kernel": "needs the package a_package_that_is_not_there, which is not installed"}
    with pytest.raises(KeyError, match="not available here: needs the package"):
        op["kernel"]
    with pytest.raises(ZeroDivisionError):
        op.load("rooms_of_this_test", "broken")


def test_the_contract_is_checked_before_the_implementation_runs(op):
    def refuse(x):
        raise ValueError("x: got 1, accepted is 2")

    op.validate = refuse
    op.register("one")(lambda x: pytest.fail("it ran"))
    with pytest.raises(ValueError, match="x: got 1"):
        op["one"](1)


def test_a_limit_names_its_reason(op):
    op.register("short", limits=(Limit("at most 3", lambda x: x > 3),))(abs)
    assert op["short"](-3) == 3
    with pytest.raises(LimitError, match=r"an_op_of_this_test\[short\]: at most 3"):
        op["short"](4)


@pytest.mark.parametrize(
    ("device", "devices", "interpreted", "interpreter", "reason"),
    [
        ("cpu", ("cpu",), False, "0", None),
        ("cpu", ("cuda",), True, "1", None),
        ("cpu", ("cuda",), True, "0", "only under Triton's interpreter"),
        ("cpu", ("cuda",), False, "1", "made for cuda, not for cpu"),
        ("tpu", ("cuda",), False, "1", "not a device"),
    ],
)
def test_why_not_names_the_reason(op, monkeypatch, device, devices, interpreted, interpreter, reason):
    monkeypatch.setenv("TRITON_INTERPRET", interpreter)
    impl = Implementation(op, "one", abs, devices, FLOATS, interpreted)
    why_not = impl.why_not(device)
    assert why_not is None if reason is None else reason in why_not


@pytest.mark.parametrize("spec", ["softmax", "softmax=", "softmax=math", "=math:exp", "softmax=math:"])
def test_a_misspelt_impl_says_what_is_accepted(spec):
    with pytest.raises(ValueError, match="accepted is op=package.module:function"):
        outside(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sofmax=math:exp", "no op 'sofmax'"),
        ("softmax=no_such_module:exp", "cannot import 'no_such_module'"),
        ("softmax=math:no_such", "has no 'no_such'"),
        ("softmax=math:pi", "is float, not callable"),
    ],
)
def test_an_impl_that_cannot_be_had_says_why(spec, message):
    with pytest.raises(ValueError, match=message):
        outside(spec)


OUTSIDE = """
import torch

def right(x):
    return torch.softmax(x.double(), -1).to(x.dtype)

def wrong(x):
    return torch.softmax(x.double(), -1).to(x.dtype) * 0.99
"""


def suite(tmp_path, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "mykernels.py").write_text(OUTSIDE)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *options],
        cwd=ROOT,
        env={**__import__("os").environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@in_checkout
def test_an_outside_function_is_held_to_every_property(tmp_path):
    tests = ("tests/test_softmax.py", "-k", "oracle and mykernels", "--device", "cpu")
    right = suite(tmp_path, "--impl", "softmax=mykernels:right", *tests)
    assert right.returncode == 0, right.stdout
    assert "3 passed" in right.stdout
    wrong = suite(tmp_path, "--impl", "softmax=mykernels:wrong", *tests)
    assert wrong.returncode == 1
    assert "should be" in wrong.stdout
    assert "load_all()['softmax']['mykernels:wrong']" in wrong.stdout


@in_checkout
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--impl", "no_such"), "--impl: got ['no_such'], there are"),
        (("--length", "0"), "--length: got 0, accepted are positive"),
        *([] if "mps" in machine.devices() else [(("--device", "mps"), "--device mps: only on macOS")]),
    ],
)
def test_an_option_that_cannot_be_met_is_an_error_not_an_empty_run(tmp_path, options, message):
    done = suite(tmp_path, "tests/test_softmax.py", "--collect-only", *options)
    assert done.returncode == 4
    assert message in done.stderr


def test_the_list_names_every_implementation():
    text = list_text()
    for op in OPS.values():
        for impl in op:
            assert any(line.split()[:2] == [op.name, impl.name] for line in text.splitlines())


def test_an_unreadable_file_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert main(["tables", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_renewing_leaves_the_text_around_the_tables():
    text = f"before\n<!-- tables:  -->old{END}\nafter"
    assert renewed(text, ROOT) == f"before\n<!-- tables:  -->\n\n\n\n{END}\nafter"
    with pytest.raises(ResultsError, match="has no"):
        renewed(f"no marker {END}", ROOT)


@in_checkout
def test_the_tables_in_the_readme_are_those_of_the_committed_results():
    text = (ROOT / "README.md").read_text()
    assert renewed(text, ROOT) == text, "stale: run python -m perf_lab tables --write README.md"


def test_results_of_a_machine_lie_in_a_folder_named_for_it():
    assert machine.slug() == machine.slug().lower()
    assert set(machine.slug()) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert torch.device("cpu").type in machine.devices()


def test_a_known_failure_is_a_strict_xfail_there_and_nowhere_else(op, monkeypatch):
    monkeypatch.setattr("perf_lab.pytest_plugin.selection", Selection())
    known = {"test_it[cpu-float16]": "rounds twice", "test_other": "never right"}
    impl = Implementation(op, "one", abs, ("cpu",), FLOATS, known_failures=known)

    def expected(test, dtypes):
        marks = {param.id: [mark.kwargs for mark in param.marks] for param in _params(impl, test, dtypes)}
        return {name: found[0] for name, found in marks.items() if found}

    assert expected("test_it", True) == {"cpu-one-float16": {"reason": "rounds twice", "strict": True}}
    assert expected("test_it", False) == {}
    assert len(expected("test_other", True)) == len(FLOATS)


def points(monkeypatch, **values):
    found = [
        metadata.EntryPoint(name.replace("_", ".", 1), value, ENTRY_POINTS) for name, value in values.items()
    ]
    monkeypatch.setattr("perf_lab.op.metadata.entry_points", lambda group: found)


def test_an_installed_package_adds_its_implementation_once(monkeypatch):
    points(monkeypatch, softmax_theirs="torch:softmax")
    try:
        assert load_all()["softmax"]["theirs"].fn is torch.softmax
        assert load_all()["softmax"]["theirs"].fn is torch.softmax
    finally:
        OPS["softmax"].implementations.pop("theirs", None)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("softmax", "torch:softmax", "accepted names are OP.NAME"),
        ("nothing_theirs", "torch:softmax", "accepted names are OP.NAME"),
        ("softmax_eager", "torch:softmax", "has an implementation called 'eager' already"),
        ("softmax_theirs", "no_such_module:softmax", "No module named 'no_such_module'"),
        ("softmax_theirs", "torch:no_such_name", "no_such_name"),
    ],
)
def test_an_entry_point_that_does_not_hold_is_named(monkeypatch, name, value, message):
    points(monkeypatch, **{name: value})
    with pytest.raises(ValueError, match=f'entry point "{name.replace("_", ".", 1)}".*{message}'):
        load_all()
