"""PP-OCR recognition on rendered lines of text: character error rate.

Lines are words of the Python language reference, numbers, dates and codes, in the fonts that come
with matplotlib, in several sizes and colors, on plain, shaded and noisy ground, turned, sheared,
blurred and compressed. Calibration and judgment use different words and seeds.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from task import Array, Case, Feeds, Figure, Task, english

from models import model_path

MODEL = "rapidocr-ch-PP-OCRv4-rec-infer"
HEIGHT, WIDTH = 48, 320
FONTS = (
    "DejaVuSans DejaVuSans-Bold DejaVuSans-Oblique DejaVuSansMono DejaVuSerif DejaVuSerif-Italic "
    "DejaVuSerif-Bold STIXGeneral STIXGeneralBol STIXGeneralItalic cmr10 cmss10 cmtt10"
).split()
MOST_LETTERS = 26


def calibration(count: int) -> Iterator[Feeds]:
    """Lines of the first half of the words."""
    return (case.feeds for case in _lines(count, first_half=True))


def cases(count: int) -> Iterator[Case]:
    """Lines of the second half of the words, with what is written on them."""
    return _lines(count, first_half=False)


def judge(held: Sequence[Case], old: Sequence[Array], new: Sequence[Array]) -> list[Figure]:
    """Error rates in percent of all characters."""
    alphabet = _alphabet()
    before, after = (
        100 * _error_rate([case.truth for case in held], [_read(p, alphabet) for p in outputs])
        for outputs in (old, new)
    )
    same = np.mean([_read(a, alphabet) == _read(b, alphabet) for a, b in zip(old, new)])  # noqa: B905
    return [
        Figure("character error rate before, %", before),
        Figure("character error rate after, %", after),
        Figure("character error rate, points more", after - before, 0.5, at_least=False),
        Figure("lines read as before, %", 100 * float(same)),
    ]


def _lines(count: int, first_half: bool) -> Iterator[Case]:
    words = [word for word in english().split() if word.isascii()]
    half = len(words) // 2
    words = words[:half] if first_half else words[half:]
    random = np.random.default_rng(1 if first_half else 2)
    fonts = [ImageFont.truetype(_font_path(name), 40) for name in FONTS]
    for index in range(count):
        text = _text(words, random)
        image = _distorted(_drawn(text, fonts[index % len(fonts)], random), random)
        yield Case({"x": _prepared(image)}, text)


def _text(words: Sequence[str], random: np.random.Generator) -> str:
    """A few words, or now and then a date, an amount or a code."""
    kind = random.integers(8)
    if kind == 0:
        return (
            f"{random.integers(1, 29):02}.{random.integers(1, 13):02}.{random.integers(1990, 2030)}"
        )
    if kind == 1:
        return f"{random.integers(1, 100000):,}.{random.integers(100):02} EUR"
    if kind == 2:
        return "".join(random.choice(list("ABCDEFGHKLMNPRSTUVWXYZ2345678")) for _ in range(12))
    start = int(random.integers(len(words) - 8))
    text = words[start][:MOST_LETTERS]
    for word in words[start + 1 : start + 1 + int(random.integers(5))]:
        if len(text) + len(word) < MOST_LETTERS:
            text += f" {word}"
    return text


def _font_path(name: str) -> str:
    import matplotlib

    return str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf")


def _drawn(text: str, font: ImageFont.FreeTypeFont, random: np.random.Generator) -> Image.Image:
    """Text with a margin, dark on light or the other way round."""
    left, top, right, bottom = font.getbbox(text)
    margin = int(random.integers(4, 14))
    size = (int(right - left) + 2 * margin, int(bottom - top) + 2 * margin)
    dark, light = random.integers(0, 90, 3), random.integers(170, 256, 3)
    ink, ground = (dark, light) if random.random() < 0.8 else (light, dark)
    image = Image.new("RGB", size, tuple(map(int, ground)))
    draw = ImageDraw.Draw(image)
    draw.text((margin - left, margin - top), text, fill=tuple(map(int, ink)), font=font)
    return image


def _distorted(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """Turned, sheared, shaded, blurred, noisy, and compressed; each of them to some degree."""
    ground = image.getpixel((0, 0))
    image = image.rotate(float(random.normal(0, 1)), Image.Resampling.BICUBIC, fillcolor=ground)
    shear = float(random.normal(0, 0.08))
    matrix = (1, shear, -shear * image.height / 2, 0, 1, 0)
    image = image.transform(
        image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC, fillcolor=ground
    )
    image = image.filter(ImageFilter.GaussianBlur(abs(float(random.normal(0, 0.9)))))
    pixels = np.asarray(image, np.float32)
    pixels = pixels * np.linspace(1, random.uniform(0.7, 1), image.width)[None, :, None]
    pixels += random.normal(0, random.uniform(0, 12), pixels.shape)
    stream = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(
        stream, "JPEG", quality=int(random.integers(40, 96))
    )
    return Image.open(stream)


def _prepared(image: Image.Image) -> Array:
    """As PP-OCR takes it: of a fixed height, padded at the right, between -1 and 1, BGR."""
    width = min(WIDTH, round(HEIGHT * image.width / image.height))
    pixels = np.asarray(image.resize((width, HEIGHT), Image.Resampling.BILINEAR), np.float32)
    result = np.zeros((1, 3, HEIGHT, WIDTH), np.float32)
    result[0, :, :, :width] = (pixels[..., ::-1] / 127.5 - 1).transpose(2, 0, 1)
    return result


def _alphabet() -> list[str]:
    """Characters by class: none, those that the model's file lists, and the space."""
    import onnx

    model = onnx.load(model_path(MODEL), load_external_data=False)
    listed = {entry.key: entry.value for entry in model.metadata_props}["character"]
    return ["", *listed.split("\n"), " "]


def _read(probabilities: Array, alphabet: Sequence[str]) -> str:
    """The text of the most probable class of each position, repetitions left out."""
    classes = np.argmax(probabilities[0], axis=-1)
    kept = [c for c, before in zip(classes, [-1, *classes[:-1]], strict=True) if c != before]
    return "".join(alphabet[c] for c in kept if c < len(alphabet))


def _error_rate(truths: Sequence[str], texts: Sequence[str]) -> float:
    """Characters to insert, delete or replace, over all characters."""
    wrong = sum(_distance(*pair) for pair in zip(truths, texts, strict=True))
    return wrong / sum(map(len, truths))


def _distance(left: str, right: str) -> int:
    """Levenshtein's distance."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        last, row[0] = row[0], i
        for j, b in enumerate(right, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (a != b))
    return row[-1]


TASK = Task(MODEL, (f"x=1x3x{HEIGHT}x{WIDTH}",), calibration, cases, judge, 520)
