"""Puts boxes of text in reading order: boxes into lines, lines from top to bottom.

Each line grows around its longest box, whose direction is the best known. Another box belongs to
it if its center lies close to that box's axis, its height is alike, and its own direction agrees,
unless it is too short (one digit, say) to have a direction that means something.
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from detection import Box, box_size

# All relative: to the smaller height, to each other, in degrees, and width to height.
OFFSET_LIMIT = 0.5
HEIGHT_RATIO_LIMIT = 2.0
ANGLE_LIMIT = 5.0
DIRECTED = 3.0


def order_lines(boxes: list[Box]) -> list[list[Box]]:
    """Return the lines, from top to bottom, each with its boxes in reading order."""
    lines: list[list[Box]] = []
    for box in sorted(boxes, key=box_size, reverse=True):
        line = next((line for line in lines if continues(line[0], box)), None)
        if line is None:
            lines.append([box])
        else:
            line.append(box)
    ordered = [sorted(line, key=partial(_along, line[0])) for line in lines]
    return sorted(ordered, key=lambda line: np.mean([box[:, 1].mean() for box in line]))


def continues(reference: Box, box: Box) -> bool:
    """Tell whether a box lies on the line of text of a reference box, which is the longer one."""
    height, reference_height = box_size(box)[1], box_size(reference)[1]
    low, high = sorted((height, reference_height))
    if high > HEIGHT_RATIO_LIMIT * low:
        return False
    if box_size(box)[0] >= DIRECTED * height and _angle_between(reference, box) > ANGLE_LIMIT:
        return False
    return abs(_across(reference, box)) <= OFFSET_LIMIT * low


def _direction(box: Box) -> NDArray[np.float64]:
    edge: NDArray[np.float64] = box[1] - box[0]
    return edge / float(np.hypot(*edge))


def _angle_between(one: Box, other: Box) -> float:
    cosine = float(_direction(one) @ _direction(other))
    return float(np.degrees(np.arccos(np.clip(cosine, -1, 1))))


def _along(reference: Box, box: Box) -> float:
    return float((box.mean(axis=0) - reference.mean(axis=0)) @ _direction(reference))


def _across(reference: Box, box: Box) -> float:
    dx, dy = _direction(reference)
    return float((box.mean(axis=0) - reference.mean(axis=0)) @ np.array((-dy, dx)))
