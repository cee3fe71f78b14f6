"""Two hosts on this machine: network namespaces, and a link between them that can be slow, lossy or cut.

Each host has a TUN device whose packets pass through this process. So a link needs root and /dev/net/tun, but
no traffic control of the kernel.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import re
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_SET_INTERFACE = 0x400454CA  # TUNSETIFF
_TUN_WITHOUT_HEADER = 0x0001 | 0x1000  # IFF_TUN | IFF_NO_PI
_numbers = itertools.count()


def is_full_root() -> bool:
    """Returns true for root with the rights to make devices and namespaces, which containers may lack."""
    held = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    needed = 1 << 12 | 1 << 21  # CAP_NET_ADMIN and CAP_SYS_ADMIN
    return os.geteuid() == 0 and held is not None and int(held[1], 16) & needed == needed


def why_no_hosts() -> str | None:
    """Returns why there can be no hosts here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "ip (of iproute2) is not there"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun is not there"
    name = f"funcol_probe_{os.getpid()}"
    made = _ip("netns", "add", name, check=False)
    if made.returncode != 0:
        return f"no network namespace can be made: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return None


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True, timeout=60)


class Host:
    """A network namespace with one device, at ``address``."""

    def __init__(self, number: int) -> None:
        suffix = f"{os.getpid() % 100000}_{next(_numbers)}"
        self.namespace = f"funcol_{suffix}"
        self.device = f"fun{suffix}"
        self.address = f"10.77.0.{number}"
        self.tun = -1

    def begin(self) -> None:
        _ip("netns", "add", self.namespace)
        self.tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        name = struct.pack("16sH", self.device.encode(), _TUN_WITHOUT_HEADER)
        fcntl.ioctl(self.tun, _SET_INTERFACE, name)
        _ip("link", "set", self.device, "netns", self.namespace)
        inside = ("-n", self.namespace)
        _ip(*inside, "addr", "add", f"{self.address}/24", "dev", self.device)
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "link", "set", self.device, "up")

    def end(self) -> None:
        if self.tun >= 0:
            os.close(self.tun)
        _ip("netns", "del", self.namespace, check=False)

    def start(self, command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Starts ``command`` on this host, in a session of its own."""
        with log.open("ab") as out:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *command],
                env={**os.environ, "GLOO_SOCKET_IFNAME": self.device, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


class Link:
    """Carries packets between the TUN devices of two hosts, in a thread."""

    def __init__(self, hosts: tuple[Host, Host], delay_s: float, loss: float) -> None:
        self._peers = {hosts[0].tun: hosts[1].tun, hosts[1].tun: hosts[0].tun}
        self._delay_s, self._loss = delay_s, loss
        self._random = random.Random(0)
        self._is_up = True
        self._ends = False
        self._on_the_way: list[tuple[float, int, int, bytes]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.num_carried = 0
        self.num_lost = 0

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ends = True
        self._thread.join()

    def cut(self) -> None:
        self._is_up = False

    def mend(self) -> None:
        self._is_up = True

    def _run(self) -> None:
        numbers = itertools.count()
        while not self._ends:
            wait = 0.1
            if self._on_the_way:
                wait = min(wait, max(0.0, self._on_the_way[0][0] - time.monotonic()))
            for tun in select.select(list(self._peers), [], [], wait)[0]:
                packet = os.read(tun, 65536)
                if not self._is_up or self._random.random() < self._loss:
                    self.num_lost += 1
                    continue
                arrival = (time.monotonic() + self._delay_s, next(numbers), self._peers[tun], packet)
                heapq.heappush(self._on_the_way, arrival)
            while self._on_the_way and self._on_the_way[0][0] <= time.monotonic():
                _, _, tun, packet = heapq.heappop(self._on_the_way)
                with suppress(BlockingIOError):  # a full queue loses packets, as that of any device does
                    os.write(tun, packet)
                    self.num_carried += 1


@contextmanager
def two_hosts(delay_s: float = 0.0, loss: float = 0.0) -> Iterator[tuple[tuple[Host, Host], Link]]:
    """Yields two hosts and their link; each way takes ``delay_s`` and loses this share of the packets."""
    hosts = Host(1), Host(2)
    with ExitStack() as stack:
        for host in hosts:
            stack.callback(host.end)
            host.begin()
        link = Link(hosts, delay_s, loss)
        link.begin()
        stack.callback(link.end)
        yield hosts, link
