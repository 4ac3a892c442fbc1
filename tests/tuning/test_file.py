"""Tuning files: what is written is read, and what is damaged or foreign is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hybridc.targets.protocol import Device
from hybridc.targets.tuning import Figures, Problem, figures
from hypothesis import given
from hypothesis import strategies as st

from hybridc.errors import UsageError
from hybridc.tuning.file import (
    SCHEMA,
    TuningFile,
    check_code,
    code_for,
    read_file,
    to_json,
)
from hybridc.tuning.measure import Measured, Times

DEVICE = Device("llvm:0", "llvm", "")


def measured(sizes: Figures, choice: Figures, kind: str = "blocked") -> Measured:
    return Measured(Problem(kind, sizes), choice, Times(1e-3, 2e-3), Times(3e-3, 4e-3), 5)


def empty() -> TuningFile:
    return TuningFile(SCHEMA, code_for(DEVICE), "", 0)


NUMBERS = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 2**40), min_size=1)


@given(
    st.lists(
        st.tuples(NUMBERS, NUMBERS), max_size=6, unique_by=lambda pair: str(sorted(pair[0].items()))
    )
)
def test_what_is_written_is_read(tmp_path_factory: Any, pairs: list[Any]) -> None:
    rows = [measured(figures(**sizes), figures(**choice)) for sizes, choice in pairs]
    file = empty().extended(rows, "a processor", 2)
    path = tmp_path_factory.mktemp("tuning") / "tuning.json"
    path.write_text(to_json(file))
    assert read_file(path) == file
    tuning = read_file(path).tuning()
    assert all(tuning.choice(row.problem) == row.choice for row in rows)
    backwards = empty().extended(rows[::-1], "a processor", 2)
    assert to_json(backwards) == to_json(file)


def test_the_order_of_names_does_not_matter(tmp_path: Path) -> None:
    row = measured(figures(a=1, b=2), figures(c=3, d=4))
    data = json.loads(to_json(empty().extended([row], "", 1)))
    for name in ("sizes", "choice"):
        data["kernels"][0][name] = dict(reversed(data["kernels"][0][name].items()))
    (tmp_path / "t.json").write_text(json.dumps(data))
    assert read_file(tmp_path / "t.json").tuning().choice(row.problem) == row.choice


def _twice(data: dict[str, Any]) -> None:
    data["kernels"] *= 2


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "schema": lambda data: data.update(schema="2.0"),
    "no schema": lambda data: data.pop("schema"),
    "no code": lambda data: data.pop("code"),
    "kernels are a number": lambda data: data.update(kernels=3),
    "a size is a text": lambda data: data["kernels"][0]["sizes"].update(a="1"),
    "a choice is missing": lambda data: data["kernels"][0].pop("choice"),
    "a kernel occurs twice": _twice,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused(tmp_path: Path, name: str) -> None:
    row = measured(figures(a=1), figures(b=2))
    data = json.loads(to_json(empty().extended([row], "", 1)))
    DAMAGES[name](data)
    (tmp_path / "t.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match=r"t\.json is no tuning file, or damaged"):
        read_file(tmp_path / "t.json")


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 10_000])
def test_what_is_no_json_object_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "t.json").write_bytes(text)
    with pytest.raises(UsageError, match=r"t\.json"):
        read_file(tmp_path / "t.json")


@pytest.mark.parametrize("name", ["hybridc", "tvm", "target", "built_for", "architecture"])
def test_what_was_measured_for_other_code_is_refused(tmp_path: Path, name: str) -> None:
    code = code_for(DEVICE)
    foreign = dataclasses.replace(empty(), code=dataclasses.replace(code, **{name: "another"}))
    with pytest.raises(UsageError, match=f"measured for {name.replace('_', ' ')} another"):
        check_code(foreign, tmp_path / "t.json", code)


def test_other_instruction_sets_are_refused(tmp_path: Path) -> None:
    code = code_for(DEVICE)
    foreign = dataclasses.replace(empty(), code=dataclasses.replace(code, cpu_flags=("mmx",)))
    with pytest.raises(UsageError, match="cpu flags mmx"):
        check_code(foreign, tmp_path / "t.json", code)
    check_code(empty(), tmp_path / "t.json", code)
