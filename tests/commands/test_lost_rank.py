"""What a rank says where another one, or its host, is gone; and which rank of a node says it."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_ranks
from jobs import PLAIN, TRAIN, ran

from ds_gpt.commands.failure import _of_a_lost_rank


def left_alone(ranks: Any) -> str | None:
    """What rank 0 would say when rank 1 leaves in the midst of the run."""
    ranks.barrier()
    said = None
    if ranks.is_first:
        try:
            ranks.barrier()
        except RuntimeError as error:
            said = _of_a_lost_rank(error)
    ranks.disconnect()
    type(ranks).barrier = lambda self: None  # the harness's last word, for which there is no group any more
    return said


def test_what_gloo_says_of_a_rank_that_left() -> None:
    said, _ = run_ranks(2, left_alone)
    assert said is not None and said.startswith(f"ds_gpt: on {platform.node()}: the connection to another rank is lost: ")
    assert re.search("onnection (closed|reset) by peer", said) and "\ndo:  " in said  # as the network has it
    assert "pair.cc" not in said and "GLHF" not in said


@pytest.mark.parametrize(
    ("error", "world_size", "lost"),
    [
        # As PyTorch 2.13 composes it: torch/csrc/distributed/c10d/NCCLUtils.cpp, of NCCL's ncclRemoteError
        (RuntimeError("NCCL error in: x.cpp:3\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."), 2, True),
        (RuntimeError("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"), 2, True),
        (RuntimeError("Connection closed by peer"), 1, False),
        (BrokenPipeError(32, "Broken pipe"), 2, False),  # nobody reads the output
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 2, False),
    ],
)
def test_which_errors_are_of_a_lost_rank(error: Exception, world_size: int, lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    assert bool(_of_a_lost_rank(error)) == lost


def test_the_first_rank_of_another_node_speaks_for_it(tmp_path: Path) -> None:
    """No launcher ends it for what happens on rank 0's node; the other ranks of its node leave that to it."""
    place = {"RANK": "8", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "LOCAL_SIZE": "8"}
    ended = ran(tmp_path, *PLAIN, TRAIN, "--set", "training.step=3", deadline_s=30, **place)
    assert ended.status == 2 and ended.err.startswith("rank 8: ") and "training.step" in ended.err
