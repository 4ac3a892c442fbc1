"""The cuda target on a machine without a GPU: what is built, and what the loader refuses."""

from __future__ import annotations

import ctypes
import platform
import shutil
import struct
import subprocess

import ml_dtypes
import numpy as np
import onnx
import pytest
from hybridc.targets.cuda import build, nvrtc
from hybridc.targets.cuda.architectures import parse_gpu
from hybridc.targets.cuda.build import compiled_graph
from hybridc.targets.cuda.nvcc import compile_source, find_nvcc
from hybridc.targets.cuda.nvrtc import compile_with_nvrtc, find_nvrtc, load_nvrtc
from hybridc.targets.cuda.pack import rewrite
from hybridc.targets.memory import planned_bytes

import hybridc
from hybridc.bundle.manifest import TransferSpec
from hybridc.bundle.read import open_bundle
from hybridc.errors import DeviceError, InternalError, UsageError
from hybridc.runtime.cuda import DriverError, devices, runs_on
from tests.gpu.emulation import cuda_source, lowered_model
from tests.gpu.models import SMALL
from tests.models import branched_model, make_model, node
from tests.support import compile_to

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not installed")
needs_nvrtc = pytest.mark.skipif(find_nvrtc() is None, reason="NVRTC is not installed")

KERNEL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }'


def gpu_is_here():
    try:
        return bool(devices())
    except DriverError:
        return False


without_gpu = pytest.mark.skipif(gpu_is_here(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", ("sm_80", "sm_90", "compute_90")),
        ("sm_90", ("sm_90", "compute_90")),
        ("sm_120,sm_80,sm_90,sm_80", ("sm_80", "sm_90", "sm_120", "compute_120")),
        ("sm_80+aarch64", ("sm_80", "compute_80")),
    ],
)
def test_specifications(text, code):
    gpu = parse_gpu(text)
    assert gpu.device_code == code
    here = platform.machine()
    assert gpu.host.architecture == ("aarch64" if "aarch64" in text else here)


@pytest.mark.parametrize("text", ["90", "sm_90x", "sm_70", "hopper", "sm_90+vax"])
def test_specifications_that_are_refused(text):
    with pytest.raises(UsageError):
        parse_gpu(text)


@pytest.mark.parametrize(
    ("code", "capability", "runs"),
    [
        ("sm_90", (9, 0), True),
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("compute_80", (9, 0), True),
        ("compute_90", (8, 9), False),
        ("compute_90", (12, 0), True),
        ("something", (9, 0), False),
    ],
)
def test_which_gpu_runs_what(code, capability, runs):
    assert runs_on(code, capability) is runs


def pack(*modules):
    """A section as TVM packs it."""

    def text(data):
        return struct.pack("<Q", len(data)) + data

    body = struct.pack("<4Q", 3, 0, 1, 1) + struct.pack("<2Q", 1, 1)
    for kind, content in modules:
        body += text(kind) + (b"" if content is None else text(content))
    return struct.pack("<Q", len(body)) + body


def content(form, functions, code):
    return b"".join(
        [struct.pack("<Q", len(form)), form, functions, struct.pack("<Q", len(code)), code]
    )


def test_sources_are_replaced_by_what_they_compile_to():
    source = "kernels in CUDA"
    before = pack((b"_lib", None), (b"cuda", content(b"cuda", b"functions", source.encode())))
    after = pack((b"_lib", None), (b"cuda", content(b"fatbin", b"functions", b"machine code")))
    compiled = {source: b"machine code"}
    assert rewrite(before, [source], compiled.__getitem__) == after


def test_a_section_of_another_form_is_no_silent_success():
    good = pack((b"_lib", None), (b"cuda", content(b"ptx", b"", b"source")))
    with pytest.raises(InternalError):
        rewrite(good, ["source"], str.encode)
    with pytest.raises(InternalError):
        rewrite(good + b"more", ["source"], str.encode)


@needs_nvcc
@pytest.mark.parametrize("name", SMALL)
def test_kernels_compile(name):
    """Also the last layer of a classifier, which by TVM's own rules does not."""
    assert compile_source(cuda_source(SMALL[name]()), ["sm_80", "sm_90"])[:4] == b"\x50\xed\x55\xba"


@needs_nvcc
def test_a_fat_binary_holds_every_architecture(tmp_path):
    tool = shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")
    if tool is None:
        pytest.skip("cuobjdump is not installed")
    (tmp_path / "k.fatbin").write_bytes(compile_source(KERNEL, ["sm_80", "sm_90"]))
    command = [tool, "--list-elf", "--list-ptx", str(tmp_path / "k.fatbin")]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "sm_80.cubin" in listing
    assert "sm_90.cubin" in listing
    assert "sm_90.ptx" in listing


@needs_nvcc
def test_a_kernel_that_does_not_compile_is_our_fault():
    with pytest.raises(InternalError, match="nvcc refused"):
        compile_source("no kernel", ["sm_90"])


TRAITS = """
#include <cuda/std/cstdint>
#include <cuda/std/type_traits>
using namespace cuda::std;
static_assert(sizeof(uint8_t) == 1 && sizeof(int16_t) == 2 && sizeof(uint32_t) == 4);
static_assert(sizeof(int64_t) == 8 && int8_t(-1) < 0 && uint16_t(-1) > 0 && int32_t(-1) < 0);
static_assert(is_same<int, int>::value && !is_same_v<int, const int> && !is_same_v<int, long>);
static_assert(is_integral<bool>::value && is_integral<unsigned long long>::value);
static_assert(!is_integral<float>::value && !is_integral<int*>::value);
static_assert(is_signed<int8_t>::value && is_signed<double>::value && !is_signed<uint8_t>::value);
static_assert(is_unsigned<bool>::value && is_unsigned<uint64_t>::value);
static_assert(!is_unsigned<float>::value && !is_unsigned<long>::value);
static_assert(is_floating_point<float>::value && !is_floating_point<int>::value);
static_assert(is_same_v<conditional<true, int, float>::type, int>);
static_assert(is_same_v<conditional<false, int, float>::type, float>);
#define DEVICE __device__ constexpr
template <class A, typename enable_if<is_integral<A>::value>::type* = nullptr>
DEVICE int f(A) { return 1; }
template <class A, typename enable_if<!is_integral<A>::value>::type* = nullptr>
DEVICE int f(A) { return 2; }
static_assert(f(1) == 1 && f(1.0f) == 2);
extern "C" __global__ void k(float* x) { x[0] = f(1); }
"""


@needs_nvrtc
def test_what_nvrtc_gets_in_place_of_headers_means_the_same():
    """Names of CUDA's C++ library; the same code is made each time."""
    first, second = (compile_with_nvrtc(TRAITS, ["sm_90"]) for _ in range(2))
    assert first == second


@needs_nvrtc
@pytest.mark.parametrize("name", SMALL)
def test_nvrtc_compiles_what_nvcc_does(name):
    assert compile_with_nvrtc(cuda_source(SMALL[name]()), ["sm_90"])[:4] == b"\x7fELF"


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_nvrtc_compiles_for_tensor_cores(dtype):
    """Their functions use what nvcc has built in, which NVRTC lacks."""
    weight = np.ones((256, 128), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    nodes = [node("MatMul", "x w", "y")]
    model = make_model(nodes, {"x": (250, 256)}, {"y": (250, 128)}, {"w": weight}, dtype=dtype)
    source = cuda_source(model)
    assert "__builtin_memcpy" in source
    assert compile_with_nvrtc(source, ["sm_90"])[:4] == b"\x7fELF"


def test_nvrtc_has_its_other_half(tmp_path):
    """Versions 13.0 to 13.3 name no folder to look for it in."""
    for name in ("libnvrtc-builtins.so.13.99", "libnvrtc.so.13"):
        command = ["cc", "-shared", f"-Wl,-soname,{name}", "-o", tmp_path / name, "-x", "c", "-"]
        subprocess.run(command, input=b"", check=True)
    load_nvrtc(str(tmp_path / "libnvrtc.so.13"))
    ctypes.CDLL("libnvrtc-builtins.so.13.99")  # by its name alone: it is there already


def test_nothing_is_loaded_from_where_the_compiler_is_started(tmp_path, monkeypatch):
    """Where the system knows NVRTC by its name alone."""
    (tmp_path / "libnvrtc-builtins.so.13.99").touch()
    monkeypatch.chdir(tmp_path)
    loaded = []
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", loaded.append)
    load_nvrtc("libnvrtc.so.13")
    assert loaded == ["libnvrtc.so.13"]


@needs_nvrtc
def test_what_nvrtc_refuses():
    source = cuda_source(SMALL["attention"]())
    with pytest.raises(DeviceError, match="one architecture"):
        compile_with_nvrtc(source, ["sm_80", "sm_90"])
    with pytest.raises(InternalError, match="NVRTC refused"):
        compile_with_nvrtc("no kernel", ["sm_90"])


def counted_model():
    """A loop whose number of turns is an input."""
    return onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        counted (float[2, 3] x, int64 turns) => (float[2, 3] y) {
            go = Constant <value = bool {1}> ()
            y = Loop (turns, go, x) <body = turn (int64 i, bool c, float[2, 3] a)
                => (bool d, float[2, 3] b) { d = Identity (c)  e = Exp (a)  b = Softmax (e) }>
        }""")


@pytest.mark.parametrize(("name", "captured"), [("attention", True), ("loop", False)])
def test_straight_graphs_are_captured(name, captured):
    gpu = parse_gpu("sm_90")
    model = counted_model() if name == "loop" else SMALL[name]()
    functions = compiled_graph(lowered_model(model)[0].module, gpu).functions
    names = [variable.name_hint for variable in functions]
    assert any("cuda_graph_capture" in name for name in names) == captured


@pytest.mark.parametrize("name", ["attention", "lstm"])
def test_storages_of_a_graph_are_counted(monkeypatch, name):
    gpu = parse_gpu("sm_90")

    def planned():
        return planned_bytes(compiled_graph(lowered_model(SMALL[name]())[0].module, gpu))

    captured = planned()
    monkeypatch.setattr(build, "_is_straight", lambda _module: False)
    assert captured == planned() > 0


@needs_nvcc
def test_a_bundle_says_what_it_needs(tmp_path):
    compile_to(tmp_path / "b", branched_model(), targets=("cuda:sm_80,sm_90",))
    manifest = open_bundle(tmp_path / "b").manifest
    (device,) = manifest.devices
    assert device.device_code == ("sm_80", "sm_90", "compute_90")
    assert device.libraries == ("libcudart.so.13",)
    assert [name.rpartition("/")[2] for name in manifest.runtime[device.architecture]] == [
        "libtvm_runtime.so",
        "libtvm_runtime_cuda.so",
    ]
    assert manifest.transfers == (TransferSpec("x", "input", "cuda:0", 3 * 8 * 8 * 4),)


@needs_nvcc
def test_parts_on_a_cpu_and_a_gpu(tmp_path):
    compile_to(
        tmp_path / "b",
        branched_model(),
        targets=("llvm", "cuda:sm_90"),
        pins=("stem*=cuda:0", "left=cuda:0"),
    )
    manifest = open_bundle(tmp_path / "b").manifest
    assert {device.kind for device in manifest.devices} == {"llvm", "cuda"}
    ends = {(transfer.source, transfer.destination) for transfer in manifest.transfers}
    assert {("input", "cuda:0"), ("cuda:0", "llvm:0")} <= ends


@needs_nvcc
def test_the_same_model_gives_the_same_bytes(tmp_path):
    for name in "ab":
        compile_to(tmp_path / name, branched_model(), targets=("cuda:sm_90",))
    parts = [sorted((tmp_path / name / "parts").iterdir()) for name in "ab"]
    for left, right in zip(*parts, strict=True):
        assert left.read_bytes() == right.read_bytes()


@needs_nvcc
@without_gpu
def test_without_a_gpu_the_loader_says_so(tmp_path):
    report = compile_to(tmp_path / "b", branched_model(), targets=("cuda:sm_90",), verify=True)
    assert any("the bundle was not run: cuda:0" in note for note in report.notes)
    with pytest.raises(DeviceError, match="NVIDIA") as caught:
        hybridc.load(tmp_path / "b")
    assert caught.value.exit_code == 7
