"""Wrong readers of tables, wrong checks of cuts, a tuner that keeps the wrong configuration."""

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Callable
from typing import Any

from perf_lab import tuning
from perf_lab.measure import tune
from perf_lab.tuning import Config, Entry, Key, Tunable

from .. import test_tuning
from . import mutant

Read = Callable[[Config], Any]
reader, cutter, chooser = test_tuning.reader, test_tuning.cutter, test_tuning.chooser


def tables(device_name: str) -> list[dict[str, Any]]:
    """The tables that are there, the user's first, without a look at what they are of."""
    found = []
    committed = tuning.package() / "tuned" / f"{tuning.slug(device_name)}.json"
    for file in (tuning.user_file(device_name), committed):
        try:
            found.append(json.loads(file.read_text()))
        except (OSError, ValueError) as error:
            if not isinstance(error, FileNotFoundError):
                warnings.warn(f"{file}: tuned configurations are not used", stacklevel=2)
    return found


def entries(table: dict[str, Any], op: str, revision: int | None = None) -> list[dict[str, Any]]:
    """Those of an op."""
    saved = table["ops"].get(op, {"revision": revision, "entries": []})
    return saved["entries"] if revision in (None, saved["revision"]) else []


def look_up(
    device_name: str,
    op: str,
    key: Key,
    revision: int,
    read: Read,
    same: Callable[[Key, Key], bool] = lambda a, b: a == b,
    of_here: bool = True,
    any_revision: bool = False,
    order: int = 1,
) -> Any:
    """Right by default, on tables that are whole."""
    for table in tables(device_name)[::order]:
        if of_here and (table["device"], table["triton"]) != (device_name, tuning.triton_release()):
            continue
        for entry in entries(table, op, None if any_revision else revision):
            if same(entry["key"], key):
                try:
                    return read(entry["config"])
                except ValueError:
                    continue
    return None


@mutant(reader, killed_by="test_tuning::test_what_was_saved_is_found")
def finds_nothing(device_name: str, op: str, key: Key, revision: int, read: Read) -> Any:
    """The default, always."""
    return None


@mutant(reader, killed_by="test_tuning::test_what_was_saved_is_found")
def order_of_fields(device_name: str, op: str, key: Key, revision: int, read: Read) -> Any:
    """A key with its fields in another order is another key."""
    return look_up(device_name, op, key, revision, read, same=lambda a, b: list(a.items()) == list(b.items()))


@mutant(reader, killed_by="test_tuning::test_another_call_is_not_answered")
def nearest_columns(device_name: str, op: str, key: Key, revision: int, read: Read) -> Any:
    """A row one longer takes the configuration of its neighbour."""
    return look_up(
        device_name, op, key, revision, read, same=lambda a, b: {**a, "columns": 0} == {**b, "columns": 0}
    )


@mutant(reader, killed_by="test_tuning::test_another_call_is_not_answered")
def dtypes_forgotten(device_name: str, op: str, key: Key, revision: int, read: Read) -> Any:
    """The dtype is no part of the key."""
    return look_up(
        device_name, op, key, revision, read, same=lambda a, b: {**a, "dtypes": 0} == {**b, "dtypes": 0}
    )


@mutant(reader, killed_by="test_tuning::test_what_is_foreign_or_stale_is_left_out")
def any_gpu(device_name: str, op: str, key: Key, revision: int, read: Read) -> Any:
    """A table of another GPU, or of another Triton, is used."""
    return look_up(device_name, op, key, revision, read, of_here=False)


@mutant(reader, killed_by="test_tuning::test_what_is_foreign_or_stale_is_left_out")
def stale_revision(device_name: str, op: str, key: Key, revision: int, read: Read) -> Any:
    """What was tuned for an older kernel is used."""
    return look_up(device_name, op, key, revision, read, any_revision=True)


@mutant(reader, killed_by="test_tuning::test_a_broken_table_is_a_warning_and_no_more")
def crashes(device_name: str, op: str, key: Key, revision: int, read: Read) -> Any:
    """A table without the expected fields ends the call."""
    try:
        return look_up(device_name, op, key, revision, read)
    except (KeyError, TypeError, AttributeError) as error:
        raise AssertionError(error) from error


@mutant(reader, killed_by="test_tuning::test_a_broken_table_is_a_warning_and_no_more")
def silent(device_name: str, op: str, key: Key, revision: int, read: Read) -> Any:
    """A broken table of the user's is passed over without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuning.look_up(device_name, op, key, revision, read)


@mutant(reader, killed_by="test_tuning::test_no_table_is_no_warning")
def warns_of_nothing(device_name: str, op: str, key: Key, revision: int, read: Read) -> Any:
    """That nobody has tuned is a warning, and where warnings are errors the end."""
    if not tuning.user_file(device_name).exists():
        raise AssertionError("no table")
    return tuning.look_up(device_name, op, key, revision, read)


@mutant(reader, killed_by="test_tuning::test_what_the_kernel_refuses_is_left_out")
def unchecked(device_name: str, op: str, key: Key, revision: int, read: Read) -> Any:
    """A configuration goes to the kernel as it stands in the file."""
    return look_up(device_name, op, key, revision, dict)


@mutant(reader, killed_by="test_tuning::test_the_users_table_goes_before_the_committed_one")
def committed_first(device_name: str, op: str, key: Key, revision: int, read: Read) -> Any:
    """The committed table goes before the user's."""
    return look_up(device_name, op, key, revision, read, order=-1)


if test_tuning.rows is not None:
    Cut = test_tuning.rows.Cut

    @mutant(cutter, killed_by="test_tuning::test_a_cut_that_no_kernel_takes_is_refused")
    def anything(config: Config) -> Any:
        """Whatever the fields hold."""
        return Cut(**{"block": 16, "warps": 4, **{k: v for k, v in config.items() if k in Cut._fields}})

    @mutant(cutter, killed_by="test_tuning::test_every_cut_that_tuning_tries_is_one")
    def small_blocks_only(config: Config) -> Any:
        """Blocks past 1024 are refused."""
        return Cut.read({**config, "block": min(config["block"], 1024)})

    @mutant(test_tuning.keyer, killed_by="test_tuning::test_rows_of_one_key_differ_less_than_fourfold")
    def every_power_of_ten(columns: int, count: int, dtypes: Any) -> Key:
        """Rows are counted in powers of ten."""
        key = test_tuning.rows.tuning_key(columns, count, dtypes)
        return {**key, "rows": min(10 ** (len(str(count)) - 1), test_tuning.rows.FULL)}

    @mutant(
        test_tuning.starter,
        killed_by="test_tuning::test_a_tuned_cut_too_large_for_the_gpu_gives_way_to_the_default",
    )
    def tries_each_time(op: Any, x: Any, launch: Any) -> None:
        """A cut that does not fit is tried again in every call."""
        try:
            launch(Cut(4096, 32))
        except test_tuning.OutOfResources:
            launch(op.default(x.shape[1], x.shape[0]))

    @mutant(test_tuning.starter, killed_by="test_tuning::test_a_default_too_large_for_the_gpu_is_an_error")
    def hides_the_error(op: Any, x: Any, launch: Any) -> None:
        """Where nothing fits, nothing is written, and nobody is told."""
        with contextlib.suppress(test_tuning.OutOfResources):
            op.tuned(launch, x, x.dtype)


@mutant(chooser, killed_by="test_tuning::test_the_fastest_is_kept")
def first_that_runs(tunable: Tunable, key: Key, measure: tune.Measure, say: Any) -> Entry:
    """The first candidate that is faster than the default is kept."""
    kept = tune.tuned(tunable, key, measure, say)
    for config in tune.configurations(tunable, key)[1:]:
        if (measure(tunable, key, config) or 1) * 1e6 < kept.default_us:
            return dataclasses.replace(kept, config=config)
    return kept


@mutant(chooser, killed_by="test_tuning::test_what_fails_or_is_wrong_is_never_kept")
def failures_are_fast(tunable: Tunable, key: Key, measure: tune.Measure, say: Any) -> Entry:
    """What could not be measured took no time."""
    return tune.tuned(tunable, key, lambda *args: measure(*args) or 1e-9, say)


@mutant(chooser, killed_by="test_tuning::test_the_default_stays_where_nothing_is_clearly_faster")
def noise_decides(tunable: Tunable, key: Key, measure: tune.Measure, say: Any) -> Entry:
    """The smallest number wins, by however little."""
    kept = tune.tuned(tunable, key, measure, say)
    configs = tune.configurations(tunable, key)
    return dataclasses.replace(kept, config=min(configs, key=lambda c: measure(tunable, key, c) or 1))


@mutant(chooser, killed_by="test_tuning::test_a_default_that_does_not_run_is_an_error")
def default_missing(tunable: Tunable, key: Key, measure: tune.Measure, say: Any) -> Entry:
    """Without a default there is nothing to be compared with, and anything is better."""
    return tune.tuned(tunable, key, lambda *args: measure(*args) or 1.0, say)
