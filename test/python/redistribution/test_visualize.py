"""``funcol.show``: tables of who holds what, in colours on terminals, drawings in notebooks."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import jupyter_client
import pytest
import torch
import torch.distributed as dist
from plans import plan
from ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import funcol
from funcol.redistribution import Plan


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(*arguments: Any, file: io.StringIO | None = None) -> list[str]:
    out = file or io.StringIO()
    funcol.show(*arguments, file=out)
    return out.getvalue().splitlines()


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_a_layout_has_a_row_a_rank_with_its_coordinate_and_its_block() -> None:
    title, header, layout, *rows = shown("S0,S1", "dp=2,tp=2", (5, 8))
    assert title == "S(0)S(1), 5x8 on dp=2, tp=2"
    assert cells(header) == ["rank", "dp", "tp", "holds"]
    assert cells(layout) == ["S(0)S(1)"]
    assert [cells(row) for row in rows] == [
        ["0", "0", "0", "[0:3, 0:4]"],
        ["1", "0", "1", "[0:3, 4:8]"],
        ["2", "1", "0", "[3:5, 0:4]"],
        ["3", "1", "1", "[3:5, 4:8]"],
    ]


def test_a_plan_has_a_column_for_its_source_and_one_a_step() -> None:
    made = plan("P,S0", "S1,R", shape=(64, 128))
    title, header, layouts, *rows = shown(made)
    assert title == f"{made}, 64x128 on dp=2, tp=4"
    assert cells(header)[3:] == ["at first", *map(str, made.steps)]
    assert cells(layouts) == [made.src, *(step.after for step in made.steps)]
    assert cells(rows[0])[3:] == ["part of [0:16, :]", "[0:16, 0:64]", "[:, 0:64]"]
    assert len(rows) == 8


@pytest.mark.parametrize(
    ("layout", "shape", "blocks"),
    [
        ("S0", (2,), ["[0:1]", "[1:2]", "nothing"]),
        ("_S(0, 2)", (7,), ["[0:2+4:5]", "[2:4+5:6]", "[6:7]"]),
        ("R", (), ["the value"] * 3),
        ("P(max)", (4, 2), ["part of [:, :]"] * 3),
        ("S1", (4, 0), ["nothing"] * 3),
    ],
)
def test_blocks_are_written_as_indices(layout: str, shape: tuple[int, ...], blocks: list[str]) -> None:
    assert [cells(row)[2] for row in shown(layout, "x=3", shape)[3:]] == blocks


def test_of_many_ranks_the_first_64_are_shown() -> None:
    lines = shown("S0", "x=100", (100,))
    assert lines[66:68] == ["63    63  [63:64]", "... and 36 ranks more"]


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        (("S0", "x=100", (100,)), ["S(0): 100 different blocks, each on 1 rank"]),
        (("S0", "x=100", (90,)), ["S(0): 90 different blocks, each on 1 rank; 10 ranks without any"]),
        (("S0,R", "x=8,y=50", (8,)), ["S(0)R: 8 different blocks, each on 50 ranks"]),
        (("R", "x=16384", (8,)), ["R: 1 different block, each on 16384 ranks"]),
        (("R", "x=16385", (8,)), ["no count of different blocks: there are more than 16384 ranks"]),
    ],
)
def test_more_ranks_than_rows_are_counted_by_block(arguments: tuple[Any, ...], counts: list[str]) -> None:
    assert shown(*arguments)[68:] == counts


def test_a_plan_counts_the_blocks_of_each_layout() -> None:
    made = plan("S0,P", "R,S1", mesh="x=16,y=8", shape=(32, 32))
    assert [line.partition(":")[0] for line in shown(made)[68:]] == [
        made.src,
        *(step.after for step in made.steps),
    ]


@pytest.mark.parametrize("mesh", [f"x={2**31 - 1}", f"x={2**20},y={2**11 - 1}"])
def test_the_largest_meshes_are_shown_from_their_first_ranks(mesh: str) -> None:
    lines = shown(",".join("R" for _ in mesh.split(",")), mesh, (4,))
    assert lines[3].split()[0] == "0"
    assert lines[67].endswith(" ranks more")


@pytest.mark.parametrize(("factor", "is_refused"), [(1024, False), (1025, True), (2**31, True)])
def test_blocks_of_more_pieces_than_anybody_reads_are_refused(factor: int, is_refused: bool) -> None:
    arguments = f"_S(0, {factor})", "x=2", (2**40,)
    if is_refused:
        with pytest.raises(ValueError, match=f"blocks of up to {factor} pieces.*the most is 1024"):
            shown(*arguments)
    else:
        assert shown(*arguments)[3].count("+") == 1023


# Colours


def colours(lines: list[str]) -> list[list[str]]:
    return [re.findall(r"\x1b\[38;5;16;48;5;(\d+)m", line) for line in lines]


def test_on_a_terminal_equal_blocks_have_equal_colours() -> None:
    found = [row[0] for row in colours(shown("R,S0", "dp=2,tp=2", (4,), file=Terminal())[3:])]
    assert found[:2] == found[2:]
    assert found[0] != found[1]


def test_colours_leave_the_text_as_it_is() -> None:
    plain, coloured = shown(plan("P,S0", "S1,R")), shown(plan("P,S0", "S1,R"), file=Terminal())
    assert [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in coloured] == plain


def test_there_are_no_colours_where_nobody_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert not any(colours(shown("S0", "x=2", (4,), file=Terminal())))


def test_the_table_goes_to_the_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    funcol.show("S0", "x=2", (4,))
    assert capsys.readouterr().out.splitlines() == shown("S0", "x=2", (4,))


# DTensors


def shown_on_ranks(rank: int, world: int, ranks: list[int]) -> list[str]:
    mesh = DeviceMesh("cpu", ranks)
    return shown(distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)]))


def test_a_dtensor_is_shown_by_the_ranks_of_its_mesh() -> None:
    *others, lines = run_ranks(shown_on_ranks, 3, [2, 0, 1])
    assert others == [lines] * 2
    assert [cells(line) for line in lines[3:]] == [
        ["2", "0", "[0:2, :]"],
        ["0", "1", "[2:4, :]"],
        ["1", "2", "[4:5, :]"],
    ]


@pytest.fixture
def dtensor(mesh_2x2: DeviceMesh) -> DTensor:
    return DTensor.from_local(torch.zeros(2, 3), mesh_2x2, [Shard(0), Replicate()], run_check=False)


def test_a_spec_is_shown_as_its_dtensor(dtensor: DTensor) -> None:
    assert shown(dtensor._spec) == shown(dtensor)


def test_the_order_in_which_axes_cut_is_seen(dtensor: DTensor) -> None:
    moved = funcol.redistribute(dtensor, placements=[Shard(0), Shard(0)], shard_order=[(0, (1, 0))])
    assert [cells(row)[3] for row in shown(moved)[3:]] == ["[0:1, :]", "[2:3, :]", "[1:2, :]", "[3:4, :]"]


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "got a int, expected a DTensor"),
        (("S0",), r"got a str, expected .* placements with a mesh and a shape"),
        ((plan("S0", "R", mesh="x=2"), "x=2"), "a Plan has a mesh and a shape: pass it alone"),
    ],
)
def test_what_cannot_be_shown_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        funcol.show(*arguments)


@pytest.fixture
def part_of_world() -> Iterator[DeviceMesh]:
    """Yields a 2 x 2 mesh (dp, tp) of 8 ranks; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))["dp", "tp"]
    dist.destroy_process_group()


def test_a_plan_says_which_flattened_mesh_would_shorten_it(part_of_world: DeviceMesh) -> None:
    def made() -> Plan:
        return funcol.plan_redistribution("S0,S1", "S1,S0", part_of_world, (4, 4))

    long = made()
    assert len(long.steps) > 1
    assert long.hint == (
        f"1 step in place of {len(long.steps)} with a process group of dp, tp together: "
        'call mesh["dp", "tp"]._flatten() first'
    )
    assert long.hint in shown(long)
    assert long.hint in ElementTree.fromstring(long._repr_html_()).itertext()
    part_of_world._flatten()
    short = made()
    assert (len(short.steps), short.hint) == (1, "")
    assert not any("_flatten" in line for line in shown(short))


# Notebooks


def test_the_html_of_a_plan_has_its_steps_and_its_drawing() -> None:
    made = plan("P,S0", "S1,R")
    html = ElementTree.fromstring(made._repr_html_())
    assert [row[0].text for row in html.iter("tr")] == ["step", *map(str, made.steps), "total"]
    drawings = [one for one in html.iter() if one.tag.endswith("svg")]
    assert len(drawings) == 1


def test_a_plan_of_more_ranks_than_a_drawing_has_is_a_table() -> None:
    html = plan("S0", "R", mesh="x=65", shape=(65,))._repr_html_()
    assert "<table>" in html
    assert "<svg" not in html
    assert "65 ranks are more than the 64" in html


CELLS = {
    "a plan": "funcol.plan_redistribution('S0', 'R', 'x=2', (4, 4), 'float32')",
    "show": "funcol.show('S0', 'x=2', (4, 4))",
}


@pytest.fixture(scope="module")
def results_in_a_notebook(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Returns the output of a notebook for each of :data:`CELLS`."""
    found: dict[str, dict[str, str]] = {}
    # By files: a port that was free when it was chosen may be taken before the kernel binds it.
    manager = jupyter_client.manager.KernelManager(
        kernel_name="python3", transport="ipc", ip=str(tmp_path_factory.mktemp("kernel") / "channel")
    )
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        client.execute_interactive("import funcol", timeout=60)
        for name, code in CELLS.items():

            def keep(message: dict[str, Any], name: str = name) -> None:
                if "data" in message["content"]:
                    found[name] = message["content"]["data"]

            client.execute_interactive(code, timeout=60, output_hook=keep)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return found


@pytest.mark.parametrize("cell", CELLS)
def test_in_a_notebook_there_is_a_drawing(
    results_in_a_notebook: dict[str, dict[str, str]], cell: str
) -> None:
    assert "<svg" in results_in_a_notebook[cell]["text/html"]


def test_a_notebook_without_html_gets_the_table(results_in_a_notebook: dict[str, dict[str, str]]) -> None:
    assert results_in_a_notebook["show"]["text/plain"].splitlines() == shown("S0", "x=2", (4, 4))
