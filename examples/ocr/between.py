"""What runs between the two models where hybridc joins them: probabilities to crops of lines."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from detection import Box, find_boxes
from hybridc.runtime.chain import step
from layout import order_lines
from recognition import crop_upright, prepare_line

WIDTH = 640


@step
def crops(known: Mapping[str, Any]) -> list[dict[str, np.ndarray]]:
    """Return the recognizer's input for each box of text, in reading order.

    The picture is uint8 of shape (height, width, 3), RGB.
    """
    picture = Image.fromarray(known["picture"])
    boxes = [box for line in lines_of(known) for box in line]
    return [{"rec_x": prepare_line(crop_upright(picture, box), WIDTH)} for box in boxes]


def lines_of(known: Mapping[str, Any]) -> list[list[Box]]:
    """Return the boxes of each line of text, by what the detector gave."""
    probability = next(array for name, array in known.items() if name.startswith("det_sigmoid"))
    sizes = zip(probability.shape[2:], known["picture"].shape[:2], strict=True)
    return order_lines(find_boxes(probability[0, 0], min(own / real for own, real in sizes)))
