"""The verdict: the module in which a fault begins, out of what agrees and what does not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from .comparing import Finding


@dataclass
class Fault:
    """A fault, where it begins, and how it was recognized.

    ``direction`` is inputs, weights, forward, loss, backward, step or run; ``tensor`` is what differs, such
    as ``output`` or ``weight.grad``; ``line`` is the module's definition, ``called`` the line that calls it.
    """

    direction: str
    module: str
    kind: str
    detail: str
    tensor: str = ""
    line: str = ""
    called: str = ""


def faults_of(findings: Sequence[Finding], drawing: Collection[str]) -> list[Fault]:
    """Returns the faults that ``findings``, in the order of the reference run, show: at most one of each
    direction. ``drawing`` are the modules that drew random numbers."""
    return _Verdict(findings, drawing).faults()


class _Verdict:
    def __init__(self, findings: Sequence[Finding], drawing: Collection[str]) -> None:
        self._findings = findings
        self._drawing = drawing
        self._by_call: dict[tuple[str, int, str], list[Finding]] = {}
        for one in findings:
            self._by_call.setdefault((one.key.module, one.key.call, one.key.kind), []).append(one)

    def faults(self) -> list[Fault]:
        found = [*self._weights(), *self._inputs()]
        if found:
            return found[:1]
        found = [*self._forward()][:1] or [*self._loss()][:1]
        if found and found[0].kind == "random draws":
            return found
        backward = [*self._backward()][:1]
        if found and backward:
            backward[0].detail += " (may follow from the fault above)"
        return found + backward or [*self._step()][:1]

    def _weights(self) -> Iterator[Fault]:
        for one in self._wrong("param"):
            yield Fault("weights", one.key.module, one.kind, one.detail, one.key.path)

    def _inputs(self) -> Iterator[Fault]:
        """A batch that differs: the first call of the run has inputs that do."""
        calls = [one for one in self._findings if one.key.kind in ("input", "output")]
        if calls and calls[0].key.kind == "input":
            first = calls[0].key
            for one in self._by_call[first.module, first.call, "input"]:
                if one.agrees is False:
                    detail = (
                        f"the batch is not the reference's: {one.detail}. Draw it from a generator of its own"
                    )
                    yield Fault("inputs", first.module, one.kind, detail, f"input {one.key.path}")

    def _forward(self) -> Iterator[Fault]:
        wrong = [one for one in self._wrong("output") if not self._is_healed(one, "output")]
        matters = any(self._wrong("loss")) or any(self._wrong("grad")) or self._root_differs("output")
        if not wrong or not matters:
            return
        for wanted in (True, None):
            for one in wrong:
                inputs = [given.agrees for given in self._by_call.get((*_call(one), "input"), ())]
                if False in inputs or (wanted and None in inputs):
                    continue
                if one.key.module in self._drawing:
                    detail = "its draws cannot be matched: switch dropout off, and check again"
                    yield Fault("forward", one.key.module, "random draws", detail, "output")
                    continue
                origin = self._origin(one, "input", "output")
                yield origin or Fault(
                    "forward", one.key.module, one.kind, one.detail, f"output{one.key.path}"
                )
        for one in wrong:
            yield Fault("forward", one.key.module, one.kind, one.detail, f"output{one.key.path}")

    def _loss(self) -> Iterator[Fault]:
        for one in self._wrong("loss"):
            origin = self._origin(one, "input", "output") if one.kind == "wrong" else None
            yield origin or Fault("loss", "", one.kind, one.detail, "loss")

    def _backward(self) -> Iterator[Fault]:
        """Follows the gradients: modules in the order in which their backward passes ended."""
        weights: dict[str, list[Finding]] = {}
        for one in self._wrong("grad"):
            weights.setdefault(one.key.module, []).append(one)
        if not weights and not self._root_differs("grad_input"):
            return
        places = {
            one.key.module: i for i, one in enumerate(self._findings) if one.key.kind.startswith("grad_")
        }
        events: list[tuple[float, Finding]] = [
            (places.get(one.key.module, len(self._findings)) + 0.5, one)
            for some in weights.values()
            for one in some
        ]
        events += [
            (i, one)
            for i, one in enumerate(self._findings)
            if one.key.kind == "grad_input" and one.agrees is False and not self._is_healed(one, "grad_input")
        ]
        last: Finding | None = None
        for _, one in sorted(events, key=lambda event: event[0]):
            last = last or one
            module = one.key.module
            given = [
                each.agrees
                for (name, _, kind), some in self._by_call.items()
                if kind == "grad_output" and name == self._recorded(module)
                for each in some
            ]
            if False not in given:
                yield self._backward_fault(one, weights)
        if last is not None:
            yield self._backward_fault(last, weights)

    def _backward_fault(self, one: Finding, weights: dict[str, list[Finding]]) -> Fault:
        is_weight = one.key.kind == "grad"
        origin = self._origin(one, "grad_output", "grad_input")
        name = f"{one.key.path}.grad" if is_weight else f"gradient of input {one.key.path}"
        detail = one.detail
        alike = [(other.kind, other.detail) == (one.kind, one.detail) for other in self._wrong("grad")]
        num_all = sum(other.key.kind == "grad" and other.agrees is not None for other in self._findings)
        if is_weight and all(alike) and 2 * len(alike) > num_all:
            detail += f"; so are {len(alike)} of {num_all} gradients of parameters: look at the loss, too"
        if origin is not None:
            origin.detail += f"; it makes {name} of {one.key.module or 'the root'} wrong"
            return origin
        return Fault("backward", one.key.module, one.kind, detail, name)

    def _step(self) -> Iterator[Fault]:
        for one in self._wrong("step"):
            yield Fault("step", one.key.module, one.kind, one.detail, f"{one.key.path} after the step")

    def _wrong(self, kind: str) -> Iterator[Finding]:
        return (one for one in self._findings if one.key.kind == kind and one.agrees is False)

    def _root_differs(self, kind: str) -> bool:
        names = [name for name, _, each in self._by_call if each == kind]
        tops = {min(names, key=lambda name: name.count(".") + bool(name))} if names else set()
        return any(one.key.module in tops for one in self._wrong(kind))

    def _is_healed(self, one: Finding, kind: str) -> bool:
        """True if a module around this one agrees: the layout within is the program's own affair."""
        parent = one.key.module
        while parent:
            parent = parent.rpartition(".")[0]
            around = [
                each.agrees
                for (name, _, what), some in self._by_call.items()
                if name == parent and what == kind
                for each in some
            ]
            if around and False not in around and None not in around:
                return True
        return False

    def _recorded(self, module: str) -> str:
        """The module, or the one around it that was recorded, as a compiled one is."""
        names = {name for name, _, kind in self._by_call if kind in ("output", "grad_output")}
        while module and module not in names:
            module = module.rpartition(".")[0]
        return module

    def _origin(self, one: Finding, given: str, made: str) -> Fault | None:
        """The outermost module that made a partial tensor, which was used as if it were reduced."""
        if (
            one.kind not in ("wrong", "differs between ranks", "never reduced")
            and "counted" not in one.detail
        ):
            return None
        end = len(self._findings)
        if one.key.kind == "grad":
            module = self._recorded(one.key.module)
            used = [
                i for i, each in enumerate(self._findings) if each.partial and _is_of(each, module, given)
            ]
            if not used:
                return None
            end = used[0] + 1
        elif one.key.kind != "loss":
            end = next(i for i, each in enumerate(self._findings) if _is_wrong(each, given, made))
        chain = [each for each in self._findings[:end] if each.key.kind in (given, made)]
        origins = []
        for each in reversed(chain):
            if not each.partial or not set(each.partial.split(", ")) <= set(one.varying.split(", ")):
                break
            before = self._by_call.get((*_call(each), given), ())
            if each.key.kind == made and not any(other.partial for other in before):
                origins.append(each)
        if not origins:
            return None
        best = min(origins, key=lambda each: each.key.module.count(".") + bool(each.key.module))
        direction = "forward" if made == "output" else "backward"
        what = "output" if made == "output" else "gradient of input "
        detail = f"over {best.partial}: the reference is the sum of what the ranks have"
        return Fault(direction, best.key.module, "never reduced", detail, f"{what}{best.key.path}")


def _call(one: Finding) -> tuple[str, int]:
    return one.key.module, one.key.call


def _is_of(one: Finding, module: str, kind: str) -> bool:
    return one.key.module == module and one.key.kind == kind


def _is_wrong(one: Finding, *kinds: str) -> bool:
    return one.key.kind in kinds and one.agrees is False
