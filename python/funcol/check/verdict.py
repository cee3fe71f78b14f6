"""The verdict: the module in which a fault begins, out of what agrees and what does not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .comparison import Finding

_TRACED = ("wrong", "differs between ranks", "never reduced")  # kinds of faults that a partial tensor makes


@dataclass
class Fault:
    """A fault, where it begins, and how it was recognized.

    ``direction`` is inputs, weights, forward, loss, backward, norm, step or run; ``tensor`` is what differs,
    such as ``output`` or ``weight.grad``; ``line`` is the module's definition, ``called`` the line that calls
    it.
    """

    direction: str
    module: str
    kind: str
    detail: str
    tensor: str = ""
    line: str = ""
    called: str = ""


class Verdict:
    """The faults that ``findings``, in the order of the reference run, show. ``drawing`` are the modules that
    drew random numbers; ``lines`` has those that define and call a module."""

    def __init__(
        self, findings: Sequence[Finding], drawing: Collection[str], lines: Mapping[str, tuple[str, str]]
    ) -> None:
        self._findings = findings
        self._drawing = drawing
        self._lines = lines
        self._by_key: dict[tuple[str, str], list[Finding]] = {}  # by module and kind
        for one in findings:
            self._by_key.setdefault((one.module, one.kind), []).append(one)

    def faults(self) -> list[Fault]:
        """Returns at most one fault of the forward and one of the backward direction."""
        for one in self._differing("param"):
            return [self._fault("weights", one, one.path)]
        first = next((one for one in self._findings if one.kind in ("input", "output")), None)
        for one in self._differing("input"):
            if first is not None and (one.module, one.call) == (first.module, first.call):
                fault = self._fault("inputs", one, f"input {one.path}")
                advice = "Draw it from a generator of its own"
                fault.detail = f"the batch is not the reference's: {fault.detail}. {advice}"
                return [fault]
        forward = self._forward() or self._loss()
        if forward is not None and forward.kind == "random draws":
            return [forward]
        backward = self._backward()
        if forward is not None and backward is not None:
            backward.detail += " (may follow from the fault above)"
        found = [one for one in (forward, backward) if one is not None]
        steps = (self._fault("step", one, f"{one.path} after the step") for one in self._differing("step"))
        norms = (self._fault("norm", one, "the norm of all gradients") for one in self._differing("norm"))
        return found or [*norms, *steps][:1]

    def _forward(self) -> Fault | None:
        """Returns the first output that differs although the inputs agree, or else the first that differs."""
        wrong = [one for one in self._differing("output") if not self._is_healed(one)]
        if not wrong or not (
            self._differing("loss") or self._differing("grad") or self._root_differs("output")
        ):
            return None
        one = min(wrong, key=lambda one: self._doubt(one, "input"))
        if self._doubt(one, "input") < 2 and one.module in self._drawing:
            fault = self._fault("forward", one, "output")
            fault.kind = "random draws"
            fault.detail = "its draws cannot be matched: switch dropout off, and check again"
            return fault
        return self._origin(one, "input", "output") or self._fault("forward", one, f"output{one.path}")

    def _loss(self) -> Fault | None:
        for one in self._differing("loss"):
            origin = self._origin(one, "input", "output") if one.fault == "wrong" else None
            return origin or self._fault("loss", one, "loss")
        return None

    def _backward(self) -> Fault | None:
        """Returns the first gradient of an input or a parameter that differs although those of the module's
        outputs agree, in the order in which the backward passes of modules end."""
        weights = self._differing("grad")
        if not weights and not self._root_differs("grad_input"):
            return None
        places = {one.module: i for i, one in enumerate(self._findings) if one.kind.startswith("grad_")}
        wrong = weights + [one for one in self._differing("grad_input") if not self._is_healed(one)]
        wrong.sort(key=lambda one: (places.get(one.module, len(self._findings)), one.kind == "grad"))
        if not wrong:
            return None
        one = min(wrong, key=lambda one: self._doubt(one, "grad_output") == 2)
        name = f"{one.path}.grad" if one.kind == "grad" else f"gradient of input {one.path}"
        origin = self._origin(one, "grad_output", "grad_input")
        if origin is not None:
            origin.detail += f"; it makes {name} of {one.module or 'the root'} wrong"
        return origin or self._fault("backward", one, name)

    def _origin(self, one: Finding, given: str, made: str) -> Fault | None:
        """Returns the outermost module that made a partial tensor, which was used as if it were reduced."""
        if one.fault not in _TRACED and "counted" not in one.detail:
            return None
        passed = [each for each in self._findings if each.kind in (given, made)]
        used = [each for each in passed if each.agrees is False and one.kind != "loss"]
        if one.kind == "grad":
            module = self._recorded_module(one.module)
            used = [each for each in self._by_key.get((module, given), ()) if each.partial]
            if not used:
                return None
        end = passed.index(used[0]) + 1 if used else len(passed)
        origins = []
        for each in reversed(passed[:end]):
            if each.agrees is False:
                continue
            if not each.partial or not {*each.partial.split(", ")} <= {*one.varying.split(", ")}:
                break
            before = (
                other for other in self._by_key.get((each.module, given), ()) if other.call == each.call
            )
            if each.kind == made and not any(other.partial for other in before):
                origins.append(each)
        if not origins:
            return None
        best = min(origins, key=lambda each: _depth(each.module))
        direction, tensor = ("forward", "output") if made == "output" else ("backward", "gradient of input ")
        fault = self._fault(direction, best, f"{tensor}{best.path}")
        fault.kind = "never reduced"
        fault.detail = f"over {best.partial}: the reference is the sum of what the ranks have"
        return fault

    def _fault(self, direction: str, one: Finding, tensor: str) -> Fault:
        return Fault(direction, one.module, one.fault, one.detail, tensor, *self._lines.get(one.module, ()))

    def _differing(self, kind: str) -> list[Finding]:
        return [one for one in self._findings if one.kind == kind and one.agrees is False]

    def _doubt(self, one: Finding, given: str) -> int:
        """Returns 2 if some of what the module was given differs, 1 if that is not known of some, else 0."""
        is_call = one.kind == "output"
        name = one.module if is_call else self._recorded_module(one.module)
        known = self._by_key.get((name, given), ())
        agree = {each.agrees for each in known if not is_call or each.call == one.call}
        return 2 if False in agree else int(None in agree)

    def _root_differs(self, kind: str) -> bool:
        """Returns true if a tensor of the outermost module that was recorded differs."""
        top = min((name for name, each in self._by_key if each == kind), key=_depth, default="")
        return any(one.module == top for one in self._differing(kind))

    def _is_healed(self, one: Finding) -> bool:
        """Returns true if a module around this one agrees: the layout within is the program's own affair."""
        around = (self._by_key.get((name, one.kind), ()) for name in _parents(one.module))
        return any(some and all(each.agrees for each in some) for some in around)

    def _recorded_module(self, module: str) -> str:
        """Returns the module, or the one around it that was recorded, as a compiled one is."""
        known = {name for name, kind in self._by_key if kind in ("output", "grad_output")}
        return next((name for name in (module, *_parents(module)) if name in known), "")


def _parents(module: str) -> Iterator[str]:
    while module:
        module = module.rpartition(".")[0]
        yield module


def _depth(module: str) -> int:
    return module.count(".") + bool(module)
