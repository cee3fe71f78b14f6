"""The report of a check: a screen of text, a page, and JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .comparison import Finding
from .verdict import Fault

_MOST_ROWS = 40  # of the table on a terminal
_COLUMNS = {
    "input": "inputs",
    "output": "outputs",
    "grad_output": "gradients\nof outputs",
    "grad_input": "gradients\nof inputs",
    "param": "weights",
    "grad": "gradients\nof weights",
    "step": "after\nthe step",
}
_CELLS = {True: "[green]agrees", False: "[dark_orange]differs", None: "[dim]-"}


@dataclass
class Report:
    """The result of :func:`funcol.check`.

    ``ok`` is true if no fault was found. ``faults`` says where they begin: ``direction`` (inputs, weights,
    forward, loss, backward, norm, step, or run for one that raised or hung), ``module``, ``tensor``,
    ``kind``, ``detail``, and the lines that define and call the module. ``findings`` has an entry for each
    tensor that was compared. ``str()`` returns a screen of text, :meth:`html` a page with the tree of
    modules, :meth:`json` all of it for machines.
    """

    mesh: Mapping[str, int]
    dtype: str
    faults: list[Fault]
    findings: list[Finding] = field(default_factory=list)
    modules: Mapping[str, str] = field(default_factory=dict)  # their classes, by name
    loss: float | None = None
    gradient_norm: float | None = None
    parallel_norm: float | None = None  # None: no rank knows it, since plain gradients are shards
    drawing: list[str] = field(default_factory=list)  # modules that drew random numbers

    @property
    def ok(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        num = sum(one.agrees is not None for one in self.findings)
        lines = [f"checked on {mesh} in {self.dtype}: {num} tensors of {len(self.modules)} modules compared"]
        if self.gradient_norm is not None:
            loss = "" if self.loss is None else f"loss {self.loss:.6g}, "
            norm = "not known" if self.parallel_norm is None else f"{self.parallel_norm:.6g}"
            lines.append(
                f"reference: {loss}gradient norm {self.gradient_norm:.6g}; of the parallel run: {norm}"
            )
        if self.ok:
            lines.append("no fault: the parallel program computes what the reference does")
        for fault in self.faults:
            place = f"{fault.direction}: {fault.module or 'the root'}"
            lines += ["", f"{'the parallel run' if fault.direction == 'run' else place}: {fault.kind}"]
            labels = ("tensor", "found", "defined", "called")
            texts = (fault.tensor, fault.detail, fault.line, fault.called)
            for label, text in zip(labels, texts, strict=True):
                lines += [f"  {'' if i else label:8} {line}" for i, line in enumerate(text.splitlines())]
        if self.drawing and not self.ok:
            names = ", ".join(name or "the root" for name in self.drawing[:3])
            advice = "if draws differ, switch dropout off and check again"
            lines += ["", f"random numbers are drawn in {names}: {advice}"]
        return "\n".join(lines)

    def rows(self) -> dict[str, dict[str, bool | None]]:
        """Returns for each module and kind of tensor true if all tensors agree, and false if one differs."""
        rows: dict[str, dict[str, bool | None]] = {name: {} for name in self.modules}
        for one in self.findings:
            row = rows.setdefault(one.module, {})
            before = row.get(one.kind)
            row[one.kind] = one.agrees if before is None or one.agrees is False else before
        return rows

    def show(self) -> None:
        """Prints the report: the text, and the modules that differ in a table."""
        self._print(Console(), is_full=False)

    def html(self) -> str:
        """Returns a page: the faults, and the tree of modules, colored by what agrees."""
        console = Console(record=True, file=io.StringIO(), width=200)
        self._print(console, is_full=True)
        return console.export_html()

    def _print(self, console: Console, is_full: bool) -> None:
        """Prints the text, and a table: the tree of all modules, or a list of those that differ."""
        console.print(Text(str(self)), soft_wrap=True)
        rows = {name: row for name, row in self.rows().items() if is_full or False in row.values()}
        at_fault = {fault.module for fault in self.faults}
        table = Table("module", *_COLUMNS.values(), box=None)
        for name, row in [*rows.items()][: len(rows) if is_full else _MOST_ROWS]:
            label = name
            if is_full:
                depth = name.count(".") + bool(name)
                label = f"{'  ' * depth}{name.rpartition('.')[2]}  {self.modules.get(name, '')}"
            style = "bold white on red" if name in at_fault else ""
            cells = ["" if kind not in row else _CELLS[row[kind]] for kind in _COLUMNS]
            table.add_row(Text(label or "the root", style), *cells)
        if rows:
            console.print("", table)
        if not is_full and len(rows) > _MOST_ROWS:
            console.print(f"and {len(rows) - _MOST_ROWS} more modules")

    def json(self) -> str:
        """Returns all of the report as JSON."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=1)

    @classmethod
    def of(cls, text: str) -> Report:
        """Returns the report whose :meth:`json` is ``text``."""
        fields = json.loads(text)
        del fields["ok"]
        fields["faults"] = [Fault(**one) for one in fields["faults"]]
        fields["findings"] = [Finding(**one) for one in fields["findings"]]
        return cls(**fields)
