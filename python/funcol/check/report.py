"""The report of a check: a screen of text, a page, and JSON."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .comparing import Finding
from .verdict import Fault

_MOST_ROWS = 40  # of the table on a terminal
_SIGNS = {True: "agrees", False: "differs", None: "not compared"}
_COLUMNS = {"input": "inputs", "output": "outputs", "grad_output": "gradients of outputs"} | {
    "grad_input": "gradients of inputs",
    "param": "weights",
    "grad": "gradients of weights",
    "step": "after the step",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222 }
table { border-collapse: collapse } td, th { padding: 2px 12px 2px 0; text-align: left; font-weight: normal }
th { border-bottom: 1px solid #999 } code { font: 13px monospace }
.agrees { background: #d9f0d3 } .differs { background: #fdd0a2 } .fault { background: #de2d26; color: white }
.none { color: #aaa } .box { border-left: 5px solid #de2d26; padding: .3em 1em; margin: 1em 0 }
"""


@dataclass
class Report:
    """The result of :func:`funcol.check`.

    ``ok`` is true if no fault was found. ``faults`` says where they begin: ``direction`` (inputs, weights,
    forward, loss, backward, step, or run for one that raised or hung), ``module``, ``tensor``, ``kind``,
    ``detail``, and the lines that define and call the module. ``findings`` has an entry for each tensor that
    was compared. ``str()`` gives a screen of text, :meth:`html` a page with the tree of modules, :meth:`json`
    all of it for machines.
    """

    mesh: Mapping[str, int]
    dtype: str
    faults: list[Fault]
    findings: list[Finding] = field(default_factory=list)
    classes: dict[str, str] = field(default_factory=dict)  # of the modules, by name
    loss: float | None = None
    gradient_norm: float | None = None
    drawing: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        compared = [one for one in self.findings if one.agrees is not None]
        numbers = f"{len(compared)} tensors of {len(self.classes)} modules compared"
        yield f"checked on {mesh} in {self.dtype}: {numbers}"
        if self.loss is not None and self.gradient_norm is not None:
            yield f"reference: loss {self.loss:.6g}, gradient norm {self.gradient_norm:.6g}"
        if self.ok:
            yield "no fault: the parallel program computes what the reference does"
        for fault in self.faults:
            yield ""
            yield f"{_title(fault)}: {fault.kind}"
            for label, text in _facts(fault):
                for i, line in enumerate(text.splitlines()):
                    yield f"  {label if i == 0 else '':8} {line}"
        if self.drawing and not self.ok:
            yield ""
            names = ", ".join(name or "the root" for name in self.drawing[:3])
            yield f"random numbers are drawn in {names}: if draws differ, switch dropout off and check again"

    def rows(self) -> dict[str, dict[str, bool | None]]:
        """For each module and column: true if all of its tensors agree, false if one differs."""
        rows: dict[str, dict[str, bool | None]] = {name: {} for name in self.classes}
        for one in self.findings:
            row = rows.setdefault(one.key.module, {})
            column = _COLUMNS.get(one.key.kind)
            if column is not None:
                before = row.get(column)
                row[column] = one.agrees if before is None or one.agrees is False else before
        return rows

    def show(self) -> None:
        """Prints the report: the text, and the modules that differ in a table."""
        print(self)
        rows = {name: row for name, row in self.rows().items() if False in row.values()}
        if not rows:
            return
        from rich.console import Console
        from rich.table import Table

        table = Table("module", *(kind.replace(" of ", " of\n") for kind in _COLUMNS.values()), box=None)
        at_fault = {fault.module for fault in self.faults}
        for name, row in list(rows.items())[:_MOST_ROWS]:
            style = "bold red" if name in at_fault else ""
            cells = ["" if kind not in row else _cell(row[kind]) for kind in _COLUMNS.values()]
            table.add_row(name or "the root", *cells, style=style)
        Console().print("", table)
        if len(rows) > _MOST_ROWS:
            print(f"and {len(rows) - _MOST_ROWS} more modules")

    def json(self) -> str:
        """All of the report as JSON."""
        tensors: list[dict[str, Any]] = []
        for one in self.findings:
            entry = one.key._asdict() | {"result": _SIGNS[one.agrees], "layout": one.layout, "kind": one.kind}
            tensors.append(entry | {"detail": one.detail})
        head = {"ok": self.ok, "mesh": dict(self.mesh), "dtype": self.dtype, "loss": self.loss}
        rest = {"gradient_norm": self.gradient_norm, "faults": [asdict(fault) for fault in self.faults]}
        modules = {"modules": self.classes, "draws": self.drawing, "tensors": tensors}
        return json.dumps(head | rest | modules, indent=1)

    def html(self) -> str:
        """A page: the faults, and the tree of modules, coloured by what agrees."""
        faults = "".join(
            f"<div class=box><b>{html.escape(_title(fault))}: {html.escape(fault.kind)}</b><table>"
            + "".join(f"<tr><td>{label}<td><code>{html.escape(text)}</code>" for label, text in _facts(fault))
            + "</table></div>"
            for fault in self.faults
        )
        at_fault = {fault.module for fault in self.faults}
        body = []
        for name, row in self.rows().items():
            depth = name.count(".") + bool(name)
            kind = "fault" if name in at_fault else ""
            label = (
                f"{html.escape(name.rpartition('.')[2] or 'the root')}</span> {self.classes.get(name, '')}"
            )
            body.append(f'<tr><td style="padding-left:{depth * 1.5}em"><span class="{kind}">{label}')
            for column in _COLUMNS.values():
                sign = _SIGNS[row[column]] if column in row else ""
                body.append(f'<td class="{sign if sign in ("agrees", "differs") else "none"}">{sign}')
        head = "".join(f"<th>{column}" for column in ("module", *_COLUMNS.values()))
        summary = "<br>".join(html.escape(line) for line in list(self._lines())[:3])
        return (
            '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>funcol check</title>'
            f"<style>{_STYLE}</style>"
            f"<h1>funcol check</h1><p>{summary}</p>{faults}<table><tr>{head}{''.join(body)}</table></html>\n"
        )


def _title(fault: Fault) -> str:
    if fault.direction == "run":
        return "the parallel run"
    return f"{fault.direction}: {fault.module or 'the root'}"


def _facts(fault: Fault) -> Iterator[tuple[str, str]]:
    for label, text in (
        ("tensor", fault.tensor),
        ("found", fault.detail),
        ("defined", fault.line),
        ("called", fault.called),
    ):
        if text:
            yield label, text


def _cell(agrees: bool | None) -> str:
    return {True: "agrees", False: "differs", None: "-"}[agrees]
