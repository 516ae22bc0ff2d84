"""Runs that differ in what is switched on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.progress import Run
from tests.usage_errors import assert_one_line_error

from unisono.bench import ablation
from unisono.bench.ablation import Variant, as_data, ladder, run_variants, storages, table, write_images
from unisono.papers.figures import MeasuredRow
from unisono.papers.measure import FigureRun
from unisono.training.recipe import find_recipe, read_recipe

DIGITS = read_recipe(find_recipe(Path("digits")))


def row(name: str, value: float) -> MeasuredRow:
    return MeasuredRow(name, "s", value, value, value)


def test_one_thing_after_another_is_switched_on() -> None:
    runs = ladder(DIGITS)
    assert list(runs) == ["all off", "schedule", "overlap", "wire", "convolutions"]
    assert list(runs["all off"].values()) == ["library", "none", "own", "library"]
    assert list(runs["overlap"].values()) == ["auto", "auto", "own", "library"]
    assert list(runs["convolutions"].values()) == ["auto", "auto", "bfloat16", "autotune"]


def test_what_the_recipe_has_is_what_is_switched_on() -> None:
    packed = read_recipe(find_recipe(Path("cifar10")), ["exchange.algorithm=ring", "exchange.wire=int8"])
    last = ladder(packed)["convolutions"]
    assert (last["exchange.algorithm"], last["exchange.wire"]) == ("ring", "int8")
    assert ladder(packed)["wire"]["data.storage"] == "streamed"
    assert last["data.storage"] == packed.data.storage
    from_files = replace(packed, data=replace(packed.data, files="images", storage="files"))
    assert [ladder(from_files)[step]["data.storage"] for step in ("all off", "memory")] == ["files", "auto"]


def test_each_run_is_one_of_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands, said = list[str](), list[str]()

    def carry_out(run: FigureRun, folder: Path) -> list[MeasuredRow]:
        commands.append(run.command.format(out=folder))
        return [row("an epoch", 4.0 / len(commands)), row("test accuracy", 97.5)]

    monkeypatch.setattr(ablation, "carry_out", carry_out)
    variants = run_variants(["unisono", "train", "x {y}.toml"], {"off": {"a": "1"}, "on": {}}, tmp_path, said.append)
    assert commands[0] == f"unisono train 'x {{y}}.toml' --set a=1 --run {tmp_path}"
    assert said == ["off: 4 s an epoch", "on: 2 s an epoch"]
    assert variants == [Variant("off", row("an epoch", 4.0), 97.5), Variant("on", row("an epoch", 2.0), 97.5)]
    lines = table(variants).splitlines()
    assert lines[2] == "| off | 4 | 4 to 4 | 97.5% |  | 1.00 |"
    assert lines[3] == "| on | 2 | 2 to 2 | 97.5% | +100% | 2.00 |"
    assert [each["name"] for each in json.loads(as_data(variants))][:2] == ["off: an epoch", "off: test accuracy"]


def test_runs_of_another_recipe_are_not_taken_for_those_of_this_one(
    in_process: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = list[Path]()
    monkeypatch.setattr(
        ablation, "carry_out", lambda run, out: [folders.append(run.folder(out)), row("an epoch", 1.0)][1:]
    )
    for epochs in (1, 1, 2):
        (tmp_path / "mine.toml").write_text(f"[training]\nepochs = {epochs}\n")
        assert in_process("bench", "ablation", "mine.toml").returncode == 0
    first, again, other = folders[:5], folders[5:10], folders[10:]
    assert first == again
    assert not set(first) & set(other)
    assert sorted(read_recipe(path).training.epochs for path in (tmp_path / "bench").glob("recipe-*.toml")) == [1, 2]


@pytest.mark.parametrize("command", ["storage", "ablation digits"])
def test_a_launcher_is_refused_before_anything_is_written(in_process: Run, tmp_path: Path, command: str) -> None:
    message = "starts the ranks of each run itself"
    assert_one_line_error(in_process("bench", *command.split(), PMI_SIZE="2", PMI_RANK="0"), message)
    assert in_process("bench", *command.split(), PMI_SIZE="2", PMI_RANK="1").stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_images_are_written_once(tmp_path: Path) -> None:
    data = write_images(tmp_path, 8, 16)
    before = [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*.jpg"))]
    assert write_images(tmp_path, 8, 16) == data
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*.jpg"))] == before
    assert len(before) == 10
    assert [switches["data.storage"] for switches in storages(data).values()] == ["partitioned", "streamed", "files"]
