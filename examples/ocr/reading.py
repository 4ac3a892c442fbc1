"""Reads the text of a picture: detection, layout and recognition, whatever runs the models."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from detection import Box, find_boxes, prepare_picture
from layout import order_lines
from models import Engine
from recognition import choose_width, crop_upright, decode, prepare_line, scaled_width


@dataclass(frozen=True)
class Reader:
    """The engines, the detector's input size (height, width), and the recognizer's classes.

    There is a recognition engine per compiled width; all are of height 48.
    """

    detect: Engine
    detection_size: tuple[int, int]
    recognize: Mapping[int, Engine]
    characters: list[str]


@dataclass(frozen=True)
class Line:
    """A line of text, its boxes, and the confidence, in [0, 1], of its least certain box."""

    text: str
    confidence: float
    boxes: list[Box]


@dataclass(frozen=True)
class Call:
    """One run of a model: its stage, detection or recognition, input, output and seconds."""

    stage: str
    tensor: np.ndarray
    output: np.ndarray
    seconds: float


@dataclass
class Reading:
    """What was read, and what it took; seconds are for the whole, including the calls."""

    lines: list[Line] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    seconds: float = 0.0

    def stage_seconds(self) -> dict[str, float]:
        """Return the seconds of detection, of recognition, and of everything around them."""
        stages = dict.fromkeys(("detection", "recognition"), 0.0)
        for call in self.calls:
            stages[call.stage] += call.seconds
        return {**stages, "pre/post": self.seconds - sum(stages.values())}

    def call(self, stage: str, engine: Engine, tensor: np.ndarray) -> np.ndarray:
        """Run an engine and note the call."""
        begin = time.perf_counter()
        output = engine(tensor)
        self.calls.append(Call(stage, tensor, output, time.perf_counter() - begin))
        return output


def read_picture(reader: Reader, picture: Image.Image) -> Reading:
    """Return the lines of text in an RGB picture, from top to bottom."""
    reading = Reading()
    begin = time.perf_counter()
    tensor, scale = prepare_picture(picture, *reader.detection_size)
    probability = reading.call("detection", reader.detect, tensor)[0, 0]
    for boxes in order_lines(find_boxes(probability, scale)):
        pieces = [_read_box(reader, picture, box, reading) for box in boxes]
        # A box with no character in it is no text; a line of such boxes is no line.
        text = " ".join(piece for piece, _ in pieces if piece.strip())
        if text:
            confidence = min(confidence for piece, confidence in pieces if piece.strip())
            reading.lines.append(Line(text, confidence, boxes))
    reading.seconds = time.perf_counter() - begin
    return reading


def _read_box(
    reader: Reader, picture: Image.Image, box: Box, reading: Reading
) -> tuple[str, float]:
    crop = crop_upright(picture, box)
    width = choose_width(scaled_width(crop), reader.recognize)
    tensor = prepare_line(crop, width)
    output = reading.call("recognition", reader.recognize[width], tensor)
    return decode(output[0], reader.characters)
