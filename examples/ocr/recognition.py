"""Reads one line of text with a CTC model (PP-OCR's recognizer): crop in, characters out.

The line is cut upright out of the picture, brought to the model's height and padded to one of the
widths it was compiled for. The model answers with a distribution over characters per column; class
0 is the CTC blank. Greedy decoding takes each column's best class, merges repeats, and drops
blanks.
"""

import math
from collections.abc import Iterable

import numpy as np
from PIL import Image

from detection import Box, box_size

HEIGHT = 48


def parse_characters(listing: str) -> list[str]:
    """Return the text of each class for a model's listing of characters, one a line.

    The blank comes before the listing and a space after it.
    """
    return ["", *listing.split("\n"), " "]


def crop_upright(picture: Image.Image, box: Box) -> Image.Image:
    """Return what lies in a box, turned so that the text is level, at the picture's resolution."""
    width, height = box_size(box)
    top_left, top_right, bottom_right, bottom_left = box
    corners = np.concatenate([top_left, bottom_left, bottom_right, top_right])
    return picture.transform(
        (max(1, round(width)), max(1, round(height))),
        Image.Transform.QUAD,
        corners.tolist(),
        Image.Resampling.BICUBIC,
    )


def scaled_width(crop: Image.Image) -> int:
    """Return the width of a crop once it is brought to the model's height."""
    return max(1, math.ceil(HEIGHT * crop.width / crop.height))


def choose_width(needed: int, widths: Iterable[int]) -> int:
    """Return the least width that holds a line, or the greatest one: the line is then squeezed."""
    ordered = sorted(widths)
    return next((width for width in ordered if width >= needed), ordered[-1])


def prepare_line(crop: Image.Image, width: int) -> np.ndarray:
    """Return the model's input for an RGB crop: float32 in [-1, 1] of shape (1, 3, 48, width).

    Channels are blue, green, red; columns beyond the line's end are 0.
    """
    size = (min(width, scaled_width(crop)), HEIGHT)
    pixels = np.asarray(crop.resize(size, Image.Resampling.BILINEAR), np.float32)[..., ::-1]
    tensor = np.zeros((1, 3, HEIGHT, width), np.float32)
    tensor[0, :, :, : size[0]] = (pixels / 127.5 - 1).transpose(2, 0, 1)
    return tensor


def decode(probability: np.ndarray, characters: list[str]) -> tuple[str, float]:
    """Return the text of a distribution of shape (columns, classes), and its confidence.

    The confidence is the mean probability of the columns that gave a character, or 0 without text.
    ValueError where the classes are not as many as the characters.
    """
    if probability.shape[1] != len(characters):
        raise ValueError(f"{probability.shape[1]} classes for {len(characters)} characters")
    best = probability.argmax(axis=1)
    kept = (best != 0) & np.concatenate([[True], best[1:] != best[:-1]])
    text = "".join(characters[index] for index in best[kept])
    return text, float(probability.max(axis=1)[kept].mean()) if kept.any() else 0.0
