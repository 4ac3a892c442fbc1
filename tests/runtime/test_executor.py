"""The executor with parts that are Python functions: what runs beside what, in which order, and
what happens when something fails.
"""

import random
import threading
from dataclasses import dataclass

import pytest

import hybridc
from hybridc.bundle.manifest import DeviceSpec, Manifest, PartSpec, TensorSpec
from hybridc.errors import PartError, UsageError
from hybridc.runtime.executor import Executor
from hybridc.runtime.loader import Model
from hybridc.runtime.tensors import HOST
from hybridc.runtime.workers import cores_of
from tests.models import branched_model, run_reference
from tests.models import random as random_array
from tests.support import assert_close, compile_to

FAR = (2, 0)
SECONDS = 20
"""No test waits for so long but where something is wrong."""


@dataclass(frozen=True)
class FakePart:
    spec: PartSpec
    function: object
    place: tuple = HOST

    def start(self):
        return self.function, ()


def part(name, device, inputs, outputs, function, place=HOST):
    spec = PartSpec(name, device, "", tuple(inputs.split()), tuple(outputs.split()), (), ())
    return FakePart(spec, function, place)


def manifest(inputs, outputs, parts):
    names = dict.fromkeys(item.spec.device for item in parts)
    return Manifest(
        *("1.0", "", "", "", "", ""),
        inputs=tuple(TensorSpec(name, "float32", ()) for name in inputs.split()),
        outputs=tuple(TensorSpec(name, "float32", ()) for name in outputs.split()),
        dimensions={},
        devices=tuple(DeviceSpec(name, "fake", "", "") for name in names),
        parts=tuple(item.spec for item in parts),
        transfers=(),
        runtime={},
        weights="",
    )


def model_of(inputs, outputs, parts):
    return Model(manifest(inputs, outputs, parts), parts)


def adder(constant):
    return lambda *values: [sum(values) + constant]


def random_parts(seed, count=8):
    """Parts that read what was there before, on three devices in two memories."""
    source = random.Random(seed)
    names, parts = ["x", "y"], []
    for index in range(count):
        read = source.sample(names, source.randint(1, min(3, len(names))))
        place = source.choice((HOST, HOST, FAR))
        device = source.choice("ab") if place == HOST else "far"
        names.append(f"t{index}")
        parts.append(part(f"p{index}", device, " ".join(read), f"t{index}", adder(index), place))
    outputs = source.sample(names, 3)
    return parts, outputs


def evaluate(parts, values):
    for item in parts:
        values[item.spec.outputs[0]] = item.function(*map(values.get, item.spec.inputs))[0]
    return values


@pytest.mark.parametrize("seed", range(60))
def test_workers_give_what_the_order_gives(seed):
    parts, outputs = random_parts(seed)
    model = model_of("x y", " ".join(outputs), parts)
    inputs = [[number, 10 * number] for number in range(9)]
    wanted = [evaluate(parts, {"x": x, "y": y}) for x, y in inputs]
    wanted = [[values[name] for name in outputs] for values in wanted]
    in_order = Executor(model.manifest, parts)
    assert [in_order.run(pair) for pair in inputs] == wanted
    futures = [model._start(Executor(model.manifest, parts), pair) for pair in inputs]
    assert [future.result(SECONDS) for future in futures] == wanted
    model.close()


def meeting(count=2):
    """A function that returns once so many are in it at the same time."""
    barrier = threading.Barrier(count, timeout=SECONDS)

    def meet(*values):
        barrier.wait()
        return [sum(values)]

    return meet


def test_independent_parts_run_at_the_same_time():
    meet = meeting()
    parts = [
        part("stem", "a", "x", "s", adder(1)),
        part("left", "a", "s", "l", meet),
        part("right", "b", "s", "r", meet),
        part("head", "a", "l r", "y", adder(0)),
    ]
    model = model_of("x", "y", parts)
    assert model.run_tensors([1]) == [4]
    assert model.run_tensors([2]) == [6]


def test_a_chain_on_two_devices_runs_in_the_callers_thread():
    found = []

    def note(value):
        found.append(threading.current_thread())
        return [value]

    parts = [part("a", "a", "x", "s", note), part("b", "b", "s", "y", note)]
    assert model_of("x", "y", parts).run_tensors([1]) == [1]
    assert set(found) == {threading.current_thread()}


def test_copies_run_beside_parts(monkeypatch):
    """The copy of the second input meets the part that works on the first."""
    meet = meeting()

    def moved(_self, _slot, place, value):
        return meet(value)[0] if place == FAR else value

    monkeypatch.setattr(Executor, "_moved", moved)
    parts = [
        part("near", "a", "x", "t", meet),
        part("far", "b", "z", "u", adder(0), FAR),
    ]
    spec = manifest("x z", "t", parts)
    executor = Executor(spec, parts)
    assert {task.worker for task in executor.tasks} == {
        "a",
        "b",
        "copies input to host",
        "copies input to device 2:0",
    }
    model = Model(spec, parts)
    assert model.run_tensors([1, 5]) == [1]


def failing(error):
    def fail(*_values):
        raise error

    return fail


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (RuntimeError("out of memory"), PartError, "bad on b failed: out of memory"),
        (ValueError("k is 0"), UsageError, "bad on b: k is 0"),
        (UsageError("as it is"), UsageError, "^as it is$"),
    ],
)
def test_an_error_names_the_part(branches, error, kind, text):
    parts = [part("good", "a", "x", "s", adder(1)), part("bad", "b", "s", "t", failing(error))]
    if branches:
        parts.append(part("other", "a", "s", "o", adder(0)))
    parts.append(part("never", "a", "t", "y", failing(AssertionError("ran"))))
    model = model_of("x", "y", parts)
    for _ in range(2):
        with pytest.raises(kind, match=text):
            model.run_tensors([1])


def test_a_failed_call_leaves_others_alone():
    def picky(value):
        if value == 3:
            raise RuntimeError("three")
        return [value]

    parts = [part("first", "a", "x", "s", adder(0)), part("second", "b", "s", "y", picky)]
    model = model_of("x", "y", parts)
    futures = [model._start(model._executor(), [value]) for value in range(6)]
    for value, future in enumerate(futures):
        if value == 3:
            assert isinstance(future.exception(SECONDS), PartError)
        else:
            assert future.result(SECONDS) == [value]


def stream_of(model, items, depth=None):
    model._reader.read = list  # these models take what they get
    return ([*outputs.values()] for outputs in model.stream(items, depth))


def test_a_stream_is_in_order_and_a_pipeline():
    """Each of two devices works on another input: both meet in every step."""
    meet = meeting()
    done = []

    def last(value):
        done.append(value)
        return [value] if value in (0, 9) else meet(value)

    def first(value):
        return [value] if value in (0, 1) else meet(value)

    parts = [part("first", "a", "x", "s", first), part("second", "b", "s", "y", last)]
    model = model_of("x", "y", parts)
    assert [*stream_of(model, ([value] for value in range(10)))] == [[v] for v in range(10)]
    assert done == [*range(10)]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_stream_takes_no_more_than_there_is_room_for(depth):
    taken = []

    def source():
        for value in range(20):
            taken.append(value)
            yield [value]

    parts = [part("first", "a", "x", "s", adder(0)), part("second", "b", "s", "y", adder(0))]
    results = stream_of(model_of("x", "y", parts), source(), depth)
    assert taken == []
    for number in range(20):
        assert next(results) == [number]
        assert len(taken) <= number + depth
    assert next(results, None) is None


def test_an_error_comes_in_its_place_in_a_stream():
    ended = []

    def picky(value):
        if value == 3:
            raise RuntimeError("three")
        ended.append(value)
        return [value]

    parts = [part("first", "a", "x", "s", adder(0)), part("second", "b", "s", "y", picky)]
    results = stream_of(model_of("x", "y", parts), ([value] for value in range(9)), 4)
    assert [next(results) for _ in range(3)] == [[0], [1], [2]]
    with pytest.raises(PartError, match="second on b failed: three"):
        next(results)
    assert next(results, None) is None
    assert ended == [0, 1, 2, 4, 5, 6], "what was under way has ended"


def test_a_source_that_fails_and_a_stream_that_is_left():
    def source():
        yield [1]
        raise KeyError("source")

    parts = [part("only", "a", "x", "y", adder(0))]
    with pytest.raises(KeyError):
        list(stream_of(model_of("x", "y", parts), source()))
    results = stream_of(model_of("x", "y", parts), ([value] for value in range(99)))
    assert next(results) == [0]
    results.close()


def test_refusals():
    model = model_of("x", "y", [part("only", "a", "x", "y", adder(0))])
    with pytest.raises(UsageError, match="depth is 0"):
        next(model.stream([], 0))
    model.close()
    with pytest.raises(UsageError, match="was closed"):
        next(stream_of(model, [[1]]))


def test_threads_end_with_their_model():
    def count():
        return sum(thread.name.startswith("hybridc end") for thread in threading.enumerate())

    for close in (True, False):
        parts = [part(f"p{i}", f"end{i}", "x", f"t{i}", meeting(1)) for i in range(2)]
        model = model_of("x", "t0", parts)
        assert model.run_tensors([1]) == [1]
        threads = [t for t in threading.enumerate() if t.name.startswith("hybridc end")]
        assert len(threads) == 2
        if close:
            model.close()
        del model
        for thread in threads:
            thread.join(SECONDS)
        assert count() == 0


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    output = tmp_path_factory.mktemp("halves") / "bundle"
    compile_to(output, branched_model(), targets=("llvm:0", "llvm:1"), pins=("right*=llvm:1",))
    return output


@pytest.mark.parametrize("used", ["llvm:0", "llvm:1"])
def test_a_half_stays_a_half_where_nothing_runs_on_the_other(tmp_path, used):
    compile_to(tmp_path / "b", branched_model(), targets=("llvm:0", "llvm:1"), pins=(f"*={used}",))
    with hybridc.load(tmp_path / "b") as model:
        assert {part.device for part in model.manifest.parts} == {used}
        shares = cores_of(model.manifest.devices, (0, 1, 2))
        assert shares == {"llvm:0": (0,), "llvm:1": (1, 2)}
        inputs = {"x": random_array(1, 3, 8, 8)}
        assert_close(model.run(inputs), run_reference(branched_model(), inputs))


def test_two_halves_of_a_cpu(halves):
    """Equal results, in calls and in a stream, each device with cores of its own."""
    with hybridc.load(halves) as model:
        devices = {device.name for device in model.manifest.devices}
        assert devices == {"llvm:0", "llvm:1"}
        assert set(cores_of(model.manifest.devices, (0, 1, 2)).values()) == {(0,), (1, 2)}
        inputs = [{"x": random_array(1, 3, 8, 8, seed=seed)} for seed in range(12)]
        wanted = [run_reference(branched_model(), feeds) for feeds in inputs]
        for outputs, expected in zip(map(model.run, inputs), wanted, strict=True):
            assert_close(outputs, expected)
        for outputs, expected in zip(model.stream(iter(inputs)), wanted, strict=True):
            assert_close(outputs, expected)


def test_a_wrong_input_in_a_stream(halves):
    with hybridc.load(halves) as model:
        good = {"x": random_array(1, 3, 8, 8)}
        results = model.stream([good, {"x": good["x"][:, :2]}, good], 1)
        next(results)
        with pytest.raises(UsageError, match="must be"):
            next(results)
