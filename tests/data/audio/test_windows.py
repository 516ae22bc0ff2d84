from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unisono.data.audio.spectrum import BANDS
from unisono.data.audio.windows import AUGMENTS, AudioOptions, AudioWindows, choose_windows
from unisono.data.counter_rng import DRAWS_PER_SAMPLE, CounterRNG, uniform_numbers

COUNTS = st.integers(1, 70), st.integers(1, 5000)
"""Windows and frames."""


def times(augment: str, count: int, frames: int = 60) -> list[AudioWindows]:
    """What is heard of one recording with different random numbers."""
    audio_options = AudioOptions(6, 2, augment)
    return [
        choose_windows(audio_options, frames, CounterRNG(row))
        for row in uniform_numbers(0, 0, np.arange(count), DRAWS_PER_SAMPLE).tolist()
    ]


def test_the_example() -> None:
    assert choose_windows(AudioOptions(3, 2), 12, None) == AudioWindows((2, 6, 10))
    assert AudioOptions(3, 2).shape == (3, 200)


@given(*COUNTS, st.floats(0, 1, exclude_max=True))
@example(7, 3, 1 - 2**-53)
@example(1, 5000, 1 - 2**-53)
def test_there_is_a_window_in_each_stretch_wherever_they_are_shifted(windows: int, frames: int, place: float) -> None:
    middles = choose_windows(AudioOptions(windows, 0, "shift"), frames, CounterRNG([place])).middles
    assert len(middles) == windows
    for window, middle in enumerate(middles):
        assert 0 <= middle < frames
        assert window * frames - windows <= middle * windows <= (window + 1) * frames
    assert list(middles) == sorted(middles)
    assert len(set(middles)) >= min(windows, frames) - 1, "rounding may lead to the end"


@given(*COUNTS)
def test_in_validation_windows_lie_evenly_and_alike_from_both_ends(windows: int, frames: int) -> None:
    for augment in AUGMENTS:
        heard = choose_windows(AudioOptions(windows, 0, augment), frames, None)
        assert heard == choose_windows(AudioOptions(windows, 0), frames, None)
        assert heard.bands == heard.frames == (0, 0)
        for one, other in zip(heard.middles, reversed(heard.middles), strict=True):
            assert one + other in (frames - 1, frames)
        apart = {after - before for before, after in zip(heard.middles, heard.middles[1:], strict=False)}
        assert apart <= {frames // windows, -(-frames // windows)}


def test_nothing_is_changed_at_random_unless_it_is_wanted() -> None:
    assert choose_windows(AudioOptions(5, 1, "none"), 50, CounterRNG([])) == choose_windows(
        AudioOptions(5, 1), 50, None
    )


def test_all_windows_are_shifted_alike_and_every_frame_may_be_the_middle_of_one() -> None:
    found = times("shift", 3000)
    assert {(heard.bands, heard.frames) for heard in found} == {((0, 0), (0, 0))}
    assert all(np.diff(heard.middles).tolist() == [10] * 5 for heard in found)
    counts = Counter(heard.middles[0] for heard in found)
    assert set(counts) == set(range(10))
    assert 220 < min(counts.values()) < max(counts.values()) < 380


def test_masks_have_any_length_up_to_a_quarter_and_any_place() -> None:
    found = times("mask", 12000)
    assert [heard.middles for heard in found[:50]] == [heard.middles for heard in times("shift", 50)]
    for length, stretches in ((BANDS, [heard.bands for heard in found]), (60, [heard.frames for heard in found])):
        wide = Counter(last - first for first, last in stretches)
        assert set(wide) == set(range(length // 4 + 1))
        assert min(wide.values()) > 0.7 * 12000 / len(wide)
        firsts = Counter(first for first, last in stretches if last - first == 2)
        assert set(firsts) == set(range(length - 1))
        assert all(0 <= first <= last <= length for first, last in stretches)
        covered = Counter(place for first, last in stretches for place in range(first, last))
        assert set(covered) == set(range(length))
    pairs = {(heard.bands, heard.frames) for heard in found}
    assert len(pairs) > 10000, "one does not follow from the other"


@given(st.integers(1, 3), st.integers(0, 99))
def test_of_a_recording_of_few_frames_none_is_masked(frames: int, seed: int) -> None:
    first, last = choose_windows(
        AudioOptions(4, 1, "mask"),
        frames,
        CounterRNG(uniform_numbers(seed, 0, np.array([0]), DRAWS_PER_SAMPLE)[0].tolist()),
    ).frames
    assert first == last


@pytest.mark.parametrize("augment", AUGMENTS)
def test_windows_follow_from_the_random_numbers_alone(augment: str) -> None:
    assert times(augment, 20) == times(augment, 20)
