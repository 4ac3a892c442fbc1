"""Reads a photographed receipt with two PP-OCR models compiled by hybridc.

Fetches the models, compiles them, reads page.jpg, and checks the result twice: against the text
that is on the page, and against ONNX Runtime on the very same tensors. The picture with what was
read drawn on it goes to demo-output/. Exits with 1 where a check fails.
"""

import argparse
import sys
import time
import unicodedata
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

import models
from models import Engine
from reading import Reader, Reading, read_picture
from recognition import HEIGHT, decode, parse_characters

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DETECTION_SIZE = (736, 672)
RECOGNITION_WIDTHS = (320, 640)
ACCURACY_LIMIT = 0.99
ERROR_LIMIT = 1e-3


def compiled_reader(detection: Path, recognition: Path, output: Path) -> Reader:
    """Compile both models, the recognizer once per width, and return a reader of the bundles."""

    def engine(model: Path, name: str, *size: int) -> Engine:
        begin = time.perf_counter()
        models.compile_bundle(model, output / f"{name}.hyb", (1, 3, *size))
        extents = " x ".join(str(extent) for extent in size)
        print(f"compiled {name} for {extents} in {time.perf_counter() - begin:.1f} s")
        return models.bundle_engine(output / f"{name}.hyb")

    recognize = {
        width: engine(recognition, f"recognition-{width}", HEIGHT, width)
        for width in RECOGNITION_WIDTHS
    }
    detect = engine(detection, "detection", *DETECTION_SIZE)
    return Reader(detect, DETECTION_SIZE, recognize, read_characters(recognition))


def reference_reader(detection: Path, recognition: Path) -> Reader:
    """Return a reader of the same shapes that runs the models in ONNX Runtime."""
    recognize = models.onnxruntime_engine(recognition)
    return Reader(
        models.onnxruntime_engine(detection),
        DETECTION_SIZE,
        dict.fromkeys(RECOGNITION_WIDTHS, recognize),
        read_characters(recognition),
    )


def read_characters(recognition: Path) -> list[str]:
    """Return the text of each class of the recognition model."""
    return parse_characters(models.read_metadata(recognition, "character"))


def read_best_of(reader: Reader, picture: Image.Image, repeats: int) -> Reading:
    """Read a picture several times, after once to warm up, and return the fastest reading."""
    readings = [read_picture(reader, picture) for _ in range(repeats + 1)]
    return min(readings[1:], key=lambda reading: reading.seconds)


def normalize(text: str) -> str:
    """Return text with compatibility forms (full-width commas, say) and spaces made plain."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def edit_distance(one: str, other: str) -> int:
    """Return the least number of characters to insert, delete or replace between two texts."""
    distances = list(range(len(other) + 1))
    for row, left in enumerate(one, 1):
        diagonal, distances[0] = distances[0], row
        for column, right in enumerate(other, 1):
            changed = diagonal + (left != right)
            diagonal = distances[column]
            distances[column] = min(changed, diagonal + 1, distances[column - 1] + 1)
    return distances[-1]


def accuracy(read: list[str], expected: list[str]) -> float:
    """Return the share of expected characters, line ends among them, that were read correctly."""
    truth = "\n".join(normalize(line) for line in expected)
    distance = edit_distance("\n".join(normalize(line) for line in read), truth)
    return max(0.0, 1 - distance / len(truth))


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the greatest absolute error over the greatest magnitude; inf for NaN."""
    if actual.shape != expected.shape:
        raise ValueError(f"output of shape {actual.shape}, expected {expected.shape}")
    error = float(np.abs(actual - expected).max() / np.abs(expected).max())
    return float("inf") if np.isnan(error) else error


def compare(
    reading: Reading, references: Mapping[str, Engine], characters: list[str]
) -> tuple[dict[str, float], int]:
    """Run a reading's calls again by the reference engines of their stages.

    Returns the worst relative error per stage, and in how many pieces of text the two differ.
    """
    errors = dict.fromkeys(references, 0.0)
    differing = 0
    for call in reading.calls:
        expected = references[call.stage](call.tensor)
        errors[call.stage] = max(errors[call.stage], relative_error(call.output, expected))
        if call.stage == "recognition":
            texts = [decode(output[0], characters)[0] for output in (call.output, expected)]
            differing += texts[0] != texts[1]
    return errors, differing


def draw_reading(picture: Image.Image, reading: Reading) -> Image.Image:
    """Return the picture with the boxes drawn, and beside it the lines of text."""
    drawn = Image.new("RGB", (2 * picture.width, picture.height), "white")
    drawn.paste(picture)
    draw = ImageDraw.Draw(drawn)
    for index, line in enumerate(reading.lines):
        for box in line.boxes:
            draw.polygon([(x, y) for x, y in box], outline=(0, 120, 215), width=3)
        font = ImageFont.load_default(28)
        y = (index + 0.5) * picture.height / len(reading.lines)
        draw.text((picture.width + 30, y), line.text, "black", font, "lm")
        draw.text((drawn.width - 30, y), f"{line.confidence:.3f}", (0, 120, 215), font, "rm")
    return drawn


def report(readings: Mapping[str, Reading]) -> None:
    """Print the lines of the first reading, and the time per stage of all."""
    first = next(iter(readings.values()))
    for line in first.lines:
        print(f"  {line.confidence:.3f}  {line.text}")
    stages = {name: reading.stage_seconds() for name, reading in readings.items()}
    print(f"\n{'milliseconds':<16}" + "".join(f"{name:>14}" for name in stages))
    for stage in first.stage_seconds():
        times = "".join(f"{1e3 * seconds[stage]:>14.1f}" for seconds in stages.values())
        print(f"{stage:<16}{times}")


def run(options: argparse.Namespace) -> list[str]:
    """Read the picture, print and draw what was read, and return what is wrong with it."""
    detection = models.fetch_model(models.DETECTION, options.cache)
    recognition = models.fetch_model(models.RECOGNITION, options.cache)
    picture = Image.open(options.picture).convert("RGB")
    reference = reference_reader(detection, recognition)
    readings = {"onnxruntime": read_best_of(reference, picture, options.repeats)}
    if options.engine == "hybridc":
        reader = compiled_reader(detection, recognition, options.output)
        readings = {"hybridc": read_best_of(reader, picture, options.repeats), **readings}
    print(f"\nread from {options.picture.name}:")
    report(readings)
    reading = readings[options.engine]
    options.output.mkdir(parents=True, exist_ok=True)
    draw_reading(picture, reading).save(options.output / "page-read.png")
    print(f"\ndrawn in {options.output / 'page-read.png'}")
    problems = check_text(reading, options.picture.with_suffix(".txt"))
    if options.engine == "hybridc":
        problems += check_reference(readings, reference)
    return problems


def check_text(reading: Reading, expected: Path) -> list[str]:
    """Compare what was read with a text file, print the accuracy, and return what is wrong."""
    truth = expected.read_text("utf-8").splitlines()
    share = accuracy([line.text for line in reading.lines], truth)
    print(f"characters read correctly: {share:.2%} of {expected.name}")
    limit = f"less than {ACCURACY_LIMIT:.0%} of the characters were read correctly"
    return [] if share >= ACCURACY_LIMIT else [limit]


def check_reference(readings: Mapping[str, Reading], reference: Reader) -> list[str]:
    """Compare hybridc with ONNX Runtime, print the errors, and return what is wrong."""
    engines = {
        "detection": reference.detect,
        "recognition": next(iter(reference.recognize.values())),
    }
    errors, differing = compare(readings["hybridc"], engines, reference.characters)
    problems = []
    for stage, error in errors.items():
        print(f"{stage}: largest error against ONNX Runtime {error:.1e} of the output's scale")
        if not error < ERROR_LIMIT:
            problems.append(f"the error of {stage}, {error:.1e}, is not below {ERROR_LIMIT:.0e}")
    texts = [[line.text for line in readings[name].lines] for name in ("hybridc", "onnxruntime")]
    if differing or texts[0] != texts[1]:
        problems.append("the text read differs from that read by ONNX Runtime")
    return problems


def main() -> int:
    """Parse the command line, run the demonstration, and return the exit status."""
    parser = argparse.ArgumentParser(description="Reads the text in a photographed receipt.")
    parser.add_argument("--engine", choices=("hybridc", "onnxruntime"), default="hybridc")
    parser.add_argument(
        "--picture",
        type=Path,
        default=HERE / "page.jpg",
        help="picture to read; beside it its text, with the suffix .txt",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "demo-output")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "ocr")
    parser.add_argument("--repeats", type=int, default=3, help="timed readings; the best counts")
    try:
        problems = run(parser.parse_args())
    except RuntimeError as error:
        problems = [str(error)]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
