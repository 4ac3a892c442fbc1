"""What the loader is to the process it runs in: imports, threads, memory, shared pages."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import hybridc
from hybridc.bundle.storage import write_archive
from hybridc.errors import UsageError
from hybridc.runtime.__main__ import COMPILER
from tests.models import branched_model, linear_model, random, run_reference
from tests.support import assert_close, compile_to

RUN = """
import json, sys
import numpy as np
import hybridc
model = hybridc.load(sys.argv[1])
inputs = {spec.name: np.ones(spec.shape, spec.dtype) for spec in model.inputs}
result = model.run(inputs)
"""


def python(code, *arguments, **options):
    """Start a fresh interpreter; returns the process."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


def answer(process):
    """The JSON that a process printed, once it has ended well."""
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(text)


def test_nothing_of_the_compiler_is_needed(bundle):
    blocked = (*COMPILER, "ml_dtypes", "google")
    block = f"import sys\nfor name in {blocked}: sys.modules[name] = None\n"
    code = block + RUN + "print(json.dumps([result['y'].tolist(), sorted(sys.modules)]))"
    values, modules = answer(python(code, bundle))
    expected = run_reference(branched_model(), {"x": np.ones((1, 3, 8, 8), "f")})
    assert_close({"y": np.array(values, "f")}, expected)
    own = {name for name in modules if name.startswith("hybridc.")}
    assert {name.split(".")[1] for name in own} == {"bundle", "errors", "runtime"}


def test_nothing_of_the_compiler_is_imported(bundle):
    modules = answer(python(RUN + "print(json.dumps(sorted(sys.modules)))", bundle))
    foreign = {name.partition(".")[0] for name in modules}
    assert not foreign & {*COMPILER, "click", "google", "scipy", "torch"}


def test_idle_workers_sleep_soon_unless_the_environment_says_otherwise(bundle):
    name = "TVM_THREAD_POOL_SPIN_COUNT"
    code = RUN + f"import os\nprint(json.dumps(os.environ['{name}']))"
    clean = {key: value for key, value in os.environ.items() if key != name}
    assert 0 < int(answer(python(code, bundle, env=clean))) < 300_000  # TVM's default
    assert answer(python(code, bundle, env={**clean, name: "123"})) == "123"


def test_help_imports_nothing():
    code = (
        "import json, sys\nfrom hybridc.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    process = python(code, stderr=subprocess.PIPE)
    text, modules = process.communicate(timeout=60)
    assert "Commands:" in text
    foreign = {name.partition(".")[0] for name in json.loads(modules)}
    assert not foreign & {*COMPILER, "numpy", "tvm_ffi"}


def test_a_process_that_has_tvm(bundle):
    """The compiler's own process, too, may load bundles."""
    text = answer(python("import tvm\n" + RUN + "print(json.dumps(result['y'].shape))", bundle))
    assert text == [1, 5]


@pytest.mark.parametrize("loads", ["one", "many"])
def test_eight_threads(bundle, loads):
    inputs = [random(1, 3, 8, 8, seed=seed) for seed in range(8)]
    expected = [run_reference(branched_model(), {"x": array}) for array in inputs]
    shared = hybridc.load(bundle)

    def work(index):
        model = shared if loads == "one" else hybridc.load(bundle)
        for call in range(200):
            which = (index + call) % len(inputs)
            assert_close(model(x=inputs[which]), expected[which])
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_memory_is_flat(bundle):
    """Resident memory after 10,000 calls is what it was after the first ones."""
    code = (
        RUN
        + """
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def call(count):
    for _ in range(count):
        model.run(inputs)
call(500)
before = resident()
call(10_000)
print(json.dumps(resident() - before))
"""
    )
    assert answer(python(code, bundle)) < 256 * 1024


def test_loading_and_closing_leaks_no_descriptors(bundle):
    code = (
        RUN
        + """
import os
def load():
    with hybridc.load(sys.argv[1]) as other:
        other.run(inputs)
load()
before = len(os.listdir("/proc/self/fd"))
for _ in range(10):
    load()
print(json.dumps(len(os.listdir("/proc/self/fd")) - before))
"""
    )
    assert answer(python(code, bundle)) == 0


SMAPS = """
def weights(path):
    found, own = [], False
    for line in open("/proc/self/smaps"):
        key, *rest = line.split()
        if not key.endswith(":"):
            own = line.rstrip().endswith(path)
            found += [{}] if own else []
        elif own and rest[-1:] == ["kB"]:
            found[-1][key[:-1]] = int(rest[0])
    return found
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps(weights(sys.argv[2])), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("form", ["folder", "archive"])
def test_processes_share_the_weights(tmp_path, form):
    size = 1024
    path = tmp_path / "b"
    compile_to(path, linear_model(size))
    mapped = path / "weights.safetensors"
    if form == "archive":
        write_archive(path, tmp_path / "b.hyb")
        path = mapped = tmp_path / "b.hyb"
    processes = [python(RUN + SMAPS, path, mapped, stdin=subprocess.PIPE) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        mappings = json.loads(process.stdout.readline())
        largest = max(mappings, key=lambda mapping: mapping["Size"])
        assert largest["Anonymous"] == 0  # no page was written to, so none was copied
        shared = largest["Shared_Clean"] + largest["Shared_Dirty"]
        assert shared >= size * size * 4 // 1024
    for process in processes:
        process.communicate("\n", timeout=60)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_kernel_threads(bundle, threads):
    inputs = {"x": random(1, 3, 8, 8)}
    with hybridc.load(bundle, threads=threads) as model:
        assert_close(model.run(inputs), run_reference(branched_model(), inputs))


def test_no_threads(bundle):
    with pytest.raises(UsageError, match="threads is 0"):
        hybridc.load(bundle, threads=0)
