"""One rank of a case: build what ``ds-gpt train`` builds, step it, and write down what was seen.

Started by ``benchmarks.launch`` in fresh processes. The timed steps run undisturbed; where the time and the memory go
is measured in further steps of their own (``benchmarks.breakdown``).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.bench import Bench, Part
from benchmarks.breakdown import memory_by_kind, profiled, time_by_phase
from benchmarks.cases import Case
from benchmarks.collectives import Collectives
from benchmarks.trainers import make
from ds_gpt.config import Composed, ConfigError, Problem
from ds_gpt.config.hardware import peak_flops
from ds_gpt.config.parse import with_vocabulary
from ds_gpt.data import Dataset
from ds_gpt.data.loader import BatchLoader
from ds_gpt.data.rows import Rows
from ds_gpt.data.stages import needed_vocabulary, prepare_stage
from ds_gpt.engine.grid import Grid
from ds_gpt.engine.ranks import Ranks
from ds_gpt.trainer.reference import remember_reference

_BREAKDOWN_STEPS, _PROFILED_STEPS, _MEMORY_STEPS = 3, 2, 2
_ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "Cannot allocate memory", "bad_alloc")


def main() -> None:
    """Run the case on this rank; exit with status 1 and a written reason on any error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=0)  # from the deepspeed launcher
    options = parser.parse_args()
    given = json.loads(options.case.read_text())
    _end_with(given["suite"])
    rank = os.environ.get("RANK", "0")
    try:
        case = Case(**{**given["case"], "overrides": tuple(given["case"]["overrides"])})
        found = measure(case, given["launched_at"])
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        kind = "out_of_memory" if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in text for words in _OUT_OF_MEMORY) else "crash"
        (options.out / f"error{rank}.json").write_text(json.dumps({"status": kind, "message": text.strip(), "at": time.time()}))
        traceback.print_exc()
        os._exit(1)  # with peers gone, an ordinary end may wait for them
    (options.out / f"rank{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # as ds_gpt.commands.train ends, and for its reason


def _end_with(suite: int) -> None:
    """A suite that is killed cannot end its ranks, which would disturb the next one's timings: each rank waits for that, asleep."""
    if not hasattr(os, "pidfd_open"):  # Linux has it
        return
    try:
        gone = os.pidfd_open(suite)
    except ProcessLookupError:
        os._exit(1)
    Thread(target=lambda: (select.select([gone], [], []), os._exit(1)), daemon=True).start()


def measure(case: Case, launched_at: float) -> dict[str, Any]:
    """Everything about one rank of a case."""
    collectives = Collectives()
    collectives.install()
    ranks = Ranks.from_environment()
    composed = case.composed(ranks.hardware())
    dataset = prepare_stage(composed.run)
    item_tokens = dataset.train.item_tokens if isinstance(dataset.train, Rows) else None
    vocabulary = needed_vocabulary(composed.run, dataset)
    composed = replace(composed, run=with_vocabulary(composed.run, vocabulary), item_tokens=item_tokens)
    ranks.connect()
    if case.threads:
        torch.set_num_threads(case.threads)
    peak = _peak(composed, ranks)
    memory: dict[str, Any] = {}
    breakdown: dict[str, Any] = {}
    overlap: dict[str, Any] = {}
    bench = make_bench(case, composed, ranks, dataset)
    parts: list[Part] = [
        (case.warmup, nullcontext()),
        (case.steps, _timed(bench, memory)),
        (_BREAKDOWN_STEPS, time_by_phase(bench, collectives, breakdown)),
        (_PROFILED_STEPS, profiled(bench, overlap)),
    ]
    if ranks.device.type == "cpu":
        parts.append((_MEMORY_STEPS, memory_by_kind(bench, collectives, memory)))
    with sdpa_kernel(_ATTENTION[case.attention]) if case.attention != "auto" else nullcontext():
        bench.run(parts)
    bench.close()
    ranks.barrier()
    chosen = slice(case.warmup, case.warmup + case.steps)
    return {
        "start_up_s": bench.ready_at - launched_at,
        "warm_up_steps_s": bench.steps_s[: case.warmup],
        "steps_s": bench.steps_s[chosen],
        "cpu_steps_s": bench.cpu_s[chosen],
        "data_wait_s": bench.data_wait_s[chosen],
        "losses": bench.losses,
        "grad_norms": bench.grad_norms,
        "memory": memory,
        "breakdown": breakdown,
        "overlap": overlap,
        "peak_flops": peak,
        "threads": torch.get_num_threads(),
        "device": composed.hardware.name,
        "precision": composed.precision,
        "run": composed.run.model_dump(mode="json"),
        "deepspeed": composed.deepspeed,
        "tokens_per_step": composed.tokens_per_step,
        "dataset_digest": dataset.digest,
    }


def make_bench(case: Case, composed: Composed, ranks: Ranks, dataset: Dataset) -> Bench:
    """The case's trainer and its batches, ready to step."""
    run = composed.run
    plain = run.stage == "pretrain" and run.objective.name == "next_token" and run.lora.rank is None
    if case.trainer != "ds_gpt" and (not plain or run.keeps_documents_apart):
        raise ConfigError(
            Problem(
                f"trainer = '{case.trainer}' with stage = '{run.stage}', objective.name = '{run.objective.name}', "
                f"lora.rank = {run.lora.rank}, data.attend_across_documents = {run.data.attend_across_documents}",
                "peers train every weight on next tokens, each of which sees all before it",
                "set trainer: ds_gpt",
            )
        )
    sampler = dataset.train.sampler(run.model.context, run.batch.global_batch_size, run.seed)
    if case.trainer == "hf_trainer":
        from benchmarks.hugging_face import HuggingFaceBench

        return HuggingFaceBench(composed, ranks, dataset.train, sampler)
    trainee = make(case.trainer, composed, ranks)
    if run.stage == "dpo":
        remember_reference(trainee.engine, dataset)
    grid = Grid(run.parallel, composed.data_ranks, ranks.rank)
    share = grid.data_rank, grid.data_ranks, composed.micro_batch_size
    loader = BatchLoader(dataset.train, sampler, *share, ranks.device, not run.data.attend_across_documents)
    return Bench(composed, ranks, trainee, loader)


@contextmanager
def _timed(bench: Bench, memory: dict[str, Any]) -> Iterator[None]:
    """The steps that count, with nothing around them but the clock; the process's peaks when they are done."""
    device = bench.ranks.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    bench.ranks.barrier()
    yield
    if device.type == "cuda":
        memory |= {"allocated_peak_bytes": torch.cuda.max_memory_allocated(device), "reserved_peak_bytes": torch.cuda.max_memory_reserved(device)}
    else:
        memory["resident_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _peak(composed: Composed, ranks: Ranks) -> dict[str, Any]:
    """The FLOP/s that utilization is a share of: a GPU's from its datasheet, a CPU's as matrix products reach it here."""
    if ranks.device.type == "cuda":
        return {"per_rank": peak_flops(composed.hardware.name, composed.precision), "source": "datasheet"}
    size, seconds = 1024, []
    a, b = torch.randn(size, size), torch.randn(size, size)
    ranks.barrier()
    for _ in range(8):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    threads = torch.get_num_threads()
    source = f"measured: best of 8 fp32 products of {size} x {size} matrices, {threads} thread{'s' if threads > 1 else ''}, all ranks at once"
    return {"per_rank": 2 * size**3 / min(seconds), "source": source}


if __name__ == "__main__":
    main()
