"""The wake word's embedding model on synthetic speech: cosines of its features.

Speech is pulses of a varying pitch and noise through resonances that glide from vowel to vowel,
with pauses, at several levels of background noise. Its mel spectrogram is made by the model that
comes with the embedding model, as openWakeWord does it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from task import Array, Case, Feeds, Figure, Task, smallest_cosine

from models import model_path

RATE, SECONDS = 16000, 0.79
WINDOW, BANDS = 76, 32
VOWELS = (
    (730, 1090, 2440),
    (270, 2290, 3010),
    (300, 870, 2240),
    (530, 1840, 2480),
    (570, 840, 2410),
)


def calibration(count: int) -> Iterator[Feeds]:
    """Speech with one seed."""
    return _spectrograms(count, 1)


def cases(count: int) -> Iterator[Case]:
    """Speech with another."""
    return map(Case, _spectrograms(count, 2))


def judge(_held: Sequence[Case], old: Sequence[Array], new: Sequence[Array]) -> list[Figure]:
    """The smallest cosine of all windows."""
    return [Figure("smallest cosine", smallest_cosine(old, new), 0.99)]


def _spectrograms(count: int, seed: int) -> Iterator[Feeds]:
    import onnxruntime

    session = onnxruntime.InferenceSession(
        model_path("openwakeword-melspectrogram"), providers=["CPUExecutionProvider"]
    )
    random = np.random.default_rng(seed)
    samples = round(RATE * SECONDS)
    for _ in range(count):
        audio = (_speech(samples, random) * 32767).astype(np.float32)
        (found,) = session.run(None, {"input": audio[None]})
        mel = found.reshape(-1, BANDS)[:WINDOW] / 10 + 2
        yield {"input_1": mel.reshape(1, WINDOW, BANDS, 1).astype(np.float32)}


def _speech(samples: int, random: np.random.Generator) -> Array:
    """Voiced and unvoiced sounds between -1 and 1."""
    from scipy.signal import lfilter

    source = _source(samples, random)
    edges = np.linspace(0, samples, int(random.integers(3, 8))).astype(int)
    state = [np.zeros(2) for _ in VOWELS[0]]
    result = np.zeros(samples)
    for start, end in itertools.pairwise(edges):
        sound = source[start:end] * random.choice([0.05, 0.4, 1.0], p=[0.2, 0.3, 0.5])
        vowel = np.array(VOWELS[random.integers(len(VOWELS))]) * random.uniform(0.85, 1.2)
        for index, frequency in enumerate(vowel):
            radius = np.exp(-np.pi * (60 + 40 * index) / RATE)
            bends = [1, -2 * radius * np.cos(2 * np.pi * frequency / RATE), radius**2]
            sound, state[index] = lfilter([sum(bends)], bends, sound, zi=state[index])
        result[start:end] = sound
    result *= random.uniform(0.02, 0.9) / (np.abs(result).max() + 1e-9)
    return np.clip(result + random.normal(0, 10 ** random.uniform(-5, -2), samples), -1, 1)


def _source(samples: int, random: np.random.Generator) -> Array:
    """Pulses of a gliding pitch, with breath."""
    pitch = np.interp(np.arange(samples), [0, samples], random.uniform(80, 280, 2))
    phase = np.cumsum(pitch / RATE)
    pulses = np.diff(np.floor(phase), prepend=0)
    return np.asarray(pulses + random.normal(0, random.uniform(0.01, 0.3), samples))


TASK = Task("openwakeword-embedding-model", ("input_1=1x76x32x1",), calibration, cases, judge, 200)
