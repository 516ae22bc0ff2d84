from __future__ import annotations

import cmath
import io
import math
import wave
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from unisono.data.kinds.audio import (
    BANDS,
    FRAMES_AT_ONCE,
    MIN_POWER,
    AudioKind,
    AudioTransform,
    Spectrum,
    choose_windows,
    hertz,
    mel,
    normalised,
    triangles,
)
from unisono.data.options import DataOptions
from unisono.data.order import DRAWS_PER_SAMPLE, CounterRNG, uniform_numbers
from unisono.errors import DecodeError

Wav = Callable[..., bytes]

HEARING = DataOptions(windows=5, context=3)


def throws(seed: int | None) -> CounterRNG | None:
    return None if seed is None else CounterRNG(uniform_numbers(seed, 0, np.array([0]), DRAWS_PER_SAMPLE)[0].tolist())


def recording(samples: int, seed: int = 0, channels: int = 1) -> NDArray[np.int16]:
    """Noise that grows louder and fades again."""
    loud = 9000 * np.sin(np.linspace(0.1, 3, samples))[:, None]
    return (loud * np.random.default_rng(seed).uniform(-1, 1, (samples, channels))).astype(np.int16)


def listened(audio_options: DataOptions, file: bytes, seed: int | None = None) -> torch.Tensor:
    """What `AudioTransform` makes of a recording."""
    transform = AudioTransform(audio_options)
    out = torch.full(transform.shape, torch.nan)
    transform.into(out, memoryview(bytearray(file)), throws(seed))
    return out


def naive(audio_options: DataOptions, file: bytes, seed: int | None) -> list[list[float]]:
    """One number after the other."""
    with wave.open(io.BytesIO(file)) as sound:
        channels, rate = sound.getnchannels(), sound.getframerate()
        numbers = np.frombuffer(sound.readframes(sound.getnframes()), np.int16).tolist()
    mono = [sum(numbers[at : at + channels]) / channels / 32768 for at in range(0, len(numbers), channels)]
    frames = Spectrum(rate).frames(np.array(mono, np.float32)).astype(np.float64)
    heard = choose_windows(audio_options, len(frames), throws(seed))
    for band in range(BANDS):
        mean = sum(frames[:, band]) / len(frames)
        std = (sum((value - mean) ** 2 for value in frames[:, band]) / len(frames)) ** 0.5
        for frame in range(len(frames)):
            frames[frame, band] = (frames[frame, band] - mean) / max(std, 0.01)
            if heard.bands[0] <= band < heard.bands[1] or heard.frames[0] <= frame < heard.frames[1]:
                frames[frame, band] = 0
    windows = []
    for middle in heard.middles:
        window: list[float] = []
        for place in range(middle - audio_options.context, middle + audio_options.context + 1):
            window += frames[min(max(place, 0), len(frames) - 1)].tolist()
        windows.append(window)
    return windows


@given(
    st.sampled_from(AudioKind.augments),
    st.integers(1, 9),
    st.integers(0, 12),
    st.integers(1, 3000),
    st.sampled_from([(1, 8000), (2, 8000), (3, 11025)]),
    st.none() | st.integers(0, 99),
)
def test_transform_equals_simple_steps(
    wav: Wav, augment: str, windows: int, context: int, samples: int, how: tuple[int, int], seed: int | None
) -> None:
    audio_options = DataOptions(windows=windows, context=context, augment=augment)
    file = wav(recording(samples, channels=how[0]), how[1])
    np.testing.assert_allclose(listened(audio_options, file, seed), naive(audio_options, file, seed), atol=2e-3)


def test_over_all_of_a_recording_each_band_has_mean_0_and_deviation_1(wav: Wav) -> None:
    frames = 1 + (4000 - 200) // 80
    heard = listened(DataOptions(windows=frames, context=0), wav(recording(4000)))
    np.testing.assert_allclose(heard.mean(dim=0), 0, atol=1e-5)
    np.testing.assert_allclose(heard.std(dim=0, correction=0), 1, atol=1e-5)


@given(st.integers(1, 40), st.integers(0, 99))
def test_a_band_in_which_nothing_changes_stays_still(frames: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).normal(-9, 3, (frames, BANDS)).astype(np.float32)
    numbers[:, 7] = numbers[0, 7]
    result = normalised(numbers)
    np.testing.assert_allclose(result[:, 7], 0, atol=1e-3)
    assert np.isfinite(result).all()


def test_loudness_is_normalised_away(wav: Wav) -> None:
    numbers = recording(3000)
    np.testing.assert_allclose(listened(HEARING, wav(3 * numbers)), listened(HEARING, wav(numbers)), atol=1e-3)


def test_rounding_noise_in_silence_is_removed(wav: Wav) -> None:
    numbers = np.zeros(4000, np.int16)
    numbers[::300] = 1
    assert not listened(HEARING, wav(numbers)).any()
    assert listened(HEARING, wav(9 * numbers)).any()


def test_channels_are_averaged(wav: Wav) -> None:
    left, right = (recording(2000, seed) // 2 * 2 for seed in (1, 2))
    expected = listened(HEARING, wav((left + right) // 2))
    assert torch.equal(listened(HEARING, wav(np.concatenate([left, right], axis=1))), expected)
    assert not torch.equal(listened(HEARING, wav(left)), expected)


@pytest.mark.parametrize("samples", [1, 3, 199, 200])
def test_what_has_one_frame_alone_becomes_zeros(wav: Wav, samples: int) -> None:
    """Its mean is itself."""
    assert not listened(HEARING, wav(recording(samples))).any()


def test_one_listens_to_recording_after_recording_of_any_rate(wav: Wav) -> None:
    audio_options = DataOptions(windows=4, context=2, augment="mask")
    files = [wav(recording(samples, samples), rate) for samples, rate in ((900, 8000), (7000, 44100), (50, 16000))]
    listen = AudioTransform(audio_options)
    out = torch.empty(listen.shape)
    for seed, file in enumerate([*files, *reversed(files)]):
        listen.into(out, memoryview(file), throws(seed))
        assert torch.equal(out, listened(audio_options, file, seed))


def test_a_recording_is_written_into_its_place_in_a_batch(wav: Wav) -> None:
    batch = torch.zeros((3, *AudioTransform(HEARING).shape))
    file = wav(recording(3000))
    AudioTransform(HEARING).into(batch[1], memoryview(file), None)
    assert torch.equal(batch[1], listened(HEARING, file))
    assert not batch[0].any()
    assert not batch[2].any()
    assert AudioTransform.batch(batch) is batch


@pytest.mark.parametrize("file", [b"", b"RIFF", b"these are words", bytes(3000)])
def test_what_is_no_recording_is_refused(file: bytes) -> None:
    with pytest.raises(DecodeError):
        listened(HEARING, file)


def noise(samples: int, seed: int = 0, loud: float = 0.3) -> NDArray[np.float32]:
    return (loud * np.random.default_rng(seed).uniform(-1, 1, samples)).astype(np.float32)


def naive_frames(samples: list[float], rate: int) -> list[list[float]]:
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
        for frequency_bin in range(size // 2 + 1):
            total = 0j
            for place in range(length):
                bell = math.sin(math.pi * place / length) ** 2
                total += samples[begin + place] * bell * cmath.exp(-2j * math.pi * frequency_bin * place / size)
            power.append(abs(total) ** 2)
        frame = []
        for band in range(BANDS):
            below, middle, above = middles[band : band + 3]
            energy = 0.0
            for frequency_bin, value in enumerate(power):
                frequency = frequency_bin * rate / size
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
    frames = Spectrum(rate).frames(sound)
    assert frames.dtype == np.float32
    np.testing.assert_allclose(frames, naive_frames(sound.tolist(), rate), atol=2e-3)


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
    for frame in {0, len(together) // 2, min(FRAMES_AT_ONCE, len(together) - 1), len(together) - 1}:
        alone = spectrum.frames(sound[4 * frame : 4 * frame + 10])
        np.testing.assert_allclose(together[frame : frame + 1], alone, atol=1e-3)


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
