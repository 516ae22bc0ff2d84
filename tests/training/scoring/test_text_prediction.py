from __future__ import annotations

import json
from contextlib import nullcontext
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.kinds import TEXT
from unisono.data.kinds.text import ByteTokenizer
from unisono.data.loading import PROCESSOR
from unisono.data.pack.index import About, Index
from unisono.errors import DecodeError, PackError, UsageError
from unisono.training.scoring.evaluate import forward_of
from unisono.training.scoring.predict import (
    NO_LABEL,
    Prediction,
    TextInputs,
    context_after,
    cut_windows,
    quoted,
    token_text,
    tokenizer_of,
)

WINDOW = 4
BYTES = ByteTokenizer()


class Recent(torch.nn.Module):
    """Scores of the next byte, from the one before it and the number of those before that in the window."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.place = torch.nn.Embedding(256, 256).double(), torch.nn.Embedding(WINDOW, 256).double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.shape[1] == WINDOW, "a network may take whole windows only"
        return self.table(tokens) + self.place(torch.arange(WINDOW))


class Successor(torch.nn.Module):
    """Network that is almost sure of the byte after each one: b after a. After z, the text ends."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        following = torch.where(tokens == ord("z"), 0, tokens + 1)
        return 20 * torch.nn.functional.one_hot(following, 256).double()


def tokens_of(text: str) -> torch.Tensor:
    return torch.from_numpy(BYTES.encode(text))


def predicted(network: torch.nn.Module, text: str, batch: int = 2, nbytes: int | None = None) -> Prediction:
    forward = forward_of(network, torch.float64, nullcontext, PROCESSOR)
    size = len(text.encode()) if nbytes is None else nbytes
    return TextInputs(index_of(BYTES.tokens), "", batch).predict_tokens(forward, tokens_of(text), size, 2)


@pytest.mark.parametrize("batch", [1, 2, 99])
def test_the_loss_is_that_of_one_token_at_a_time(batch: int) -> None:
    network, text = Recent(), "nine bytes"
    stream = [0, *text.encode()]
    losses = []
    with torch.no_grad():
        for position, token in enumerate(text.encode()):
            first = position // WINDOW * WINDOW
            window = [*stream[first : position + 1], *[0] * WINDOW][:WINDOW]
            chances = network(torch.tensor([window]))[0, position - first].softmax(0)
            losses.append(-float(chances[token].log()))
    score = predicted(network, text, batch=batch)[1]
    assert score["loss"] == pytest.approx(sum(losses) / len(text), rel=1e-12)
    assert score["tokens"] == len(text) == 10
    assert score["bits_per_byte"] == pytest.approx(score["loss"] / log(2))


def test_the_next_tokens_follow_the_last_one() -> None:
    (first, _) = predicted(Successor(), "abcdef")[1]["next"]
    assert first == {"token": "g", "probability": pytest.approx(1, abs=1e-5)}
    assert predicted(Successor(), "a")[1]["next"][0]["token"] == "b"


def test_a_sure_network_has_no_loss() -> None:
    assert predicted(Successor(), "\1\2\3\4\5\6")[1]["perplexity"] == pytest.approx(1, abs=1e-5)


def test_bits_are_those_of_bytes_even_where_tokens_are_longer() -> None:
    score = predicted(Recent(), "abcd", nbytes=8)[1]
    assert score["bits_per_byte"] == pytest.approx(score["loss"] / log(2) / 2)


def test_the_line_has_the_score_and_texts_in_quotes() -> None:
    description, values = predicted(Recent(), "abcd")
    data = json.loads(json.dumps(values, allow_nan=False))
    following = "  ".join(f"{quoted(guess['token'])} {guess['probability']:.2%}" for guess in data["next"])
    score = f"loss {data['loss']:.4f}  perplexity {data['perplexity']:.2f}  {data['bits_per_byte']:.4f} bits per byte"
    assert description == f"4 tokens  {score}  next {following}"
    assert quoted("\x1b[0m\\") == '"\\x1b[0m\\\\"'


def test_a_token_that_is_no_whole_character_has_its_name() -> None:
    assert [token_text(BYTES, token) for token in (97, 10, 195)] == ["a", "\n", "\\xc3"]


END = 0
texts = st.lists(st.integers(1, 9), min_size=1, max_size=20)


def test_the_worked_example() -> None:
    inputs, labels = cut_windows(torch.tensor([1, 2, 3, 4, 5]), END, 3)
    assert inputs.tolist() == [[END, 1, 2], [3, 4, END]]
    assert labels.tolist() == [[1, 2, 3], [4, 5, NO_LABEL]]
    context, last = context_after(torch.tensor([1, 2, 3, 4, 5]), END, 3)
    assert (context.tolist(), last) == ([[3, 4, 5]], 2)


@given(texts, st.integers(1, 8))
def test_each_token_is_a_label_once_after_the_one_before_it(text: list[int], window: int) -> None:
    inputs, labels = cut_windows(torch.tensor(text), END, window)
    assert inputs.shape == labels.shape == (len(inputs), window)
    pairs = [
        (before, label)
        for before, label in zip(inputs.flatten().tolist(), labels.flatten().tolist(), strict=True)
        if label != NO_LABEL
    ]
    assert pairs == list(zip([END, *text], text, strict=False))
    assert len(inputs) == len(range(0, len(text), window)), "no window without a label"


@given(texts, st.integers(1, 8))
def test_the_context_ends_with_the_last_token(text: list[int], window: int) -> None:
    context, last = context_after(torch.tensor(text), END, window)
    known = [END, *text][-window:]
    assert context.shape == (1, window)
    assert context[0, : last + 1].tolist() == known
    assert context[0, last + 1 :].tolist() == [END] * (window - len(known))


def index_of(tokens: tuple[str, ...]) -> Index:
    none = np.zeros(0, np.int32)
    return Index(About(TEXT, tokens, (5,)), none, none, none, none, none, Path("packs/a"))


class Even(torch.nn.Module):
    """Network to which all tokens are as probable."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*tokens.shape, 256, dtype=torch.float64)


def test_a_file_is_read_as_it_was_packed(tmp_path: Path) -> None:
    """Ends of lines are those of the sources of text, without a byte order mark, and bits are those of UTF-8."""
    inputs = TextInputs(index_of(ByteTokenizer.tokens), "")
    (tmp_path / "text.txt").write_bytes("\ufefffür\r\n".encode())
    score = inputs.predict(Even(), tmp_path / "text.txt", 1)[1]
    assert score["tokens"] == len("für\n".encode()) == 5
    assert score["bits_per_byte"] == pytest.approx(8)
    assert score["perplexity"] == pytest.approx(256)


def test_files_that_are_no_text_are_named(tmp_path: Path) -> None:
    inputs = TextInputs(index_of(ByteTokenizer.tokens), "")
    for content, error in ((b"", "it is empty; the run takes texts in UTF-8"), (b"f\xfcr", "it is no text in UTF-8: ")):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(DecodeError, match=error):
            inputs.predict(Even(), tmp_path / "file", 1)
    with pytest.raises(FileNotFoundError):
        inputs.predict(Even(), tmp_path / "missing", 1)


def test_tokens_that_are_no_bytes_need_their_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    model = {"type": "WordLevel", "vocab": {"?": 0, "one": 1, "</s>": 2}, "unk_token": "?"}
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}))
    with pytest.raises(UsageError, match=r"packs/a has 3 tokens that are no bytes: give the tokenizer\.json"):
        tokenizer_of(index_of(("?", "one", "</s>")), "")
    assert tokenizer_of(index_of(("?", "one", "</s>")), str(path)).encode("one two").tolist() == [1, 0]
    with pytest.raises(PackError, match=r"t\.json has 3 tokens, which are not the 2 of packs/a; give the"):
        tokenizer_of(index_of(("?", "two")), str(path))
    with pytest.raises(PackError, match="which are not the 256 of packs/a; omit --tokenizer"):
        tokenizer_of(index_of(ByteTokenizer.tokens), str(path))
