"""The command `unisono predict`: files of a test set have the classes that an evaluation counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.progress import Run
from tests.usage_errors import assert_one_line_error

RECIPE = """\
[data]
pack = "packs"
size = 8
threads = 1

[model]
dtype = "float64"

[rule]
overlap = "none"

[exchange]
bucket_megabytes = 1

[training]
epochs = 4
batch = 8
"""


def test_files_are_predicted_as_they_were_evaluated(
    on_ranks: Run, in_process: Run, image_samples: Callable[..., Path], tmp_path: Path
) -> None:
    for part, count in (("train", 12), ("test", 5)):
        image_samples(tmp_path / "images" / part, count=count)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    assert in_process("pack", "images", "packs").returncode == 0
    for arguments in (("train", "recipe.toml", "--run", "mine"), ("evaluate", "mine", "--out", "found")):
        done = on_ranks(*arguments)
        assert done.returncode == 0, done.stderr
    files = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "images/test").rglob("*.jpg"))
    done = in_process("predict", "mine", *files, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert [entry["file"] for entry in data] == files
    confusion = json.loads((tmp_path / "found/evaluation.json").read_text())["confusion"]
    pairs = Counter((Path(entry["file"]).parent.name, entry["classes"][0]["class"]) for entry in data)
    names = ("cat", "dog")
    assert [[pairs[label, guess] for guess in names] for label in names] == confusion
    assert all(abs(sum(each["probability"] for each in entry["classes"]) - 1) < 1e-9 for entry in data)

    done = in_process("predict", "mine", files[0], "missing.jpg", files[1], "--top", "1")
    best = data[0]["classes"][0]
    assert done.stdout.splitlines()[0] == f"{files[0]}: {best['class']} {best['probability']:.2%}"
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 2)
    assert done.stderr == (
        "unisono: missing.jpg: No such file or directory; give the path of a file that can be read\n"
    )
    done = in_process("predict", "mine", "missing.jpg", "--json")
    assert done.returncode == 1
    assert list(json.loads(done.stdout)[0]) == ["file", "error"]

    assert_one_line_error(in_process("predict", "mine", files[0], "--top", "0"), "--top 0")
    (tmp_path / "packs").rename(tmp_path / "moved")
    assert_one_line_error(in_process("predict", "mine", files[0]), "packs has no pack named train")
    (tmp_path / "mine/checkpoints").rename(tmp_path / "mine/gone")
    assert_one_line_error(in_process("predict", "mine", files[0]), "mine has no checkpoint yet")
    assert_one_line_error(in_process("predict", "nowhere", files[0]), "nowhere holds no run")


TEXT_RECIPE = """\
[data]
pack = "packs"
threads = 1

[model]
name = "gpt_small"

[optimizer]
name = "adamw"
learning_rate = 1e-3  # slow enough that all processors end with the same digits

[rule]
overlap = "none"

[exchange]
bucket_megabytes = 1

[training]
epochs = 3
batch = 16
"""


def test_texts_are_scored(command: Run, in_process: Run, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abc " * 600)  # 4 does not divide the window: places alone say nothing
    (tmp_path / "recipe.toml").write_text(TEXT_RECIPE)
    assert in_process("pack", "text.txt", "packs", "--window", "7").returncode == 0
    done = command("train", "recipe.toml", "--ranks", "1", "--run", "mine")
    assert done.returncode == 0, done.stderr
    (tmp_path / "likely.txt").write_text("abc abc abc ab")
    (tmp_path / "strange.txt").write_text("zzzzzz")
    (tmp_path / "broken.txt").write_bytes(b"\xff")
    done = in_process("predict", "mine", "likely.txt", "strange.txt", "broken.txt")
    assert done.returncode == 1
    likely, strange = done.stdout.splitlines()
    assert likely.startswith("likely.txt: 14 tokens  loss ")
    assert ' bits per byte  next "c" ' in likely
    assert strange.startswith("strange.txt: 6 tokens  loss ")
    assert done.stderr.startswith("unisono: broken.txt: it is no text in UTF-8: ")
    done = in_process("predict", "mine", "likely.txt", "strange.txt", "--top", "2", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    likely_score, strange_score = json.loads(done.stdout)
    assert list(likely_score) == ["file", "tokens", "loss", "perplexity", "bits_per_byte", "next"]
    assert likely_score["next"][0]["token"] == "c"
    assert len(likely_score["next"]) == 2
    assert likely_score["perplexity"] < strange_score["perplexity"]
    assert_one_line_error(in_process("predict", "mine", "likely.txt", "--tokenizer", "no.json"), "no.json")
