"""Make one kernel of attention's products, mask and softmax.

    permute(matmul(softmax(mask(matmul(query, permute(key)))), value))

Swaps of axes become part of how the kernel reads its operands and stores its result. Runs before
Relax's operators become tensor programs. See ``schedules/attention.py`` for the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.layout.graph import bindings_of, sizes_of, variables_used
from hybridc.targets.llvm.layout.main_writer import MainWriter
from hybridc.targets.llvm.schedules.attention_blocks import (
    ATTENTION,
    BLOCKS,
    Sizes,
    plan_attention,
)
from hybridc.targets.llvm.schedules.blocks import (
    axes_of,
    collect,
    inner_blocks,
    is_spatial,
    same_variables,
    store_of,
)
from hybridc.targets.llvm.schedules.statements import int64
from hybridc.targets.llvm.schedules.tails import substitute
from hybridc.targets.relax_pipeline import rewrite_main
from tvm import relax, te, tirx

from hybridc.bundle.tensors import Array

PLAIN = (0, 1, 2, 3)

DTYPE = "float32"


def fuse_attention(module: tvm.IRModule, weights: Mapping[str, Array], cpu: Cpu) -> tvm.IRModule:
    """The module with one kernel for each attention of known sizes that gains by it.

    Args:
        module: A Relax module whose ``main`` takes the weights as one tuple, last.
        weights: Their arrays by name, in order.
        cpu: The processor.
    """
    reader = _Reader(module)
    found = {}
    for variable in reader.values:
        try:
            attention = reader.attention(variable)
            plan_attention(attention.sizes, cpu)
        except Misfit:
            continue
        found[attention.result] = attention
    if not found:
        return module
    writer = MainWriter(module, weights)

    def block(old: Any) -> Any:
        bindings = []
        for binding in old.bindings:
            if binding.var in found:
                binding = relax.VarBinding(binding.var, found[binding.var].call(writer))
            bindings.append(binding)
        return type(old)(bindings)

    return rewrite_main(writer.builder, module, block)


@dataclass(frozen=True)
class _Operand:
    """An operand before its axes were swapped, and which axis of it is which of the product's."""

    variable: Any
    axes: Sequence[int] = PLAIN

    def at(self, tensor: te.Tensor, place: Sequence[Any]) -> Any:
        """The element of a place in the product's order."""
        own = dict(zip(self.axes, place, strict=True))
        return tensor(*(own[axis] for axis in range(len(place))))


@dataclass(frozen=True)
class _Mask:
    """What is done to each score.

    Attributes:
        function: The tensor program.
        position: Which of its parameters has the scores.
        operands: The others.
    """

    function: tirx.PrimFunc
    position: int
    operands: tuple[Any, ...]

    @cached_property
    def block(self) -> Any:
        """Its only block.

        Raises:
            Misfit: It has another form.
        """
        blocks = inner_blocks(self.function)
        if len(blocks) != 1 or not is_spatial(blocks[0]):
            raise Misfit("not element by element")
        (block,), source = blocks, self.function.params[self.position]
        store, axes = store_of(block), axes_of(block)
        if store is None or not same_variables(store.indices, axes):
            raise Misfit("not element by element")
        for load in collect(store.value, tvm.ir.TensorLoad):
            if load.source.same_as(source) and not same_variables(load.indices, axes):
                raise Misfit("a score depends on others")
        return block

    def element(self, place: Sequence[Any], scores: te.Tensor, given: Sequence[te.Tensor]) -> Any:
        """The score of a place, from the tensors that the operands are."""
        parameters = list(self.function.params)[: len(given) + 1]
        tensors = [*given[: self.position], scores, *given[self.position :]]

        def replace(load: Any) -> Any:
            (number,) = (i for i, p in enumerate(parameters) if load.source.same_as(p))
            return tensors[number](*load.indices)

        store: Any = store_of(self.block)
        value = substitute(store.value, dict(zip(axes_of(self.block), place, strict=True)))
        return tvm_ffi.structural_map(value, [(tvm.ir.TensorLoad, replace)])


@dataclass(frozen=True)
class _Attention:
    """Attention in ``main``.

    Attributes:
        sizes: How large it is.
        query, key, value: Its operands; ``key`` with the axes of ``(batch, head, key, depth)``.
        mask: What is done to scores, if anything.
        result: The variable of the result.
        order: Which of the axes batch, head, query and column each axis of the result is.
    """

    sizes: Sizes
    query: _Operand
    key: _Operand
    value: _Operand
    mask: _Mask | None
    result: Any
    order: Sequence[int]

    def call(self, writer: MainWriter) -> Any:
        """A call of the kernel."""
        own = [self.query, self.key, self.value]
        others = self.mask.operands if self.mask is not None else ()
        operands = [*(operand.variable for operand in own), *others]
        shapes = [(sizes_of(o), str(o.ty.dtype)) for o in operands]
        function = None if self.mask is None else tvm_ffi.structural_hash(self.mask.function)
        axes = [tuple(operand.axes) for operand in own]
        key = (self.sizes, tuple(shapes), tuple(axes), tuple(self.order), function)
        return writer.kernel("attention", repr(key), self._kernel, *operands, fuses=True)

    def _kernel(
        self, query: te.Tensor, key: te.Tensor, value: te.Tensor, *given: te.Tensor
    ) -> te.Tensor:
        s = self.sizes
        front = tuple(map(int64, (s.batch, s.heads, s.queries)))
        scored = (*front, int64(s.keys))
        names = iter(BLOCKS)
        depth, keys = _axis(s.depth), _axis(s.keys)

        def product(b: Any, h: Any, q: Any, t: Any) -> Any:
            first = self.query.at(query, (b, h, q, depth))
            return te.sum(first * self.key.at(key, (b, h, t, depth)), axis=depth)

        scores = te.compute(scored, product, next(names))
        masked = te.compute(
            scored,
            lambda *p: scores(*p) if self.mask is None else self.mask.element(p, scores, given),
            next(names),
        )
        most = te.compute(front, lambda *p: te.max(masked(*p, keys), axis=keys), next(names))
        raised = te.compute(scored, lambda *p: te.exp(masked(*p) - most(*p[:-1])), next(names))
        keys = _axis(s.keys)
        total = te.compute(front, lambda *p: te.sum(raised(*p, keys), axis=keys), next(names))
        share = te.compute(scored, lambda *p: raised(*p) / total(*p[:-1]), next(names))
        summed = _axis(s.keys)

        def element(*place: Any) -> Any:
            at = dict(zip(self.order, place, strict=True))
            b, h, q, column = (at[axis] for axis in PLAIN)
            return te.sum(
                share(b, h, q, summed) * self.value.at(value, (b, h, summed, column)), axis=summed
            )

        full = (*front, int64(s.columns))
        shape = [full[axis] for axis in self.order]
        annotation = [*vars(s).values(), *self.order]
        return te.compute(shape, element, "attention", attrs={ATTENTION: annotation})


def _axis(size: int) -> Any:
    return te.reduce_axis((int64(0), int64(size)), "k")


@dataclass
class _Reader:
    """Reads ``main``.

    Attributes:
        module: The module.
        values: What a variable is bound to.
        readers: Which variables' values read a variable; ``None`` stands for the result of all.
    """

    module: tvm.IRModule
    values: dict[Any, Any] = field(default_factory=dict)
    readers: dict[Any, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        main = self.module["main"]
        for binding in bindings_of(main):
            self.values[binding.var] = getattr(binding, "value", None)
            for variable in variables_used(binding.value):
                self.readers.setdefault(variable, []).append(binding.var)
        for variable in variables_used(main.body.body):
            self.readers.setdefault(variable, []).append(None)

    def attention(self, variable: Any) -> _Attention:
        """The attention whose last product is bound to a variable.

        Raises:
            Misfit: There is none.
        """
        weights, value = self._call(variable, "relax.matmul").args
        (score,) = self._inner(weights, "relax.nn.softmax").args
        if int(self.values[weights].attrs.axis) not in (-1, 3):
            raise Misfit("a softmax of other axes")
        mask, score = self._mask(score)
        query, key = self._inner(score, "relax.matmul").args
        tensors = [variable, query, key, value, score, weights]
        if any(str(tensor.ty.dtype) != DTYPE for tensor in tensors):
            raise Misfit("other types")
        sizes = _sizes(*map(sizes_of, (query, key, value)))
        keys, values = self._origin(key), self._origin(value)
        if values.axes[-1] != PLAIN[-1]:
            values = _Operand(value)
        turned = _Operand(keys.variable, (*keys.axes[:2], keys.axes[3], keys.axes[2]))
        result, order = self._result(variable)
        return _Attention(sizes, self._origin(query), turned, values, mask, result, order)

    def _name(self, variable: Any) -> str:
        """Name of the operator that a variable is the result of, or nothing."""
        return str(getattr(getattr(self.values.get(variable), "op", None), "name", ""))

    def _call(self, variable: Any, name: str) -> Any:
        if self._name(variable) != name:
            raise Misfit(f"not {name}")
        return self.values[variable]

    def _inner(self, variable: Any, name: str) -> Any:
        """A call whose result nothing else reads."""
        if len(self.readers[variable]) != 1:
            raise Misfit("something else reads it")
        return self._call(variable, name)

    def _mask(self, score: Any) -> tuple[_Mask | None, Any]:
        """What is done to scores, and the scores."""
        if self._name(score) != "relax.call_tir":
            return None, score
        function, fields, *sizes = self._inner(score, "relax.call_tir").args
        operands = list(fields.fields)
        if sizes or not all(isinstance(operand, tvm.ir.Var) for operand in operands):
            raise Misfit("sizes as operands")
        names = list(map(self._name, operands))
        products = [i for i, name in enumerate(names) if name == "relax.matmul"]
        if len(products) != 1:
            raise Misfit("not one product")
        position = products[0]
        others = (*operands[:position], *operands[position + 1 :])
        mask = _Mask(self.module[function], position, others)
        _ = mask.block, list(map(sizes_of, others))
        return mask, operands[position]

    def _origin(self, variable: Any) -> _Operand:
        """An operand before all swaps of its axes."""
        axes: Sequence[int] = PLAIN
        while self._name(variable) == "relax.permute_dims":
            value = self.values[variable]
            swap = _swap(value)
            axes = tuple(swap[axis] for axis in axes)
            variable = value.args[0]
        return _Operand(variable, axes)

    def _result(self, variable: Any) -> tuple[Any, Sequence[int]]:
        """The product's result after a swap of its axes, if that alone reads it."""
        readers = self.readers.get(variable, [])
        if len(readers) == 1 and self._name(readers[0]) == "relax.permute_dims":
            order = _swap(self.values[readers[0]])
            if order[-1] == PLAIN[-1]:
                return readers[0], order
        return variable, PLAIN


def _swap(value: Any) -> list[int]:
    axes = value.attrs.axes
    return list(PLAIN)[::-1] if axes is None else [int(axis) % 4 for axis in axes]


def _sizes(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> Sizes:
    """Sizes of attention, with keys as ``(batch, heads, depth, keys)``.

    Raises:
        Misfit: They do not fit together.
    """
    if not len(query) == len(key) == len(value) == len(PLAIN) or 0 in (*query, *key, *value):
        raise Misfit("other ranks")
    if not query[:2] == key[:2] == value[:2]:
        raise Misfit("operands that are repeated")
    return Sizes(query[0], query[1], query[2], key[3], query[3], value[3])
