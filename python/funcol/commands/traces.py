"""Traces of torch.profiler as spans of time: the one reader, which checks every value that it returns."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

MOST_BYTES = 1 << 29
"""How much of a trace is read, decompressed, unless the caller says otherwise."""

_MOST = 2.0**63  # of times, in the units of the file
_MOST_RANK = 2**31 - 1
_CHUNK = 1 << 20
_MOST_SHOWN = 60
_GZIP = b"\x1f\x8b"
_WRITERS = "Pass what export_chrome_trace() of torch.profiler wrote."


class TraceError(ValueError):
    """A trace that cannot be read: which file, what is wrong, what was expected."""


@dataclass
class Span:
    """An event on one thread of a rank, or on one stream of a device, in ms since the epoch."""

    kind: str
    start: float
    end: float
    thread: int | str = 0
    name: str = ""

    def starts_in(self, other: Span) -> bool:
        return other.start <= self.start < other.end


@dataclass
class Trace:
    """The spans of one rank, the outer before the inner; ``rank`` is None if the file does not say it."""

    spans: list[Span]
    rank: int | None = None


def read_trace(path: str | Path, most_bytes: int = MOST_BYTES) -> Trace:
    """Reads a trace from a file, which may be compressed (``.gz``).

    Raises :class:`TraceError`, which names the file and what is wrong with it, also if the file, once
    decompressed, has more than ``most_bytes`` bytes: no more of it is read.
    """
    try:
        return trace_of(_content(_read(path, most_bytes)))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    except MemoryError:
        raise TraceError(
            f"{path}: there is not enough memory for this trace. Profile fewer steps, or bound what is read."
        ) from None


def trace_of(content: Any) -> Trace:
    """Checks the JSON of a trace, and returns its spans; their ``kind`` is the profiler's category."""
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise TraceError(f"it has no list 'traceEvents'. {_WRITERS}")
    base_us = _number(content, "baseTimeNanoseconds", "the trace", -_MOST, default=0) / 1000
    timed = [_timed(event, place) for place, event in _complete_events(content["traceEvents"])]
    timed.sort(key=lambda one: (one[0], -one[1]))
    spans = []
    for ts, dur, kind, thread, name in timed:
        start = (ts + base_us) / 1000
        spans.append(Span(kind, start, start + dur / 1000, thread, name))
    return Trace(spans, _rank(content))


# The file


def _read(path: str | Path, most_bytes: int) -> bytes:
    """Reads up to ``most_bytes`` bytes, and refuses a file that has more."""
    try:
        with Path(path).open("rb") as file:
            is_compressed = file.peek(len(_GZIP)).startswith(_GZIP)
            source: IO[bytes] = gzip.GzipFile(fileobj=file) if is_compressed else file  # type: ignore[assignment]
            data = b"".join(_chunks(source, most_bytes + 1))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"its gzip data is cut or damaged: {error}. Copy the file again.") from None
    except OSError as error:
        raise TraceError(f"it cannot be read: {error.strerror or error}.") from None
    except ValueError as error:  # a path that no file can have
        raise TraceError(f"it cannot be read: {error}.") from None
    if len(data) > most_bytes:
        raise TraceError(
            f"it has more than {most_bytes} bytes{' once decompressed' if is_compressed else ''}. "
            "Profile fewer steps, or raise the limit with --max-bytes."
        )
    return data


def _chunks(source: IO[bytes], most_bytes: int) -> Iterator[bytes]:
    left = most_bytes
    while left > 0 and (chunk := source.read(min(left, _CHUNK))):
        left -= len(chunk)
        yield chunk


def _content(data: bytes) -> Any:
    if not data:
        raise TraceError(f"it is empty. {_WRITERS}")
    try:
        return json.loads(data)
    except RecursionError:
        raise TraceError(f"its JSON is nested too deeply. {_WRITERS}") from None
    except ValueError as error:  # no UTF-8, no JSON, too many digits
        raise TraceError(f"this is not valid JSON: {error}.") from None


# Values


def _complete_events(events: list[Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the events that have a duration, with their places."""
    for place, event in enumerate(events):
        if not isinstance(event, dict):
            raise TraceError(f"traceEvents[{place}] is {_shown(event)}, expected an object. {_WRITERS}")
        if event.get("ph") == "X" and "dur" in event:
            yield place, event


def _timed(event: dict[str, Any], place: int) -> tuple[float, float, str, int | str, str]:
    """Returns the begin, the duration, the category, the thread and the name of an event."""
    where = f"traceEvents[{place}]"
    return (
        _number(event, "ts", where, -_MOST),
        _number(event, "dur", where, 0),
        _value(event, "cat", where, (str,), "text", default=""),
        _value(event, "tid", where, (int, str), "a whole number or text"),
        _value(event, "name", where, (str,), "text"),
    )


def _rank(content: dict[str, Any]) -> int | None:
    known = _value(content, "distributedInfo", "the trace", (dict,), "an object", default={})
    if "rank" not in known:
        return None
    rank: int = _value(known, "rank", "'distributedInfo'", (int,), "the number of a rank")
    if not 0 <= rank <= _MOST_RANK:
        raise TraceError(
            f"'rank' of 'distributedInfo' is {_shown(rank)}, expected a number from 0 to {_MOST_RANK}."
        )
    return rank


def _number(values: dict[str, Any], key: str, where: str, least: float, default: int | None = None) -> float:
    number: float = _value(values, key, where, (int, float), "a number", default)
    if not least <= number <= _MOST:  # NaN is in no range.
        raise TraceError(
            f"'{key}' of {where} is {_shown(number)}, expected a number from {least:.4g} to {_MOST:.4g}."
        )
    return number


def _value(
    values: dict[str, Any], key: str, where: str, kinds: tuple[type, ...], expected: str, default: Any = None
) -> Any:
    """Returns the value of ``key``, if it is of one of ``kinds``. A key with a default may be missing."""
    if key not in values and default is None:
        raise TraceError(f"{where} has no '{key}', expected {expected}. {_WRITERS}")
    value = values.get(key, default)
    if type(value) not in kinds:  # A bool is an int for isinstance().
        raise TraceError(f"'{key}' of {where} is {_shown(value)}, expected {expected}. {_WRITERS}")
    return value


def _shown(value: Any) -> str:
    """Returns ``value`` as JSON, cut off if it is long."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "a value that is nested deeply"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
