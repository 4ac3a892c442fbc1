"""Renders the demonstration's picture, page.jpg, and its expected text, page.txt.

A receipt on a wooden desk as a camera would see it. The sheet is drawn flat at twice the final
size, with a rubber stamp and a paper note set askew on it; it is then projected on the desk, lit
from one side, brought to size, blurred, and given sensor noise. Every random number comes from one
seed, so the same Pillow and the same fonts give the same picture.

The fonts are free; on Debian: fonts-comic-neue, fonts-dejavu-core, fonts-dejavu-extra,
fonts-freefont-ttf and fonts-liberation. Only this script needs them.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont

HERE = Path(__file__).resolve().parent
FONTS = Path("/usr/share/fonts")
WIDTH, HEIGHT = 1000, 1120
SUPERSAMPLE = 2
INK = (44, 42, 48)
STAMP_INK = (166, 38, 44)
NOTE_INK = (36, 54, 120)

SERIF_TITLE = "truetype/freefont/FreeSerifBoldItalic.ttf"
SERIF_ITALIC = "truetype/dejavu/DejaVuSerif-Italic.ttf"
SERIF = "truetype/liberation/LiberationSerif-Regular.ttf"
SANS = "truetype/liberation/LiberationSans-Regular.ttf"
SANS_BOLD = "truetype/dejavu/DejaVuSans-Bold.ttf"
MONO_BOLD = "truetype/dejavu/DejaVuSansMono-Bold.ttf"
MONO = "truetype/dejavu/DejaVuSansMono.ttf"
STAMP = "truetype/liberation/LiberationSans-Bold.ttf"
HAND = "opentype/comic-neue/ComicNeue-Bold.otf"


@dataclass(frozen=True)
class Cell:
    """One piece of text; x and y are where its anchor lies on the flat sheet, in final pixels."""

    text: str
    x: float
    y: float
    font: str
    size: float
    anchor: str = "ls"


@dataclass(frozen=True)
class Label:
    """Lines of centered text that lie askew on the sheet; the angle is counterclockwise degrees."""

    lines: tuple[str, ...]
    center: tuple[float, float]
    box: tuple[float, float]
    angle: float
    font: str
    size: float


def row(y: float, *texts: str) -> tuple[Cell, ...]:
    """Return a table row: a name, an optional quantity and a price, the numbers set flush right."""
    stops = (600.0, 815.0)[-(len(texts) - 1) :]
    prices = (Cell(text, x, y, MONO, 27, "rs") for text, x in zip(texts[1:], stops, strict=True))
    return (Cell(texts[0], 165, y, MONO, 27), *prices)


PRINTED: tuple[tuple[Cell, ...], ...] = (
    (Cell("Harbor Lane Bakery", 490, 158, SERIF_TITLE, 64, "ms"),),
    (Cell("Bread and pastry since 1978", 490, 203, SERIF_ITALIC, 25, "ms"),),
    (Cell("Open daily from 7:30 to 18:00", 490, 245, SANS, 27, "ms"),),
    (
        Cell("Receipt 20731", 165, 316, MONO_BOLD, 26),
        Cell("2025-06-12", 815, 316, MONO_BOLD, 26, "rs"),
    ),
    row(382, "Sourdough loaf", "3", "19.50"),
    row(428, "Dark rye bread", "2", "11.80"),
    row(474, "Almond croissant", "12", "42.00"),
    row(520, "Blueberry muffin", "6", "21.00"),
    row(590, "Subtotal", "94.30"),
    row(636, "Sales tax 5.5%", "5.19"),
    (
        Cell("Total", 165, 694, SANS_BOLD, 36),
        Cell("$99.49", 815, 694, SANS_BOLD, 36, "rs"),
    ),
    (Cell("Paid by card ending in 4417", 165, 750, SERIF, 30),),
)
STAMPED = Label(("PAID IN FULL",), (325, 842), (330, 84), 15, STAMP, 42)
NOTE = Label(
    ("Please slice the rye", "and pack it in two bags"), (660, 906), (350, 126), -7, HAND, 31
)
CLOSING: tuple[tuple[Cell, ...], ...] = (
    (Cell("Thank you! See you again soon.", 490, 1036, SERIF_ITALIC, 27, "ms"),),
)
RULES = (338, 544, 652)


def expected_lines() -> list[str]:
    """Return the page's lines from top to bottom, cells of a row joined by a space."""
    above, below = (
        [" ".join(cell.text for cell in line) for line in part] for part in (PRINTED, CLOSING)
    )
    return [*above, *STAMPED.lines, *NOTE.lines, *below]


def load_font(name: str, size: float) -> ImageFont.FreeTypeFont:
    """Return a font at a size in supersampled pixels; OSError where it is not installed."""
    layout = ImageFont.Layout.BASIC
    return ImageFont.truetype(str(FONTS / name), round(size * SUPERSAMPLE), layout_engine=layout)


def smooth_noise(
    random: np.random.Generator, cells: tuple[int, int], size: tuple[int, int]
) -> np.ndarray:
    """Return float32 noise of unit range, shape (height, width), grown from a grid of cells."""
    grid = random.random(cells, dtype=np.float32)
    return np.asarray(Image.fromarray(grid).resize(size, Image.Resampling.BICUBIC))


def draw_sheet(random: np.random.Generator) -> Image.Image:
    """Return the flat sheet, RGB at the supersampled size, with everything that lies on it."""
    size = (WIDTH * SUPERSAMPLE, HEIGHT * SUPERSAMPLE)
    fibers = smooth_noise(random, (560, 500), size) + smooth_noise(random, (14, 12), size)
    paper = np.array((243, 239, 228)) + 5.0 * (fibers[..., None] - 1.0)
    sheet = Image.fromarray(paper.clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(sheet)
    for cell in (cell for line in (*PRINTED, *CLOSING) for cell in line):
        place = (cell.x * SUPERSAMPLE, cell.y * SUPERSAMPLE)
        draw.text(place, cell.text, INK, load_font(cell.font, cell.size), cell.anchor)
    for y in RULES:
        ends = [(165 * SUPERSAMPLE, y * SUPERSAMPLE), (815 * SUPERSAMPLE, y * SUPERSAMPLE)]
        draw.line(ends, (150, 146, 142), SUPERSAMPLE)
    apply_stamp(sheet, STAMPED, random)
    stick_note(sheet, NOTE)
    return sheet


def rotate_onto(sheet: Image.Image, layer: Image.Image, label: Label) -> Image.Image:
    """Return the layer, mode L or RGBA, turned by the label's angle on a sheet-sized canvas."""
    turned = layer.rotate(label.angle, Image.Resampling.BICUBIC, expand=True)
    canvas = Image.new(layer.mode, sheet.size)
    x, y = (round(c * SUPERSAMPLE - s / 2) for c, s in zip(label.center, turned.size, strict=True))
    canvas.paste(turned, (x, y))
    return canvas


def layer_size(label: Label) -> tuple[int, int]:
    """Return a label's width and height in supersampled pixels."""
    return round(label.box[0] * SUPERSAMPLE), round(label.box[1] * SUPERSAMPLE)


def draw_lines(draw: ImageDraw.ImageDraw, label: Label, ink: int | tuple[int, int, int]) -> None:
    """Write the label's lines, evenly spaced and centered, on a layer of the label's size."""
    width, height = layer_size(label)
    step = height / len(label.lines)
    font = load_font(label.font, label.size)
    for index, text in enumerate(label.lines):
        draw.text((width / 2, (index + 0.5) * step), text, ink, font, "mm")


def apply_stamp(sheet: Image.Image, label: Label, random: np.random.Generator) -> None:
    """Press a framed rubber stamp on the sheet, its ink a little uneven."""
    size = layer_size(label)
    layer = Image.new("L", size)
    draw = ImageDraw.Draw(layer)
    frame = [(4, 4), (size[0] - 5, size[1] - 5)]
    draw.rounded_rectangle(frame, 10 * SUPERSAMPLE, outline=255, width=3 * SUPERSAMPLE)
    draw_lines(draw, label, 255)
    worn = 0.72 + 0.2 * smooth_noise(random, (size[1] // 6, size[0] // 6), size)
    coverage = (np.asarray(layer) * worn.clip(0, 1)).astype(np.uint8)
    mask = rotate_onto(sheet, Image.fromarray(coverage), label)
    sheet.paste(Image.new("RGB", sheet.size, STAMP_INK), mask=mask)


def stick_note(sheet: Image.Image, label: Label) -> None:
    """Put a yellow paper note with a soft shadow on the sheet."""
    size = layer_size(label)
    layer = Image.new("RGBA", size, (250, 226, 122, 255))
    draw_lines(ImageDraw.Draw(layer), label, NOTE_INK)
    note = rotate_onto(sheet, layer, label)
    cast_shadow(sheet, note.getchannel("A"), 5 * SUPERSAMPLE, 0.35)
    sheet.paste(note, mask=note.getchannel("A"))


def cast_shadow(image: Image.Image, mask: Image.Image, reach: int, strength: float) -> None:
    """Darken the image below and to the right of the mask, softly; reach is in pixels."""
    shifted = ImageChops.offset(mask, reach, reach)
    soft = shifted.filter(ImageFilter.GaussianBlur(reach)).point(lambda a: round(a * strength))
    image.paste(Image.new("RGB", image.size, (20, 14, 10)), mask=soft)


def draw_desk(random: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    """Return a wooden desk top, RGB: planks with a grain stretched from left to right."""
    grain = smooth_noise(random, (size[1] // 5, 6), size)
    rings = np.sin(14 * smooth_noise(random, (10, 3), size) + 2 * grain)
    wood = np.array((112, 76, 48)) + (18 * rings + 22 * (grain - 0.5))[..., None]
    desk = Image.fromarray(wood.clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(desk)
    for y in range(size[1] // 9, size[1], size[1] // 4):
        draw.line([(0, y), (size[0], y + 6)], (52, 34, 22), 2 * SUPERSAMPLE)
    return desk


def projection(source: np.ndarray, target: np.ndarray) -> tuple[float, ...]:
    """Return Pillow's eight coefficients of the map that takes target corners to source corners.

    Both are float arrays of shape (4, 2).
    """
    rows = [
        equation
        for (u, v), (x, y) in zip(source, target, strict=True)
        for equation in (
            (x, y, 1, 0, 0, 0, -u * x, -u * y),
            (0, 0, 0, x, y, 1, -v * x, -v * y),
        )
    ]
    return tuple(np.linalg.solve(np.array(rows, np.float64), source.reshape(-1)))


def photograph(sheet: Image.Image, random: np.random.Generator) -> Image.Image:
    """Return the sheet as seen on the desk, RGB at the final size."""
    size = sheet.size
    flat = np.array([(90, 70), (890, 70), (890, 1070), (90, 1070)], np.float64) * SUPERSAMPLE
    seen = np.array([(78, 44), (935, 62), (962, 1082), (42, 1068)], np.float64) * SUPERSAMPLE
    map_back = projection(flat, seen)
    method, smooth = Image.Transform.PERSPECTIVE, Image.Resampling.BICUBIC
    mask = Image.new("L", size)
    ImageDraw.Draw(mask).polygon([tuple(corner) for corner in seen], fill=255)
    scene = draw_desk(random, size)
    cast_shadow(scene, mask, 9 * SUPERSAMPLE, 0.6)
    scene.paste(sheet.transform(size, method, map_back, smooth), mask=mask)
    scene = scene.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)
    return expose(scene.filter(ImageFilter.GaussianBlur(0.6)), random)


def expose(scene: Image.Image, random: np.random.Generator) -> Image.Image:
    """Return the scene lit warmly from the upper left, with a lens's vignette and sensor noise."""
    y, x = np.mgrid[0 : 1 : HEIGHT * 1j, 0 : 1 : WIDTH * 1j]
    light = 1.06 - 0.30 * (0.55 * x + 0.45 * y)
    # A fold of the sheet and a window frame's blurred shade cross the picture.
    light *= 1 - 0.10 / (1 + np.exp(-(x + 0.35 * y - 0.92) * 40))
    light *= 1 - 0.18 * ((x - 0.5) ** 2 + (y - 0.5) ** 2)
    tint = np.array((1.0, 0.975, 0.92))
    noise = random.normal(0, 3.2, (HEIGHT, WIDTH, 1)) + random.normal(0, 1.6, (HEIGHT, WIDTH, 3))
    lit = np.asarray(scene) * light[..., None] * tint + noise
    return Image.fromarray(lit.clip(0, 255).astype(np.uint8))


def main() -> None:
    """Write page.jpg and page.txt."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=20731)
    parser.add_argument("--output", type=Path, default=HERE, help="folder to write to")
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)
    picture = photograph(draw_sheet(random), random)
    picture.save(options.output / "page.jpg", quality=92)
    (options.output / "page.txt").write_text("\n".join(expected_lines()) + "\n", "utf-8")


if __name__ == "__main__":
    main()
