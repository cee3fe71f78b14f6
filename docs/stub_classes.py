"""The directive ``stubclass``: a class of ``funcol._C`` from its stubs, which have types and docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils.nodes import Element, Node, TextElement
from docutils.statemachine import StringList
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

STUBS = sorted((Path(__file__).resolve().parents[1] / "python" / "funcol" / "_C").glob("*.pyi"))


class StubClass(SphinxDirective):
    """``.. stubclass:: Plan`` writes the class with its public members; those of the stub without docstrings,
    too."""

    required_arguments = 1

    def run(self) -> list[Node]:
        stub, node = class_of_stubs(self.arguments[0])
        self.env.note_dependency(str(stub))
        self.content = StringList(list(described(node)), source=str(stub))
        return self.parse_content_to_nodes()


def class_of_stubs(name: str) -> tuple[Path, ast.ClassDef]:
    for stub in STUBS:
        for node in ast.parse(stub.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return stub, node
    raise LookupError(f"no stub of funcol._C has the class {name}")


def described(node: ast.ClassDef) -> Iterator[str]:
    """The class in reStructuredText."""
    yield f".. py:class:: {node.name}"
    yield from docstring(node, "   ")
    for member in node.body:
        if not isinstance(member, ast.FunctionDef) or member.name.startswith("_"):
            continue
        is_property = any(getattr(one, "id", "") == "property" for one in member.decorator_list)
        returned = ast.unparse(member.returns) if member.returns else "None"
        if is_property:
            yield f"   .. py:property:: {member.name}"
            yield f"      :type: {returned}"
        else:
            arguments = ast.unparse(member.args).removeprefix("self, ").removeprefix("self")
            yield f"   .. py:method:: {member.name}({arguments}) -> {returned}"
        yield from docstring(member, "      ")


def docstring(node: ast.ClassDef | ast.FunctionDef, indent: str) -> Iterator[str]:
    yield ""
    for line in (ast.get_docstring(node) or "").splitlines():
        yield f"{indent}{line}" if line else ""
    yield ""


def public_name(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: TextElement) -> Element | None:
    """Signatures name ``funcol._C.Plan``, which is documented as ``funcol.redistribution.Plan``."""
    target = node.get("reftarget", "")
    if not target.startswith("funcol._C."):
        return None
    name = f"funcol.redistribution.{target.removeprefix('funcol._C.')}"
    python = env.get_domain("py")
    return python.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], name, node, text)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("stubclass", StubClass)
    app.connect("missing-reference", public_name)
    return {"parallel_read_safe": True}
