from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from unisono.data.kinds import TEXT
from unisono.data.kinds.text import ByteTokenizer
from unisono.data.pack.index import About, Index
from unisono.errors import DecodeError, PackError, UsageError
from unisono.training.scoring.network_prediction import PredictOptions
from unisono.training.scoring.text_inputs import TextInputs, tokenizer_of

OPTIONS = PredictOptions(1, 1, torch.float64, nullcontext)


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
    found = inputs.predict(Even(), tmp_path / "text.txt", OPTIONS)
    assert found.tokens == len("für\n".encode()) == 5
    assert found.bits_per_byte == pytest.approx(8)
    assert found.accuracy.perplexity == pytest.approx(256)


def test_files_that_are_no_text_are_named(tmp_path: Path) -> None:
    inputs = TextInputs(index_of(ByteTokenizer.tokens), "")
    for content, words in ((b"", "it is empty; the run takes texts in UTF-8"), (b"f\xfcr", "it is no text in UTF-8: ")):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(DecodeError, match=words):
            inputs.predict(Even(), tmp_path / "file", OPTIONS)
    with pytest.raises(FileNotFoundError):
        inputs.predict(Even(), tmp_path / "missing", OPTIONS)


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
