"""Words of the field: names and phrases that were replaced stay away, and a class name has one meaning."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "src").rglob("*.toml")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "conformance").rglob("*.md")),
]

QUESTIONS = {"What", "Whether", "Where", "Of", "How", "Who", "Whose", "Which"}

REPLACED = {
    "part_reduce": "reduce_scatter",
    "part_broadcast": "all_gather",
    "on_root": "call_on_root",
    "on_all": "call_on_all",
    "agreeing": "agree_on_errors",
    "twin": "dup",
    "embedding": "overlap",
    # the reducer and the engine
    "Meeting": "Reducer",
    "Passage": "BackwardPass",
    "Carrier": "Player",
    "Awaited": "WaitOnAccess",
    "Talk": "ModelCollectives",
    "Measured": "StepTimes",
    "Word": "ControlMessage",
    "Agreed": "ControlResult",
    "Promise": "Guarantee",
    "Whose": "GradientSource",
    "Symbols": "SymbolicState",
    "Exchanges": "CommunicatorPool",
    "Turn": "ExclusiveVariable",
    "settle": "set_grads",
    "SETTLE": "SET_GRADS",
    "come": "mark_ready",
    "drop": "zero_grad",
    "let_go": "release",
    "let_in": "admit",
    "say": "log",
    "tell": "notify",
    "told": "ended",
    "go_on": "resume",
    "keep": "keep_alive",
    # transports and collectives
    "meet": "barrier",
    "card": "token",
    "Passing": "SlotTransfers",
    "plan_sweep": "plan_reduce_in_place",
    "Notes": "WatchMessages",
    "Survey": "StateQueries",
    "Board": "NodeStates",
    "Ways": "Routes",
    "carrier_of": "move_dtype_of",
    "by_element": "elementwise",
    # convolutions and benchmarks
    "Way": "ConvolutionAlgorithm",
    "WAYS": "ALGORITHMS",
    "input_gradient": "grad_input",
    "weight_gradient": "grad_weight",
    "TRIED": "AUTOTUNE_CALL_OPERATIONS",
    "tried": "autotune",
    "rehearsal": "warmup",
    "rehearse": "warm_up",
    "take_cores": "bind_cores",
    # data
    "dice": "uniform_numbers",
    "Throws": "CounterRNG",
    "shelf": "store",
    "Shelf": "SampleStore",
    "holding": "owners",
    "dealing": "partition",
    "sliding": "compaction",
    "room": "free_memory",
    "Show": "ImageTransform",
    "Showing": "SampleTransform",
    "showing": "transform",
    "Look": "ImageAugmentation",
    "Listen": "AudioTransform",
    "listening": "transform",
    "Hearing": "DataOptions",
    "hearing": "windows",
    "Heard": "AudioWindows",
    "PICTURE": "IMAGE",
    "PictureError": "DecodeError",
    "pictures": "images",
    "SOUND": "AUDIO",
    "sounds": "audio",
    "colours": "channels",
    "held_out": "test_batches",
    "HELD_OUT": "TEST_SPLITS",
    "deviation": "std",
    "mark": "fingerprint",
    "places": "output_size",
    "Torn": "DamagedCheckpoint",
    "making": "build",
    "catalogue": "names",
    # limits
    "PATIENCE": "..._SECONDS",
    "KEPT": "CHECKPOINTS_KEPT",
    "MOST": "MAX_...",
    "SHORT": "MAX_..._BYTES",
    "NAP": "SLEEP_SECONDS",
    "NAPS": "SLEEPS_PER_PROGRESS",
    "LOOKS": "POLLS_PER_PROGRESS",
    "LISTEN": "POLL_SECONDS",
}
"""Names of before, and those of today."""

PHRASES = (
    "held out",
    "pictures a second",
    "images a second",
    "Hann's bell",
    "rehears",
    "as people hear heights",
    "is told on every rank",
    "are told so",
    "told of each",
    "that anybody is told of",
    "broken or empty is left out",
    "counts what was measured",
    "floors of the house",
    "colours",
    "pictures and sounds",
)
"""Phrases of before, by which a page or a message is known that was not rewritten."""

CONVERTERS = {
    "network/choice.py": {"part_reduce", "part_broadcast"},
    "training/recipe.py": {"embedding", "tried"},
    "training/state.py": {"meeting"},
}
"""Files that read what older releases wrote, with the names that stand there in strings."""


VAGUE = {
    "src": {"found": 10, "number": 33, "one": 8, "whole": 13, "words": 9},
    "tests": {"found": 0, "number": 6, "one": 0, "whole": 7, "words": 4},
}
"""Names that fit anything, with the number of places that bind them: names of options and files, or the right word."""

OF_PYTORCH = {"tensor_parallel/layers.py": {"embedding"}}
"""Files that use names of PyTorch's which were ours for something else."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield strings that stand alone: docstrings, and those below constants and attributes."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    places = []
    for path in SOURCES:
        texts = [(line, text.split()) for line, text in docstrings(ast.parse(path.read_text()))]
        places += [f"{path}:{line}" for line, words in texts if words and words[0].strip('",.:;') in QUESTIONS]
    assert places == []


def test_names_that_were_replaced_stay_away() -> None:
    for path in SOURCES:
        with path.open("rb") as file:
            names = {token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME}
        allowed = OF_PYTORCH.get(path.relative_to(ROOT / "src/unisono").as_posix(), set())
        assert names & REPLACED.keys() <= allowed, path
        assert set(path.relative_to(ROOT / "src").with_suffix("").parts).isdisjoint(REPLACED), path


@pytest.mark.parametrize("tree", VAGUE)
def test_names_say_what_they_hold(tree: str) -> None:
    counts, most = Counter[str](), VAGUE[tree]
    for path in (ROOT / tree).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            binds = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            counts[node.id if binds else node.arg if isinstance(node, ast.arg) else ""] += 1
    assert {name: counts[name] for name in most if counts[name] > most[name]} == {}


def test_phrases_that_were_replaced_stay_away() -> None:
    for path in [*SOURCES, *PAGES]:
        text = " ".join(path.read_text(encoding="utf-8").split())
        matches = [phrase for phrase in PHRASES if re.search(rf"\b{re.escape(phrase)}", text, re.IGNORECASE)]
        assert matches == [], path


def test_texts_call_collectives_by_their_names() -> None:
    for path in [*SOURCES, *PAGES]:
        kept = CONVERTERS.get(path.relative_to(ROOT).as_posix().removeprefix("src/unisono/"), set())
        text = path.read_text(encoding="utf-8")
        for word in ("part_reduce", "part_broadcast"):
            allowed = kept | ({word} if "PCL-DNN (section 3.4) calls it" in text else set())
            assert word in allowed or word not in text, path


def test_converters_read_what_they_convert() -> None:
    for name, words in CONVERTERS.items():
        text = (ROOT / "src" / "unisono" / name).read_text(encoding="utf-8")
        assert all(f'"{word}"' in text for word in words), name


def test_a_class_name_has_one_meaning() -> None:
    homes = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].append(path.name)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
