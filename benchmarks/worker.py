"""One rank of a case: build what ``ds-gpt train`` builds, step it, and write down what was seen.

Started by ``benchmarks.launch`` in fresh processes. The timed steps run undisturbed; where the time and the memory go
is measured in further steps of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import traceback
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases import Case
from benchmarks.collectives import Collectives
from benchmarks.ledger import Ledger
from benchmarks.trainers import Trainee, make
from ds_gpt.config import Composed
from ds_gpt.config.hardware import peak_flops
from ds_gpt.config.parse import with_vocabulary
from ds_gpt.data import prepare
from ds_gpt.data.loader import BatchLoader
from ds_gpt.engine.ranks import Ranks
from ds_gpt.learning.schedule import schedule

_BREAKDOWN_STEPS = 3
_MEMORY_STEPS = 2
_ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "Cannot allocate memory", "bad_alloc")


@dataclass
class Bench:
    """A rank ready to step. `step_number` counts optimizer steps, so that every part trains on."""

    case: Case
    composed: Composed
    ranks: Ranks
    trainee: Trainee
    loader: BatchLoader
    step_number: int = 0

    def __post_init__(self) -> None:
        self.learning_rate = schedule(self.composed.run, self.ranks.world_size)
        self.cpu_s: list[float] = []  # of this process: what other work on the machine takes away does not count
        self.losses: list[float] = []
        self.grad_norms: list[float] = []

    def step(self) -> tuple[float, float]:
        """One step, as the training loop takes it. Seconds of the whole step and of waiting for data."""
        start, cpu_start = time.perf_counter(), time.process_time()
        batches = self.loader.load(self.step_number)
        loaded = time.perf_counter()
        loss, grad_norm = self.trainee.step(self.step_number, batches, self.learning_rate(self.step_number))
        self.synchronize()
        end = time.perf_counter()
        self.cpu_s.append(time.process_time() - cpu_start)
        self.step_number += 1
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)
        return end - start, loaded - start

    def synchronize(self) -> None:
        """Wait until the device is done."""
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)


def main() -> None:
    """Run the case on this rank; exit with status 1 and a written reason on any error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=0)  # from the deepspeed launcher
    options = parser.parse_args()
    given = json.loads(options.case.read_text())
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


def measure(case: Case, launched_at: float) -> dict[str, Any]:
    """Everything about one rank of a case."""
    collectives = Collectives()
    collectives.install()
    ranks = Ranks.from_environment()
    composed = case.composed(ranks.hardware())
    dataset = prepare(composed.run.data, composed.run.seed)
    composed = replace(composed, run=with_vocabulary(composed.run, dataset.tokenizer.vocab_size))
    ranks.connect()
    if case.threads:
        torch.set_num_threads(case.threads)
    on_gpu = ranks.device.type == "cuda"
    peak = _peak(composed, ranks)
    trainee = make(case.trainer, composed, ranks)
    run = composed.run
    sampler = dataset.train.sampler(run.model.context, run.batch.global_batch_size, run.seed)
    loader = BatchLoader(dataset.train, sampler, ranks.rank, ranks.world_size, composed.micro_batch_size, ranks.device)
    bench = Bench(case, composed, ranks, trainee, loader)
    ranks.barrier()
    ready_at = time.time()
    with sdpa_kernel(_ATTENTION[case.attention]) if case.attention != "auto" else nullcontext():
        warm_up = [bench.step()[0] for _ in range(case.warmup)]
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(ranks.device)
        ranks.barrier()
        timed = [bench.step() for _ in range(case.steps)]
        memory = _device_memory(ranks) if on_gpu else {"resident_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        breakdown = time_by_phase(bench, collectives)
        if not on_gpu:
            memory |= memory_by_kind(bench, collectives)
    bench.loader.close()
    ranks.barrier()
    return {
        "start_up_s": ready_at - launched_at,
        "warm_up_steps_s": warm_up,
        "steps_s": [whole for whole, _ in timed],
        "cpu_steps_s": bench.cpu_s[case.warmup : case.warmup + case.steps],
        "data_wait_s": [waited for _, waited in timed],
        "losses": bench.losses,
        "grad_norms": bench.grad_norms,
        "memory": memory,
        "breakdown": breakdown,
        "peak_flops": peak,
        "threads": torch.get_num_threads(),
        "device": composed.hardware.name,
        "precision": composed.precision,
        "run": run.model_dump(mode="json"),
        "deepspeed": composed.deepspeed,
        "tokens_per_step": composed.tokens_per_step,
        "dataset_digest": dataset.digest,
    }


def _device_memory(ranks: Ranks) -> dict[str, int]:
    return {
        "allocated_peak_bytes": torch.cuda.max_memory_allocated(ranks.device),
        "reserved_peak_bytes": torch.cuda.max_memory_reserved(ranks.device),
    }


def time_by_phase(bench: Bench, collectives: Collectives) -> dict[str, Any]:
    """Seconds a step by phase, communication apart, in steps that wait for the device at each phase's end."""
    seconds: dict[str, float] = defaultdict(float)
    communicating: dict[str, float] = defaultdict(float)
    phase, since, so_far = "", 0.0, 0.0

    def enter(name: str) -> None:
        nonlocal phase, since, so_far
        bench.synchronize()
        now = time.perf_counter()
        if phase:
            communicating[phase] += collectives.seconds - so_far
            seconds[phase] += now - since - (collectives.seconds - so_far)
        phase, since, so_far = name, time.perf_counter(), collectives.seconds

    bench.trainee.on_phase = enter
    wholes, waits = [], []
    with collectives.counting():
        for _ in range(_BREAKDOWN_STEPS):
            bench.ranks.barrier()
            whole, waited = bench.step()
            enter("")
            wholes.append(whole)
            waits.append(waited)
    bench.trainee.on_phase = lambda name: None
    steps = _BREAKDOWN_STEPS
    counts = {name: {key: value / steps for key, value in count.items()} for name, count in collectives.counts.items()}
    return {
        "steps": steps,
        "step_s": sum(wholes) / steps,
        "data_wait_s": sum(waits) / steps,
        "phases_s": {name: value / steps for name, value in seconds.items()},
        "communication": counts,
    }


def memory_by_kind(bench: Bench, collectives: Collectives) -> dict[str, dict[str, int]]:
    """Bytes of live tensors by kind: at their peak, and when the gradients of a step are complete."""
    ledger = Ledger()
    complete: dict[str, int] = {}
    born = {"forward": "activations", "backward": "activations", "optimizer": "buffers", "bookkeeping": "buffers"}

    def know() -> None:
        for tensor, kind in bench.trainee.tensors():
            ledger.add(tensor, kind)

    def enter(name: str) -> None:
        nonlocal complete
        know()
        ledger.phase, ledger.born = name, born[name]
        if name == "optimizer":  # of the last micro-step in the end
            complete = ledger.held()

    def gradient_there(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            ledger.add(parameter.grad, "gradients")

    hooks = [parameter.register_post_accumulate_grad_hook(gradient_there) for parameter in bench.trainee.model.parameters() if parameter.requires_grad]
    collectives.on_tensors = ledger.communicated
    bench.trainee.on_phase = enter
    ledger.add_everything()
    know()
    ledger.phase = "forward"
    with ledger:
        for _ in range(_MEMORY_STEPS):
            bench.step()
    know()
    bench.trainee.on_phase, collectives.on_tensors = lambda name: None, None
    for hook in hooks:
        hook.remove()
    peaks = ledger.at_peaks()
    highest = max(peaks.values(), key=lambda kinds: sum(kinds.values()))
    return {"peak_bytes": highest, "peak_by_phase_bytes": peaks, "complete_bytes": complete, "between_steps_bytes": ledger.held()}


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
