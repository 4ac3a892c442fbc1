"""The documentation says what is so: its commands run, its tables and paths agree with the code.

Fenced blocks marked ``sh`` hold ``hybridc`` commands, which are run; a comment ``# exit N`` names
the exit code of a command. Blocks marked ``python`` are run as scripts. A block with the title of a
file in the repository is an excerpt of it. Blocks marked otherwise are left alone.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import onnx
import pytest

import hybridc.errors
from hybridc.cli.explain import find_group, group_lines
from hybridc.cli.main import commands as all_commands
from hybridc.cli.placing import read_plan
from tests.support import hybridc as run_hybridc
from tools.models import model_path

ROOT = Path(__file__).resolve().parents[2]
START = ROOT / "docs" / "getting-started.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])

_FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"\n]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"^(#+) +(.+)$", re.MULTILINE)
_EXPECTED_CODE = re.compile(r"# exit (\d+)")
DETECTOR = ("ppocr-det.onnx", "rapidocr-ch-PP-OCRv4-det-infer")
"""A real model that a page speaks of: its name there, and in the catalog."""

_OTHER_CODES = {0, 130, 141}
"""Exit codes that belong to no error: done, interrupted, and a closed pipe."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its title if it has one, and its text."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*groups) for groups in _FENCE.findall(page.read_text())]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def is_run(block: Block) -> bool:
    return block.language in ("sh", "python") and not block.title


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def on(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=name_of)


def run_page(page: Path, folder: Path) -> None:
    """Run a page's commands one by one, and its Python blocks together, in its order."""
    script = ""
    for block in filter(is_run, blocks(page)):
        if block.language == "python":
            script += block.text
            run_python(script, folder)
        else:
            for command, code in commands(block):
                outcome = run_hybridc(*command)
                assert outcome.code == code, (page.name, command, outcome)


def commands(block: Block) -> Iterator[tuple[list[str], int]]:
    """Arguments of each ``hybridc`` command of a block, with the exit code that it announces."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        assert words[0] == "hybridc", f"blocks marked sh hold hybridc commands only, not: {line}"
        expected = _EXPECTED_CODE.search(line)
        yield words[1:], int(expected[1]) if expected else 0


def run_python(script: str, folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, (script, result.stderr)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which everything of the page for newcomers was done."""
    folder = tmp_path_factory.mktemp("started")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_page(START, folder)
    return folder


@pytest.fixture
def folder(started: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own, with the model and the bundle that the pages speak of."""
    for name in ("model.onnx", "model.hyb"):
        shutil.copy(started / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@on([page for page in PAGES if page != START and any(map(is_run, blocks(page)))])
def test_commands_run(page: Path, folder: Path) -> None:
    if DETECTOR[0] in page.read_text():
        shutil.copy(model_path(DETECTOR[1]), folder / DETECTOR[0])
    run_page(page, folder)


def test_every_node_of_the_detector_is_explained(folder: Path) -> None:
    """As the page on placement promises; its commands plan the model."""
    shutil.copy(model_path(DETECTOR[1]), folder / DETECTOR[0])
    page = ROOT / "docs" / "placement.md"
    (block,) = [b for b in blocks(page) if is_run(b) and f"plan {DETECTOR[0]}" in b.text]
    ((command, _),) = commands(block)
    assert run_hybridc(*command).code == 0
    plan = read_plan(Path("det.json"))
    names = [n.name for n in onnx.load(DETECTOR[0]).graph.node if n.op_type != "Constant"]
    assert len(names) == 330
    assert len(plan.groups) == 83
    for name in names:
        lines = group_lines(plan, find_group(plan, name))
        assert re.search(r"runs on (llvm|opencl):0: cost$", lines[0])
        assert re.search(r"ms here; .* of copies: [+-].* ms in all$", lines[1])


def test_the_example_target_compiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = blocks(ROOT / "docs" / "architecture.md")
    (code,) = [block.text for block in page if block.title == "board.py"]
    (entry,) = [block.text for block in page if block.language == "toml"]
    group, name, value = re.fullmatch(r'\[.*"(.+)"\]\n(\w+) = "(.+)"\n', entry).groups()
    (folder / "board.py").write_text(code)
    metadata = folder / "board-1.0.dist-info"
    metadata.mkdir()
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(folder)
    options = ["--shape", "batch=1", "--target", name]
    assert run_hybridc("compile", "model.onnx", "-o", "board.hyb", *options).code == 0
    assert "for x86-64-v2" in run_hybridc("inspect", "board.hyb").stdout


@on(PAGES)
def test_excerpts_are_in_their_files(page: Path) -> None:
    for block in blocks(page):
        if not block.title or block.title == "board.py":
            continue
        lines = (ROOT / block.title).read_text().splitlines()
        missing = [line for line in block.text.splitlines() if line and line not in lines]
        assert missing == [], block.title


@on(PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target
        inside = page.parent != ROOT / "docs" or place.is_relative_to(ROOT / "docs")
        assert inside, f"{target} leads out of the site"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Python-Markdown and GitHub form them."""
    titles = [title for _, title in _HEADING.findall(prose(page))]
    plain = (re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles)
    return {re.sub(r"\s+", "-", title) for title in plain}


@on(PAGES)
def test_named_files_exist(page: Path) -> None:
    top = {path.name for path in ROOT.iterdir()} - {".venv", "build"}
    for text in _CODE.findall(prose(page)):
        if re.fullmatch(r"[\w.*/-]+", text) is None or text.startswith("/"):
            continue
        first, slash, _ = text.partition("/")
        of_source = text.endswith((".py", ".md", ".toml", ".yml")) and text != "board.py"
        if (slash and first in top) or of_source:
            assert list(ROOT.glob(text.rstrip("/"))), f"{name_of(page)} names {text}"


def test_exit_codes_are_those_of_the_errors() -> None:
    documented: dict[int, set[str]] = {}
    for cells in table_rows(section(ROOT / "docs" / "compile.md", "Exit codes")):
        documented[int(cells[0])] = set(_CODE.findall(cells[1]))
    defined: dict[int, set[str]] = {code: set() for code in _OTHER_CODES}
    for name, kind in inspect.getmembers(hybridc.errors, inspect.isclass):
        if issubclass(kind, hybridc.errors.HybridcError):
            defined.setdefault(kind.exit_code, set()).add(name)
    assert documented == defined


@pytest.mark.parametrize("words", sorted(all_commands()), ids=" ".join)
def test_options_are_documented(words: tuple[str, ...]) -> None:
    pages = [ROOT / "docs" / "compile.md", ROOT / "docs" / "commands.md"]
    (text,) = [found for page in pages if (found := section(page, f"`hybridc {' '.join(words)}`"))]
    documented = {option for cells in table_rows(text) for option in _CODE.findall(cells[0])}
    command = all_commands()[words]
    context = click.Context(command, help_option_names=["-h", "--help"])
    defined = {
        option
        for parameter in command.get_params(context)
        if isinstance(parameter, click.Option)
        for option in parameter.opts
    }
    assert documented == defined


def section(page: Path, title: str) -> str:
    """The text below the heading that ends in ``title``; empty if there is none."""
    parts = re.split(r"^## (.+)$", prose(page), flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    return next((text for head, text in found.items() if head.endswith(title)), "")


def table_rows(text: str) -> list[list[str]]:
    """Cells of a Markdown table's rows, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_quoted_messages_are_in_the_code() -> None:
    page = prose(ROOT / "docs" / "troubleshooting.md")
    tables = [line for line in page.splitlines() if line.startswith("| ") and "|---" not in line]
    quoted = [line.strip("| ").split(" | ")[0].replace("`", "") for line in tables]
    quoted += re.findall(r"^- \*(.+?)\*", page, re.MULTILINE)
    messages = [text for folder in ("hybridc", "passes", "targets") for text in strings(folder)]
    for message in set(quoted) - {"Message"}:
        pattern = re.compile(".{0,60}".join(map(re.escape, message.split("..."))), re.DOTALL)
        assert any(map(pattern.search, messages)), message


def strings(folder: str) -> Iterator[str]:
    """All string literals of a folder's code; in formatted ones ``...`` stands for each value."""
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "..."
                    for part in node.values
                )


def test_manifest_fields_are_documented() -> None:
    from dataclasses import fields

    from hybridc.bundle.manifest import Manifest

    rows = table_rows(section(ROOT / "docs" / "bundle.md", "Manifest"))
    documented = {name for cells in rows for name in _CODE.findall(cells[0])}
    assert documented == {field.name for field in fields(Manifest)} | {"digest"}


def test_the_protocol_of_targets_is_documented() -> None:
    from hybridc.targets.protocol import Target

    rows = table_rows(section(ROOT / "docs" / "architecture.md", "Add a target"))
    documented = {name for cells in rows for name in _CODE.findall(cells[0])}
    assert documented == {name for name in vars(Target) if not name.startswith("_")}


def test_every_page_is_in_the_site() -> None:
    listed = re.findall(r"^ +- ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in ROOT.glob("docs/*.md"))


def test_make_targets_exist() -> None:
    defined = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"\bmake ([a-z]+)\b", " ".join(_CODE.findall(prose(page)))))
        named |= set(re.findall(r"^make ([a-z]+)\b", page.read_text(), re.MULTILINE))
        assert named <= defined, name_of(page)
