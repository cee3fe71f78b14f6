"""The stubs of ``funcol._C`` have the names, parameters, defaults and types of the built module."""

from __future__ import annotations

import ast

import check_stubs
import pytest

from funcol import _C


def test_stubs_agree_with_the_built_module() -> None:
    assert check_stubs.differences(check_stubs.stub_members(), check_stubs.module_members(_C)) == []


@pytest.mark.parametrize(
    ("text", "difference"),
    [
        ("def similar_ops(name: str) -> list[str]: ...", "parameters ['name'], the binding has ['op']"),
        ("def similar_ops(op: int) -> list[str]: ...", "op is {'int'}, the binding takes {'str'}"),
        ("def similar_ops(op: str) -> int: ...", "returns {'int'}, the binding {'list'}"),
        ("def similar_ops(op: str = '') -> list[str]: ...", "defaults [\"''\"], the binding has []"),
        ("def similar_ops(op: str, /) -> list[str]: ...", "parameters are positional only"),
        ("def mesh_of(mesh: Any) -> Mesh: ...", "parameters have no names: end them with '/'"),
        ("def isend(tensor: Tensor, /) -> Any: ...", "1 parameters, the binding takes 5"),
        ("def is_pending(tensor: object) -> bool: ...", "takes arguments by position alone"),
        ("def has_active_layers(name: str, /) -> bool: ...", "1 parameters, the binding takes 0"),
        ("EVERY_RANK: str", "is str, the binding is int"),
        ("class NoRuleError(ValueError): ...", "a class with bases ['ValueError']"),
    ],
)
def test_a_stub_that_differs_is_found(text: str, difference: str) -> None:
    [stub] = ast.parse(text).body
    name = getattr(stub, "name", "EVERY_RANK")
    [found] = check_stubs.member_differences(stub, getattr(_C, name))
    assert difference in found


def test_a_missing_and_a_left_over_stub_are_found() -> None:
    stubs, members = check_stubs.stub_members(), check_stubs.module_members(_C)
    stubs["gone"] = stubs.pop("isend")
    assert check_stubs.differences(stubs, members) == [
        "gone has a stub, but the module does not have it",
        "isend has no stub",
    ]
