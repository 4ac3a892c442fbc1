"""The safetensors container: what we write others read, what others write we read."""

import json
import struct

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hybridc.bundle.read import open_bundle
from hybridc.bundle.storage import open_storage
from hybridc.bundle.tensors import ALIGNMENT, decode, encode
from hybridc.errors import BundleError

DTYPES = "bool float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()

tensors = st.dictionaries(
    st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=5).filter(
        lambda name: not name.startswith("__")
    ),
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0, max_side=4))
    ),
    max_size=4,
)


def joined(contents):
    return b"".join(bytes(chunk) for chunk in encode(contents))


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        assert actual[name].shape == array.shape
        np.testing.assert_array_equal(actual[name], array)


@settings(max_examples=100, deadline=None)
@given(tensors)
def test_round_trip_and_alignment(contents):
    data = joined(contents)
    assert_equal(decode(data, "file"), contents)
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    for name in contents:
        assert (8 + length + header[name]["data_offsets"][0]) % ALIGNMENT == 0


@settings(max_examples=50, deadline=None)
@given(tensors)
def test_the_safetensors_library_reads_ours(contents):
    read = safetensors.numpy.load(joined(contents))
    assert_equal({name: read[name] for name in contents}, contents)


@settings(max_examples=50, deadline=None)
@given(tensors)
def test_we_read_what_the_safetensors_library_writes(contents):
    assert_equal(decode(safetensors.numpy.save(contents), "file"), contents)


def test_non_contiguous_arrays_are_written_in_order():
    array = np.arange(24, dtype="float32").reshape(4, 6)
    assert_equal(
        decode(joined({"t": array.T, "s": array[::2, ::-3]}), "file"),
        {
            "t": array.T,
            "s": array[::2, ::-3],
        },
    )


@pytest.mark.parametrize("change", [0, 1e-5, 1e6, -0.0])
def test_floats_of_16_bits_take_16_bits(change):
    array = np.random.default_rng(0).standard_normal(4096).astype(np.float16).astype(np.float32)
    array[7] += np.float32(change)
    array[8] = -0.0
    data = joined({"whole": np.arange(4, dtype=np.float32), "t": array})
    read = decode(data, "file")["t"]
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read.view(np.uint32), array.view(np.uint32))
    assert (len(data) < 2 * array.size + 512) == (change in (0, -0.0))


def test_unstorable_type_is_refused():
    with pytest.raises(ValueError, match="complex64"):
        encode({"z": np.zeros(1, np.complex64)})


def container(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(**changes):
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 1 << 62) + b"{}",
        container(b"{"),
        container(b"[" * 100_000),
        container([]),
        container({"t": 1}),
        container(entry(dtype="F33"), bytes(8)),
        container(entry(shape=[3]), bytes(8)),
        container(entry(shape=[-2]), bytes(8)),
        container(entry(shape=[1 << 32, 1 << 32], data_offsets=[0, 0])),
        container(entry(shape=[1 << 70], data_offsets=[0, 8]), bytes(8)),
        container(entry(), bytes(7)),
        container(entry(data_offsets=[8, 0]), bytes(8)),
        container(entry(data_offsets=[-8, 0]), bytes(8)),
        container(entry(data_offsets=[0.0, 8.0]), bytes(8)),
        container(entry(data_offsets=[0]), bytes(8)),
    ],
)
def test_malformed_container_is_refused(data):
    with pytest.raises(BundleError, match="not a valid safetensors file"):
        decode(data, "file")


@pytest.mark.parametrize("form", ["bundle", "archive"])
def test_tensors_of_a_bundle_are_aligned_in_memory(form, request):
    opened = open_bundle(request.getfixturevalue(form))
    weights = opened.tensors(opened.manifest.weights)
    assert len(weights) >= 4
    assert all(array.ctypes.data % ALIGNMENT == 0 for array in weights.values())


def test_files_of_an_archive_are_aligned(archive):
    places = open_storage(archive).places
    assert all(place.offset % ALIGNMENT == 0 for place in places.values())


def test_the_safetensors_library_reads_a_bundles_weights(bundle):
    ours = open_bundle(bundle).tensors("weights.safetensors")
    theirs = safetensors.numpy.load_file(bundle / "weights.safetensors")
    assert_equal({name: theirs[name] for name in ours}, ours)
