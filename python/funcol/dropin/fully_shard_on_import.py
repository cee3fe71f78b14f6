"""funcol put under FSDP2 once a program has imported FSDP2; a program without it is not made to."""

from __future__ import annotations

from collections.abc import Callable

from .put_on_import import PutOnImport


def _start() -> Callable[[], None]:
    from .fully_shard import UnderFullyShard

    return UnderFullyShard().undo


_under_fully_shard = PutOnImport("torch.distributed.fsdp._fully_shard", _start)
put, take = _under_fully_shard.put, _under_fully_shard.take
