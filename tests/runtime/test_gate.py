"""The gate: what is alone is alone, and nobody waits for ever."""

import threading
import time

import pytest

from hybridc.runtime.gate import Gate


def run_all(*works):
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def test_alone_is_alone():
    gate = Gate()
    inside, seen = [], []

    def together():
        for _ in range(50):
            with gate.together():
                inside.append(1)
                time.sleep(0)
                inside.pop()

    def alone():
        for _ in range(20):
            with gate.alone():
                seen.append(len(inside))
                inside.append(1)
                time.sleep(0.001)
                inside.pop()

    run_all(together, together, together, alone, alone)
    assert seen == [0] * 40


def test_many_are_together():
    gate = Gate()
    meeting = threading.Barrier(3, timeout=20)

    def together():
        with gate.together():
            meeting.wait()

    run_all(together, together, together)


@pytest.mark.parametrize("way", ["together", "alone"])
def test_an_error_opens_it_again(way):
    gate = Gate()
    with pytest.raises(ValueError, match="no"), getattr(gate, way)():
        raise ValueError("no")
    with gate.alone():
        pass
    with gate.together():
        pass
