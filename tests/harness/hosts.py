"""Two hosts on one machine: network namespaces with a cable between them, each with a name of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Host:
    """One of them.

    Attributes:
        name: what `hostname` says there.
        space: its network namespace.
        interface: its end of the cable.
        address: of that end.
        cores: processor cores that are its own, as `taskset` lists them.
    """

    name: str
    space: str
    interface: str
    address: str
    cores: str

    def words(self, *command: object) -> list[str]:
        """The words that run a command there."""
        start = 'hostname "$0"; exec "$@"'
        place = ["ip", "netns", "exec", self.space, "unshare", "--uts", "taskset", "--cpu-list", self.cores]
        return [*place, "sh", "-c", start, self.name, *map(str, command)]

    def pull_the_cable(self) -> None:
        """From now on nothing that is sent arrives, in either direction, and nobody is told so."""
        subprocess.run(["ip", "-n", self.space, "link", "set", self.interface, "down"], check=True)

    def kill(self) -> None:
        """Every process there, however it was started."""
        listed = subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True, check=False).stdout
        for pid in listed.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@contextlib.contextmanager
def two_hosts(named: bool = True) -> Iterator[tuple[Host, Host]]:
    """Both of them while the block runs; the test is skipped where they cannot be made.

    Args:
        named: whether each knows the other, and itself, by name.
    """
    mark = f"dsgpt{os.getpid()}"
    cores = sorted(os.sched_getaffinity(0))
    hosts = tuple(
        Host(f"host{n}", f"{mark}{'ab'[n]}", "wire", f"10.77.0.{n + 1}", ",".join(map(str, cores[n::2] or cores)))
        for n in range(2)
    )
    made = [
        *(f"ip netns add {host.space}" for host in hosts),
        f"ip link add wire netns {hosts[0].space} type veth peer name wire netns {hosts[1].space}",
        *(f"ip -n {host.space} addr add {host.address}/24 dev {host.interface}" for host in hosts),
        *(f"ip -n {host.space} link set {device} up" for host in hosts for device in (host.interface, "lo")),
    ]
    try:
        for command in made:
            try:
                subprocess.run(command.split(), check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                pytest.skip("only root may make network namespaces, with iproute2")
        for host in hosts:
            _wait_for_carrier(host)
        for host in hosts if named else ():
            _of(host).mkdir(parents=True)
            known = "".join(f"{each.address} {each.name}\n" for each in hosts)
            (_of(host) / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        yield hosts  # type: ignore[misc]
    finally:
        for host in hosts:
            host.kill()
            shutil.rmtree(_of(host), ignore_errors=True)
            subprocess.run(["ip", "netns", "del", host.space], capture_output=True, check=False)


def _wait_for_carrier(host: Host, deadline_s: float = 20) -> None:
    """The kernel tells of a cable's other end up to a second after it is there; until then the interface is not running."""
    late = time.monotonic() + deadline_s
    shown = ["ip", "-n", host.space, "link", "show", "dev", host.interface]
    while "state UP" not in subprocess.run(shown, check=True, capture_output=True, text=True).stdout:
        assert time.monotonic() < late, f"{host.interface} of {host.name} did not come up"
        time.sleep(0.02)


def _of(host: Host) -> Path:
    """Where `ip netns exec` looks for files that are to stand in for those of /etc."""
    return Path("/etc/netns") / host.space
