"""The place of a program is a line of its own, not one of a library."""

from __future__ import annotations

import threading

import torch

from unisono.collectives import places


def test_this_line_is_where_the_program_is() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(places.where()))
    thread.start()
    thread.join()
    assert found[0].rpartition(":")[0] == __file__


def test_what_belongs_to_a_library() -> None:
    assert not any(places.is_program(file) for file in (torch.__file__, threading.__file__, places.__file__))
    assert not places.is_program("<frozen runpy>")
    assert places.is_program("<string>")
