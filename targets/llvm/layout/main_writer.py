"""Write ``main`` anew around weights in another form: what all that packs weights does alike.

    main(inputs, weights)  ->  main(inputs, packed weights)

Who packs says which weights there are then, and writes the bindings block by block. Kernels come
as tensor expressions, and the same kernel is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.llvm.layout.graph import bindings_of, dims_of, variables_used
from hybridc.targets.relax_pipeline import rewrite_main
from tvm import relax, te, tirx

from hybridc.bundle.tensors import Array

FUSES_AHEAD = 4
"""TVM's number for a kernel into which element-wise kernels that follow are fused."""


def weight_names(module: tvm.IRModule, weights: Mapping[str, Array]) -> dict[Any, str]:
    """Name of the weight, by the variable of ``main`` that it is bound to."""
    main, names = module["main"], list(weights)
    found = {}
    for binding in bindings_of(main):
        value: Any = getattr(binding, "value", None)
        if isinstance(value, tvm.ir.TupleGetItem) and value.tuple_value.same_as(main.params[-1]):
            found[binding.var] = names[int(value.index)]
    return found


@dataclass
class MainWriter:
    """Writes a module whose ``main`` takes the given weights as one tuple, last.

    Attributes:
        module: The module as it was.
        weights: The new weights by name, in order.
        functions: Variables of new kernels, by what they do.
    """

    module: tvm.IRModule
    weights: Mapping[str, Array]
    functions: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def parameter(self) -> relax.Var:
        """The new tuple of weights."""
        arrays = self.weights.values()
        types = [relax.TensorType(array.shape, array.dtype.name) for array in arrays]
        return relax.Var("model_params", relax.TupleType(types))

    @cached_property
    def builder(self) -> relax.BlockBuilder:
        """Holds the module's functions, new ones included."""
        return relax.BlockBuilder(self.module)

    @cached_property
    def _positions(self) -> Mapping[str, int]:
        return {name: position for position, name in enumerate(self.weights)}

    def item(self, name: str) -> Any:
        """A weight, taken out of the tuple."""
        return relax.TupleGetItem(self.parameter, self._positions[name])

    def type_of(self, value: Any) -> Any:
        """Type of a weight that was taken out of the tuple, or of a call of a kernel."""
        if isinstance(value, relax.TupleGetItem):
            return self.parameter.ty.fields[value.index]
        return value.ty_args[0]

    def written(self, block: Callable[[Any], Any]) -> tvm.IRModule:
        """The new module; ``block`` gives the new form of each block of bindings."""
        parameters = [*self.module["main"].params[:-1], self.parameter]
        return rewrite_main(self.builder, self.module, block, parameters)

    def rewritten(
        self,
        names: Mapping[Any, str],
        packed: Mapping[Any, str],
        compute: Callable[[Any, Any], Any],
    ) -> tvm.IRModule:
        """The new module where some bindings are computed with a packed weight each.

        Args:
            names: Name of the weight, by the variable that it is bound to.
            packed: Name of the packed weight, by the variable of the binding that takes it.
            compute: From such a binding and the variable of its packed weight to its new value.
        """

        def block(old: Any) -> Any:
            bindings: list[Any] = []
            for binding in old.bindings:
                variable = binding.var
                if variable in packed:
                    item = self.item(packed[variable])
                    weight = type(variable)(f"{variable.name}_packed", self.type_of(item))
                    bindings.append(relax.VarBinding(weight, item))
                    bindings.append(relax.VarBinding(variable, compute(binding, weight)))
                elif variable not in names:
                    bindings.append(binding)
                elif names[variable] in self.weights:
                    bindings.append(relax.VarBinding(variable, self.item(names[variable])))
            return type(old)(bindings)

        return self.written(block)

    def kernel(
        self,
        name: str,
        key: Any,
        build: Callable[..., te.Tensor],
        *operands: Any,
        fuses: bool = False,
        shape: Sequence[Any] | None = None,
    ) -> Any:
        """A call of a kernel that is given as tensor expression.

        Args:
            name: What to call it.
            key: The same for the same kernel.
            build: From a placeholder for each operand to the result; it takes the result's shape
                last, if that is given.
            operands: Variables of known type.
            fuses: Whether element-wise kernels that follow are fused into it.
            shape: Of the result, where it is not known from what ``build`` gives.
        """
        given = [] if shape is None else [shape]
        sizes = kernel_sizes([*map(dims_of, operands), *given])
        key = (key, sizes.key)
        if key not in self.functions:
            kinds = [str(operand.ty.dtype) for operand in operands]
            pairs = enumerate(zip(sizes.shapes, kinds, strict=False))
            tensors = [te.placeholder(size, kind, f"p{i}") for i, (size, kind) in pairs]
            result = build(*tensors, *sizes.shapes[len(operands) :])
            function = te.create_prim_func([*tensors, *sizes.parameters(len(operands)), result])
            function = function.without_attr("global_symbol").with_attr("tirx.noalias", True)
            if fuses:
                function = function.with_attr("op_pattern", FUSES_AHEAD)
            self.functions[key] = self.builder.add_func(function, name)
        primitives = sizes.arguments(len(operands))
        return self.call(self.functions[key], *operands, *primitives, shape=shape)

    def call(self, variable: Any, *operands: Any, shape: Sequence[Any] | None = None) -> Any:
        """A call of a kernel with one result, by its variable.

        Args:
            variable: The kernel's.
            operands: What it takes.
            shape: Of the result, where it is not known.
        """
        output = self.builder.get()[variable].params[-1]
        sizes = [int(dim) for dim in output.shape] if shape is None else list(shape)
        kind = relax.TensorType(sizes, str(output.dtype))
        return relax.call_tir(variable, relax.Tuple(list(operands)), kind)


@dataclass(frozen=True)
class KernelSizes:
    """Shapes of a kernel's operands and of its result, in variables of its own.

    Attributes:
        key: The same for shapes of the same form.
        shapes: The shapes.
        variables: Its variable, by the one outside.
    """

    key: str
    shapes: list[list[Any]]
    variables: Mapping[Any, Any]

    def arguments(self, operands: int) -> list[Any]:
        """Variables outside that have to be given, since no operand has them as a size."""
        seen = [dim for shape in self.shapes[:operands] for dim in shape]
        return [
            outside
            for outside, own in self.variables.items()
            if not any(own.same_as(dim) for dim in seen)
        ]

    def parameters(self, operands: int) -> list[Any]:
        """The kernel's variables for these."""
        return [self.variables[outside] for outside in self.arguments(operands)]


def kernel_sizes(shapes: Sequence[Sequence[Any]]) -> KernelSizes:
    """Shapes for a kernel, with variables of its own for those in the given ones."""
    used = [v for s in shapes for dim in s for v in tirx.analysis.undefined_vars(_index(dim))]
    variables = {variable: tirx.Var(variable.name, variable.ty.dtype) for variable in used}

    def own(dim: Any) -> Any:
        return tvm_ffi.structural_map(_index(dim), (tirx.Var, lambda v: variables.get(v, v)))

    # Names may occur twice, positions do not.
    order = {variable: position for position, variable in enumerate(variables)}

    def text(dim: Any) -> str:
        numbers = [str(order[v]) for v in tirx.analysis.undefined_vars(_index(dim))]
        return ":".join([str(dim), *numbers])

    key = "; ".join(",".join(map(text, shape)) for shape in shapes)
    return KernelSizes(key, [list(map(own, shape)) for shape in shapes], variables)


def _index(dim: Any) -> Any:
    return tirx.IntImm("int64", dim) if isinstance(dim, int) else dim


def weights_left(
    module: tvm.IRModule,
    weights: Mapping[str, Array],
    names: Mapping[Any, str],
    replaced: Mapping[Any, Any],
) -> dict[str, Array]:
    """The weights that ``main`` reads but for the bindings in ``replaced``, in order."""
    main = module["main"]
    needed = variables_used(main.body.body)
    for binding in bindings_of(main):
        if binding.var not in replaced:
            needed |= variables_used(binding.value)
    left = {name for variable, name in names.items() if variable in needed}
    return {name: array for name, array in weights.items() if name in left}
