"""Hosts that are reached over ssh: a real sshd on each, with keys of their own, and nothing of this machine's changed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hosts import Host

_CONFIG = """\
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PidFile none
"""


@contextlib.contextmanager
def reached_over_ssh(hosts: Sequence[Host], folder: Path) -> Iterator[Path]:
    """A folder for the front of PATH whose `ssh` reaches every host; the test is skipped where there is no sshd or pdsh."""
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin")
    if sshd is None or shutil.which("pdsh") is None or shutil.which("ssh") is None:
        pytest.skip("pdsh, ssh and sshd are not all installed (apt install pdsh openssh-client openssh-server)")
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    commands = folder / "bin"
    commands.mkdir()
    options = f"-F none -i {folder}/user_key -o StrictHostKeyChecking=no -o UserKnownHostsFile={folder}/known -o LogLevel=ERROR"
    (commands / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {options} "$@"\n')
    (commands / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd will not start without it
    with contextlib.ExitStack() as stack:
        for host in hosts:
            config = folder / f"{host.name}.sshd"
            config.write_text(_CONFIG.format(address=host.address, folder=folder))
            log = stack.enter_context((folder / f"{host.name}.log").open("w"))
            server = subprocess.Popen(host.words(sshd, "-D", "-e", "-f", config), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            stack.callback(server.wait)
            stack.callback(server.kill)
        for host in hosts:
            _wait_for(hosts[0], host.address)
        yield commands


def _wait_for(one: Host, address: str) -> None:
    """Until `one` is let in at port 22 of `address`."""
    end = time.monotonic() + 20
    connect = f"import socket; socket.create_connection(({address!r}, 22), 2)"
    while subprocess.run(one.words("python3", "-c", connect), capture_output=True, check=False).returncode:
        assert time.monotonic() < end, "sshd does not answer"
        time.sleep(0.1)
