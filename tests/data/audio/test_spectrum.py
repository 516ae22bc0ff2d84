from __future__ import annotations

import cmath
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from unisono.data.audio.spectrum import BANDS, FRAMES_AT_ONCE, MIN_POWER, Spectrum, hertz, mel, triangles


def noise(samples: int, seed: int = 0, loud: float = 0.3) -> NDArray[np.float32]:
    return (loud * np.random.default_rng(seed).uniform(-1, 1, samples)).astype(np.float32)


def naive(samples: list[float], rate: int) -> list[list[float]]:
    """One number after the other, from the words alone: frames of 25 ms, 10 ms apart, bins by the sum that is a DFT.

    The FFT's size is the least power of 2 that a frame fits into, and whose bins are no further apart than the first
    band's middle is from 0.
    """
    length, hop = round(rate / 40), round(rate / 100)
    middles = [hertz(mel(rate / 2) * place / (BANDS + 1)) for place in range(BANDS + 2)]
    size = 1
    while size < length or rate / size > middles[1]:
        size *= 2
    frames = []
    for begin in range(0, len(samples) - length + 1, hop):
        power = []
        for number in range(size // 2 + 1):
            total = 0j
            for place in range(length):
                bell = math.sin(math.pi * place / length) ** 2
                total += samples[begin + place] * bell * cmath.exp(-2j * math.pi * number * place / size)
            power.append(abs(total) ** 2)
        frame = []
        for band in range(BANDS):
            below, middle, above = middles[band : band + 3]
            energy = 0.0
            for number, value in enumerate(power):
                frequency = number * rate / size
                if below < frequency <= middle:
                    energy += value * (frequency - below) / (middle - below)
                elif middle < frequency < above:
                    energy += value * (above - frequency) / (above - middle)
            frame.append(math.log(max(energy, MIN_POWER)))
        frames.append(frame)
    return frames


@pytest.mark.parametrize("loud", [0.3, 1e-4])
@pytest.mark.parametrize(("rate", "samples"), [(400, 40), (1000, 60), (2205, 99), (8000, 290)])
def test_frames_are_what_their_definition_says(rate: int, samples: int, loud: float) -> None:
    """Loud, and about as quiet as the floor."""
    sound = noise(samples, rate, loud)
    found = Spectrum(rate).frames(sound)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, naive(sound.tolist(), rate), atol=2e-3)


@given(st.integers(100, 50_000), st.integers(1, 5000))
def test_there_is_a_frame_each_10_ms_and_one_at_least(rate: int, samples: int) -> None:
    length, hop = round(0.025 * rate), round(0.010 * rate)
    frames = 1 + max(0, samples - length) // hop
    assert Spectrum(rate).frames(np.zeros(samples, np.float32)).shape == (frames, BANDS)


@settings(max_examples=20)
@example(4 * (FRAMES_AT_ONCE + 40), 0)
@given(st.integers(10, 4 * (FRAMES_AT_ONCE + 40)), st.integers(0, 99))
def test_a_frame_follows_from_its_own_25_ms_alone(samples: int, seed: int) -> None:
    sound, spectrum = noise(samples, seed), Spectrum(400)
    together = spectrum.frames(sound)
    for number in {0, len(together) // 2, min(FRAMES_AT_ONCE, len(together) - 1), len(together) - 1}:
        alone = spectrum.frames(sound[4 * number : 4 * number + 10])
        np.testing.assert_allclose(together[number : number + 1], alone, atol=1e-3)


@given(st.integers(1, 199))
def test_what_is_shorter_than_a_frame_ends_in_silence(samples: int) -> None:
    sound, spectrum = noise(samples), Spectrum(8000)
    np.testing.assert_array_equal(
        spectrum.frames(sound), spectrum.frames(np.concatenate([sound, np.zeros(200 - samples, np.float32)]))
    )


def test_silence_is_the_floor() -> None:
    np.testing.assert_allclose(Spectrum(8000).frames(np.zeros(400, np.float32)), math.log(MIN_POWER), rtol=1e-6)


def test_twice_as_loud_is_four_times_the_power_in_every_band() -> None:
    spectrum, sound = Spectrum(8000), noise(1000)
    np.testing.assert_allclose(spectrum.frames(2 * sound) - spectrum.frames(sound), math.log(4), atol=1e-4)


@settings(max_examples=60)
@given(st.integers(100, 200_000))
def test_no_band_is_deaf_at_any_rate(rate: int) -> None:
    assert (Spectrum(rate).frames(noise(round(0.025 * rate), loud=1.0)) > math.log(MIN_POWER) + 1).all()


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_a_tone_is_strongest_in_the_band_around_it(rate: int) -> None:
    spectrum, times = Spectrum(rate), np.arange(rate // 10) / rate
    for band in range(BANDS):
        frequency = hertz(mel(rate / 2) * (band + 1) / (BANDS + 1))
        if frequency < 500:  # whose bands are narrower than what 25 ms can tell apart
            continue
        frames = spectrum.frames(np.sin(2 * np.pi * frequency * times).astype(np.float32))
        assert set(frames.argmax(axis=1).tolist()) == {band}, frequency


@pytest.mark.parametrize(("rate", "size"), [(8000, 256), (16000, 512), (44100, 2048)])
def test_between_the_first_middle_and_the_last_all_bins_count_alike(rate: int, size: int) -> None:
    weights = triangles(rate, size)
    first, last = (hertz(mel(rate / 2) * place / (BANDS + 1)) for place in (1, BANDS))
    bins = np.arange(size // 2 + 1) * rate / size
    within = (bins >= first) & (bins <= last)
    assert within.sum() > BANDS
    np.testing.assert_allclose(weights.sum(axis=0)[within], 1, atol=1e-5)
    assert ((weights > 0).sum(axis=0) <= 2).all()
    assert not weights[:, 0].any(), "what does not change is no sound"


@given(st.floats(0, 1e6))
def test_mel_and_hertz_undo_each_other(frequency: float) -> None:
    assert hertz(mel(frequency)) == pytest.approx(frequency, rel=1e-9, abs=1e-9)


def test_the_example() -> None:
    assert mel(1000) == pytest.approx(1000, abs=0.1), "by its definition"
    assert Spectrum(8000).frames(np.zeros(4000, np.float32)).shape == (48, 40)
    middles = [round(hertz(mel(4000) * place / 41)) for place in (1, 2, 3, 40)]
    assert middles == [33, 68, 105, 3787]
