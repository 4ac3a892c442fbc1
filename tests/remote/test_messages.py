"""Messages carry tensors exactly, and bytes that make no sense are refused."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hybridc.bundle.manifest import RemoteSpec, TensorSpec
from hybridc.runtime.remote_messages import infer_request, message_types, reply_tensors
from hybridc.runtime.remote_tensors import BUILD, DATATYPES, read_reply, to_bytes, wire_tensors

BUILT = "0123456789abcdef" * 4


def tensors() -> st.SearchStrategy[np.ndarray]:
    return arrays.arrays(
        st.sampled_from([np.dtype(name) for name in DATATYPES]),
        arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    )


def spec_of(name: str, array: np.ndarray) -> TensorSpec:
    return TensorSpec(name, array.dtype.name, array.shape)


def reply_of(values: dict[str, np.ndarray], build: str = BUILT, seconds: float = 0.25) -> bytes:
    reply = message_types()["ModelInferResponse"]()
    mark = np.frombuffer(bytes.fromhex(build) + np.float64(seconds).tobytes(), np.uint8)
    for name, array in {**values, BUILD: mark}.items():
        reply.outputs.add(name=name, datatype=DATATYPES[array.dtype.name], shape=array.shape)
        reply.raw_output_contents.append(to_bytes(array))
    return reply.SerializeToString()


def parse(data: bytes):
    return reply_tensors(message_types()["ModelInferResponse"].FromString(data))


@given(st.lists(tensors(), max_size=3))
@settings(max_examples=100, deadline=None)
def test_tensors_come_back_as_they_were(values):
    named = {f"t{index}": array for index, array in enumerate(values)}
    specs = tuple(spec_of(name, array) for name, array in named.items())
    remote = RemoteSpec("m", "1", BUILT, specs, specs)
    found, seconds = read_reply(remote, parse(reply_of(named)))
    assert seconds == 0.25
    for array, expected in zip(found, values, strict=True):
        assert array.dtype == expected.dtype
        assert array.shape == expected.shape
        assert array.tobytes() == expected.tobytes()
        assert array.flags.writeable


def test_a_request_names_the_build_and_the_outputs():
    array = np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::-1]
    remote = RemoteSpec("m", "7", BUILT, (spec_of("x", array),), (spec_of("y", array),))
    request = message_types()["ModelInferRequest"].FromString(
        infer_request(remote, wire_tensors(remote.inputs, [array]), {}).SerializeToString()
    )
    assert (request.model_name, request.model_version) == ("m", "7")
    assert request.parameters[0].value.string_param == BUILT
    assert [output.name for output in request.outputs] == ["y", BUILD]
    assert request.raw_input_contents == [np.ascontiguousarray(array).tobytes()]


VALUE = np.zeros((2, 3), np.float32)
REMOTE = RemoteSpec("m", "1", BUILT, (), (TensorSpec("y", "float32", ("n", 3)),))


@pytest.mark.parametrize(
    ("values", "changes", "word"),
    [
        ({}, {}, "lacks the tensor 'y'"),
        ({"y": VALUE.astype(np.float64)}, {}, "FP64"),
        ({"y": VALUE[:, :2]}, {}, "must be"),
        ({"y": VALUE[0]}, {}, "must be"),
        ({"y": VALUE}, {"build": "ff" * 32}, "another build"),
        ({"y": VALUE}, {"seconds": float("nan")}, "took"),
        ({"y": VALUE}, {"seconds": -1.0}, "took"),
    ],
)
def test_replies_that_do_not_fit(values, changes, word):
    with pytest.raises(ValueError, match=word):
        read_reply(REMOTE, parse(reply_of(values, **changes)))


@given(st.binary(max_size=200), st.integers(0, 200))
@settings(max_examples=200, deadline=None)
def test_damaged_replies_are_refused_or_whole(noise, position):
    good = reply_of({"y": VALUE})
    damaged = good[:position] + noise + good[position + len(noise) :]
    try:
        (array,), _ = read_reply(REMOTE, parse(damaged))
    except (ValueError, DecodeError):
        return
    assert array.dtype == np.float32
    assert array.shape[1:] == (3,)
