"""How functions of PyTorch are recognised, redirected to funcol's, and put back.

A function is PyTorch's own by its code. There are two questions: :func:`is_own` and :func:`own_function` ask
whether a program has put something in the place of a function, and look through its wrappers;
:func:`undecorated` asks whether FSDP2's function has no more around it than its source says.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

import torch

from .._compat.fully_shard import source_of

# What is PyTorch's own


def is_own(found: Any) -> bool:
    """Whether ``found`` is a function of PyTorch, with the code that the module it comes from has for it."""
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


def own_function(found: Any) -> Any:
    """PyTorch's own function in ``found``: itself, or what a program put wrappers around that name what they
    wrap; None if there is none."""
    while found is not None and not is_own(found):
        found = found.func if isinstance(found, partial) else getattr(found, "__wrapped__", None)
    return found


def own_function_of(module: ModuleType, name: str) -> Any:
    """PyTorch's own function ``name`` of ``module``, also where a program put something else in its place;
    None if nobody has it any more."""
    found = own_function(vars(module).get(name))
    if found is not None and found.__qualname__ == name and found.__globals__ is vars(module):
        return found
    # A wrapper may have it anywhere; what every function of the module has is the module's dict.
    holders = gc.get_referrers(vars(module))
    return next((one for one in holders if is_own(one) and one.__qualname__ == name), None)


def is_own_context(found: Any) -> bool:
    """Whether ``found`` is a generator function of PyTorch that PyTorch made a context of."""
    code = getattr(found, "__code__", None)
    return code is not None and code is _CONTEXT_CODE and is_own(getattr(found, "__wrapped__", None))


_CONTEXT_CODE = contextmanager(lambda: iter(())).__code__


@functools.cache
def codes_of(module: ModuleType) -> dict[str, list[CodeType]]:
    """What the source of ``module`` has for its functions and methods, by their qualified names."""
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


def looked_up(module: ModuleType, path: str) -> Any:
    """The function ``path``, a name or ``Class.method``, as ``module`` has it now; None if it has none."""
    first, _, method = path.partition(".")
    found = vars(module).get(first)
    if method:
        found = vars(found).get(method) if isinstance(found, type) else None
    if isinstance(found, (staticmethod, classmethod)):
        return found.__func__
    return found.fget if isinstance(found, property) else found


def has_code(found: Any, codes: list[CodeType]) -> bool:
    """Whether ``found`` does what PyTorch's source says, ``codes``; also in decorators of PyTorch, and where
    funcol redirected it."""
    while not isinstance(found, type):  # that of a class is the code of its body
        code = getattr(found, "__code__", None)
        if code in codes or (code is not None and code.co_filename == __file__):
            return True
        wrapped = getattr(found, "__wrapped__", None)
        if wrapped is None or not _is_from_decorator(found):
            return False
        found = wrapped
    return True


def _is_from_decorator(found: Any) -> bool:
    """Whether a decorator of PyTorch or of the standard library made ``found``."""
    if type(found) is not FunctionType:
        return isinstance(found, functools._lru_cache_wrapper)
    module = str(found.__globals__.get("__name__"))
    return module.split(".")[0] in ("torch", "contextlib", "functools", "typing_extensions", "warnings")


def described(found: Any) -> str:
    """What ``found``, in the place of a function of PyTorch, is called by its program."""
    while isinstance(found, partial):
        found = found.func
    if type(found) is FunctionType:
        return f"{found.__globals__.get('__name__')}.{found.__code__.co_qualname}"
    named = found if isinstance(found, type) else type(found)
    return f"{named.__module__}.{named.__qualname__}"


NOT_PYTORCHS = object()  # in place of a function that is not PyTorch's own any more
_ROOTS = (str(Path(torch.__file__).parent), contextlib.__file__)


def is_pytorchs(code: CodeType) -> bool:
    """Whether ``code`` comes from a file of PyTorch, or of what it makes context managers by."""
    return code.co_filename.startswith(_ROOTS)


def undecorated(found: Any) -> Any:
    """PyTorch's function behind its decorators, of which there may be no more than its source says;
    :data:`NOT_PYTORCHS` if somebody has put something in its place or around it."""
    depth = 0
    while True:
        if isinstance(found, (staticmethod, classmethod)):
            found = found.__func__
        elif isinstance(found, property):
            found = found.fget
        elif hasattr(found, "__wrapped__"):
            if not (isinstance(found, FunctionType) and is_pytorchs(found.__code__)):
                return NOT_PYTORCHS
            found = vars(found)["__wrapped__"]
        else:
            break
        depth += 1
    is_own = isinstance(found, FunctionType) and is_pytorchs(found.__code__)
    return found if is_own and depth <= _num_decorators(found.__code__) else NOT_PYTORCHS


@functools.cache
def _num_decorators(code: CodeType) -> int:
    lines = source_of(code).splitlines()
    return sum(line.startswith("@") for line in lines)


# Redirections


def copied(function: Any) -> Any:
    """A function that does what ``function``, PyTorch's own in it, does now; ``None`` for ``None``."""
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


def redirected(function: Any, ours: Callable[..., Any]) -> Callable[[], None]:
    """Makes ``function`` call ``ours`` until what is returned is called.

    The function stays the same object: whoever holds it sees the change, modules that imported it by name,
    Dynamo's tables, and PyTorch's C++, which looks some up once and keeps them. Of a wrapper that a program
    put around a function of PyTorch, that function: the wrapper stays. Does nothing to what is not PyTorch's.
    """
    function = own_function(function)
    if function is None or function.__code__.co_freevars:
        return lambda: None
    return redirected_of_package(function, ours)


def redirected_of_package(function: Any, ours: Callable[..., Any]) -> Callable[[], None]:
    """:func:`redirected` for a function of another package, which has no closure."""
    signature = inspect.signature(function)
    put_back = _swapped(function, _redirect.__code__, _funcol=ours)
    function.__signature__ = signature

    def undo() -> None:
        put_back()
        del function.__signature__

    return undo


def _swapped(function: Any, code: CodeType, **defaults: Any) -> Callable[[], None]:
    """Gives ``function`` other code, whose additional keywords are ``defaults``, until what is returned is
    called."""
    own_code, own = function.__code__, function.__kwdefaults__

    def undo() -> None:
        function.__code__ = own_code
        function.__kwdefaults__ = own
        _forget_parameters(function)

    # In this order, as other threads may call it meanwhile; defaults of either code are there for both.
    function.__kwdefaults__ = {**(own or {}), **defaults}
    function.__code__ = code
    _forget_parameters(function)
    return undo


def _forget_parameters(function: Any) -> None:
    """Makes Dynamo, which remembers the parameters of the functions that it looked into, look anew."""
    functions = sys.modules.get("torch._dynamo.variables.functions")
    remembered = getattr(functions, "_spec_cache", None)
    if remembered is not None:
        remembered.pop(function, None)


def _redirect(*args: Any, _funcol: Callable[..., Any], **kwargs: Any) -> Any:
    return _funcol(*args, **kwargs)


def called_directly(wrapper: Any, when: Callable[[], bool]) -> Callable[[], None]:
    """Makes ``wrapper``, which has ``func`` in its closure, call that alone where ``when()`` says so, until
    what is returned is called. The wrapper stays the same object.

    Dynamo begins no graph in the wrapper, as it begins none in PyTorch's modules, nor in ``when``; it does
    look into both where a graph that it has begun calls them.
    """
    assert wrapper.__code__.co_freevars == ("func",)
    code = _direct_call(None).__code__
    for skipped in (code, cast(FunctionType, when).__code__):
        _begin_no_graph(skipped)
    return _swapped(wrapper, code, _funcol=when, _stock=_copy(wrapper))


def _begin_no_graph(code: CodeType) -> None:
    """As ``skip_code`` of ``torch._dynamo.eval_frame``, which would import Dynamo."""
    frames: Any = torch._C._dynamo.eval_frame
    frames.set_code_exec_strategy(
        code, frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    )


def _direct_call(func: Any) -> FunctionType:
    def call(*args: Any, _funcol: Callable[[], bool], _stock: Callable[..., Any], **kwargs: Any) -> Any:
        if _funcol():
            return func(*args, **kwargs)
        return _stock(*args, **kwargs)

    return cast(FunctionType, call)


def is_in_context(function: Any) -> bool:
    """Whether ``function`` is one that ``torch.no_grad()``, or another context of its kind, decorates."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_freevars == ("ctx_factory", "func")


def entered_if(wrapper: Any, when: Callable[[], bool]) -> Callable[[], None]:
    """Makes ``wrapper``, a function decorated with a context, enter that only if ``when()``, until what is
    returned is called. The wrapper stays the same object."""
    assert is_in_context(wrapper)
    return _swapped(wrapper, _context_if(None, None).__code__, _funcol=when)


def _context_if(ctx_factory: Any, func: Any) -> FunctionType:
    def call(*args: Any, _funcol: Callable[[], bool], **kwargs: Any) -> Any:
        if _funcol():
            with ctx_factory():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    return cast(FunctionType, call)
