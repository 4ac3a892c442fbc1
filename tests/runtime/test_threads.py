"""Threads and cores: equal shares, and a caller that stays where it may run."""

import os
import threading

import pytest
import tvm_ffi

from hybridc.runtime.threads import available_cores, share_out, use_threads


@pytest.mark.parametrize(
    ("cores", "count", "shares"),
    [
        ((0, 1, 2, 3), 1, [(0, 1, 2, 3)]),
        ((0, 1, 2, 3), 2, [(0, 1), (2, 3)]),
        ((1, 3, 5), 2, [(1,), (3, 5)]),
        ((4,), 3, [(4,), (4,), (4,)]),
    ],
)
def test_shares(cores, count, shares):
    assert share_out(cores, count) == shares


@pytest.mark.usefixtures("bundle")  # which has brought TVM's runtime
def test_a_caller_keeps_its_cores():
    before = available_cores()
    found = []

    def work():
        for count in (1, len(before), 1):
            use_threads(count)
            found.append((available_cores(), tvm_ffi.get_global_func("runtime.NumThreads")()))
        use_threads(1, before[-1:])
        found.append((available_cores(), 1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[:3] == [(before, 1), (before, len(before)), (before, 1)]
    assert found[3] == (before[-1:], 1)
    assert tuple(sorted(os.sched_getaffinity(0))) == before
