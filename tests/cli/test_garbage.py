import gc

import pytest

from unisono.cli.garbage import paused_collection
from unisono.cli.plan import plan
from unisono.errors import UsageError


def test_collection_is_paused_inside_and_goes_on_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), paused_collection():
        assert not gc.isenabled()
        raise ValueError("inside")
    assert gc.isenabled()


def test_what_is_alive_at_the_end_is_walked_by_no_collection() -> None:
    before = gc.get_freeze_count()
    with paused_collection():
        kept = [[number] for number in range(100)]
    assert gc.get_freeze_count() >= before + len(kept)


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_plan_pauses_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    states = list[bool]()

    def find_machine(_: str) -> None:
        states.append(gc.isenabled())
        raise UsageError("enough")

    monkeypatch.setattr("unisono.plan.machines.find_machine", find_machine)
    with pytest.raises(UsageError, match="enough"):
        plan(machine="taihulight", model="vgg_a")
    assert states == [False]
    assert gc.isenabled()
