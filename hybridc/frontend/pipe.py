"""Several models as one: outputs of one feed inputs of a later one.

    hybridc compile a.onnx b.onnx --pipe a:out=b:in

Everything in a model gets the name of its file in front, ``a_`` and ``b_``, inputs and outputs too.
Dimensions keep their names, so ``batch`` is one dimension in all of them. The border between two
models is a tensor like any other: a plan may cut there, and a rule may name it.

    hybridc compile a.onnx b.onnx --step b=module:function

A step is Python of the user's, which runs where the bundle is loaded and gives all inputs of what
comes after it. So the models before and after are stages, and each is compiled by itself.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
from onnx import compose, helper, version_converter

from hybridc.errors import ModelError, UsageError
from hybridc.frontend.read import read_model

_LARGE = 1 << 30
"""Bytes from which on weights go to a file of their own; a protobuf message holds two of these."""

_PIPE = re.compile(r"(?P<a>[^:=]+):(?P<out>[^=]+)=(?P<b>[^:=]+):(?P<into>.+)")


@dataclass(frozen=True)
class Pipe:
    """An output that feeds an input of a later model, each by model and name."""

    source: str
    output: str
    reader: str
    input: str

    def __str__(self) -> str:
        return f"--pipe {self.source}:{self.output}={self.reader}:{self.input}"


@dataclass(frozen=True)
class Stage:
    """Models that are compiled together.

    Attributes:
        paths: The models.
        pipes: Pipes between them, as they were given.
        step: What gives the first one's inputs, as ``module:function``; empty for the caller.
    """

    paths: tuple[Path, ...]
    pipes: tuple[str, ...] = ()
    step: str = ""

    @property
    def name(self) -> str:
        """The names of its models."""
        return "+".join(path.stem for path in self.paths)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What names of its models' values start with."""
        return tuple(_prefix(path.stem) for path in self.paths)


def split_stages(
    paths: Sequence[Path], pipes: Sequence[str], steps: Sequence[str]
) -> tuple[Stage, ...]:
    """The stages that steps divide models into.

    Args:
        paths: The models, each behind those that it reads from.
        pipes: Pipes as in ``a:out=b:in``.
        steps: Steps as in ``b=module:function``.

    Raises:
        UsageError: A step cannot be read, or a pipe goes past one.
    """
    names = [path.stem for path in paths]
    if steps:
        _check_distinct(names)
    found = dict(_parse_step(text, names) for text in steps)
    if len(found) < len(steps):
        raise UsageError("--step: a model gets its inputs from one step")
    bounds = [0, *sorted(map(names.index, found)), len(paths)]
    stages = []
    for start, end in itertools.pairwise(bounds):
        inside = [text for text in pipes if _reader(text, names) in range(start, end)]
        for text in inside:
            if names.index(_parse(text, names).source) < start:
                raise UsageError(
                    f"--pipe {text}: {names[start]} comes after a step, which gives all inputs of "
                    "the models from there on"
                )
        step = found.get(names[start], "")
        stages.append(Stage(tuple(paths[start:end]), tuple(inside), step))
    return tuple(stages)


def _reader(text: str, names: Sequence[str]) -> int:
    return names.index(_parse(text, names).reader)


def _parse_step(text: str, names: Sequence[str]) -> tuple[str, str]:
    name, _, step = text.partition("=")
    if re.fullmatch(r"[\w.]+:\w+", step) is None:
        raise UsageError(f"--step {text!r} is not of the form MODEL=MODULE:FUNCTION")
    if name not in names[1:]:
        after = ", ".join(names[1:]) or "none, since there is one model only"
        raise UsageError(f"--step {text}: a step is before a model that is not the first: {after}")
    return name, step


@contextmanager
def joined_models(
    paths: Sequence[Path], texts: Sequence[str], prefixed: bool = False
) -> Iterator[Path]:
    """One model out of several, in a file that is there for the time being.

    Args:
        paths: The models, each behind those that it reads from; one alone is given as it is.
        texts: Pipes as in ``a:out=b:in``, with the names of the models' files.
        prefixed: Whether one alone gets its file's name in front of its names, too.

    Raises:
        UsageError: The pipes do not fit the models.
        ModelError: A model cannot be read, or not be brought to the others' opset.
    """
    if len(paths) == 1 and not texts and not prefixed:
        yield paths[0]
        return
    names = [path.stem for path in paths]
    pipes = [_parse(text, names) for text in texts]
    _check_names(names, pipes)
    with TemporaryDirectory() as folder:
        file = Path(folder) / f"{'+'.join(names)}.onnx"
        model = _join(dict(zip(names, _alike(paths), strict=True)), pipes)
        onnx.save(model, file, save_as_external_data=model.ByteSize() > _LARGE)
        yield file


def _parse(text: str, names: Sequence[str]) -> Pipe:
    match = _PIPE.fullmatch(text)
    if match is None:
        raise UsageError(f"--pipe {text!r} is not of the form MODEL:OUTPUT=MODEL:INPUT")
    pipe = Pipe(match["a"], match["out"], match["b"], match["into"])
    for name in (pipe.source, pipe.reader):
        if name not in names:
            raise UsageError(f"{pipe}: there is no model {name}; models are {', '.join(names)}")
    if names.index(pipe.source) >= names.index(pipe.reader):
        raise UsageError(f"{pipe}: {pipe.source} must be given before {pipe.reader}")
    return pipe


def _check_names(names: Sequence[str], pipes: Sequence[Pipe]) -> None:
    _check_distinct(names)
    for before, name in itertools.pairwise(names):
        if not any(pipe.reader == name for pipe in pipes):
            raise UsageError(
                f"nothing feeds {name}; say what does, as in --pipe {before}:OUTPUT={name}:INPUT"
            )
    fed = [(pipe.reader, pipe.input) for pipe in pipes]
    for pipe in pipes:
        if fed.count((pipe.reader, pipe.input)) > 1:
            raise UsageError(f"{pipe}: {pipe.input} is fed twice")


def _check_distinct(names: Sequence[str]) -> None:
    if len({_prefix(name) for name in names}) < len(names):
        raise UsageError(f"models are told apart by their files' names: {', '.join(names)}")


def _alike(paths: Sequence[Path]) -> list[onnx.ModelProto]:
    """The models, all of the newest opset among them."""
    for path in paths:
        read_model(path)  # says better what is wrong with a file than what follows
    models = [onnx.load(path) for path in paths]
    newest = max(_opset(model) for model in models)
    for index, (path, model) in enumerate(zip(paths, models, strict=True)):
        if _opset(model) < newest:
            try:
                models[index] = version_converter.convert_version(model, newest)
            except (RuntimeError, ValueError) as error:
                reason = str(error).strip().splitlines()[-1]
                raise ModelError(
                    f"{path} cannot be brought to opset {newest}, which the others have: {reason}"
                ) from error
    return models


def _opset(model: onnx.ModelProto) -> int:
    return max((e.version for e in model.opset_import if e.domain in ("", "ai.onnx")), default=1)


def _join(models: Mapping[str, onnx.ModelProto], pipes: Sequence[Pipe]) -> onnx.ModelProto:
    """The models one behind the other, each pipe an Identity."""
    for pipe in pipes:
        _check_types(pipe, models)
    sources = {_full(pipe.source, pipe.output) for pipe in pipes}
    readers = {_full(pipe.reader, pipe.input): _full(pipe.source, pipe.output) for pipe in pipes}
    graph = onnx.GraphProto(name="+".join(models))
    joined = onnx.ModelProto(ir_version=max(model.ir_version for model in models.values()))
    versions: dict[str, int] = {}
    for name, model in models.items():
        own = compose.add_prefix(model, _prefix(name))
        fed = {value.name for value in own.graph.input} & set(readers)
        graph.node.extend(helper.make_node("Identity", [readers[n]], [n]) for n in sorted(fed))
        graph.node.extend(own.graph.node)
        graph.input.extend(value for value in own.graph.input if value.name not in fed)
        graph.output.extend(value for value in own.graph.output if value.name not in sources)
        graph.initializer.extend(t for t in own.graph.initializer if t.name not in fed)
        graph.sparse_initializer.extend(own.graph.sparse_initializer)
        joined.functions.extend(own.functions)
        for entry in own.opset_import:
            versions[entry.domain] = max(versions.get(entry.domain, 0), entry.version)
    joined.opset_import.extend(helper.make_opsetid(*item) for item in versions.items())
    joined.graph.CopyFrom(graph)
    return joined


def _check_types(pipe: Pipe, models: Mapping[str, onnx.ModelProto]) -> None:
    """Refuse a pipe between tensors that cannot be the same."""
    source, reader = models[pipe.source].graph, models[pipe.reader].graph
    output = _find(pipe, pipe.source, pipe.output, "output", source.output)
    input_ = _find(pipe, pipe.reader, pipe.input, "input", reader.input)
    kinds = [value.type.tensor_type.elem_type for value in (output, input_)]
    if kinds[0] != kinds[1]:
        names = [onnx.TensorProto.DataType.Name(kind).lower() for kind in kinds]
        raise UsageError(f"{pipe}: the output is {names[0]} and the input {names[1]}")
    shapes = [value.type.tensor_type.shape for value in (output, input_)]
    if not all(value.type.tensor_type.HasField("shape") for value in (output, input_)):
        return
    texts = [[d.dim_value or d.dim_param or "?" for d in shape.dim] for shape in shapes]
    known = [[d.dim_value if d.HasField("dim_value") else None for d in s.dim] for s in shapes]
    if len(known[0]) != len(known[1]) or any(
        a is not None and b is not None and a != b for a, b in zip(*known, strict=True)
    ):
        forms = ["x".join(map(str, text)) for text in texts]
        raise UsageError(f"{pipe}: the output is {forms[0]} and the input {forms[1]}")


def _find(
    pipe: Pipe, model: str, name: str, what: str, values: Sequence[onnx.ValueInfoProto]
) -> onnx.ValueInfoProto:
    for value in values:
        if value.name == name:
            return value
    names = ", ".join(value.name for value in values)
    raise UsageError(f"{pipe}: {model} has no {what} {name}; it has {names}")


def _prefix(name: str) -> str:
    return re.sub(r"\W", "_", name) + "_"


def _full(model: str, name: str) -> str:
    return _prefix(model) + name
