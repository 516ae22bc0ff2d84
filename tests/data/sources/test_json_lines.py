from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.data.sources.text_corpus import texts_of

from unisono.errors import PackError


def test_lines_are_texts_and_names_are_splits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        lines = [json.dumps({"text": f"{split} 1\n"}), "", json.dumps({"content": "é", "text": "2"})]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    assert texts_of(tmp_path) == {split: f"{split} 1\n\0002\0".encode() for split in ("test", "train")}


def test_content_is_taken_where_there_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "abcdefghijklmnopqrs"}\n')
    assert b"".join(texts_of(tmp_path).values()) == b"abcdefghijklmnopqrs\0"


@pytest.mark.parametrize("line", ['{"words": "a"}', '{"text": 1}', '["a"]'])
def test_a_line_without_a_text_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + line)
    with pytest.raises(PackError, match=r"a\.jsonl: line 2 has no text in text or content"):
        texts_of(tmp_path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a"', "Expecting ',' delimiter at character 13; mend the line"),
        ('{"text": "für"}'.encode("latin-1"), "'utf-8' codec can't decode byte 0xfc"),
    ],
)
def test_what_is_no_json_is_refused_with_its_line(tmp_path: Path, line: bytes, words: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\r\n\n' + line)
    with pytest.raises(PackError, match=rf"a\.jsonl: line 3 is no JSON in UTF-8: {words}"):
        texts_of(tmp_path)


def test_a_byte_order_mark_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "abcdefghijklmnopqrs"}\r\n\r\n')
    assert b"".join(texts_of(tmp_path).values()) == b"abcdefghijklmnopqrs\0"
