"""Write the precision of each operator into an ONNX model: casts between nodes, and weights in their type."""
from __future__ import annotations

import importlib
from typing import Any, Mapping

import numpy as np

_FLOAT16_MAX = float(np.finfo(np.float16).max)
_IN_FLOAT16 = "tensor(float16)"


def package(name: str) -> Any:
    """Return a package that only exports need."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"an export to ONNX needs the packages onnx and onnxruntime ({error}).\n"
                          "Run: python -m pip install 'gluon_amp[onnx]'") from error


def tensor_types(model: Any, **options: Any) -> dict[str, int]:
    """Return the type of each tensor of a model."""
    inferred = package("onnx").shape_inference.infer_shapes(model, **options).graph
    values = [*inferred.input, *inferred.value_info, *inferred.output]
    return {**{each.name: each.type.tensor_type.elem_type for each in values},
            **{each.name: each.data_type for each in model.graph.initializer}}


class Float16:
    """Puts casts to and from float16 into an FP32 model, from its inputs to its outputs."""

    def __init__(self, model: Any, lowered: Mapping[str, bool]) -> None:
        self.onnx = package("onnx")
        self.kinds = self.onnx.TensorProto
        self.graph = model.graph
        self.lowered = lowered  # by the first output of each node: whether that runs in float16
        self.types = tensor_types(model, strict_mode=True)
        self.weights = {each.name: each for each in model.graph.initializer}
        self.version = next(each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
        self.made: dict[tuple[str, int], str] = {}  # casts, and weights in another type
        self.nodes: list[Any] = []
        self.casts = 0  # how many there are
        outputs = {each.name: each.type.tensor_type.elem_type for each in self.graph.output}
        for node in list(self.graph.node):
            self._lower(node)
            self.nodes.append(node)
        for name, kind in outputs.items():
            if self.types.get(name) != kind:
                self._cast_output(name, kind)
        del self.graph.node[:], self.graph.value_info[:]
        self.graph.node.extend(self.nodes)
        used = {name for node in self.nodes for name in node.input}.union(outputs)
        kept = [each for each in self.weights.values() if each.name in used]
        del self.graph.initializer[:]
        self.graph.initializer.extend(kept)

    def _lower(self, node: Any) -> None:
        """Give a node the types of its inputs and outputs, and casts before it."""
        kinds, schema = self.kinds, self.onnx.defs.get_schema(node.op_type, self.version, node.domain)
        known = {each.type_param_str: _IN_FLOAT16 in each.allowed_type_strs for each in schema.type_constraints}
        read, given = _variables(schema.inputs, node.input), _variables(schema.outputs, node.output)
        floats = {variable for name, variable in zip(node.output, given) if self.types.get(name) == kinds.FLOAT}
        # Nodes that are told their type by an attribute are not touched.
        may = self.lowered.get(node.output[0]) and node.op_type not in ("Cast", "Constant", "ConstantOfShape")
        low = {variable for variable in floats if may and known.get(variable)}
        if not all(self._fits(name) for name, variable in zip(node.input, read) if variable in low):
            low = set()
        # What gives no values, as Shape and Greater, reads float16 where it is given nothing else.
        for variable in {variable for variable in read if known.get(variable)} - floats:
            types = {self.types.get(name) for name, each in zip(node.input, read) if each == variable}
            low.update([variable] if types == {kinds.FLOAT16} else [])
        for position, (name, variable) in enumerate(zip(node.input, read)):
            kind = kinds.FLOAT16 if variable in low else kinds.FLOAT
            if self.types.get(name) in (kinds.FLOAT, kinds.FLOAT16) and self.types[name] != kind:
                node.input[position] = self._in_type(name, kind)
        for name, variable in zip(node.output, given):
            if self.types.get(name) == kinds.FLOAT and variable in low:
                self.types[name] = kinds.FLOAT16

    def _fits(self, name: str) -> bool:
        """Tell whether float16 can hold a constant: those of masks are large. What is computed is not known here."""
        weight = self.weights.get(name)
        if weight is None or weight.data_type != self.kinds.FLOAT:
            return True
        values = np.abs(self.onnx.numpy_helper.to_array(weight))
        return bool((values[np.isfinite(values)] <= _FLOAT16_MAX).all())

    def _in_type(self, name: str, kind: int) -> str:
        """Return the name of a tensor in another type."""
        if (name, kind) not in self.made:
            to = "fp16" if kind == self.kinds.FLOAT16 else "fp32"
            self.made[name, kind] = made = f"{name}_{to}"
            if name in self.weights:
                values = self.onnx.numpy_helper.to_array(self.weights[name]).astype(np.float16)
                self.weights[made] = self.onnx.numpy_helper.from_array(values, made)
            else:
                self.nodes.append(self.onnx.helper.make_node("Cast", [name], [made], name=f"{made}_cast", to=kind))
                self.casts += 1
            self.types[made] = kind
        return self.made[name, kind]

    def _cast_output(self, name: str, kind: int) -> None:
        """Let an output keep its name in another type than its producer gives."""
        inner = f"{name}_inner"
        for node in self.nodes:
            for names in (node.input, node.output):
                for position, each in enumerate(names):
                    if each == name:
                        names[position] = inner
        self.nodes.append(self.onnx.helper.make_node("Cast", [inner], [name], name=f"{name}_cast", to=kind))
        self.casts += 1


def _variables(formal: Any, names: Any) -> list[str]:
    """Return the type of each input or output by the schema, whose last one may stand for several."""
    known = [formal[min(position, len(formal) - 1)] for position in range(len(names))]
    return [each.type_str if each.is_homogeneous else "" for each in known]
