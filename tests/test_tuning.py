"""What tables of tuned configurations must never do: make a call fail, or use what is not its own."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import perf_lab
from perf_lab import cli, tuning
from perf_lab.measure import tune
from perf_lab.op import OPS, Op
from perf_lab.pytest_plugin import implementations, on_devices
from perf_lab.tuning import Entry, Tunable

GPU = "Test GPU 9000"
KEY = {"columns": 4096, "rows": 1024, "dtypes": "bfloat16"}
CONFIG = {"block": 4096, "warps": 16}

reader = Op(
    "table_reader"
)  # implementations: (device name, op, key, revision, read) -> configuration or None
reader.register("look_up", devices=("cpu",))(tuning.look_up)
del OPS[reader.name]


def entry(config=CONFIG, key=KEY, op="softmax", revision=1, us=1.0):
    return Entry(op, revision, key, config, us, 2.0)


@contextlib.contextmanager
def tables(own=(), committed=(), device_name=GPU):
    """A user's folder and a package of this test's own, with these entries; gives the user's file."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(tuning.FOLDER_VARIABLE, folder)
        patch.setattr(tuning, "package", lambda: Path(folder))
        tuning.changed()
        if committed:
            tuning.save(committed, device_name, Path(folder, "tuned", f"{tuning.slug(device_name)}.json"))
        if own:
            tuning.save(own, device_name)
        yield tuning.user_file(device_name)
    tuning.changed()


def found(impl, key=KEY, op="softmax", revision=1, read=dict):
    """What a call is told."""
    return impl.fn(GPU, op, key, revision, read)


@implementations(reader)
def test_what_was_saved_is_found(device, impl):
    with tables([entry()]):
        assert found(impl) == CONFIG
        assert found(impl, key=dict(reversed(KEY.items()))) == CONFIG


@implementations(reader)
def test_another_call_is_not_answered(device, impl):
    with tables([entry()]):
        assert found(impl, op="rms_norm") is None
        for change in ({"columns": 4097}, {"rows": 4096}, {"dtypes": "float16"}, {"more": 1}):
            assert found(impl, key={**KEY, **change}) is None, change


@implementations(reader)
def test_what_is_foreign_or_stale_is_left_out(device, impl):
    for fields in ({"device": "Another GPU"}, {"triton": "1.0"}, {"triton": None}):
        with tables([entry()]) as file:
            file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
            assert found(impl) is None, fields
    with tables([entry()]):
        assert found(impl, revision=2) is None


def table_of(ops) -> bytes:
    """A table of this GPU and Triton."""
    return json.dumps({"device": GPU, "triton": tuning.triton_release(), "ops": ops}).encode()


BROKEN = {
    "nothing": b"",
    "no json": b"{",
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "null": b"null",
    "no fields": b"{}",
    "ops a list": table_of([1]),
    "no entries": table_of({"softmax": {"revision": 1}}),
    "a number for a configuration": table_of(
        {"softmax": {"revision": 1, "entries": [{"key": KEY, "config": 7}]}}
    ),
}


@implementations(reader)
def test_a_broken_table_is_a_warning_and_no_more(device, impl):
    for name, content in BROKEN.items():
        with tables() as file:
            file.write_bytes(content)
            with pytest.warns(UserWarning, match="tuned configurations are not used"):
                assert found(impl) is None, name


@implementations(reader)
def test_no_table_is_no_warning(device, impl):
    with tables(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found(impl) is None


@implementations(reader)
def test_what_the_kernel_refuses_is_left_out(device, impl):
    def refuse(config):
        raise ValueError(config)

    with tables([entry()]):
        assert found(impl, read=refuse) is None


@implementations(reader)
def test_the_users_table_goes_before_the_committed_one(device, impl):
    second, third = {**KEY, "rows": 1}, {"x": 1}
    own = [entry({"block": 1}), entry({"block": 2}, second)]
    committed = [entry({"block": 3}), entry({"block": 4}, second), entry({"block": 5}, third)]
    with tables(own, committed):
        assert [found(impl, key=key)["block"] for key in (KEY, second, third)] == [1, 2, 5]


def test_saving_again_replaces_the_same_keys_only():
    impl, other = reader["look_up"], {**KEY, "columns": 1024}
    with tables([entry({"block": 1}), entry({"block": 2}, other), entry({"block": 3}, op="rms_norm")]):
        tuning.save([entry({"block": 9})], GPU)
        assert found(impl) == {"block": 9}
        assert found(impl, key=other) == {"block": 2}
        assert found(impl, op="rms_norm") == {"block": 3}
        tuning.save([entry({"block": 7}, revision=2)], GPU)  # what was tuned for the old kernel goes
        assert found(impl, key=other) is None and found(impl, revision=2) == {"block": 7}


TEXT = st.text(max_size=5)


@given(
    key=st.dictionaries(TEXT, st.one_of(st.integers(), TEXT, st.booleans())),
    config=st.dictionaries(TEXT, st.one_of(st.integers(), TEXT)),
)
def test_any_key_and_configuration_survives_the_file(key, config):
    with tables([entry(config, key)]) as file:
        assert tuning.parsed(file.read_text(), GPU) == {("softmax", 1, tuning.text(key)): config}


# the cuts of kernels over rows

cutter = Op("cut_reader")
keyer = Op("tuning_key")  # implementations: (columns, rows, dtypes) -> key
rows = None
if "triton" not in OPS["softmax"].missing:
    from perf_lab import rows

    cutter.register("read", devices=("cpu",))(rows.Cut.read)
    keyer.register("fourfold", devices=("cpu",))(rows.tuning_key)
del OPS[cutter.name], OPS[keyer.name]

BAD_CUTS = {
    "nothing": {},
    "no warps": {"block": 64},
    "a field of another kernel": {"block": 64, "warps": 4, "BLOCK_M": 64},
    "a text": {"block": "64", "warps": 4},
    "a fraction": {"block": 64.0, "warps": 4},
    "a truth": {"block": 64, "warps": 4, "split": True},
    "no power of two": {"block": 100, "warps": 4},
    "a negative block": {"block": -64, "warps": 4},
    "a block past the registers": {"block": 2**20, "warps": 32},
    "rows past the registers": {"block": 2**16, "warps": 32, "rows": 2},
    "three warps": {"block": 64, "warps": 3},
    "three rows": {"block": 64, "warps": 4, "rows": 3},
    "no stages": {"block": 64, "warps": 4, "stages": 0},
    "too large a lap": {"block": 64, "warps": 4, "split": 2**21},
    "fewer than none": {"block": 64, "warps": 4, "split": -1},
}


@implementations(cutter)
def test_a_cut_that_no_kernel_takes_is_refused(device, impl):
    for config in BAD_CUTS.values():
        with pytest.raises(ValueError, match="got|has no"):
            impl.fn(config)


@implementations(cutter)
@given(columns=st.integers(1, 2**20), count=st.integers(1, 2**17))
def test_every_cut_that_tuning_tries_is_one(device, impl, columns, count):
    tried = [rows.default_cut(columns, count), *rows.candidates(columns, count, split=True)]
    assert [impl.fn(cut._asdict()) for cut in tried] == tried


@implementations(keyer)
@given(columns=st.integers(1, 2**20), count=st.integers(1, 2**17))
def test_rows_of_one_key_differ_less_than_fourfold(device, impl, columns, count):
    key = impl.fn(columns, count, (torch.bfloat16,))
    assert key["rows"] <= count and (count < 4 * key["rows"] or key["rows"] == rows.FULL)
    assert key == impl.fn(columns, key["rows"], (torch.bfloat16,))


class Kernel:
    """In place of a kernel: notes the warps of each launch; 32 are too many for this GPU."""

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        def launch(*args, num_warps, **options):
            self.launched.append(num_warps)
            if num_warps == 32:
                raise OutOfResources(300_000, 232_448, "shared memory")

        return launch


starter = Op("starter")  # implementations: (row op, x, launch)
if rows is not None:
    from triton.runtime.errors import OutOfResources

    starter.register("tuned", devices=("cpu",))(lambda op, x, launch: op.tuned(launch, x, x.dtype))
del OPS[starter.name]


@implementations(starter)
def test_a_tuned_cut_too_large_for_the_gpu_gives_way_to_the_default(device, impl):
    kernel, x = Kernel(), torch.ones(2, 4096)
    op = rows.RowOp("softmax", kernel, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "find", lambda *args: rows.Cut(4096, 32))
        for _ in range(2):
            impl.fn(op, x, lambda cut: op.run((x,), (), (x,), (), cut))
    assert kernel.launched == [32, 8, 8]  # not tried again


@implementations(starter)
def test_a_default_too_large_for_the_gpu_is_an_error(device, impl):
    kernel, x = Kernel(), torch.ones(2, 4096)
    op = rows.RowOp("softmax", kernel, None, default=lambda columns, count: rows.Cut(4096, 32))
    with pytest.raises(OutOfResources):
        impl.fn(op, x, lambda cut: op.run((x,), (), (x,), (), cut))


# the tuner, on a kernel whose times are made up


@dataclasses.dataclass
class Clock:
    """Seconds by configuration, and what was measured."""

    times: dict
    asked: list = dataclasses.field(default_factory=list)

    def __call__(self, tunable, key, config):
        self.asked.append(config["n"])
        return self.times.get(config["n"])


def tunable(candidates=(1, 2, 3)):
    return Tunable(
        "softmax",
        1,
        [KEY],
        lambda key: [],
        lambda key: {"n": 0},
        lambda key: [{"n": n} for n in candidates],
        None,
    )


chooser = Op("chooser")
chooser.register("tuned", devices=("cpu",))(tune.tuned)
del OPS[chooser.name]


@implementations(chooser)
def test_the_fastest_is_kept(device, impl):
    kept = impl.fn(tunable(), KEY, Clock({0: 4e-6, 1: 3e-6, 2: 2e-6, 3: 5e-6}), str)
    assert kept.config == {"n": 2} and (kept.us, kept.default_us) == (2.0, 4.0)


@implementations(chooser)
def test_what_fails_or_is_wrong_is_never_kept(device, impl):
    kept = impl.fn(tunable(), KEY, Clock({0: 4e-6, 1: None, 3: 3e-6}), str)
    assert kept.config == {"n": 3}


@implementations(chooser)
def test_the_default_stays_where_nothing_is_clearly_faster(device, impl):
    kept = impl.fn(tunable(), KEY, Clock({0: 4e-6, 1: 3.99e-6, 2: 5e-6}), str)
    assert kept.config == {"n": 0}


@implementations(chooser)
def test_a_default_that_does_not_run_is_an_error(device, impl):
    with pytest.raises(RuntimeError, match="the default {'n': 0} does not run"):
        impl.fn(tunable(), KEY, Clock({1: 1e-6}), str)


def test_each_configuration_is_tried_once():
    assert list(tune.configurations(tunable((0, 1, 1, 2)), KEY)) == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_tuning_asks_for_a_gpu_and_a_known_op(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["tune"]) == 2
    assert "no GPU is visible" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cli.main(["tune", "sort"]) == 2
    assert "got ['sort'], accepted are" in capsys.readouterr().err


def test_every_committed_table_is_of_kernels_that_are_here():
    for file in (Path(perf_lab.__file__).parent / "tuned").glob("*.json"):
        table = json.loads(file.read_text())
        assert file.stem == tuning.slug(table["device"])
        for op, saved_op in table["ops"].items():
            kernel = tuning.TUNABLES[op]
            assert saved_op["revision"] == kernel.revision
            for saved_entry in saved_op["entries"]:
                assert saved_entry["us"] <= saved_entry["default_us"]
                kernel.read(saved_entry["config"])


@on_devices("cuda")
def test_this_machine_can_be_tuned(device, tmp_path):
    file = tune.tune(["softmax"], str, tmp_path / "table.json", only=['"columns": 1024', '"rows": 1}'])
    table = json.loads(file.read_text())
    assert table["device"] == torch.cuda.get_device_name() and len(table["ops"]["softmax"]["entries"]) == 1


@on_devices("cuda")
@pytest.mark.parametrize("op", ["rms_norm", "softmax", "add_rms_norm"])
def test_a_tuned_call_is_right_in_a_fresh_process(device, op, tmp_path):
    """The first call of a process uses the table, and is as right as any (nothing is tried on its data)."""
    code = (
        "import torch; from perf_lab import tuning; from perf_lab.op import load_all\n"
        "from perf_lab.numerics import check; from perf_lab.strategies import Input\n"
        f"t = tuning.TUNABLES if load_all() else {{}}; t = t[{op!r}]; key = t.keys[0]\n"
        "configs = [t.default(key), *t.candidates(key)][:4]\n"
        "for config in configs:\n"
        "    entry = tuning.Entry(t.op, t.revision, key, config, 1.0, 1.0)\n"
        "    tuning.save([entry], torch.cuda.get_device_name())\n"
        "    inputs = [Input(shape, dtype, i) for i, (shape, dtype) in enumerate(t.inputs(key))]\n"
        f"    check(load_all()[{op!r}]['triton'], *inputs, device='cuda')\n"
    )
    environment = {
        **os.environ,
        tuning.FOLDER_VARIABLE: str(tmp_path),
        "PYTHONPATH": str(Path(perf_lab.__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
