"""Kernels are built once for all compiles, and a bundle does not show it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest

pytest.importorskip("tvm")

from hybridc.targets.llvm import objects
from hybridc.targets.llvm.cpu import Cpu, parse_cpu
from hybridc.targets.llvm.detach import Kernel, kernel_of
from hybridc.targets.llvm.object_cache import VARIABLE, ObjectCache
from hybridc.targets.llvm.objects import build_objects
from tvm import te, tirx

from tests.models import make_model, node, random, relu_model, save
from tests.support import assert_refused, compile_to, hybridc


def scale(size: int, factor: float, name: str = "x") -> tirx.PrimFunc:
    """Multiply ``size`` numbers, in a parameter called ``name``, by ``factor``."""
    x = te.placeholder((size,), "float32", name=name)
    return te.create_prim_func([x, te.compute((size,), lambda i: x[i] * factor, name="scaled")])


def convolutions(middle: str = "Relu", channels: int = 16) -> onnx.ModelProto:
    """Three convolutions with other sizes each, and an activation after each."""
    counts, kinds = (4, 8, channels, 12), ("Relu", middle, "Relu")
    nodes, weights, value = [], {}, "x"
    for i, (kind, before, after) in enumerate(zip(kinds, counts[:-1], counts[1:], strict=True)):
        weights[f"w{i}"] = random(after, before, 3, 3, seed=i) / 9
        nodes.append(node("Conv", f"{value} w{i}", f"c{i}", pads=[1, 1, 1, 1]))
        nodes.append(node(kind, f"c{i}", f"y{i}"))
        value = f"y{i}"
    return make_model(nodes, {"x": (1, 4, 16, 16)}, {value: (1, 12, 16, 16)}, weights)


def kernels_in(folder: Path) -> dict[str, bytes]:
    """Contents of the cache by file name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def compiled(folder: Path, name: str, model: onnx.ModelProto, cache: Path | None) -> bytes:
    """The bytes of a bundle; the model's name is the same for all of them."""
    own = folder / name
    own.mkdir()
    compile_to(own / "b.hyb", model, cache=cache)
    return (own / "b.hyb").read_bytes()


def some_kernels() -> dict[str, Kernel]:
    kernels = [kernel_of(f"scale{size}", scale(size, 3.0)) for size in (1, 33, 64, 1000, 4096)]
    return {kernel.symbol: kernel for kernel in kernels}


def test_cold_warm_and_without(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cold = compiled(tmp_path, "cold", convolutions(), cache)
    kept = kernels_in(cache)
    assert len(kept) >= 3
    assert compiled(tmp_path, "warm", convolutions(), cache) == cold
    assert kernels_in(cache) == kept
    assert compiled(tmp_path, "without", convolutions(), None) == cold


@pytest.mark.parametrize(
    ("changed", "count"),
    [(convolutions("LeakyRelu"), 1), (convolutions(channels=24), 2)],
    ids=["activation", "channels between two layers"],
)
def test_only_changed_kernels_are_built(
    tmp_path: Path, changed: onnx.ModelProto, count: int
) -> None:
    cache = tmp_path / "cache"
    compiled(tmp_path, "before", convolutions(), cache)
    before = kernels_in(cache)
    after_change = compiled(tmp_path, "after", changed, cache)
    assert len(kernels_in(cache)) == len(before) + count
    assert after_change == compiled(tmp_path, "without", changed, None)


def test_weights_do_not_matter(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    compiled(tmp_path, "before", convolutions(), cache)
    before = kernels_in(cache)
    model = convolutions()
    weight = model.graph.initializer[0]
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * 2, "w0"))
    compiled(tmp_path, "after", model, cache)
    assert kernels_in(cache) == before


@pytest.mark.parametrize("workers", [2, 5])
def test_workers_do_not_matter(cpu: Cpu, workers: int) -> None:
    kernels = some_kernels()
    alone = build_objects(kernels, cpu, workers=1)
    together = build_objects(kernels, cpu, workers=workers)
    assert list(alone) == list(together) == list(kernels)
    assert alone == together


def test_a_fault_of_a_kernel_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_function: tirx.PrimFunc, _cpu: Cpu) -> tirx.PrimFunc:
        raise KeyError("no schedule")

    monkeypatch.setattr(objects, "schedule_function", fail)
    with pytest.raises(KeyError, match="no schedule"):
        build_objects(some_kernels(), parse_cpu(""))


def test_names_of_parameters_do_not_matter() -> None:
    first, second = kernel_of("f1", scale(8, 3.0, "x")), kernel_of("f2", scale(8, 3.0, "lv7"))
    assert first.symbol == second.symbol
    assert first.text == second.text


def test_all_that_matters_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = 3.0
    functions = [
        ("f", scale(8, factor)),
        ("g", scale(8, factor)),
        ("f", scale(9, factor)),
        ("f", scale(8, float(np.nextafter(np.float32(factor), np.float32(4))))),
    ]
    kernels = [kernel_of(name, function) for name, function in functions]
    keys = {objects._key(kernel, "made with") for kernel in kernels}
    assert len(keys) == len(kernels)
    made_with = {objects._made_with(parse_cpu(name)) for name in ("x86-64-v3", "x86-64-v4")}
    monkeypatch.setattr(objects, "_source_digest", lambda: "other source")
    made_with.add(objects._made_with(parse_cpu("x86-64-v3")))
    assert len(made_with) == 3


def flip(content: bytes) -> bytes:
    return content[:-7] + bytes([content[-7] ^ 1]) + content[-6:]


@pytest.mark.parametrize(
    "damage",
    [flip, lambda content: content[:-1], lambda content: content[:40], lambda _content: b""],
    ids=["flipped", "cut", "nearly nothing", "empty"],
)
def test_damaged_kernels_are_built_anew(tmp_path: Path, damage) -> None:
    cpu, cache = parse_cpu(""), ObjectCache(tmp_path)
    built = build_objects(some_kernels(), cpu, cache)
    before = kernels_in(tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(damage(path.read_bytes()))
    assert build_objects(some_kernels(), cpu, cache) == built
    assert kernels_in(tmp_path) == before


def test_a_kernel_under_another_name_is_not_taken(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path)
    cache.write("one", b"code")
    (tmp_path / "one.kernel").rename(tmp_path / "two.kernel")
    assert cache.read("two") is None
    assert cache.read("one") is None


def test_a_kernel_that_others_may_write_is_not_taken(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path)
    cache.write("one", b"code")
    assert cache.read("one") == b"code"
    (tmp_path / "one.kernel").chmod(0o664)
    assert cache.read("one") is None
    (tmp_path / "one.kernel").rename(tmp_path / "elsewhere")
    (tmp_path / "one.kernel").symlink_to(tmp_path / "elsewhere")
    assert cache.read("one") is None


def test_a_folder_that_cannot_be_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = ObjectCache(tmp_path / "file")
    built = build_objects(some_kernels(), parse_cpu(""), cache)
    assert built == build_objects(some_kernels(), parse_cpu(""))
    assert (tmp_path / "file").read_text() == "in the way"


def test_what_was_used_least_recently_goes_first(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, limit=3 * (100 + 32))
    for second, key in enumerate("abcd"):
        cache.write(key, bytes(100))
        os.utime(tmp_path / f"{key}.kernel", (second, second))
    (tmp_path / "notes.txt").write_text("not ours")
    assert cache.read("a") == bytes(100)
    cache.trim()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.kernel",
        "c.kernel",
        "d.kernel",
        "notes.txt",
    ]


def test_writers_and_readers_share_a_folder(tmp_path: Path) -> None:
    contents = {f"key{i}": bytes([i]) * (1000 + i) for i in range(8)}
    cache = ObjectCache(tmp_path, limit=5000)

    def work(seed: int) -> set[bool]:
        whole = set()
        for step in range(100):
            key = f"key{(seed * 7 + step * 3) % 8}"
            found = cache.read(key)
            whole.add(found is None or found == contents[key])
            cache.write(key, contents[key])
            cache.trim()
        return whole

    with ThreadPoolExecutor(4) as pool:
        assert set().union(*pool.map(work, range(4))) == {True}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 5000
    assert {path.suffix for path in tmp_path.iterdir()} == {".kernel"}


def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(relu_model(), tmp_path / "m.onnx")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "environment"))

    def kept(*options: str | Path) -> list[str]:
        words = ("compile", model, "-o", tmp_path / "b.hyb", "--no-verify", *options)
        assert hybridc(*words).code == 0
        return sorted(path.name for path in tmp_path.iterdir() if path.is_dir())

    assert kept("--no-cache") == []
    assert kept("--cache", tmp_path / "chosen") == ["chosen"]
    assert kept() == ["chosen", "environment"]
    assert kernels_in(tmp_path / "chosen") == kernels_in(tmp_path / "environment")
    home = tmp_path / "home"  # where ONNX Runtime may keep something, too
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    kept()
    assert not (home / "hybridc").exists()
    monkeypatch.delenv(VARIABLE)
    kept()
    assert kernels_in(home / "hybridc" / "kernels") == kernels_in(tmp_path / "chosen")
    refused = hybridc("compile", model, "-o", tmp_path / "c", "--no-cache", "--cache", tmp_path)
    assert_refused(refused, 2, "--cache", "--no-cache")
