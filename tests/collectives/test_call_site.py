"""The call site of a program is a line of its own, not one of a library."""

from __future__ import annotations

import threading

import torch

from unisono.collectives import call_site


def test_call_site_is_this_line() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(call_site.call_site()))
    thread.start()
    thread.join()
    assert found[0].rpartition(":")[0] == __file__


def test_library_files_are_not_user_code() -> None:
    assert not any(call_site.is_user_code(file) for file in (torch.__file__, threading.__file__, call_site.__file__))
    assert not call_site.is_user_code("<frozen runpy>")
    assert call_site.is_user_code("<string>")
