"""Ranks of a preflight, as functions for the fork server, each with what is broken on one of them."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_gpt.config import load
from ds_gpt.config.shipped import DEFAULT_DEEPSPEED, DEFAULT_RUN
from ds_gpt.engine.ranks import Ranks
from ds_gpt.trainer import preflight_ranks
from ds_gpt.trainer.preflight import Check

DEADLINE_S = 4.0


def examined(ranks: Any, port: int, folder: str, broken: str = "") -> dict[str, Any]:
    """A preflight of all ranks that meet at `port`; rank 1 is `broken`. The group that the harness made is left."""
    ranks.barrier()  # a rank that leaves while another still connects makes that fail
    ranks.disconnect()
    os.chdir(folder)
    os.environ.update(MASTER_PORT=str(port))
    if not ranks.is_first and broken:
        _BREAK[broken]()
    if broken in ("clock", "unshared", "lo"):  # two nodes of a rank each
        ranks = replace(ranks, local_rank=0, local_world_size=1)
    composed = load(DEFAULT_RUN, DEFAULT_DEEPSPEED, ranks.hardware(), [])
    found: list[Check] = []
    start = time.monotonic()
    failed = preflight_ranks.preflight(ranks, composed, Path("runs"), DEADLINE_S, lambda checks: found.extend(checks))
    seconds = time.monotonic() - start
    Ranks.barrier = lambda self: None  # the harness's last word, for which there is no group any more
    return {"failed": failed, "found": found, "seconds": seconds}


def _other_version() -> None:
    real = preflight_ranks.version
    preflight_ranks.version = lambda package: "0.1.2" if package == "deepspeed" else real(package)


def _other_node() -> None:
    platform.node = lambda: "other"


def _clock() -> None:
    _other_node()
    now = time.time
    time.time = lambda: now() + 90


def _unshared() -> None:
    _other_node()
    elsewhere = Path("elsewhere")
    elsewhere.mkdir()
    os.chdir(elsewhere)


def _lo() -> None:
    _other_node()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def _late() -> None:
    """Hangs in the checks of its machine, as on a dead network disk, for longer than rank 0 waits."""
    real = preflight_ranks.facts
    preflight_ranks.facts = lambda ranks: (time.sleep(1.5 * DEADLINE_S), real(ranks))[1]


def _gone() -> None:
    """Arrives at the all-reduce and does not enter it, for longer than rank 0 waits for it and then for its word."""
    preflight_ranks.all_reduce = lambda meeting: time.sleep(2.5 * DEADLINE_S) or []


_BREAK = {"version": _other_version, "clock": _clock, "unshared": _unshared, "lo": _lo, "late": _late, "gone": _gone}


def saw(checks: Sequence[Check], name: str) -> Check:
    """The gravest check of that name."""
    return min((check for check in checks if check.name == name), key=lambda c: ("problem", "warning", "ok").index(c.verdict))
