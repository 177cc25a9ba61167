"""The preflight finds what is broken, names it, and never waits for it for long."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from doctored import DEADLINE_S, examined, saw
from forked_ranks import run_ranks

from ds_gpt.config import ParallelConfig, load
from ds_gpt.config.shipped import DEFAULT_DEEPSPEED, DEFAULT_RUN
from ds_gpt.engine.ranks import Ranks
from ds_gpt.trainer import preflight, preflight_ranks

ONE = Ranks(0, 1, 0, 1, torch.device("cpu"))


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def two_ranks(port: int, folder: Path, broken: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = run_ranks(2, examined, port, str(folder), broken, deadline_s=60)
    assert first["failed"] == second["failed"]
    assert max(first["seconds"], second["seconds"]) < 6 * DEADLINE_S
    return first, second


# ---- All ranks together -------------------------------------------------------------------------------------------------


def test_ranks_that_agree(port: int, tmp_path: Path) -> None:
    first, second = two_ranks(port, tmp_path)
    assert not first["failed"] and second["found"] == []
    assert {check.verdict for check in first["found"]} <= {"ok", "warning"}  # a warning: a machine of one core
    assert "deepspeed 0." in saw(first["found"], "versions").saw
    assert "16 MiB in" in saw(first["found"], "all-reduce").saw and "planner" not in saw(first["found"], "all-reduce").saw
    assert first["seconds"] < DEADLINE_S
    assert not list(tmp_path.iterdir())  # it leaves nothing behind


@pytest.mark.parametrize(
    ("broken", "name", "verdict", "words"),
    [
        ("version", "versions", "problem", ["deepspeed: 0.19", "on rank 0", "0.1.2 on rank 1"]),
        ("clock", "clock", "warning", ["other is 90.", "s ahead of"]),
        ("unshared", "shared folder", "problem", ["is not there on other"]),
        ("lo", "network", "problem", ["other: GLOO_SOCKET_IFNAME = 'lo' is the loopback"]),
        ("late", "ranks", "problem", ["rank 1 did not answer within 4 s"]),
        ("gone", "all-reduce", "problem", ["rank 0 (", "rank 1 (", "no word within 4 s"]),
    ],
)
def test_what_is_broken_on_one_rank_is_named(
    broken: str, name: str, verdict: str, words: list[str], port: int, tmp_path: Path
) -> None:
    first, _ = two_ranks(port, tmp_path, broken)
    (found,) = [check for check in first["found"] if check.name == name and all(word in check.saw for word in words)]
    assert found.verdict == verdict and found.why and found.fix
    assert first["failed"] == any(check.verdict == "problem" for check in first["found"])


def of_nodes(*counts: int) -> dict[int, dict[str, str]]:
    """What is known of the ranks of nodes with so many each."""
    names = [f"node{number}" for number, count in enumerate(counts) for _ in range(count)]
    return {rank: {"node": name} for rank, name in enumerate(names)}


@pytest.mark.parametrize(
    ("counts", "parallel", "verdict", "words"),
    [
        ((8,), ParallelConfig(tensor=8), "ok", "1: node0 with 8 ranks"),
        ((8, 8), ParallelConfig(tensor=4, pipeline=2, sequence=2), "ok", "2: node0, node1, 8 ranks each"),
        ((8, 4), ParallelConfig(tensor=4), "ok", "2: node0 with 8 ranks, node1 with 4 ranks"),
        ((4, 4), ParallelConfig(tensor=4, sequence=2), "warning", "ranks 0 to 7 share matrices and sequences"),
        ((6, 6), ParallelConfig(tensor=4), "warning", "ranks 4 to 7 share matrices"),
        ((2, 2, 2, 2), ParallelConfig(sequence=4), "warning", "ranks 0 to 3, and 1 more groups, share sequences"),
    ],
)
def test_those_that_talk_most_should_be_on_one_node(counts: tuple[int, ...], parallel: ParallelConfig, verdict: str, words: str) -> None:
    found = preflight_ranks.nodes(of_nodes(*counts), parallel)
    assert (found.verdict, words in found.saw) == (verdict, True), found
    assert bool(found.why and found.fix) == (verdict == "warning")


# ---- One machine --------------------------------------------------------------------------------------------------------


def run_config(*overrides: str) -> Any:
    return load(DEFAULT_RUN, DEFAULT_DEEPSPEED, ONE.hardware(), overrides).run


def test_a_port_that_is_taken() -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        number = holder.getsockname()[1]
        found = preflight.port(number)
    assert found.verdict == "warning" and str(number) in found.saw and "--master_port" in found.fix
    assert preflight.port(number).verdict == "ok"


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that even root cannot write."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", place]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        place.chmod(0o500)
        if os.access(place, os.W_OK):
            pytest.skip("root that may not mount")
        yield place
        return
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_folder_that_cannot_be_written(read_only: Path, tmp_path: Path) -> None:
    found = preflight.folder(read_only / "runs" / "x")
    assert found.verdict == "problem" and str(read_only) in found.saw and "--run-dir" in found.fix
    (tmp_path / "file").touch()
    assert preflight.folder(tmp_path / "file" / "runs").verdict == "problem"
    assert preflight.folder(tmp_path / "new" / "runs").verdict == "ok"
    assert not (tmp_path / "new").exists()


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    # GPT-2 small has 124,439,808 parameters (Radford et al. 2019, as transformers counts them)
    gpt2 = ["model.layers=12", "model.width=768", "model.heads=12", "model.context=1024", "model.vocab_size=50257"]
    kept = ["checkpoints.every=10", "checkpoints.keep_last=3", "checkpoints.keep_best=false"]
    found = preflight.disk(run_config(*gpt2, *kept), tmp_path)
    assert f"keeps 3 checkpoints and writes one, {4 * 12 * 124_439_808 / 2**30:,.3g} GiB" in found.saw
    huge = preflight.disk(run_config(*gpt2, *kept, "model.layers=200000", "checkpoints.keep_last=100"), tmp_path)
    assert huge.verdict == "problem" and "keep_last" in huge.fix
    assert "at least" in preflight.disk(run_config(), tmp_path).saw


def test_a_model_that_does_not_fit() -> None:
    settings = ["model.vocab_size=50257"]
    (fits,) = preflight.memory(ONE, load(DEFAULT_RUN, DEFAULT_DEEPSPEED, ONE.hardware(), settings))
    assert fits.verdict == "ok" and "the step of quickstart needs " in fits.saw
    huge = load(DEFAULT_RUN, DEFAULT_DEEPSPEED, ONE.hardware(), [*settings, "model.layers=1000", "model.width=16384"])
    (short,) = preflight.memory(ONE, huge)  # 3.2e12 parameters
    assert short.verdict == "problem" and "ds-gpt plan" in short.fix
    assert not list(preflight.memory(ONE, load(DEFAULT_RUN, DEFAULT_DEEPSPEED, ONE.hardware(), [])))  # no vocabulary yet


def test_a_stale_lock_of_a_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert preflight.extension_locks().verdict == "ok"
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert preflight.extension_locks().verdict == "ok"  # someone compiles right now
    os.utime(lock, (time.time() - 3600,) * 2)
    found = preflight.extension_locks()
    assert found.verdict == "problem" and str(lock) in found.saw and "60 minutes" in found.saw


@pytest.mark.parametrize(
    ("kind", "value", "nodes", "verdict"),
    [
        ("cpu", "nowhere0", 1, "problem"),
        ("cpu", "lo", 1, "ok"),
        ("cpu", "lo", 2, "problem"),
        ("cuda", "l", 2, "problem"),  # a prefix
        ("cuda", "=l", 2, "problem"),  # a whole name, of no interface
        ("cuda", "^lo", 1, "ok"),
    ],
)
def test_the_interface_that_was_chosen(kind: str, value: str, nodes: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME" if kind == "cuda" else "GLOO_SOCKET_IFNAME", value)
    if value == "^lo" and not preflight._chosen("^lo", preflight.psutil.net_if_addrs(), exact=False):
        pytest.skip("this machine has no interface but the loopback")
    (found,) = preflight.interfaces(kind, nodes > 1)
    assert found.verdict == verdict, found


def test_a_name_that_leads_to_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert [check.verdict for several in (False, True) for check in preflight.interfaces("cpu", several)] == ["ok", "problem"]


def test_a_limit_on_open_files() -> None:
    assert next(iter(preflight.limits(10**9))).verdict == "warning"


def test_gpus_as_nvidia_smi_prints_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that PyTorch does not see, one that somebody uses, and one with memory errors."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\ncat <<'TEXT'\n0, NVIDIA A100-SXM4-40GB, 30123, 40960, 0, 550.54.15\n"
        "1, NVIDIA A100-SXM4-40GB, 4, 40960, 7, 550.54.15\n2, NVIDIA L4, 1, 23034, [N/A], 550.54.15\nTEXT\n"
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (unseen,) = preflight.devices(ONE)
    assert unseen.verdict == "problem" and "3 x NVIDIA A100-SXM4-40GB" in unseen.saw and torch.__version__ in unseen.saw
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    fine, used, broken = preflight.devices(ONE)
    assert fine.verdict == "ok" and "NCCL 2.27.3" in fine.saw
    assert used.verdict == "warning" and "GPU 0" in used.saw and "30123 of 40960 MiB" in used.saw
    assert broken.verdict == "problem" and "GPU 1" in broken.saw and "7 uncorrected" in broken.saw
