"""Twenty random splits of two real models over two devices give the unsplit result."""

import random

import pytest
from hybridc.passes.pipeline import run_passes

from hybridc.compiler import build, load_built
from hybridc.frontend.read import read_model
from hybridc.frontend.shapes import parse_shapes, specialize
from hybridc.lowering.ops import default_table
from hybridc.placement.group import make_groups
from hybridc.runtime.arrays import random_inputs
from tests.support import assert_close, make_options
from tools.models import light_model, model_path

pytestmark = pytest.mark.slow

DEVICES = ("llvm:0", "llvm:1")
MODELS = {
    "squeezenet": (lambda: light_model("squeezenet"), ()),
    "angle classifier": (
        lambda: model_path("rapidocr-ch-ppocr-mobile-v2.0-cls-infer"),
        ("x=1x3x48x192",),
    ),
}


class Whole:
    """A model compiled in one part: its groups' names, inputs, and results."""

    def __init__(self, path, shapes):
        self.path, self.shapes = path, shapes
        source = read_model(path)
        specialize(source.model, parse_shapes(shapes))
        model, _ = run_passes(source.model, default_table().lowers)
        self.names = [group.name for group in make_groups(list(model.graph))]
        with self.compiled(()) as whole:
            self.inputs = random_inputs(whole, 0)
            self.results = whole.run(self.inputs)

    def compiled(self, pins):
        """The model with these pins, loaded in this process."""
        options = make_options(targets=DEVICES, shapes=self.shapes, pins=pins)
        return load_built(build(read_model(self.path), options)[0])


@pytest.fixture(scope="module", params=MODELS)
def whole(request):
    make_path, shapes = MODELS[request.param]
    return Whole(make_path(), shapes)


@pytest.mark.parametrize("seed", range(20))
def test_random_split(whole, seed):
    """Groups in order stay on a device for a while or hardly at all, by the seed."""
    dice = random.Random(seed)
    change = (0.05, 0.15, 0.3, 0.5)[seed % 4]
    device, pins = dice.choice(DEVICES), []
    for name in whole.names:
        if dice.random() < change:
            device = DEVICES[device == DEVICES[0]]
        pins.append(f"{name}={device}")
    with whole.compiled(tuple(pins)) as split:
        assert set(split.plan) == set(DEVICES)
        assert len(split.manifest.parts) > 1
        assert_close(split.run(whole.inputs), whole.results, 1e-5)
