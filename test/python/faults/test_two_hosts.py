"""Training on two hosts by torchrun, over a link that is slow, loses packets or is cut, and hosts that leave
and come back.

The hosts are network namespaces. Where there can be none, the tests are skipped; in CI with the
rights to make them, they fail.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import elastic_training
import pytest
from fault_programs import runs_fsdp2
from two_hosts import Host, Link, is_full_root, two_hosts, why_no_hosts

NUM_STEPS = 6
TIMEOUT_S = 5.0  # of the groups that lose a rank
GRACE_S = 5.0
LIMIT_S = 180.0

Losses = dict[int, float]


@pytest.fixture(autouse=True, scope="module")
def _hosts_are_possible() -> None:
    reason = why_no_hosts()
    if reason is not None and os.environ.get("CI") == "true" and is_full_root():
        pytest.fail(f"two hosts are required where CI is true: {reason}", pytrace=False)
    if reason is not None:
        pytest.skip(reason)


class Run:
    """A training on two hosts, a rank on each."""

    def __init__(
        self, folder: Path, hosts: tuple[Host, Host], link: Link, options: list[str], program: list[str]
    ):
        self.folder, self.hosts, self.link = folder, hosts, link
        self.options, self.program = options, program
        self.agents = [self.start_agent(number) for number in range(2)]

    def start_agent(self, number: int) -> subprocess.Popen[bytes]:
        rendezvous = [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.hosts[0].address}:29400",
            f"--rdzv-conf=is_host={int(number == 0)}",
            "--rdzv-id=two_hosts",
            f"--local-addr={self.hosts[number].address}",
        ]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        environment = {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            # The agents' own store keeps addresses of ranks that are gone, which the next ones would call.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        command = [*torchrun, *rendezvous, *self.options, elastic_training.__file__, *self.program]
        return self.hosts[number].start(command, self.folder / f"log_{number}", environment)

    def losses(self) -> Losses:
        """Of each step; a step that was taken again after a checkpoint has the same loss."""
        losses: Losses = {}
        for step, loss in map(json.loads, self.lines()):
            assert losses.setdefault(step, loss) == loss
        return losses

    def lines(self) -> list[str]:
        path = self.folder / "losses"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for_steps(self, number: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while len(self.lines()) < number:
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def wait(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        for agent in self.agents:
            assert agent.wait(max(0.0, deadline - time.monotonic())) == 0, self.logs()

    def error_of(self, rank: int) -> dict[str, object]:
        path = self.folder / f"error_of_{rank}"
        deadline = time.monotonic() + TIMEOUT_S + 2 * GRACE_S
        while not path.exists() or not path.read_text():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)
        return json.loads(path.read_text())  # type: ignore[no-any-return]

    def leave(self, number: int) -> None:
        """The host's agent and ranks are killed."""
        agent = self.agents[number]
        namespace = ["ip", "netns", "pids", self.hosts[number].namespace]
        pids = subprocess.run(namespace, capture_output=True, text=True, check=True, timeout=60).stdout
        for pid in pids.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        agent.wait(60)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("log_*")))


@contextmanager
def training(
    folder: Path,
    *,
    delay_s: float = 0.0,
    loss: float = 0.0,
    max_restarts: int = 0,
    num_steps: int = NUM_STEPS,
    timeout_s: float = 60.0,
    breaks_at: int = -1,
) -> Iterator[Run]:
    program = [str(folder), str(num_steps), str(timeout_s), str(breaks_at)]
    with two_hosts(delay_s, loss) as (hosts, link):
        run = Run(folder, hosts, link, [f"--max-restarts={max_restarts}"], program)
        try:
            yield run
        finally:
            for number in range(2):
                run.leave(number)


@pytest.fixture(scope="module")
def expected(_hosts_are_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Losses of a run that nothing disturbs."""
    with training(tmp_path_factory.mktemp("undisturbed")) as run:
        run.wait()
        losses = run.losses()
    assert list(losses) == list(range(NUM_STEPS))
    assert losses[NUM_STEPS - 1] < losses[0]
    return losses


@pytest.mark.long
def test_a_delay_of_50_ms_changes_no_loss(expected: Losses, tmp_path: Path) -> None:
    with training(tmp_path, delay_s=0.05) as run:
        run.wait()
        assert run.losses() == expected


@pytest.mark.long
def test_a_loss_of_one_packet_in_a_hundred_changes_no_loss(expected: Losses, tmp_path: Path) -> None:
    with training(tmp_path, loss=0.01) as run:
        run.wait()
        assert run.link.num_lost > 0
        assert run.losses() == expected


@pytest.mark.long
def test_a_link_that_comes_back_within_the_time_out_changes_no_loss(expected: Losses, tmp_path: Path) -> None:
    with training(tmp_path) as run:
        run.wait_for_steps(2)
        run.link.cut()
        time.sleep(2)
        run.link.mend()
        run.wait()
        assert run.link.num_lost > 0
        assert run.losses() == expected


@runs_fsdp2
def test_a_cut_link_gives_each_rank_an_error_that_names_op_group_and_shape(tmp_path: Path) -> None:
    with training(tmp_path, timeout_s=TIMEOUT_S, num_steps=1_000_000) as run:
        run.wait_for_steps(3)
        run.link.cut()
        cut_at = time.time()
        for rank in range(2):
            error = run.error_of(rank)
            assert error["type"] == "DistBackendError", error
            failed = rf"funcol::\w+ failed on group '{error['group']}'"
            named = failed + r"; result of shape .*\[[\d, ]*\].* has no data"
            assert re.search(named, str(error["text"])), error
            assert cut_at < float(str(error["at"])) < cut_at + TIMEOUT_S + GRACE_S


@pytest.mark.long
def test_ranks_that_are_started_again_go_on_from_the_checkpoint(expected: Losses, tmp_path: Path) -> None:
    with training(tmp_path, max_restarts=2, breaks_at=3) as run:
        run.wait()
        assert (tmp_path / "has_broken").exists()
        assert (tmp_path / "error_of_1").exists()
        assert run.losses() == expected


@pytest.mark.long
def test_a_host_that_leaves_and_comes_back_goes_on_from_the_checkpoint(
    expected: Losses, tmp_path: Path
) -> None:
    with training(tmp_path, max_restarts=3, delay_s=0.05) as run:
        run.wait_for_steps(2)
        run.leave(1)
        assert "failed on group" in str(run.error_of(0)["text"])
        run.agents[1] = run.start_agent(1)
        run.wait()
        assert run.losses() == expected
