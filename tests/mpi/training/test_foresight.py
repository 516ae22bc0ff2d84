"""A run seals its prediction before it is measured, and both are in the ledger."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from tests.mpi.training.test_run import recipe_of

from unisono.errors import UsageError
from unisono.foresight.compare import explain
from unisono.foresight.ledger import LedgerEntry, changed_seals, ended_run, read
from unisono.foresight.seal import read_measurement, read_seal, seals_of
from unisono.reducer import tuning
from unisono.training.checkpoint.files import load_newest
from unisono.training.recipe import Recipe
from unisono.training.run import TrainOptions, train
from unisono.training.trainer import Trainer
from unisono.world import World

MACHINE = """
name = "ours"
[node]
flops = 1e9
memory_bandwidth = 1e10
[link]
bandwidth = 1e9
"""


def machine_in(home: Path) -> str:
    (home / "ours.toml").write_text(MACHINE)
    return str(home / "ours.toml")


def entries_of(home: Path) -> list[LedgerEntry]:
    """The entries of the ledger in a folder, which is whole."""
    entries, complaints = read(home / "ledger.jsonl")
    assert complaints == []
    assert changed_seals(home / "ledger.jsonl", entries) == []
    return entries


def searched(packs: Path) -> Recipe:
    """72 steps, whose overlap and buckets are searched in the first of them."""
    recipe = recipe_of(packs)
    recipe = replace(recipe, rule=replace(recipe.rule, overlap="auto"))
    recipe = replace(recipe, exchange=replace(recipe.exchange, bucket_megabytes=0.0))
    return replace(recipe, training=replace(recipe.training, epochs=8, batch=12, checkpoint_every=0))


def test_a_machine_file_predicts_before_the_first_step(
    group: World, packs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = group.call_on_root(lambda: tmp_path)
    machine = group.call_on_root(lambda: machine_in(home))
    seen, step = list[list[str]](), Trainer.step

    def watched(trainer: Trainer, *batch: torch.Tensor) -> float:
        seen.append(sorted(path.name for path in (home / "run").glob("*.json")))
        return step(trainer, *batch)

    monkeypatch.setattr(Trainer, "step", watched)
    train(recipe_of(packs), group, TrainOptions(home / "run", machine=machine))
    assert seen[0] == ["prediction.json"]

    def check() -> None:
        output = capsys.readouterr().out
        assert "prediction sealed before the first step: " in output
        seal, measurement = ended_run(home / "run")
        run = seal.prediction.run
        assert (run.ranks, run.nodes, run.batch, run.steps, run.machine) == (group.size, 1, 32, 8, "ours")
        skipped = 5 + (group.size > 1)  # warm-up, and the step that finds the order of gradients
        assert (measurement.steps, measurement.skipped) == (8 - skipped, skipped)
        assert measurement.step.median > 0
        (entry,) = entries_of(home)
        assert entry.prediction == seal.prediction
        assert entry.measurement == measurement
        assert (entry.run, entry.digest) == ("run/prediction.json", seal.digest)

    group.call_on_root(check)


def test_a_resumed_run_adds_a_seal_and_keeps_the_first(group: World, packs: Path, tmp_path: Path) -> None:
    home = group.call_on_root(lambda: tmp_path)
    machine = group.call_on_root(lambda: machine_in(home))
    recipe = recipe_of(packs)
    recipe = replace(recipe, training=replace(recipe.training, epochs=4, checkpoint_every=0))
    train(recipe, group, TrainOptions(home / "whole", machine=machine, ledger=home / "other.jsonl"))

    def stop() -> bytes:
        assert len(read(home / "other.jsonl")[0]) == 1
        shutil.copytree(home / "whole", home / "run")
        (home / "run/measurement.json").unlink()
        for path in sorted((home / "run/checkpoints").iterdir())[1:]:
            shutil.rmtree(path)
        return (home / "run/prediction.json").read_bytes()

    before = group.call_on_root(stop)
    train(recipe, group, TrainOptions(resume=home / "run", machine=machine))

    def check() -> None:
        assert (home / "run/prediction.json").read_bytes() == before
        assert [read_seal(path).prediction.run.steps for path in seals_of(home / "run")] == [16, 8]
        assert ended_run(home / "run")[0].path.name == "prediction-2.json"
        (entry,) = entries_of(home)
        assert entry.run == "run/prediction-2.json"
        assert (entry.measurement.steps, entry.measurement.timed) == (8 - 5, 8)

    group.call_on_root(check)


def test_a_search_predicts_once_it_has_ended(
    group: World, packs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "STEPS_BETWEEN_ROUNDS", 1000)  # a rival may be kept, and the test below is for that
    home = group.call_on_root(lambda: tmp_path)
    train(searched(packs), group, TrainOptions(home / "run"))

    def check() -> None:
        output, log = capsys.readouterr().out, (home / "run/log.txt").read_text()
        assert "prediction is sealed" not in output, "a detail"
        assert "prediction sealed" not in output
        if group.size == 1:
            assert "no prediction is sealed: one rank measures no exchange; give --machine" in log
            assert (home / "run/measurement.json").exists()
            assert not (home / "ledger.jsonl").exists()
            return
        (entry,) = entries_of(home)
        sealed, count = entry.prediction, int(entry.prediction.sealed.split()[1])
        assert f"the first {count} steps tuned how gradients are averaged: overlap " in output
        assert f"prediction sealed after {count} tuning steps: " in log
        assert sealed.sealed == f"after {count} tuning steps"
        assert entry.measurement.skipped == count + 5
        assert (entry.measurement.steps, entry.measurement.timed) == (72 - count - 5, 72)
        assert sealed.run.steps == 72 - count - 1
        assert sealed.run.machine == ""
        assert 0 < sealed.low <= sealed.step < sealed.high
        assert sealed.communicating > 0
        assert 0 <= sealed.processor.taken <= 1
        written = json.loads((home / "run/measurement.json").read_text())
        assert written["processor"] == asdict(entry.measurement.processor)
        assert written["explanation"] == explain(sealed, entry.measurement)
        shutil.rmtree(max((home / "run/checkpoints").iterdir()))

    group.call_on_root(check)
    if group.size > 1:
        train(searched(packs), group, TrainOptions(resume=home / "run"))

        def check_resumed() -> None:
            first, second = entries_of(home)
            assert seals_of(home / "run") == [home / "run/prediction.json"], "the search was not made again"
            assert (second.prediction, second.digest) == (first.prediction, first.digest)

        group.call_on_root(check_resumed)


def test_a_prediction_is_not_compared_with_steps_of_a_rival_that_is_kept_instead(
    group: World, packs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if group.size == 1:
        pytest.skip("one rank searches nothing")
    home = group.call_on_root(lambda: tmp_path)
    monkeypatch.setattr(tuning, "STEPS_BETWEEN_ROUNDS", 1000)
    monkeypatch.setattr(tuning.Tuning, "kept", tuning.Setting("funnel", 12345))
    train(searched(packs), group, TrainOptions(home / "run"))

    def check() -> None:
        said = "is not compared: as the run went on, overlap funnel, buckets of 12345 bytes was faster, and is kept"
        assert said in (home / "run/log.txt").read_text()
        assert not (home / "ledger.jsonl").exists()
        assert json.loads((home / "run/measurement.json").read_text())["seal"] == ""

    group.call_on_root(check)


@pytest.mark.parametrize(
    ("name", "message"), [("local_sgd", "the steps of LocalSGD are not alike"), ("bsp", "searched")]
)
def test_a_run_that_is_not_predicted_says_so(
    group: World, packs: Path, tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    home = group.call_on_root(lambda: tmp_path)
    recipe = recipe_of(packs)
    train(replace(recipe, rule=replace(recipe.rule, name=name)), group, TrainOptions(home / "run", verbose=True))

    def check() -> None:
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "no prediction is sealed" in line]
        assert (message if group.size > 1 else "one rank") in line
        assert seals_of(home / "run") == []
        with pytest.raises(UsageError, match="has no sealed prediction"):
            ended_run(home / "run")

    group.call_on_root(check)


def test_a_run_that_ends_during_the_search_says_that_this_is_no_error(
    group: World, packs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, recipe = group.call_on_root(lambda: tmp_path), searched(packs)
    train(replace(recipe, training=replace(recipe.training, epochs=1)), group, TrainOptions(home / "run"))

    def check() -> None:
        expected = "no prediction is sealed, which is no error: the run ended after 9 steps, while settings were still"
        assert (expected in capsys.readouterr().out) == (group.size > 1)
        with pytest.raises(
            UsageError, match="has no sealed prediction: one rank" if group.size == 1 else "still tried"
        ):
            ended_run(home / "run")

    group.call_on_root(check)


def test_runs_that_a_machine_file_does_not_predict_say_so(
    spread: World, packs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = spread.call_on_root(lambda: tmp_path)
    machine = spread.call_on_root(lambda: machine_in(home))
    recipe, workers = recipe_of(packs), replace(recipe_of(packs).rule, name="easgd", overlap="auto")
    train(recipe, spread, TrainOptions(home / "uneven", machine=machine))
    split = replace(recipe, parallel=replace(recipe.parallel, layers="auto"))
    train(split, spread, TrainOptions(home / "split", machine=machine))
    cases = [("split", "its layers are split over ranks, which a machine file does not predict")]
    if spread.size == 3:
        cases.append(("uneven", "3 ranks do not spread evenly over 2 nodes"))
    if spread.size > 1:
        train(replace(recipe, rule=workers), spread, TrainOptions(home / "easgd", machine=machine))
        cases.append(("easgd", "rule easgd has no step that all ranks make together"))
    output = capsys.readouterr().out

    def check() -> None:
        for name, message in cases:
            assert seals_of(home / name) == []
            assert [line for line in output.splitlines() if "no prediction is sealed" in line and message in line] != []

    spread.call_on_root(check)


def test_a_rule_with_a_period_is_measured_by_periods(group: World, packs: Path, tmp_path: Path) -> None:
    home = group.call_on_root(lambda: tmp_path)
    machine = group.call_on_root(lambda: machine_in(home))
    recipe = recipe_of(packs)
    recipe = replace(recipe, rule=replace(recipe.rule, name="local_sgd", options={"every": 2}))
    train(recipe, group, TrainOptions(home / "run", machine=machine))

    def check() -> None:
        (entry,) = entries_of(home)
        assert (entry.measurement.period, entry.measurement.steps) == (2, 2)
        assert entry.prediction.program.period == 2

    group.call_on_root(check)


def test_a_seal_changes_no_weights(group: World, packs: Path, tmp_path: Path) -> None:
    """The trace of the model takes no random numbers from the run."""
    home = group.call_on_root(lambda: tmp_path)
    machine = group.call_on_root(lambda: machine_in(home))
    for name, given in (("plain", None), ("sealed", machine)):
        train(recipe_of(packs), group, TrainOptions(home / name, machine=given))

    def check() -> None:
        plain, sealed = (load_newest(home / name / "checkpoints")[0].weights for name in ("plain", "sealed"))
        assert all(torch.equal(weight, sealed[name]) for name, weight in plain.items())

    group.call_on_root(check)


def test_a_ledger_that_cannot_be_written_at_the_end_is_a_line(
    group: World, packs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = group.call_on_root(lambda: tmp_path)
    machine = group.call_on_root(lambda: machine_in(home))
    group.call_on_root((home / "ledger.jsonl").mkdir)
    assert train(recipe_of(packs), group, TrainOptions(home / "run", machine=machine)) == 0
    group.call_on_root(lambda: assert_line(capsys.readouterr().out, "not in the ledger: cannot append to the ledger"))


def assert_line(output: str, start: str) -> None:
    assert [line for line in output.splitlines() if line.startswith(start)] != []


def test_a_model_that_cannot_be_predicted_runs_without_a_seal(
    group: World, packs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = group.call_on_root(lambda: tmp_path)
    text = MACHINE.replace("flops = 1e9\n", "")
    group.call_on_root(lambda: (home / "ours.toml").write_text(text))
    train(recipe_of(packs), group, TrainOptions(home / "run", machine=str(home / "ours.toml")))

    def check() -> None:
        assert_line(capsys.readouterr().out, "no prediction is sealed before the first step: ours has no node.flops")
        assert read_measurement(home / "run/measurement.json").seal == ""

    group.call_on_root(check)
