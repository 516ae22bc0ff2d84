import pytest

from unisono.training.recorder import KINDS, Recorder


def test_time_is_added_even_when_the_block_fails() -> None:
    recorder = Recorder()
    with pytest.raises(ValueError, match="so it is"), recorder.record("loading"):
        raise ValueError("so it is")
    assert recorder.loading > 0
    assert tuple(recorder.split()) == KINDS
    assert recorder.split()["waiting"] == 0
