"""What one rank allocates, byte by byte, with no GPU and no other ranks: the real engine on fake tensors.

``trace`` runs our own build and our own step inside DeepSpeed under PyTorch's FakeTensorMode, whose tensors have
shapes and storages but no data, and a fake process group of any size, whose collectives do nothing. What is counted
is therefore what DeepSpeed and PyTorch ask for, not what a formula says. It patches torch for good, so it has a process
of its own: ``python -m ds_gpt.engine.trace`` reads a JSON request and prints the answer (see `trace_elsewhere`).

The tensors are CPU tensors, because a build without CUDA cannot differentiate fake CUDA ones. Three things that a GPU does
otherwise are put right: dropout keeps a mask of one byte an element, attention never forms its T x T matrix, and RMSNorm
is one kernel.
Not in it: the CUDA context, NCCL's buffers, and what the caching allocator holds beyond what is asked for.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_gpt.config import Composed, ConfigError, Hardware, Problem, load
from ds_gpt.engine.allocations import Allocations, Phase
from ds_gpt.engine.gpu_kernels import as_on_a_gpu

_STEPS = 2  # the first makes the optimizer's state; the second is like all that follow

# Attributes of DeepSpeed's optimizers, by what they hold. A storage that two of them reach is what the first says.
_OWNED = (
    ("weights", ("bit16_groups_flat", "bf16_groups_flat", "fp16_groups", "fp16_partitioned_groups_flat", "lp_param_buffer")),
    (
        "masters",
        ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat", "fp32_groups", "fp32_groups_flat"),
    ),
    (
        "gradients",
        (
            "fp32_groups_gradients_flat", "fp32_groups_gradients", "averaged_gradients", "all_grad_tensors", "temp_grad_buffer_for_cpu_offload",
            "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", "accumulated_grads_in_cpu", "single_partition_of_fp32_groups_grads",
            "grad_partitions_flat_buffer", "fp32_sr_partitioned_groups_flat",
        ),
    ),
    ("host copies", ("param_buffer_of_bit16_for_cpu_offload_groups",)),
    ("buckets", ("temp_grad_buffer_for_gpu_offload", "ipg_buckets", "ipg_buffer", "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer", "extra_large_param_to_reduce")),
)  # fmt: skip
# What DeepSpeed puts into host memory where the optimizer is offloaded, and where the parameters are too.
_HOST = {"optimizer": ("masters", "moments", "gradients", "host copies"), "parameters": ("masters", "moments", "gradients", "weights")}


@dataclass(frozen=True)
class Trace:
    """What one rank allocates while it is built and takes two optimizer steps.

    Attributes:
        phases: in order of time.
        peak_bytes: most that was live on the device after the build, and at which phase.
        peak_phase: name of that phase.
        kinds: bytes at the peak, by kind.
        resident: bytes between two steps, by kind.
        host_bytes: what is in host memory between two steps; not in the others.
        collectives: bytes that one optimizer step hands to each kind of collective (the larger of its inputs and outputs).
        world_size: ranks of the fake process group.
    """

    phases: tuple[Phase, ...]
    peak_bytes: int
    peak_phase: str
    kinds: dict[str, int]
    resident: dict[str, int]
    host_bytes: int
    collectives: dict[str, int]
    world_size: int


def run_steps(engine: Any, allocations: Allocations, kinds: dict[int, str]) -> None:
    """Two optimizer steps through the engine, each of its calls marked as a phase. `kinds` takes what each storage is."""
    wrapped, composed = engine.deepspeed, engine.composed
    forward, backward, step = wrapped.forward, wrapped.backward, wrapped.step
    _name_buckets(wrapped.optimizer, allocations, kinds)

    def marked(function: Any, phase: str, before: str | None = None) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if before:
                allocations.mark(before)
            result = function(*args, **kwargs)
            allocations.mark(phase)
            classify(engine, allocations, kinds)
            return result

        return call

    wrapped.forward, wrapped.backward, wrapped.step = marked(forward, "forward"), marked(backward, "backward", "loss"), marked(step, "step")
    for number in range(_STEPS):
        batches = [_batch(composed) for _ in range(composed.accumulation_steps)]
        if number == _STEPS - 1:
            allocations.collectives.clear()
        engine.step(number, batches, composed.run.optimizer.lr)
        del batches
        allocations.mark("between steps")


def _batch(composed: Composed) -> tuple[Tensor, ...]:
    """What the objective of the run takes, as `ds_gpt.data.loader` makes it."""
    run, size = composed.run, composed.micro_batch_size
    arrays = 2 + run.keeps_documents_apart + (run.stage == "sft")
    batch = [torch.zeros((run.sequences * size, run.model.context), dtype=torch.int64) for _ in range(arrays)]
    if run.stage == "dpo":
        batch.append(torch.zeros((size, 2)))
    if run.objective.name != "next_token":
        batch.append(torch.zeros(size, dtype=torch.int64))
    if run.stage != "pretrain" or run.objective.name != "next_token":
        batch.append(torch.ones(()))
    return tuple(batch)


def _name_buckets(optimizer: Any, allocations: Allocations, kinds: dict[int, str]) -> None:
    """ZeRO-2 makes its buckets as backward begins and frees them before it ends."""
    set_up = getattr(optimizer, "setup_buckets", None)
    if set_up is None:
        return

    def set_up_and_name() -> None:
        set_up()
        for bucket in tensors(list(optimizer.ipg_buckets.values())):
            kinds.setdefault(allocations.serial(bucket), "buckets")

    optimizer.setup_buckets = set_up_and_name


def classify(engine: Any, allocations: Allocations, kinds: dict[int, str]) -> None:
    """Name the storages that the engine owns by now; a name once given stays."""

    def name(kind: str, value: Any) -> None:
        for tensor in tensors(value):
            serial = allocations.serial(tensor)
            if serial is not None:
                kinds.setdefault(serial, kind)

    optimizer = engine.deepspeed.optimizer
    inner = engine.deepspeed.basic_optimizer
    for state in inner.state.values():
        name("moments", [state.get("exp_avg"), state.get("exp_avg_sq"), state.get("momentum_buffer")])
    for parameter in engine.model.parameters():
        shard = getattr(parameter, "ds_tensor", None)
        name("weights", shard)
        name("weights" if shard is None else "gathered weights", parameter.data)
        name("gradients", parameter.grad)
    for kind, attributes in _OWNED:
        for attribute in attributes:
            owned = getattr(optimizer, attribute, None)
            name(kind, owned)
            if kind == "masters":
                name("gradients", [master.grad for master in tensors(owned) if master.grad is not None])


def tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors in nested containers, and in objects that DeepSpeed keeps them in."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors(inner, depth + 1)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors(inner, depth + 1)
    elif depth < 3 and type(value).__module__.startswith("deepspeed") and hasattr(value, "__dict__"):
        for key in ("buffer", "ds_tensor"):
            yield from tensors(getattr(value, key, None), depth + 1)


def summarize(allocations: Allocations, kinds: dict[int, str], composed: Composed) -> Trace:
    """The answer, from the log of allocations."""
    zero = composed.deepspeed["zero_optimization"]
    offloaded: set[str] = set()
    for section, where in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        if (zero.get(section) or {}).get("device", "none") != "none":
            offloaded |= set(_HOST[where])
    on_host = {serial for serial, kind in kinds.items() if kind in offloaded}
    everything = list(allocations.phases(on_host))
    peak, peak_at = max(everything[1:], key=lambda item: item[0].peak_bytes)  # the first is the build
    host_bytes = sum(size for serial, size in allocations.live_at(allocations.marks[-1][1]).items() if serial in on_host)

    def by_kind(event: int) -> dict[str, int]:
        sizes: Counter[str] = Counter()
        for serial, size in allocations.live_at(event).items():
            if serial not in on_host:
                sizes[kinds.get(serial, "activations and temporaries")] += size
        return dict(sorted(sizes.items()))

    return Trace(
        tuple(phase for phase, _ in everything), peak.peak_bytes, peak.name, by_kind(peak_at), by_kind(allocations.marks[-1][1]), host_bytes,
        dict(allocations.collectives), composed.hardware.world_size,
    )  # fmt: skip


def trace(composed: Composed) -> Trace:
    """Build the engine and take two optimizer steps on fake tensors, as rank 0 of ``composed.hardware.world_size``.

    Patches torch for good: call it in a process that does nothing else.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    composed = replace(composed, deepspeed=_without_compiled_adam(composed.deepspeed), compiled=False)
    ranks = _pretend(composed)
    with FakeTensorMode():
        return measure(composed, ranks)


def measure(composed: Composed, ranks: Any) -> Trace:
    """Build the engine and take two optimizer steps, counting what this rank allocates. Also works on real ranks."""
    from ds_gpt.engine.engine import Engine

    allocations, kinds = Allocations(), {}
    with allocations:
        engine = Engine(composed, ranks)
        allocations.mark("build")
        classify(engine, allocations, kinds)
        run_steps(engine, allocations, kinds)
    result = summarize(allocations, kinds, composed)
    engine.close()
    return result


def _without_compiled_adam(deepspeed: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeedCPUAdam holds what torch's AdamW does, but has to be compiled. ``fused``: no temporaries in the step, as on a GPU."""
    optimizer = deepspeed["optimizer"]
    if optimizer["type"] != "AdamW":
        return deepspeed
    return {**deepspeed, "optimizer": {**optimizer, "params": {**optimizer["params"], "torch_adam": True, "fused": True}}}


def _pretend(composed: Composed) -> Any:
    """Make this process rank 0 of a group that does not exist, and torch work on tensors that hold nothing."""
    import torch._subclasses.fake_impls as fake_impls
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import ds_gpt.engine.engine
    from ds_gpt.engine.deepspeed_import import import_deepspeed
    from ds_gpt.engine.ranks import Ranks

    world_size = composed.hardware.world_size
    os.environ.update(
        DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    deepspeed = import_deepspeed("cpu")
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    # Numbers that are read out of tensors: no overflow, a positive norm.
    fake_impls.op_implementations_dict[torch.ops.aten._local_scalar_dense.default] = _number
    nn.Module._apply = _apply
    for check in ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks"):
        setattr(coordinator, check, lambda *args, **kwargs: None)
    # It hides ZeRO-3's gathering from every mode, that of fake tensors too. What it is for, evaluation, is not traced.
    ds_gpt.engine.engine.hide_gathering = lambda wrapped: None
    as_on_a_gpu(composed.run.model.dropout)
    return Ranks(0, world_size, 0, world_size, torch.device("cpu"))


def _number(mode: Any, func: Any, tensor: Tensor) -> bool | int | float:
    if tensor.dtype == torch.bool:
        return False
    if tensor.dtype == torch.uint8:  # DeepSpeed's flag of an overflow
        return 0
    return 1.0 if tensor.dtype.is_floating_point else 1


def _apply(self: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """``nn.Module._apply`` for fake tensors: PyTorch's own cannot swap a parameter that two modules share."""
    for child in self.children():
        child._apply(function)
    for parameter in self._parameters.values():
        if parameter is not None:
            with torch.no_grad():
                applied = function(parameter)
            if applied is not parameter:
                parameter.data = applied
    for key, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[key] = function(buffer)
    return self


@dataclass(frozen=True)
class Request:
    """What to trace: the arguments of ``ds_gpt.config.load``."""

    config: str
    deepspeed_config: str
    hardware: Hardware
    overrides: tuple[str, ...] = ()


def trace_elsewhere(requests: Sequence[Request], deadline_s: float = 900) -> list[Trace]:
    """`trace` of each request, in a process of their own.

    Raises:
        ConfigError: a request cannot be composed, a trace fails, or they are not done in time.
    """
    for request in requests:
        _load(request)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "ds_gpt.engine.trace"]
    asked = json.dumps([asdict(request) for request in requests])
    try:
        process = subprocess.run(command, input=asked, capture_output=True, text=True, env=environment, timeout=deadline_s)
    except subprocess.TimeoutExpired:
        raise ConfigError(Problem(f"the trace was not done after {deadline_s:.0f} s", fix="trace a model with fewer layers, or plan without --trace")) from None
    if process.returncode:
        last = "\n".join(process.stderr.strip().splitlines()[-12:])
        raise ConfigError(Problem(f"the trace failed: {last}", fix="plan without --trace; the analytic figures do not need it"))
    answers = json.loads(process.stdout.splitlines()[-1])
    return [Trace(**{**answer, "phases": tuple(Phase(**phase) for phase in answer["phases"])}) for answer in answers]


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    return asdict(trace(_load(Request(**{**request, "hardware": Hardware(**request["hardware"])}))))


def _load(request: Request) -> Composed:
    return load(request.config, request.deepspeed_config, request.hardware, request.overrides)


def main() -> None:
    """A JSON list of requests on standard input, a JSON list of traces on standard output."""
    from ds_gpt.engine.deepspeed_import import import_deepspeed
    # Each trace is a fork, because torch and DeepSpeed keep much of an engine for good. What all import, is imported once.
    import_deepspeed("cpu")
    import torch._dynamo
    import torch.testing._internal.distributed.fake_pg

    import ds_gpt.engine.engine  # noqa: F401

    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(json.dumps(pool.map(_answer, json.load(sys.stdin), chunksize=1)))


if __name__ == "__main__":
    main()
