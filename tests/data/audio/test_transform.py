from __future__ import annotations

import io
import wave
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from unisono.data.audio.spectrum import BANDS, Spectrum
from unisono.data.audio.transform import AudioTransform, normalised
from unisono.data.audio.windows import AUGMENTS, AudioOptions, choose_windows
from unisono.data.counter_rng import DRAWS_PER_SAMPLE, CounterRNG, uniform_numbers
from unisono.errors import DecodeError

Wav = Callable[..., bytes]

HEARING = AudioOptions(5, 3)


def throws(seed: int | None) -> CounterRNG | None:
    return None if seed is None else CounterRNG(uniform_numbers(seed, 0, np.array([0]), DRAWS_PER_SAMPLE)[0].tolist())


def recording(samples: int, seed: int = 0, channels: int = 1) -> NDArray[np.int16]:
    """Noise that grows louder and fades again."""
    loud = 9000 * np.sin(np.linspace(0.1, 3, samples))[:, None]
    return (loud * np.random.default_rng(seed).uniform(-1, 1, (samples, channels))).astype(np.int16)


def listened(audio_options: AudioOptions, file: bytes, seed: int | None = None) -> torch.Tensor:
    """What `AudioTransform` makes of a recording."""
    out = torch.full(audio_options.shape, torch.nan)
    AudioTransform(audio_options).into(out, memoryview(bytearray(file)), throws(seed))
    return out


def naive(audio_options: AudioOptions, file: bytes, seed: int | None) -> list[list[float]]:
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
        for number in range(len(frames)):
            frames[number, band] = (frames[number, band] - mean) / max(std, 0.01)
            if heard.bands[0] <= band < heard.bands[1] or heard.frames[0] <= number < heard.frames[1]:
                frames[number, band] = 0
    windows = []
    for middle in heard.middles:
        window: list[float] = []
        for place in range(middle - audio_options.context, middle + audio_options.context + 1):
            window += frames[min(max(place, 0), len(frames) - 1)].tolist()
        windows.append(window)
    return windows


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(AUGMENTS),
    st.integers(1, 9),
    st.integers(0, 12),
    st.integers(1, 3000),
    st.sampled_from([(1, 8000), (2, 8000), (3, 11025)]),
    st.none() | st.integers(0, 99),
)
def test_transform_equals_simple_steps(
    wav: Wav, augment: str, windows: int, context: int, samples: int, how: tuple[int, int], seed: int | None
) -> None:
    audio_options = AudioOptions(windows, context, augment)
    file = wav(recording(samples, channels=how[0]), how[1])
    np.testing.assert_allclose(listened(audio_options, file, seed), naive(audio_options, file, seed), atol=2e-3)


def test_over_all_of_a_recording_each_band_has_mean_0_and_deviation_1(wav: Wav) -> None:
    frames = 1 + (4000 - 200) // 80
    heard = listened(AudioOptions(frames, 0), wav(recording(4000)))
    np.testing.assert_allclose(heard.mean(dim=0), 0, atol=1e-5)
    np.testing.assert_allclose(heard.std(dim=0, correction=0), 1, atol=1e-5)


@given(st.integers(1, 40), st.integers(0, 99))
def test_a_band_in_which_nothing_changes_stays_still(frames: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).normal(-9, 3, (frames, BANDS)).astype(np.float32)
    numbers[:, 7] = numbers[0, 7]
    found = normalised(numbers)
    np.testing.assert_allclose(found[:, 7], 0, atol=1e-3)
    assert np.isfinite(found).all()


def test_loudness_is_normalised_away(wav: Wav) -> None:
    numbers = recording(3000)
    np.testing.assert_allclose(listened(HEARING, wav(3 * numbers)), listened(HEARING, wav(numbers)), atol=1e-3)


def test_rounding_noise_in_silence_is_removed(wav: Wav) -> None:
    numbers = np.zeros(4000, np.int16)
    numbers[::300] = 1
    assert not listened(HEARING, wav(numbers)).any()
    assert listened(HEARING, wav(9 * numbers)).any()


def test_channels_are_averaged(wav: Wav) -> None:
    one, other = (recording(2000, seed) // 2 * 2 for seed in (1, 2))
    expected = listened(HEARING, wav((one + other) // 2))
    assert torch.equal(listened(HEARING, wav(np.concatenate([one, other], axis=1))), expected)
    assert not torch.equal(listened(HEARING, wav(one)), expected)


@pytest.mark.parametrize("samples", [1, 3, 199, 200])
def test_what_has_one_frame_alone_becomes_zeros(wav: Wav, samples: int) -> None:
    """Its mean is itself."""
    assert not listened(HEARING, wav(recording(samples))).any()


def test_one_listens_to_recording_after_recording_of_any_rate(wav: Wav) -> None:
    audio_options = AudioOptions(4, 2, "mask")
    files = [wav(recording(samples, samples), rate) for samples, rate in ((900, 8000), (7000, 44100), (50, 16000))]
    listen, out = AudioTransform(audio_options), torch.empty(audio_options.shape)
    for seed, file in enumerate([*files, *reversed(files)]):
        listen.into(out, memoryview(file), throws(seed))
        assert torch.equal(out, listened(audio_options, file, seed))


def test_a_recording_is_written_into_its_place_in_a_batch(wav: Wav) -> None:
    batch = torch.zeros((3, *HEARING.shape))
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
