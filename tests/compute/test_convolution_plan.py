"""Choice of an algorithm for each convolution."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.progress import Watched
from torch import Tensor

from unisono.compute import convolution_plan
from unisono.compute.algorithms import ALGORITHMS, DEFAULT
from unisono.compute.convolution_plan import (
    ConvolutionPlan,
    best_of,
    key_of,
    load_plan,
    machine,
    merge,
    read_plan,
    save_plan,
    write_plan,
)
from unisono.compute.geometry import ConvolutionAlgorithm, Geometry, Pass
from unisono.errors import TableError, UsageError
from unisono.processor import processor

LAYER = Geometry(1, 4, 4, (8, 8), (3, 3), (1, 1), (1, 1), (1, 1), 1, torch.float32)


class Bench:
    """Algorithms that record their calls, and a clock that advances by their times."""

    def __init__(self, seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch, first: float = 1.0) -> None:
        """`first`: ratio of an algorithm's first call to later ones."""
        self.calls: list[str] = []
        self.first = first
        self.now = 0.0
        monkeypatch.setattr(convolution_plan, "MIN_AUTOTUNED_OPERATIONS", 0)
        monkeypatch.setattr(
            convolution_plan, "ALGORITHMS", {name: self._algorithm(name, each) for name, each in seconds.items()}
        )

    def clock(self) -> float:
        return self.now

    def _algorithm(self, name: str, seconds: float) -> ConvolutionAlgorithm:
        def compute(geometry: Geometry, first: Tensor, second: Tensor) -> Tensor:
            self.now += seconds if name in self.calls else seconds * self.first
            self.calls.append(name)
            return first

        return ConvolutionAlgorithm(lambda geometry: seconds > 0, compute, compute, compute)


def test_each_algorithm_is_timed_once_and_the_best_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench({DEFAULT: 2.0, "fast": 1.0, "slow": 9.0, "hopeless": 11.0, "unfit": 0.0}, monkeypatch)
    plan, given = ConvolutionPlan(clock=bench.clock), torch.zeros(1)
    for _ in range(2):
        plan.compute(Pass.FORWARD, LAYER, given, given)
    assert bench.calls == [DEFAULT] * 3 + ["fast"] * 3 + ["slow"] * 2 + ["hopeless"] + ["fast"] * 2
    assert plan.measured == {key_of(LAYER, Pass.FORWARD): {DEFAULT: 2.0, "fast": 1.0, "slow": 9.0}}
    assert plan.algorithm(Pass.FORWARD, LAYER) == "fast"
    assert plan.algorithm(Pass.GRAD_INPUT, LAYER) == DEFAULT


def test_the_first_call_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench({DEFAULT: 2.0, "fast": 1.0}, monkeypatch, first=8.0)
    plan = ConvolutionPlan(clock=bench.clock)
    plan.compute(Pass.FORWARD, LAYER, torch.zeros(1), torch.zeros(1))
    assert plan.measured == {key_of(LAYER, Pass.FORWARD): {DEFAULT: 2.0, "fast": 1.0}}


def test_a_large_layer_is_timed_on_some_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def compute(geometry: Geometry, first: Tensor, second: Tensor) -> Tensor:
        seen.append((geometry.samples, len(first), len(second)))
        return first

    monkeypatch.setattr(convolution_plan, "MIN_AUTOTUNED_OPERATIONS", 0)
    monkeypatch.setattr(convolution_plan, "AUTOTUNE_CALL_OPERATIONS", 5 * LAYER.operations)
    monkeypatch.setattr(
        convolution_plan, "ALGORITHMS", {DEFAULT: ConvolutionAlgorithm(lambda _: True, compute, compute, compute)}
    )
    plan, many = ConvolutionPlan(), replace(LAYER, samples=20)
    for which, (first, second) in {Pass.FORWARD: (20, 4), Pass.GRAD_INPUT: (20, 4), Pass.GRAD_WEIGHT: (20, 20)}.items():
        seen.clear()
        plan.compute(which, many, torch.zeros(first), torch.zeros(second))
        assert seen[:-1] == [(5, 5, 5 if which is Pass.GRAD_WEIGHT else 4)] * 3
        assert seen[-1] == (20, first, second)


def test_known_layers_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench({DEFAULT: 2.0, "fast": 1.0}, monkeypatch)
    plan = ConvolutionPlan({key_of(LAYER, Pass.GRAD_INPUT): {DEFAULT: 1.0, "fast": 3.0}}, bench.clock)
    plan.compute(Pass.GRAD_INPUT, LAYER, torch.zeros(1), torch.zeros(1))
    assert bench.calls == [DEFAULT]


def test_a_frozen_plan_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench({DEFAULT: 2.0, "fast": 1.0}, monkeypatch)
    plan = ConvolutionPlan(clock=bench.clock)
    plan.compute(Pass.GRAD_INPUT, LAYER, torch.zeros(1), torch.zeros(1))
    plan.freeze({key_of(LAYER, Pass.GRAD_INPUT): {DEFAULT: 1.0, "fast": 1.0}})
    bench.calls.clear()
    for which in Pass:
        plan.compute(which, LAYER, torch.zeros(1), torch.zeros(1))
    assert bench.calls == [DEFAULT] * 3


def test_another_number_of_samples_uses_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    Bench({DEFAULT: 2.0, "fast": 1.0}, monkeypatch)
    few, many = (replace(LAYER, samples=samples) for samples in (2, 30))
    plan = ConvolutionPlan()
    plan.freeze(
        {
            key_of(few, Pass.GRAD_INPUT): {DEFAULT: 1.0, "fast": 2.0},
            key_of(many, Pass.GRAD_INPUT): {DEFAULT: 2.0, "fast": 1.0},
            key_of(replace(many, out_channels=8), Pass.GRAD_INPUT): {DEFAULT: 1.0, "fast": 2.0},
        }
    )
    assert [plan.algorithm(Pass.GRAD_INPUT, replace(LAYER, samples=samples)) for samples in (1, 3, 29, 99)] == [
        DEFAULT, DEFAULT, "fast", "fast",
    ]  # fmt: skip
    assert plan.algorithm(Pass.FORWARD, few) == DEFAULT


def test_small_layers_use_the_library() -> None:
    def clock() -> float:
        raise AssertionError("nothing is timed")

    plan = ConvolutionPlan(clock=clock)
    outputs = plan.compute(Pass.FORWARD, LAYER, torch.ones(1, 4, 8, 8), torch.ones(4, 4, 3, 3))
    assert outputs[0, 0, 4, 4] == 36
    assert plan.measured == {}


def test_another_algorithm_has_to_be_clearly_faster() -> None:
    assert best_of({DEFAULT: 1.0, "product": 0.96}) == DEFAULT
    assert best_of({DEFAULT: 1.0, "product": 0.94}) == "product"
    assert best_of({"product": 2.0, "unfolded": 1.0}) == "unfolded"


def test_merged_timings_are_the_slowest_of_each_algorithm() -> None:
    merged = merge([{"a": {DEFAULT: 1.0, "x": 3.0}}, {"a": {DEFAULT: 2.0, "x": 1.0, "y": 1.0}, "b": {DEFAULT: 1.0}}])
    assert merged == {"a": {DEFAULT: 2.0, "x": 3.0}, "b": {DEFAULT: 1.0}}


def test_a_plan_is_written_and_read(tmp_path: Path) -> None:
    path, here = tmp_path / "new" / "plan.json", machine("Xeon")
    measured = {"a": {DEFAULT: 0.25, "product": 0.125}}
    write_plan(path, here, measured)
    assert read_plan(path, here) == measured
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]


def test_concurrent_runs_can_check_and_write_one_file(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from unisono.compute.convolution_plan import check_plan, write_plan
path, own = Path(sys.argv[1]), sys.argv[2]
for number in range(200):
    check_plan(path)
    write_plan(path, {"processor": own}, {str(number): {"product": 1.0}})
    print(number, flush=True)
"""
    path = tmp_path / "plan.json"
    runs = [Watched([sys.executable, "-c", program, str(path), own]) for own in ("first", "second")]
    done = [run.finish() for run in runs]
    assert [process.returncode for process in done] == [0, 0], done
    assert "199" in {**read_plan(path, {"processor": "first"}), **read_plan(path, {"processor": "second"})}
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_of_another_machine_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, machine("Xeon"), {"a": {DEFAULT: 0.25}})
    assert read_plan(path, machine("EPYC")) == {}
    assert read_plan(tmp_path / "none.json", machine("Xeon")) == {}


@pytest.mark.parametrize("text", ["", "3", "[3]", '[{"machine": HERE, "measured": 3}]', '{"machine": HERE}'])
def test_a_file_that_is_not_a_plan_is_refused(tmp_path: Path, text: str) -> None:
    path, here = tmp_path / "plan.json", machine("Xeon")
    path.write_text(text.replace("HERE", json.dumps(here)))
    with pytest.raises(TableError, match="is not a convolution plan"):
        read_plan(path, here)


def test_an_algorithm_of_another_version_is_left_out(tmp_path: Path) -> None:
    path, here = tmp_path / "plan.json", machine("Xeon")
    write_plan(path, here, {"a": {DEFAULT: 0.25, "magic": 0.1}})
    assert read_plan(path, here) == {"a": {DEFAULT: 0.25}}


def test_algorithms_are_part_of_the_machine() -> None:
    assert machine("Xeon")["algorithms"] == list(ALGORITHMS)


def test_a_plan_of_format_3_is_read_and_rewritten(tmp_path: Path) -> None:
    path, here = tmp_path / "plan.json", machine("Xeon")
    old = {**{key: value for key, value in here.items() if key != "algorithms"}, "format": 3, "ways": list(ALGORITHMS)}
    measured = {"a forward": {DEFAULT: 1.0}, "a input gradient": {DEFAULT: 2.0}, "a weight gradient": {DEFAULT: 3.0}}
    path.write_text(json.dumps([{"machine": old, "measured": measured}]))
    converted = {"a forward": {DEFAULT: 1.0}, "a grad_input": {DEFAULT: 2.0}, "a grad_weight": {DEFAULT: 3.0}}
    assert read_plan(path, here) == converted
    write_plan(path, here, {"b forward": {DEFAULT: 4.0}})
    (entry,) = json.loads(path.read_text())
    assert entry == {"machine": here, "measured": {**converted, "b forward": {DEFAULT: 4.0}}}


HERE = machine(processor().name)


class Alone:
    """A world of one rank."""

    def call_on_root(self, function: Callable[[], Any]) -> Any:
        return function()


WORLD: Any = Alone()


def test_a_new_run_knows_nothing() -> None:
    assert load_plan("", None, WORLD) == ConvolutionPlan()


def test_a_resumed_run_computes_as_it_began(tmp_path: Path) -> None:
    own, shared = tmp_path / "own.json", tmp_path / "shared.json"
    write_plan(own, HERE, {"a": {DEFAULT: 1.0}})
    write_plan(shared, HERE, {"b": {DEFAULT: 1.0}})
    loaded = load_plan(str(shared), own, WORLD)
    assert loaded.measured == {"a": {DEFAULT: 1.0}}
    assert not loaded.frozen, "layers that have become others are tried"


def test_what_several_runs_share_is_taken_up_and_added_to(tmp_path: Path) -> None:
    shared = tmp_path / "shared.json"
    write_plan(shared, HERE, {"b": {DEFAULT: 1.0}})
    loaded = load_plan(str(shared), tmp_path / "none.json", WORLD)
    assert loaded.measured == {"b": {DEFAULT: 1.0}}
    assert not loaded.frozen


def test_a_plan_of_another_machine_is_made_anew(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    write_plan(own, {**HERE, "threads": -1}, {"a": {DEFAULT: 1.0}})
    assert load_plan("", own, WORLD) == ConvolutionPlan()


def test_it_is_kept_with_the_run_and_for_others(tmp_path: Path) -> None:
    own, shared = tmp_path / "own.json", tmp_path / "deep" / "shared.json"
    save_plan(str(shared), own, ConvolutionPlan({"a": {DEFAULT: 1.0}}), WORLD)
    assert read_plan(own, HERE) == read_plan(shared, HERE) == {"a": {DEFAULT: 1.0}}


def test_timings_of_other_runs_stay(tmp_path: Path) -> None:
    own, shared = tmp_path / "own.json", tmp_path / "shared.json"
    elsewhere = {**HERE, "threads": -1}
    write_plan(shared, elsewhere, {"a": {DEFAULT: 2.0}})
    write_plan(shared, HERE, {"b": {DEFAULT: 1.0}})
    save_plan(str(shared), own, ConvolutionPlan({"a": {DEFAULT: 1.0}}), WORLD)
    assert read_plan(own, HERE) == {"a": {DEFAULT: 1.0}}
    assert read_plan(shared, HERE) == {"a": {DEFAULT: 1.0}, "b": {DEFAULT: 1.0}}
    assert read_plan(shared, elsewhere) == {"a": {DEFAULT: 2.0}}


def test_a_plan_without_timings_is_not_written(tmp_path: Path) -> None:
    save_plan("", tmp_path / "own.json", ConvolutionPlan(), WORLD)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*file/plan.json"):
        save_plan("", tmp_path / "file" / "plan.json", ConvolutionPlan({"a": {DEFAULT: 1.0}}), WORLD)


def test_a_plan_that_could_not_be_written_is_reported_before_any_timing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write the plan .*: Is a directory"):
        load_plan(str(tmp_path), None, WORLD)
    assert list(tmp_path.parent.glob("*.partial")) == []
