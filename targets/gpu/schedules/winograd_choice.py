"""Whether Winograd's algorithm computes a convolution, and with tiles of how many outputs.

Beside the product, it takes two kernels that transform the inputs and the products, and what these
three leave for each other goes through memory:

    clocks = transforms + max(product, bytes of the product) + bytes of the transforms

That is compared with the product of the convolution itself, whose right factor is gathered from the
image (:mod:`.product`).

The figures were corrected by measurements on an H200, of 18 layers of ResNet-50, SqueezeNet and
VGG-16 at batch 1 and 32 (``benchmarks/gpu/winograd.py``). What they choose takes 2 % longer than
the best choice of these in the geometric mean, and 39 % at most: there, the estimate of the product
is off. They need not be the hardware's one by one.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from hybridc.targets.gpu.schedules.product import MIN_EXTENT
from hybridc.targets.gpu.schedules.tile_choice import least_clocks
from hybridc.targets.llvm.schedules.winograd_transforms import SIZES, TAPS
from hybridc.targets.tuning import Figures, Problem, figures

NONE = 0
"""Stands for the outputs of a tile where the algorithm is not used."""

TRANSFORM = {2: 2800, 4: 4200}
"""Clocks that a transform takes however little there is to do, by outputs of a tile."""

BYTES = 2200
"""Bytes that the whole GPU reads or writes in a clock, if they are more than its caches hold."""

MOST_BYTES = 2**30
"""Most memory for transformed inputs and products."""


@dataclass(frozen=True)
class Geometry:
    """A convolution of 3 x 3 taps.

    Attributes:
        batch: Images.
        channels: Channels of the input.
        filters: Channels of the output.
        height: Rows of the input.
        width: Columns of the input.
        rows: Rows of the output.
        columns: Columns of the output.
        top: Rows of zeros above the input.
        left: Columns of zeros left of the input.
        size: Outputs of a tile in each axis.
    """

    batch: int
    channels: int
    filters: int
    height: int
    width: int
    rows: int
    columns: int
    top: int
    left: int
    size: int = NONE

    @property
    def edge(self) -> int:
        """Inputs of a tile in each axis."""
        return self.size + TAPS - 1

    @property
    def positions(self) -> int:
        """Numbers of a transformed tile, each of which belongs to a product of its own."""
        return self.edge**2

    @property
    def down(self) -> int:
        """Tiles of an image from top to bottom."""
        return -(-self.rows // self.size)

    @property
    def across(self) -> int:
        """Tiles of an image from left to right."""
        return -(-self.columns // self.size)

    @property
    def tiles(self) -> int:
        """Tiles of all images."""
        return self.batch * self.down * self.across

    def encode(self) -> list[int]:
        """All fields, in order."""
        return list(astuple(self))


def winograd_problem(geometry: Geometry) -> Problem:
    """What the algorithm is chosen for."""
    g = geometry
    return Problem(
        "winograd",
        figures(
            batch=g.batch,
            channels=g.channels,
            filters=g.filters,
            rows=g.rows,
            columns=g.columns,
        ),
    )


def winograd_choices(geometry: Geometry) -> dict[Figures, int]:
    """Outputs of a tile that can be chosen, those that take the least time first."""
    sizes = [NONE, *(size for size in SIZES if _fits(replace(geometry, size=size)))]
    ranked = sorted(sizes, key=lambda size: clocks(replace(geometry, size=size)))
    return {figures(size=size): size for size in ranked}


def clocks(geometry: Geometry) -> float:
    """Estimate for a convolution, with Winograd's algorithm if it has tiles."""
    g = geometry
    if g.size == NONE:
        return least_clocks(1, g.filters, g.batch * g.rows * g.columns, TAPS**2 * g.channels)
    images = g.batch * (g.channels * g.height * g.width + g.filters * g.rows * g.columns)
    weights = g.positions * g.filters * g.channels
    product = least_clocks(g.positions, g.filters, g.tiles, g.channels)
    return (
        2 * TRANSFORM[g.size]
        + max(product, 4 * (_elements(g) + weights) / BYTES)
        + 4 * (_elements(g) + images) / BYTES
    )


def _fits(geometry: Geometry) -> bool:
    g = geometry
    small = min(g.tiles, g.filters, g.channels) < MIN_EXTENT
    return not small and 4 * _elements(g) <= MOST_BYTES


def _elements(geometry: Geometry) -> int:
    """Transformed inputs and products."""
    g = geometry
    return g.positions * g.tiles * (g.channels + g.filters)
