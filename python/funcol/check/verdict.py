"""The verdict: the module in which a fault begins, out of what agrees and what does not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from .comparing import Finding


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
    drew random numbers."""

    def __init__(self, findings: Sequence[Finding], drawing: Collection[str]) -> None:
        self._findings = findings
        self._drawing = drawing
        self._of: dict[tuple[str, str], list[Finding]] = {}
        for one in findings:
            self._of.setdefault((one.module, one.kind), []).append(one)

    def faults(self) -> list[Fault]:
        """Returns at most one fault of the forward and one of the backward direction."""
        first = self._weights() or self._inputs()
        if first is not None:
            return [first]
        forward = self._forward() or self._loss()
        if forward is not None and forward.kind == "random draws":
            return [forward]
        backward = self._backward()
        if forward is not None and backward is not None:
            backward.detail += " (may follow from the fault above)"
        found = [one for one in (forward, backward) if one is not None]
        last = [*self._wrong("norm"), *self._wrong("step")]
        if not found and last:
            one = last[0]
            tensor = "the norm of all gradients" if one.kind == "norm" else f"{one.path} after the step"
            found = [_fault(one.kind, one, tensor)]
        return found

    def _weights(self) -> Fault | None:
        return next((_fault("weights", one, one.path) for one in self._wrong("param")), None)

    def _inputs(self) -> Fault | None:
        """A batch that differs: the first call of the run has inputs that do."""
        first = next((one for one in self._findings if one.kind in ("input", "output")), None)
        if first is None or first.kind == "output":
            return None
        for one in self._of[first.module, "input"]:
            if one.call == first.call and one.agrees is False:
                detail = (
                    f"the batch is not the reference's: {one.detail}. Draw it from a generator of its own"
                )
                return Fault("inputs", one.module, one.fault, detail, f"input {one.path}")
        return None

    def _forward(self) -> Fault | None:
        """The first output that differs although the inputs agree, or else the first that differs."""
        wrong = [one for one in self._wrong("output") if not self._is_healed(one)]
        if not wrong or not (self._wrong("loss") or self._wrong("grad") or self._root_differs("output")):
            return None
        doubts = [self._doubt(one, "input") for one in wrong]
        one = wrong[doubts.index(min(doubts))]
        if min(doubts) < 2 and one.module in self._drawing:
            detail = "its draws cannot be matched: switch dropout off, and check again"
            return Fault("forward", one.module, "random draws", detail, "output")
        return self._origin(one, "input", "output") or _fault("forward", one, f"output{one.path}")

    def _loss(self) -> Fault | None:
        for one in self._wrong("loss"):
            origin = self._origin(one, "input", "output") if one.fault == "wrong" else None
            return origin or _fault("loss", one, "loss")
        return None

    def _backward(self) -> Fault | None:
        """The first gradient of an input or a parameter that differs although those of the module's outputs
        agree, in the order in which the backward passes of modules end."""
        weights = self._wrong("grad")
        if not weights and not self._root_differs("grad_input"):
            return None
        places = {one.module: i for i, one in enumerate(self._findings) if one.kind.startswith("grad_")}
        wrong = weights + [one for one in self._wrong("grad_input") if not self._is_healed(one)]
        wrong.sort(key=lambda one: (places.get(one.module, len(self._findings)), one.kind == "grad"))
        if not wrong:
            return None
        one = next((one for one in wrong if self._doubt(one, "grad_output") < 2), wrong[0])
        name = f"{one.path}.grad" if one.kind == "grad" else f"gradient of input {one.path}"
        origin = self._origin(one, "grad_output", "grad_input")
        if origin is not None:
            origin.detail += f"; it makes {name} of {one.module or 'the root'} wrong"
        return origin or _fault("backward", one, name)

    def _wrong(self, kind: str) -> list[Finding]:
        return [one for one in self._findings if one.kind == kind and one.agrees is False]

    def _doubt(self, one: Finding, given: str) -> int:
        """2 if some of what the module was given differs, 1 if that is not known of some, else 0."""
        is_call = one.kind == "output"
        name = one.module if is_call else self._recorded(one.module)
        agree = [
            each.agrees for each in self._of.get((name, given), ()) if not is_call or each.call == one.call
        ]
        return 2 if False in agree else int(None in agree)

    def _root_differs(self, kind: str) -> bool:
        """True if it does in the outermost module that was recorded."""
        names = [name for name, each in self._of if each == kind]
        top = min(names, key=_depth, default="")
        return any(one.module == top for one in self._wrong(kind))

    def _is_healed(self, one: Finding) -> bool:
        """True if a module around this one agrees: the layout within is the program's own affair."""
        around = (self._of.get((name, one.kind), ()) for name in _parents(one.module))
        return any(some and all(each.agrees for each in some) for some in around)

    def _recorded(self, module: str) -> str:
        """The module, or the one around it that was recorded, as a compiled one is."""
        kinds = ("output", "grad_output")
        known = (
            name for name in (module, *_parents(module)) if any((name, kind) in self._of for kind in kinds)
        )
        return next(known, "")

    def _origin(self, one: Finding, given: str, made: str) -> Fault | None:
        """The outermost module that made a partial tensor, which was used as if it were reduced."""
        if (
            one.fault not in ("wrong", "differs between ranks", "never reduced")
            and "counted" not in one.detail
        ):
            return None
        used = [each for each in self._findings if each.kind in (given, made) and each.agrees is False]
        if one.kind == "grad":
            used = [each for each in self._of.get((self._recorded(one.module), given), ()) if each.partial]
            if not used:
                return None
        end = self._findings.index(used[0]) + 1 if used and one.kind != "loss" else len(self._findings)
        origins = []
        for each in reversed(self._findings[:end]):
            if each.kind not in (given, made) or each.agrees is False:
                continue
            if not each.partial or not {*each.partial.split(", ")} <= {*one.varying.split(", ")}:
                break
            before = (other for other in self._of.get((each.module, given), ()) if other.call == each.call)
            if each.kind == made and not any(other.partial for other in before):
                origins.append(each)
        if not origins:
            return None
        best = min(origins, key=lambda each: _depth(each.module))
        direction, what = ("forward", "output") if made == "output" else ("backward", "gradient of input ")
        detail = f"over {best.partial}: the reference is the sum of what the ranks have"
        return Fault(direction, best.module, "never reduced", detail, f"{what}{best.path}")


def _fault(direction: str, one: Finding, tensor: str) -> Fault:
    return Fault(direction, one.module, one.fault, one.detail, tensor)


def _parents(module: str) -> Iterator[str]:
    while module:
        module = module.rpartition(".")[0]
        yield module


def _depth(module: str) -> int:
    return module.count(".") + bool(module)
