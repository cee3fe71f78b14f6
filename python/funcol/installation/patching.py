"""How functions of PyTorch are recognized, replaced by funcol's, and restored.

A function is PyTorch's own by its code. :func:`own_function` finds it within whatever a program has wrapped
around it; :func:`own_function_as_written` only within the decorators that its source has.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import linecache
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

import torch

from .. import _compat

# Tests for PyTorch's own functions


def is_own(found: Any) -> bool:
    """Returns true if ``found`` is a function of PyTorch, with the code that its module defines for it."""
    if type(found) is not FunctionType:
        return False
    names, code = found.__globals__, found.__code__
    module = sys.modules.get(names.get("__name__", ""))
    return (
        module is not None
        and vars(module) is names
        and module.__name__.split(".")[0] == "torch"
        and code.co_filename == module.__file__
        and code.co_qualname == found.__qualname__
    )


def _layers(found: Any) -> Iterator[Any]:
    """Yields ``found``, the object that it wraps, and so on, to PyTorch's function or the innermost
    object."""
    while True:
        yield found
        if is_own(found):
            return
        if isinstance(found, (staticmethod, classmethod)):
            found = found.__func__
        elif isinstance(found, property):
            found = found.fget
        elif isinstance(found, partial):
            found = found.func
        elif hasattr(found, "__wrapped__"):
            found = found.__wrapped__
        else:
            return


def own_function(found: Any) -> Any:
    """Returns PyTorch's own function in ``found``: itself, or within wrappers that name what they wrap;
    ``None`` if there is none."""
    *_, innermost = _layers(found)
    return innermost if is_own(innermost) else None


NOT_FROM_PYTORCH = object()
"""In the place of a function that a program has replaced."""


def own_function_as_written(found: Any) -> Any:
    """Returns PyTorch's own function in ``found``, behind no more decorators than its source has, all of them
    PyTorch's; :data:`NOT_FROM_PYTORCH` if a program has put something in its place or around it."""
    *decorators, innermost = _layers(found)
    is_as_written = (
        is_own(innermost)
        and all(
            isinstance(one, (staticmethod, classmethod, property))
            or (isinstance(one, FunctionType) and is_from_pytorch(one.__code__))
            for one in decorators
        )
        and len(decorators) <= num_decorators(innermost.__code__)
    )
    return innermost if is_as_written else NOT_FROM_PYTORCH


_PYTORCH_FILES = (str(Path(torch.__file__).parent), contextlib.__file__)


def is_from_pytorch(code: CodeType) -> bool:
    """Returns true if ``code`` comes from a file of PyTorch, or from ``contextlib``, by which PyTorch makes
    contexts."""
    return code.co_filename.startswith(_PYTORCH_FILES)


def own_function_of(module: ModuleType, name: str) -> Any:
    """Returns PyTorch's own function ``name`` of ``module``, also if a program has replaced it; ``None`` if
    nothing refers to it any more."""
    found = own_function(vars(module).get(name))
    if found is not None and found.__qualname__ == name and found.__globals__ is vars(module):
        return found
    # A wrapper may keep the function anywhere, but the function refers to the module's dict.
    holders = gc.get_referrers(vars(module))
    return next((one for one in holders if is_own(one) and one.__qualname__ == name), None)


def is_own_context(found: Any) -> bool:
    """Returns true if ``found`` is a context that PyTorch made of a generator function."""
    code = getattr(found, "__code__", None)
    return code is not None and code is _CONTEXT_CODE and is_own(getattr(found, "__wrapped__", None))


_CONTEXT_CODE = contextmanager(lambda: iter(())).__code__


@functools.cache
def codes_of(module: ModuleType) -> dict[str, list[CodeType]]:
    """Returns the code objects of functions and methods in the source of ``module``, by qualified name."""
    codes: dict[str, list[CodeType]] = {}

    def collect(code: CodeType) -> None:
        for one in code.co_consts:
            if isinstance(one, CodeType) and not one.co_qualname.endswith((">", "<locals>")):
                codes.setdefault(one.co_qualname, []).append(one)
                if "__qualname__" in one.co_names:  # the body of a class
                    collect(one)

    code = module.__loader__.get_code(module.__name__)  # type: ignore[union-attr]
    if code is not None:
        collect(code)
    return codes


def find_function(module: ModuleType, path: str) -> Any:
    """Returns the function ``path``, a name or ``Class.method``, of ``module``; ``None`` if it has none."""
    first, _, method = path.partition(".")
    found = vars(module).get(first)
    if method:
        found = vars(found).get(method) if isinstance(found, type) else None
    if isinstance(found, (staticmethod, classmethod)):
        return found.__func__
    return found.fget if isinstance(found, property) else found


_OWN_FOLDER = str(Path(__file__).parent)


def has_code(found: Any, codes: list[CodeType]) -> bool:
    """Returns true if ``found`` runs one of ``codes``, itself or within decorators of PyTorch, or if funcol
    redirects it."""
    while not isinstance(found, type):  # in the codes a class is its body
        code = getattr(found, "__code__", None)
        if code in codes or (code is not None and code.co_filename.startswith(_OWN_FOLDER)):
            return True
        wrapped = getattr(found, "__wrapped__", None)
        if wrapped is None or not _is_from_decorator(found):
            return False
        found = wrapped
    return True


def _is_from_decorator(found: Any) -> bool:
    """Returns true if a decorator of PyTorch or of the standard library made ``found``."""
    if type(found) is not FunctionType:
        return isinstance(found, functools._lru_cache_wrapper)
    module = str(found.__globals__.get("__name__"))
    return module.split(".")[0] in ("torch", "contextlib", "functools", "typing_extensions", "warnings")


def describe(found: Any) -> str:
    """Returns the module and name of ``found``, with which a program replaced a function of PyTorch."""
    while isinstance(found, partial):
        found = found.func
    if type(found) is FunctionType:
        return f"{found.__globals__.get('__name__')}.{found.__code__.co_qualname}"
    named = found if isinstance(found, type) else type(found)
    return f"{named.__module__}.{named.__qualname__}"


# Digests of sources, by which funcol recognizes the functions and modules that it was written for


def _lines_from(code: CodeType) -> list[str]:
    """Returns the lines of a function's file from its first decorator on; none if there is no source."""
    return linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]


def _end_lines(code: CodeType) -> Iterator[int]:
    """Yields lines on which operations of a function end, those of the functions within it included."""
    yield from (end or line or 0 for line, end, _, _ in code.co_positions())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _end_lines(constant)


@functools.cache
def num_decorators(code: CodeType) -> int:
    """Counts the decorators in a function's source."""
    lines = (line.lstrip() for line in _lines_from(code))
    head = itertools.takewhile(lambda line: not line.startswith(("def ", "async def ")), lines)
    return sum(line.startswith("@") for line in head)


@functools.cache
def digest_of(code: CodeType) -> str:
    """Returns the digest of a function's source, to its last statement, without spaces and without lines of
    comments; ``"no source"`` if there is none."""
    lines = _lines_from(code)[: max(_end_lines(code)) - code.co_firstlineno + 1]
    if not lines:
        return "no source"
    text = "".join(line for line in lines if not line.lstrip().startswith("#"))
    return _digest("".join(text.split()).encode())


def digest_of_file(file: Path) -> str:
    """Returns the digest of a module's source as it is."""
    return _digest(file.read_bytes())


def _digest(source: bytes) -> str:
    return f"{zlib.crc32(source):08x}"


# Replacements


def install_all(installs: Iterable[Callable[[], Callable[[], None]]]) -> Callable[[], None]:
    """Calls each of ``installs``, which replaces something and returns the function that undoes it. Returns
    the function that undoes all of them, the last one first. If one fails, those before it are undone."""
    with ExitStack() as undo:
        for install in installs:
            undo.callback(install())
        return undo.pop_all().close


def set_entries(table: dict[Any, Any], ours: Mapping[Any, Any]) -> Callable[[], None]:
    """Enters ``ours`` in ``table``. Returns the function that undoes it, where the table still has ours."""
    before = {key: table[key] for key in ours if key in table}
    table.update(ours)

    def undo() -> None:
        for key in ours:
            if table.get(key) is not ours[key]:
                continue
            if key in before:
                table[key] = before[key]
            else:
                del table[key]

    return undo


def set_attribute(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Gives ``owner``, a class or an object, an attribute. Returns the function that undoes it, where
    ``owner`` still has ours."""
    before = vars(owner).get(name)
    setattr(owner, name, value)

    def undo() -> None:
        if vars(owner).get(name) is not value:
            return
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo


def copy_function(function: Any) -> Any:
    """Returns a copy of PyTorch's own function in ``function``, which stays as it is when that is replaced;
    ``None`` for ``None``."""
    function = own_function(function) or function
    return _copy(function) if type(function) is FunctionType else function


def _copy(function: FunctionType) -> FunctionType:
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__ and dict(function.__kwdefaults__)
    return copy


def redirect(function: Any, ours: Callable[..., Any]) -> Callable[[], None]:
    """Makes PyTorch's own function in ``function`` call ``ours``. Returns the function that undoes it.

    The function stays the same object, so all that hold it call ``ours``: modules that imported it by name,
    wrappers of programs, Dynamo's tables, and PyTorch's C++, which looks some functions up once. Does nothing
    if there is no function of PyTorch in ``function``.
    """
    function = own_function(function)
    if function is None or function.__code__.co_freevars:
        return lambda: None
    return _swap_code_keeping_signature(function, _redirecting.__code__, _funcol=ours)


def inline(function: Any, ours: Any) -> Callable[[], None]:
    """Makes PyTorch's own function in ``function`` run the code of ``ours``, a frame and a dict less than
    :func:`redirect`. Returns the function that undoes it.

    ``ours`` refers only to builtins and to its keyword-only parameters, which have defaults. If the function
    has other parameters in this release, it is redirected.
    """
    own = own_function(function)
    if own is None or own.__code__.co_freevars or not _has_parameters_of(ours, own):
        return redirect(function, ours)
    return _swap_code_keeping_signature(own, ours.__code__, **ours.__kwdefaults__)


def _has_parameters_of(ours: FunctionType, theirs: FunctionType) -> bool:
    def positional(function: FunctionType) -> tuple[str, ...]:
        return function.__code__.co_varnames[: function.__code__.co_argcount]

    return (
        positional(ours) == positional(theirs)
        and ours.__defaults__ == theirs.__defaults__
        and (theirs.__kwdefaults__ or {}).items() <= (ours.__kwdefaults__ or {}).items()
    )


def replace(function: Any, ours: Callable[..., Any]) -> Callable[[], None]:
    """Makes ``function``, which has no closure, call ``ours``, and its own code where ``ours`` returns
    ``NotImplemented``. Returns the function that undoes it. Does nothing if ``function`` is ``None``."""
    if function is None:
        return lambda: None
    return _swap_code_keeping_signature(function, _replacing.__code__, _funcol=ours, _stock=_copy(function))


def _swap_code_keeping_signature(function: Any, code: CodeType, **defaults: Any) -> Callable[[], None]:
    signature = inspect.signature(function)
    restore = _swap_code(function, code, **defaults)
    function.__signature__ = signature

    def undo() -> None:
        restore()
        del function.__signature__

    return undo


def _swap_code(function: Any, code: CodeType, **defaults: Any) -> Callable[[], None]:
    """Gives ``function`` the code ``code``, whose additional keywords are ``defaults``. Returns the function
    that undoes it."""
    own_code, own = function.__code__, function.__kwdefaults__

    def undo() -> None:
        function.__code__ = own_code
        function.__kwdefaults__ = own
        _compat.forget_parameters(function)

    # Other threads may call the function meanwhile, so the defaults of both codes are set first.
    function.__kwdefaults__ = {**(own or {}), **defaults}
    function.__code__ = code
    _compat.forget_parameters(function)
    return undo


def _redirecting(*args: Any, _funcol: Callable[..., Any], **kwargs: Any) -> Any:
    return _funcol(*args, **kwargs)


def _replacing(*args: Any, _funcol: Callable[..., Any], _stock: Callable[..., Any], **kwargs: Any) -> Any:
    result = _funcol(*args, **kwargs)
    return _stock(*args, **kwargs) if result is NotImplemented else result


def call_directly(wrapper: Any, when: Callable[[], bool]) -> Callable[[], None]:
    """Makes ``wrapper``, whose closure is the function ``func``, call ``func`` directly where ``when()`` is
    true. Returns the function that undoes it. The wrapper stays the same object.

    Dynamo begins no graph in the wrapper nor in ``when``, as it begins none in PyTorch's modules. It traces
    both where a graph that it has begun calls them.
    """
    assert wrapper.__code__.co_freevars == ("func",)
    code = _calling_directly(None).__code__
    for skipped in (code, cast(FunctionType, when).__code__):
        _skip_in_dynamo(skipped)
    return _swap_code(wrapper, code, _funcol=when, _stock=_copy(wrapper))


def _skip_in_dynamo(code: CodeType) -> None:
    """Does the work of ``skip_code`` of ``torch._dynamo.eval_frame``, without importing Dynamo."""
    frames: Any = torch._C._dynamo.eval_frame
    frames.set_code_exec_strategy(
        code, frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    )


def _calling_directly(func: Any) -> FunctionType:
    def call(*args: Any, _funcol: Callable[[], bool], _stock: Callable[..., Any], **kwargs: Any) -> Any:
        if _funcol():
            return func(*args, **kwargs)
        return _stock(*args, **kwargs)

    return cast(FunctionType, call)


def is_in_context(function: Any) -> bool:
    """Returns true if ``torch.no_grad()``, or another context of its kind, decorates ``function``."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_freevars == ("ctx_factory", "func")


def enter_context_if(wrapper: Any, when: Callable[[], bool]) -> Callable[[], None]:
    """Makes ``wrapper``, a function decorated with a context, enter the context only where ``when()`` is
    true. Returns the function that undoes it. The wrapper stays the same object."""
    assert is_in_context(wrapper)
    return _swap_code(wrapper, _entering_context_if(None, None).__code__, _funcol=when)


def _entering_context_if(ctx_factory: Any, func: Any) -> FunctionType:
    def call(*args: Any, _funcol: Callable[[], bool], **kwargs: Any) -> Any:
        if _funcol():
            with ctx_factory():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    return cast(FunctionType, call)
