"""The command `unisono pack`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.progress import Run, Watched
from tests.usage_errors import assert_one_line_error

from unisono.data.pack.index import read_index
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import find
from unisono.files import locked
from unisono.launch import launch_environment

Pictures = Callable[..., Path]

COMMAND = """
import os, resource, signal, sys
{before}
sys.argv[0] = "unisono"
from unisono.cli import main
main()
"""
SLOW = """
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def finished(folder: Path) -> dict[str, tuple[int, int]]:
    """The stripes that are finished in a folder without an index, and which files they are."""
    files = {note.stem: note.with_suffix(".arrow").stat() for note in folder.glob("stripe-*.json")}
    return {f"{stem}.arrow": (stat.st_ino, stat.st_mtime_ns) for stem, stat in files.items()}


def still(folder: Path, before: dict[str, tuple[int, int]]) -> bool:
    """Whether these stripes are the same files."""
    now = {name: (folder / name).stat() for name in before}
    return before == {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in now.items()}


def test_a_data_set_is_packed_and_described(in_process: Run, image_samples: Pictures, tmp_path: Path) -> None:
    image_samples(tmp_path / "data/train", count=8)
    image_samples(tmp_path / "data/test", count=3, seed=1)
    done = in_process("pack", "data", "packs/[small] set", "--stripes", "4", "--short-side", "16")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(
        r"packs/\[small\] set/test: 6 samples of 2 classes, 0\.0 MB in 4 stripes\n"
        r"packs/\[small\] set/train: 16 samples of 2 classes, 0\.0 MB in 4 stripes\n",
        done.stdout,
    )
    index = read_index(tmp_path / "packs/[small] set/train")
    assert (len(index), index.about.classes) == (16, ("cat", "dog"))
    described = in_process("pack", "--describe", "packs/[small] set")
    assert (described.returncode, described.stderr) == (0, "")
    lines = described.stdout.splitlines()
    assert lines[0] == "packs/[small] set/test: 6 samples (image), 0.0 MB in 4 stripes"
    assert [line.split() for line in lines if "cat" in line] == [["cat", "3"], ["cat", "8"]]


def test_a_terminal_shows_progress(in_process: Run, image_samples: Pictures, tmp_path: Path) -> None:
    image_samples(tmp_path / "data", count=2)
    done = in_process("pack", "data", "[/]", FORCE_COLOR="1", TERM="xterm", COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    assert "4/4" in done.stdout


def test_options(in_process: Run, image_samples: Pictures, tmp_path: Path) -> None:
    data = image_samples(tmp_path / "data", count=2, size=(60, 50))
    options = ("--short-side", "20", "--stripes", "1", "--stripe-size", "1KiB", "--quality", "50")
    assert in_process("pack", "data", "out", *options).returncode == 0
    pack(find(data)[""], tmp_path / "same", PackOptions(20, 1, 1024, 50), 1, lambda: None)
    assert contents(tmp_path / "out") == contents(tmp_path / "same")
    assert len(read_index(tmp_path / "out").about.stripes) > 1


def test_text_is_cut_into_windows(in_process: Run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 99)
    done = in_process("pack", "a.txt", "out", "--window", "3")
    assert (done.returncode, done.stderr) == (0, "")
    heads = [line.split(", 0.0 MB")[0] for line in done.stdout.splitlines()]
    assert heads == ["out/train: 29 samples of 256 tokens", "out/test: 3 samples of 256 tokens"]
    assert read_index(tmp_path / "out/train").about.shape == (4,)


def test_links_in_a_tar_and_classes_without_samples_are_listed(
    in_process: Run, image_samples: Pictures, tmp_path: Path
) -> None:
    data = image_samples(tmp_path / "data", count=2)
    (data / "bird").mkdir()
    (data / "cat/link.jpg").symlink_to("000.jpg")
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        for class_ in ("bird", "cat", "dog"):
            tar.add(data / class_, class_)
    for _ in range(2):  # the second finds the pack of the first
        done = in_process("pack", "data.tar", "out")
        assert (done.returncode, done.stderr) == (1, "")
        head, *rest = done.stdout.splitlines()
        assert head.startswith("out: 4 samples of 2 classes")
        assert rest == [
            "  skipped data.tar/cat/link.jpg: it is a link, to 000.jpg",
            "  folders without samples, so no classes: bird",
        ]


def test_images_of_12_bits_in_16_are_told(in_process: Run, tmp_path: Path) -> None:
    for name, bits in (("dark", 12), ("light", 16)):
        (tmp_path / name / "cat").mkdir(parents=True)
        pixels = np.arange(1 << bits, dtype=np.uint32).reshape(64, -1).astype(np.uint16)
        Image.fromarray(pixels).save(tmp_path / name / "cat/0.png")
        done = in_process("pack", name, f"packs/{name}")
        told = "  almost black, mean 0.03"  # 2,048 of 65,536
        assert (done.returncode, told in done.stdout) == (0, name == "dark"), done.stdout


def test_one_process_packs_at_a_time(in_process: Run, image_samples: Pictures, tmp_path: Path) -> None:
    image_samples(tmp_path / "data", count=2)
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out"):
        assert_one_line_error(in_process("pack", "data", "out"), "another process packs into out; wait for it, or")
    assert in_process("pack", "data", "out").returncode == 0


def test_broken_files_are_skipped_and_listed_and_the_exit_code_is_1(
    in_process: Run, image_samples: Pictures, tmp_path: Path
) -> None:
    data = image_samples(tmp_path / "data", count=8)
    (data / "cat/003.jpg").write_text("no picture")
    (data / "dog/000.jpg").write_bytes(b"")
    (data / "dog/raw.heic").write_bytes(b"")
    done = in_process("pack", "data", "two")
    assert (done.returncode, done.stderr) == (1, "")
    head, *rest = done.stdout.splitlines()
    assert head.startswith("two: 14 samples of 2 classes")
    assert rest.pop() == "  files of other kinds, left out: 1, as dog/raw.heic"
    assert [line.split(": ")[0] for line in rest] == ["  skipped cat/003.jpg", "  skipped dog/000.jpg"]
    assert rest[1] == "  skipped dog/000.jpg: it is empty"
    described = in_process("pack", "--describe", "two")
    assert described.returncode == 0
    for line in rest:
        assert line.replace("skipped", " ") in described.stdout.splitlines()
    for path in data.glob("dog/*.jpg"):
        path.write_bytes(b"")
    (data / "cat/001.jpg").write_bytes(b"")
    (data / "cat/002.jpg").write_bytes(b"")
    (data / "dog/raw.heic").unlink()
    done = in_process("pack", "data", "many")
    assert done.returncode == 1
    _, *rest = done.stdout.splitlines()
    assert len(rest) == 11
    assert rest[-1] == "  and 1 more: unisono pack --describe many"


def test_nothing_but_broken_files_gets_one_line_and_leaves_nothing(
    in_process: Run, image_samples: Pictures, tmp_path: Path
) -> None:
    for path in image_samples(tmp_path / "data", count=3).rglob("*.jpg"):
        path.write_bytes(b"")
    assert_one_line_error(
        in_process("pack", "data", "out"), "there is no sample to pack (cat/000.jpg: it is empty; cat/001.jpg: "
    )
    assert contents(tmp_path / "out") == {}


def begin(folder: Path, before: str, *arguments: str) -> Watched:
    """Start `unisono ARGUMENTS` in a folder, after some Python."""
    command = [sys.executable, "-c", COMMAND.format(before=before), *arguments]
    return Watched(command, cwd=folder, env=launch_environment(os.environ, terminal=False))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_pack_resumes_and_has_the_same_bytes(in_process: Run, tmp_path: Path, how: signal.Signals) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (500, 500, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    for index in range(60):
        path = tmp_path / f"data/{index % 2}/{index:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.hardlink_to(tmp_path / "noise.png")
    options = ("pack", "data", "out", "--stripes", "30", "--short-side", "32")
    out = tmp_path / "out"
    with begin(tmp_path, SLOW, *options) as watched:
        watched.until(lambda: [*out.glob("stripe-*.json")])
        watched.process.send_signal(how)
        done = watched.finish()
    assert not (out / "index.arrow").exists(), "the command ended by itself"
    if how == signal.SIGINT:
        assert (done.returncode, done.stderr) == (130, "")
        assert not [*out.glob("*.partial")]
    before = finished(out)
    assert before
    done = in_process(*options)
    assert done.returncode == 0, done.stderr
    assert still(out, before)
    pack(find(tmp_path / "data")[""], tmp_path / "whole", PackOptions(32, 30), 2, lambda: None)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_data_set_in_parts_resumes_where_it_stopped(in_process: Run, image_samples: Pictures, tmp_path: Path) -> None:
    image_samples(tmp_path / "data/test", count=2)
    complete = image_samples(tmp_path / "data/train", count=3).rename(tmp_path / "whole")
    (tmp_path / "data/train/cat").mkdir(parents=True)
    (tmp_path / "data/train/cat/000.jpg").write_bytes(b"")
    stopped = in_process("pack", "data", "out")
    assert (stopped.returncode, stopped.stdout.splitlines()[0].split(" of ")[0]) == (2, "out/test: 4 samples")
    assert len(stopped.stderr.splitlines()) == 1
    shutil.rmtree(tmp_path / "data/train")
    complete.rename(tmp_path / "data/train")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/test").iterdir()}
    done = in_process("pack", "data", "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(" of ")[0] for line in done.stdout.splitlines()] == [
        "out/test: 4 samples",
        "out/train: 6 samples",
    ]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out/test").iterdir()} == before


def test_a_full_disk_gets_one_line_and_the_same_command_resumes(
    in_process: Run, image_samples: Pictures, tmp_path: Path
) -> None:
    data = image_samples(tmp_path / "data")
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8)
    Image.fromarray(noise).save(data / "dog/999.jpg", quality=95)
    options = ("pack", "data", "out", "--stripes", "4", "--short-side", "0")
    with begin(tmp_path, "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))", *options) as watched:
        stopped = watched.finish()
    assert (stopped.returncode, stopped.stdout) == (2, "")
    before = finished(tmp_path / "out")
    assert stopped.stderr == (
        f"unisono: out: File too large; {len(before)} of 4 stripes are finished; run the same command again to resume\n"
    )
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.endswith((".partial", "index.arrow"))]
    done = in_process(*options)
    assert (done.returncode, done.stderr) == (0, "")
    assert still(tmp_path / "out", before)
    assert len(read_index(tmp_path / "out")) == 13


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "missing SOURCE or OUT: unisono pack SOURCE OUT"),
        (["data"], "missing SOURCE or OUT: unisono pack SOURCE OUT"),
        (["nowhere", "out"], "nowhere: no such file or folder"),
        (["empty", "out"], "empty is no data set of a known kind: folders of classes with images or wav files"),
        (["/dev/null", "out"], "/dev/null is no data set of a known kind"),
        (["data", "data"], "data is not empty: it has cat; name a new folder"),
        (["data", "out", "--stripe-size", "huge"], "--stripe-size huge: write sizes like 4096, 4KiB or 64MB"),
        (["data", "out", "--stripes", "0"], "--stripes"),
        (["data", "--describe", "out"], "--describe takes no SOURCE"),
        (["--describe", "data"], "data is no pack, and has none in its subfolders; create one with"),
    ],
)
def test_bad_input(
    in_process: Run, image_samples: Pictures, tmp_path: Path, arguments: list[str], message: str
) -> None:
    image_samples(tmp_path / "data", classes=["cat"], count=1)
    (tmp_path / "empty").mkdir()
    assert_one_line_error(in_process("pack", *arguments), message)
