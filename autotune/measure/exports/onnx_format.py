"""Writes a traced program as ONNX: its names, its size, and the conditions on sizes that torch's exporter drops."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch

from ...errors import Caught, PlanError, first_line
from ...internals import lost

_MOST_BYTES = 3 * 2**29 - 2**20
"""Of an ONNX file's weights: a little less than what torch writes a second file for."""
_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul", ast.FloorDiv: "Div", ast.Mod: "Mod",
    ast.LtE: "LessOrEqual", ast.Lt: "Less", ast.GtE: "GreaterOrEqual", ast.Gt: "Greater", ast.Eq: "Equal",
}  # fmt: skip
"""ONNX's, of whole numbers that are no less than 0."""
_CONDITIONS = "conditions of a trace"
_INT64 = 7
"""ONNX's number of the type."""


def write_onnx(
    program: torch.export.ExportedProgram, file: str, inputs: Mapping[str, str], outputs: list[str], source: str
) -> None:
    """Write a program, which then refuses sizes that it was not traced for.

    Args:
        program: traced.
        file: path.
        inputs: by name, how the program's own conditions write each: ``L['batch']['x']``.
        outputs: names.
        source: the task, for errors.

    Raises:
        PlanError: ONNX cannot hold it.
        OSError: the file cannot be written.
    """
    held = [tensor for tensor in (*program.state_dict.values(), *program.constants.values()) if torch.is_tensor(tensor)]
    _check_size(sum(tensor.nbytes for tensor in {one.untyped_storage().data_ptr(): one for one in held}.values()))
    with Caught(MemoryError, OSError) as raised:
        made = torch.onnx.export(
            program,
            dynamo=True,
            input_names=[*inputs],
            output_names=outputs,
            verbose=False,
            custom_translation_table={torch.ops.aten._int_mm.default: _integer_product},
        )
    if raised.error is not None:
        raise PlanError(
            f"{source}: ONNX cannot hold what the plan computes: {first_line(raised.take())}\nUse --to pt2."
        )
    assert made is not None, "a program comes back where no file is named"
    graph: Any = made.model.graph
    _check_size(sum(value.const_value.nbytes for value in graph.initializers.values()))
    if (guards := guards_of(program)) is None:
        raise PlanError(f"--to onnx: {lost(_CONDITIONS)}: a file would take sizes that it is wrong for. Use --to pt2.")
    _hold_sizes(graph, guards, inputs, source)
    _make_names_unique(graph, {*inputs, *outputs})
    made.save(file)


def _check_size(num_bytes: int) -> None:
    if num_bytes > _MOST_BYTES:
        raise PlanError(
            f"--to onnx: a file holds at most {_MOST_BYTES:,} bytes of weights, but there are {num_bytes:,}. "
            "Use --to pt2."
        )


def guards_of(program: torch.export.ExportedProgram) -> list[str] | None:
    """Conditions on sizes that a trace is right under, as Python: ``L['batch'].size()[1] <= 16``. None where this torch
    does not tell."""
    return None if lost(_CONDITIONS) is not None else [*program._guards_code]


def _hold_sizes(graph: Any, guards: list[str], inputs: Mapping[str, str], source: str) -> None:
    """Let the graph fail where a condition does not hold: a reshape of an input to its own shape, and one more.

    Raises:
        PlanError: a condition that ONNX has no words for.
    """
    from onnxscript import ir

    nodes: list[Any] = []
    readers = {value.name: [*value.uses()] for value in graph.inputs}
    values = {inputs[value.name]: value for value in graph.inputs}

    def add(kind: str, *given: Any, **attributes: Any) -> Any:
        made = ir.node(kind, given, attributes, name=f"sizes_{len(nodes)}")
        made.outputs[0].name = made.name
        nodes.append(made)
        return made.outputs[0]

    def built(one: ast.AST) -> Any:
        match one:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                return add(_OPERATORS[type(operator)], built(left), built(right))
            case ast.BinOp(left=left, op=operator, right=right):
                return add(_OPERATORS[type(operator)], built(left), built(right))
            case ast.Constant(value=int(number)):
                return add("Constant", value_ints=[number])
            case ast.Subscript(
                value=ast.Call(func=ast.Attribute(value=place, attr="size")), slice=ast.Constant(int(k))
            ):
                return add("Shape", values[ast.unparse(place)], start=k, end=k + 1)
        raise KeyError(ast.unparse(one))

    failed = None
    for guard in guards:
        try:
            broken = add("Cast", add("Not", built(ast.parse(guard, mode="eval").body)), to=_INT64)
        except KeyError:
            raise PlanError(
                f"{source}: what was traced is right only where {guard}, which an ONNX file cannot check. Use --to pt2."
            ) from None
        failed = broken if failed is None else add("Add", failed, broken)
    if failed is None:
        return
    gate = next(value for value in graph.inputs if any(inputs[value.name] in guard for guard in guards))
    held = add("Reshape", gate, add("Add", add("Shape", gate), failed))
    held.producer().name = f"only where {' and '.join(guards)}"  # an error names it
    held.shape, held.type = gate.shape, gate.type
    graph.insert_before(next(iter(graph)), nodes)
    for node, place in readers[gate.name]:
        node.replace_input_with(place, held)


def _make_names_unique(graph: Any, outer: set[str]) -> None:
    """Values within the graph give way to the names of its inputs and outputs."""
    ends = {id(value) for value in (*graph.inputs, *graph.outputs)}
    inner = [*graph.initializers.values(), *(value for node in graph.all_nodes() for value in node.outputs)]
    taken = outer | {value.name for value in inner}
    for value in inner:
        if id(value) not in ends and value.name in outer:
            value.name = unused(value.name, taken)
            taken.add(value.name)


def unused(name: str, taken: set[str]) -> str:
    """A name, or with the first number from 2 that makes it one of its own: ``logits_2``."""
    number, found = 2, name
    while found in taken:
        found, number = f"{name}_{number}", number + 1
    return found


def _integer_product(one: Any, other: Any) -> Any:
    """ONNX's operation for ``torch._int_mm``, which torch 2.13 has none for.

    Source: https://onnx.ai/onnx/operators/onnx__MatMulInteger.html
    """
    from onnxscript import opset18

    return opset18.MatMulInteger(one, other)
