"""When a GPU would run what a trace file of the simulated GPU says: an estimate by a model of durations.

The host's own processor time between calls into CUDA is the trace's, of all its threads one after the other;
each call costs what the model says of launches.
An operation begins when it has arrived, the one before it on its stream is over, and so is all that it comes
after. A collective takes its time from then on: other ranks are taken to come to it at the same moment.
Streams do not slow each other down.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

Number = tuple[int, int]  # the first so many operations of a stream

# Bytes that a rank sends, in those of the larger of input and output, for the number of ranks.
SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}


@dataclass(frozen=True)
class Operation:
    """One of a stream. ``kind`` is kernel, copy, collective, order or poison."""

    stream: int
    number: int
    kind: str = "kernel"
    name: str = ""
    after: tuple[Number, ...] = ()
    read: int = 0
    written: int = 0
    host: int = 0
    flops: int = 0
    type: str = ""
    ranks: int = 0

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        after = tuple((stream, number) for stream, number in values["after"])
        known = {name: values[name] for name in cls.__dataclass_fields__ if name != "after"}
        return cls(after=after, **known)


@dataclass(frozen=True)
class Call:
    """A call of a host thread: the work that it issued, and the work that it then waited for.

    It began at ``begin``, after ``own`` nanoseconds of other work of the thread.
    """

    begin: int
    own: int
    issued: tuple[Operation, ...] = ()
    waits: tuple[Number, ...] = ()


@dataclass(frozen=True)
class Mark:
    text: str
    begin: int


def read_trace(path: Path) -> list[Call | Mark]:
    """In the order of time; of all threads."""
    events: list[Call | Mark] = []
    for line in path.read_text().splitlines():
        values = json.loads(line)
        if "mark" in values:
            events.append(Mark(values["mark"], values["begin"]))
            continue
        issued = tuple(Operation.of(operation) for operation in values["issued"])
        waits = tuple((stream, number) for stream, number in values["waits"])
        events.append(Call(values["begin"], values["own"], issued, waits))
    return sorted(events, key=lambda event: event.begin)


@dataclass(frozen=True)
class Machine:
    """Durations in ms, by the numbers of a file; README.md says what they are."""

    matrix_tflops: dict[str, float]
    memory_gb_per_s: float
    host_copy_gb_per_s: float
    collective_gb_per_s: float
    collective_latency_us: float
    kernel_latency_us: float
    launch_latency_us: float
    launch_us: dict[str, float]

    @classmethod
    def read(cls, path: Path) -> Self:
        values = json.loads(path.read_text())
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})

    def launch(self, operation: Operation) -> float:
        """Of the host."""
        return self.launch_us.get(operation.kind, 0.0) / 1e3

    def duration(self, operation: Operation) -> float:
        """Of the device."""
        if operation.kind in ("order", "poison"):
            return 0.0
        if operation.kind == "collective":
            return self._collective(operation)
        in_memory = (operation.read + operation.written) / (self.memory_gb_per_s * 1e6)
        over_bus = operation.host / (self.host_copy_gb_per_s * 1e6)
        arithmetic = operation.flops / (self.matrix_tflops[operation.type] * 1e9) if operation.flops else 0.0
        return self.kernel_latency_us / 1e3 + max(in_memory, over_bus, arithmetic)

    def _collective(self, operation: Operation) -> float:
        size = max(operation.read, operation.written)
        name = operation.name.removeprefix("nccl ")
        sent = size * SENT[name](operation.ranks) if name in SENT else size
        if operation.ranks < 2:
            return self.kernel_latency_us / 1e3
        return self.collective_latency_us / 1e3 + sent / (self.collective_gb_per_s * 1e6)


@dataclass(frozen=True)
class Ran:
    """An operation on a device, in ms; it came there at ``arrived``."""

    operation: Operation
    arrived: float
    begin: float
    end: float


@dataclass
class Step:
    """``host`` has spans of the host's work, apart from its waits for the device."""

    host_begin: float
    host: list[tuple[float, float]] = field(default_factory=list)
    ran: list[Ran] = field(default_factory=list)

    def host_time(self) -> float:
        return sum(end - begin for begin, end in self.host)


class Replay:
    """Runs the calls between the marks "begin" and "end" of each step.

    What lies between steps costs nothing, and what was issued there is over at once: steps follow each other
    as if nobody had looked at the device.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._host = 0.0
        self._ends: dict[Number, float] = {}
        self._last_of_stream: dict[int, float] = defaultdict(float)
        self.steps: list[Step] = []

    def run(self, events: list[Call | Mark]) -> Self:
        step: Step | None = None
        for event in events:
            if isinstance(event, Mark):
                step = Step(self._host) if event.text == "begin" else None
                if step is not None:
                    self.steps.append(step)
                continue
            if step is None:
                for operation in event.issued:
                    self._end(operation, self._last_of_stream[operation.stream])
                continue
            self._call(step, event)
        return self

    def _call(self, step: Step, call: Call) -> None:
        begin = self._host
        self._host += call.own / 1e6
        for operation in call.issued:
            self._host += self._machine.launch(operation)
            self._run(step, operation)
        step.host.append((begin, self._host))
        self._host = max([self._host, *(self._ends[mark] for mark in call.waits if mark in self._ends)])

    def _run(self, step: Step, operation: Operation) -> None:
        arrived = self._host + self._machine.launch_latency_us / 1e3
        ready = max((self._ends[mark] for mark in operation.after if mark in self._ends), default=0.0)
        begin = max(arrived, ready, self._last_of_stream[operation.stream])
        if operation.kind == "poison":
            begin = self._last_of_stream[operation.stream]
        end = begin + self._machine.duration(operation)
        self._end(operation, end)
        if operation.kind != "poison":
            step.ran.append(Ran(operation, arrived, begin, end))

    def _end(self, operation: Operation, end: float) -> None:
        self._last_of_stream[operation.stream] = end
        self._ends[operation.stream, operation.number] = end


@dataclass(frozen=True)
class Share:
    """A step on the stream that computes most, in ms.

    The stream computes, or waits for the host to issue something, or for other streams, mostly those of
    collectives. ``host`` is the host's own work.
    """

    host: float
    computes: float
    waits_for_host: float
    waits_for_streams: float

    @property
    def step(self) -> float:
        return self.computes + self.waits_for_host + self.waits_for_streams


def main_stream(steps: list[Step]) -> int:
    times: dict[int, float] = defaultdict(float)
    for step in steps:
        for ran in step.ran:
            if ran.operation.kind == "kernel":
                times[ran.operation.stream] += ran.end - ran.begin
    return max(times, key=lambda stream: times[stream])


def shares(steps: list[Step]) -> list[Share]:
    """Returns the shares of all steps but the first, each from the end of the previous on the main stream."""
    stream = main_stream(steps)
    found = []
    last = 0.0
    for step in steps:
        computes = for_host = for_streams = 0.0
        for ran in (ran for ran in step.ran if ran.operation.stream == stream):
            for_host += max(0.0, min(ran.arrived, ran.begin) - last)
            for_streams += max(0.0, ran.begin - max(ran.arrived, last))
            computes += ran.end - ran.begin
            last = ran.end
        found.append(Share(step.host_time(), computes, for_host, for_streams))
    return found[1:]


def median_step(of_steps: list[Share]) -> int:
    """The index, in ``of_steps``, of the step of the (lower) median time."""
    times = [share.step for share in of_steps]
    return times.index(statistics.median_low(times))
