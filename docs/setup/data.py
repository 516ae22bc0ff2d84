"""Class folders of images, and recordings: digit_speaker_number.wav."""

import runpy
import wave
from pathlib import Path

import numpy as np

runpy.run_path(str(Path(__file__).with_name("README.py")))
random = np.random.default_rng(0)
recordings = Path("fsdd/recordings")
recordings.mkdir(parents=True)
for index in range(200):
    with wave.open(str(recordings / f"{index % 2}_nobody_{index // 2}.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(random.integers(-9000, 9000, 6000, dtype=np.int16).tobytes())
