"""End a rank on an error so that the user reads it once, not once a rank, and the launcher ends non-zero."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ds_gpt.config import NeedsAttention
from ds_gpt.trainer.out_of_memory import OutOfMemory

# The launchers look for a dead rank once a second and then end the others: by SIGTERM, which a rank in the midst of
# training takes for a request to save, and deepspeed's after 30 s more by SIGKILL.
_PATIENCE_S = 35
# A launcher sees to its own node alone: the first rank of another one speaks for it, if no job manager was quicker.
_NODE_PATIENCE_S = 5

# What gloo, NCCL and the store between the ranks say of one that is gone. Without gloo's source line and its advice.
_GONE = "onnection (?:reset|closed) by peer|onnection timed out|onnection was likely closed|Broken pipe|No route to host|remote process exit"
_LOST = re.compile(rf"(?:\[\S+:\d+\] )?(?P<words>[^\n]*(?:{_GONE}).*?)(?:\. This is typically|\n|$)")


def run_or_fail(function: Callable[[], None]) -> None:
    """Call `function`; on an error print it, and exit with status 2 where a person has to see to it, else 1, which a restart may mend.

    Most errors happen on every rank at once. The first rank speaks, a little later the first of each other node; the
    others wait to be ended by the launcher, and speak only if they are still there, because then theirs is an error that
    the first rank does not have.
    """
    try:
        function()
    except NeedsAttention as error:
        _fail(f"\nds_gpt: {'these need' if len(error.problems) > 1 else 'this needs'} your attention\n\n{error}\n", status=2)
    except KeyboardInterrupt:
        os._exit(130)
    except OutOfMemory as error:
        _fail(str(error))
    except Exception as error:
        if lost := _of_a_lost_rank(error):
            _fail(lost, patience_s=0)
        _fail(traceback.format_exc())


def print_or_fail(function: Callable[[], None]) -> None:
    """`run_or_fail` for a verb that only prints: a reader that has seen enough, say `head`, is no error."""

    def printed() -> None:
        try:
            function()
            sys.stdout.flush()
        except BrokenPipeError:
            os._exit(0)  # an ordinary exit would flush once more

    run_or_fail(printed)


def _of_a_lost_rank(error: Exception) -> str | None:
    """What to say where a rank, or its host, is gone, which is no error of this one; None where that is not the reason."""
    found = _LOST.search(str(error)) if int(os.environ.get("WORLD_SIZE", 1)) > 1 else None
    if found is None or not isinstance(error, RuntimeError):
        return None
    return (
        f"ds_gpt: on {platform.node()}: the connection to another rank is lost: {found['words']}\n"
        "why: that rank has ended, or its host or the network has; no step can be taken without it\n"
        "do:  look for what was said there last; then go on with --resume, on the hosts that are left if need be"
    )


def _tell_torchrun(message: str) -> None:
    """Say it once more, to torchrun, which ends with a page of its own whatever we do.

    The last thing there, its root cause, is then what went wrong instead of "To enable traceback see ...".
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        told = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": told}), encoding="utf-8")


def _fail(message: str, status: int = 1, patience_s: float = _NODE_PATIENCE_S) -> NoReturn:
    rank = int(os.environ.get("RANK", 0))
    if rank > 0:
        time.sleep(patience_s if os.environ.get("LOCAL_RANK") == "0" else _PATIENCE_S)
        message = f"rank {rank}: {message}"
    _tell_torchrun(message)
    with contextlib.suppress(OSError):  # nobody reads any more: the status tells
        print(message, file=sys.stderr, flush=True)
    # Not sys.exit: with peers gone, tearing down the process group can wait for them for minutes.
    os._exit(status)
