"""Finds text in a picture with a DBNet model (PP-OCR's detector): its tensors in, boxes out.

The model maps a picture to the probability that each pixel belongs to the core of a piece of text.
Cores are drawn shrunken so that neighbors stay apart. Reading a probability map therefore means:
threshold it, label the connected components, fit a rotated rectangle of least area to each, drop
weak ones by the mean probability inside, and grow the others back by area * ratio / perimeter, the
inverse of the shrinking the model was trained with.

A box is a float64 array of shape (4, 2): corners x, y in pixels, in the order in which the text
is read: top left, top right, bottom right, bottom left. Pixel i covers the interval [i, i + 1].
"""

from dataclasses import dataclass

import numpy as np
import shapely
from numpy.typing import NDArray
from PIL import Image

Box = NDArray[np.float64]

# ImageNet statistics, applied to channels in the order blue, green, red, as in training.
MEAN = np.array((0.485, 0.456, 0.406), np.float32)
DEVIATION = np.array((0.229, 0.224, 0.225), np.float32)
# Beyond this ratio of its sides a box's long side is the text's direction, even if upright.
ELONGATED = 1.5


@dataclass(frozen=True)
class Thresholds:
    """What counts as text: probabilities, the growth ratio, and the least core side in pixels."""

    pixel: float = 0.3
    box: float = 0.5
    growth: float = 1.6
    side: float = 3.0


def prepare_picture(picture: Image.Image, height: int, width: int) -> tuple[np.ndarray, float]:
    """Return the model's input and the scale from picture to input.

    The picture, RGB of any size, is scaled to fit and padded on the right and below. The input is
    float32 of shape (1, 3, height, width); both sides must be multiples of 32.
    """
    if height % 32 or width % 32:
        raise ValueError(f"the sides {height} x {width} are not multiples of 32")
    scale = min(height / picture.height, width / picture.width)
    size = (round(picture.width * scale), round(picture.height * scale))
    pixels = np.asarray(picture.resize(size, Image.Resampling.BILINEAR))
    tensor = np.zeros((1, 3, height, width), np.float32)
    for channel, (mean, deviation) in enumerate(zip(MEAN, DEVIATION, strict=True)):
        plane = tensor[0, channel, : size[1], : size[0]]
        np.multiply(pixels[..., 2 - channel], 1 / (255 * deviation), out=plane)
        plane -= mean / deviation
    return tensor, scale


def find_boxes(
    probability: np.ndarray, scale: float, thresholds: Thresholds = Thresholds()
) -> list[Box]:
    """Return the boxes of a probability map, in pixels of the picture.

    The map is float of shape (height, width); scale is what prepare_picture returned.
    """
    boxes = []
    for outline in connected_components(probability > thresholds.pixel):
        core = fit_rectangle(outline)
        if min(box_size(core)) < thresholds.side or box_score(probability, core) < thresholds.box:
            continue
        boxes.append(orient(unclip(core, thresholds.growth)) / scale)
    return boxes


def connected_components(mask: np.ndarray) -> list[NDArray[np.int64]]:
    """Return the 8-connected components of a boolean mask of shape (height, width).

    Each is an int64 array of shape (n, 2): the corners x, y of its horizontal runs of pixels, whose
    convex hull is that of the component's area.
    """
    padded = np.pad(mask.astype(np.int8), ((0, 0), (1, 1)))
    steps = np.diff(padded, axis=1)
    rows, starts = np.nonzero(steps == 1)
    ends = np.nonzero(steps == -1)[1]
    labels = _label_runs(rows, starts, ends, mask.shape[1] + 1)
    corners = np.array(
        [(starts, rows), (ends, rows), (starts, rows + 1), (ends, rows + 1)]
    ).transpose(2, 0, 1)
    return [corners[labels == label].reshape(-1, 2) for label in np.unique(labels)]


def _label_runs(
    rows: np.ndarray, starts: np.ndarray, ends: np.ndarray, stride: int
) -> NDArray[np.int64]:
    """Return a label per run, equal for runs that touch; runs come sorted by row and start."""
    # In a row's keys the runs touched by one of the row above are neighbors: two binary searches.
    below = (rows + 1) * stride
    first = np.searchsorted(rows * stride + ends, below + starts, "left")
    last = np.searchsorted(rows * stride + starts, below + ends, "right")
    parents = list(range(len(rows)))

    def root(run: int) -> int:
        while parents[run] != run:
            parents[run] = run = parents[parents[run]]
        return run

    for run in range(len(rows)):
        for touched in range(first[run], last[run]):
            parents[root(touched)] = root(run)
    return np.array([root(run) for run in range(len(rows))], np.int64)


def fit_rectangle(points: np.ndarray) -> Box:
    """Return the corners, in order around it, of the rectangle of least area around the points.

    Points are of shape (n, 2) and must not lie on one line.
    """
    rectangle = shapely.MultiPoint(points).minimum_rotated_rectangle
    return np.array(rectangle.exterior.coords[:4], np.float64)


def box_size(box: Box) -> tuple[float, float]:
    """Return the lengths of a box's first and second side: width and height of an oriented box."""
    return float(np.hypot(*(box[1] - box[0]))), float(np.hypot(*(box[2] - box[1])))


def box_score(probability: np.ndarray, box: Box) -> float:
    """Return the mean of a map, of shape (height, width), over the pixel centers in a box."""
    limit = (probability.shape[1], probability.shape[0])
    left, top = np.clip(np.floor(box.min(axis=0)).astype(int), 0, limit)
    right, bottom = np.clip(np.ceil(box.max(axis=0)).astype(int), 0, limit)
    y, x = np.mgrid[top:bottom, left:right] + 0.5
    edges = np.roll(box, -1, axis=0) - box
    sides = [dx * (y - py) - dy * (x - px) for (px, py), (dx, dy) in zip(box, edges, strict=True)]
    inside = np.all(np.array(sides) >= 0, axis=0) | np.all(np.array(sides) <= 0, axis=0)
    return float(probability[top:bottom, left:right][inside].mean()) if inside.any() else 0.0


def unclip(box: Box, ratio: float) -> Box:
    """Return a box whose sides lie further out by area * ratio / perimeter."""
    width, height = box_size(box)
    distance = width * height * ratio / (2 * (width + height))
    grown = shapely.Polygon(box).buffer(distance, join_style="mitre")
    return np.array(grown.exterior.coords[:4], np.float64)


def orient(box: Box) -> Box:
    """Return a box's corners in reading order: clockwise on the screen, from the text's top left.

    Text runs along the long side, or along the more level one if the sides are alike; to the right,
    or down if it is steeper than 45 degrees.
    """
    edges = np.roll(box, -1, axis=0) - box
    if edges[0, 0] * edges[1, 1] - edges[0, 1] * edges[1, 0] < 0:
        return orient(box[::-1])
    lengths = np.hypot(*edges.T)
    elongated = max(lengths[:2]) >= ELONGATED * min(lengths[:2])
    reach = lengths if elongated else np.abs(edges[:, 0])
    dx, dy = edges[int(np.argmax(reach[:2]))]
    forward = (dx if abs(dx) >= abs(dy) else dy) > 0
    return np.roll(box, -int(np.argmax(reach[:2])) - (0 if forward else 2), axis=0)
