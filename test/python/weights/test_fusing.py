"""Names that stand for several tensors: fused and split as weights are loaded and exported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from ranks import device_type, on_ranks
from sharded import mesh_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from funcol import full_state_dict, full_tensors, load_full_state_dict
from funcol.weights import Cat, Stack

ON_DEVICES = True

NAMES: dict[str, Any] = {
    "qkv.weight": Cat("q.w", "k.w", "v.w", sizes=[4, 2, 2]),
    "qkv.bias": Cat("q.b", "k.b", "v.b", sizes=[4, 2, 2]),
    "experts": Stack("0.w", "1.w", "2.w"),
    "gate": Cat("left", "right", dim=1),
    "norm": "n",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(3, 8)
        self.experts = nn.Parameter(torch.zeros(3, 5, 2))
        self.gate = nn.Parameter(torch.zeros(5, 6, dtype=torch.bfloat16))
        self.register_buffer("norm", torch.zeros(7))


def parts() -> dict[str, Tensor]:
    shapes = {"q.w": (4, 3), "k.w": (2, 3), "v.w": (2, 3), "q.b": (4,), "k.b": (2,), "v.b": (2,)}
    shapes |= {f"{expert}.w": (5, 2) for expert in range(3)} | {"left": (5, 3), "right": (5, 3), "n": (7,)}
    generator = torch.Generator("cpu").manual_seed(1)
    return {
        name: torch.rand(shape, generator=generator, device="cpu").bfloat16().float()
        for name, shape in shapes.items()
    }


def model_on(world: int) -> nn.Module:
    return fully_shard(Block().to(device_type()), mesh=mesh_of((world,)))


class Files(Mapping[str, Tensor]):
    """Reads a tensor each time that it is asked for it."""

    def __init__(self) -> None:
        self.num_read = 0

    def __getitem__(self, name: str) -> Tensor:
        self.num_read += 1
        return parts()[name]

    def __contains__(self, name: object) -> bool:
        return name in parts()

    def __iter__(self) -> Iterator[str]:
        return iter(parts())

    def __len__(self) -> int:
        return len(parts())


@pytest.mark.parametrize("by", ["mapping", "function"])
@pytest.mark.parametrize("given", ["dict", "pairs", "reversed", "files"])
@on_ranks(2)
def test_parts_are_loaded_into_fused_tensors_and_exported_again(
    rank: int, world: int, given: str, by: str
) -> None:
    model = model_on(world)
    names: Any = NAMES if by == "mapping" else NAMES.__getitem__
    files = Files()
    source: Any = {
        "dict": parts(),
        "pairs": iter(parts().items()),
        "reversed": iter([*parts().items()][::-1]),
        "files": files,
    }[given]
    found = load_full_state_dict(model, source if rank == 0 else None, names=names, bucket_bytes=80)
    assert found == ([], [])
    assert files.num_read == (len(parts()) if given == "files" and rank == 0 else 0)
    whole = full_state_dict(model, to=None)
    assert torch.equal(whole["qkv.weight"].cpu(), torch.cat([parts()[f"{name}.w"] for name in "qkv"]))
    assert torch.equal(whole["experts"][1].cpu(), parts()["1.w"])
    assert torch.equal(whole["gate"][:, 3:].cpu(), parts()["right"].bfloat16())
    exported = full_state_dict(model, to=1, names=names, bucket_bytes=80, dtype={"q.w": torch.float64})
    in_order = ["0.w", "1.w", "2.w", "left", "right", "n", "q.w", "k.w", "v.w", "q.b", "k.b", "v.b"]
    assert list(exported) == (in_order if rank == 1 else [])
    for name, part in exported.items():
        assert torch.equal(part.cpu().float(), parts()[name]), name
    pairs = [*full_tensors(model, to=0, names=names)]
    assert [name for name, _ in pairs] == in_order
    assert all((part is None) == (rank != 0) for _, part in pairs)


@pytest.mark.parametrize("given", ["dict", "pairs"])
@on_ranks(2)
def test_a_fused_tensor_is_missing_if_a_part_is(rank: int, world: int, given: str) -> None:
    model = model_on(world)
    source = parts()
    del source["k.w"]
    tensors: Any = source if given == "dict" else iter(source.items())
    found = load_full_state_dict(model, tensors if rank == 0 else None, names=NAMES, strict=False)
    assert found == (["qkv.weight"], [])
    assert torch.equal(
        full_state_dict(model, to=None)["qkv.bias"].cpu(), torch.cat([source[f"{n}.b"] for n in "qkv"])
    )
    with pytest.raises(
        (ValueError, RuntimeError), match=r"'qkv\.weight' of the model is missing|rank 0 left"
    ):
        load_full_state_dict(model, source if rank == 0 else None, names=NAMES)


@on_ranks(2)
def test_wrong_parts_are_refused_before_anything_is_sent(rank: int, world: int) -> None:
    model = model_on(world)
    for part in (torch.ones(3, 3), torch.ones(2, 4), torch.ones(2)):
        with pytest.raises((ValueError, RuntimeError), match=r"made of tensors of the shapes \[|rank 0 left"):
            load_full_state_dict(model, {**parts(), "k.w": part} if rank == 0 else None, names=NAMES)
    for names in ({"norm": Cat("a", "b")}, {"norm": Stack("a", "b")}, {"norm": Cat("a", "b", sizes=[3, 3])}):
        with pytest.raises(ValueError, match=r"has 7 indices"):
            full_state_dict(model, names=names)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cat(),
        lambda: Cat("a", "a"),
        lambda: Cat("a", "b", sizes=[1]),
        lambda: Stack(),
        lambda: Stack("a", "a"),
    ],
)
def test_names_of_parts_are_several_and_differ(make: Any) -> None:
    with pytest.raises(ValueError, match="got the names"):
        make()
