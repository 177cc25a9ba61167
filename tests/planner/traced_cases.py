"""Runs whose memory was traced once, so that the analytic figures are held to the trace without tracing again.

``python tests/planner/traced_cases.py`` traces those that ``traced_peaks.json`` lacks and adds them (minutes to an hour);
``--again`` traces all. It needs PYTHONPATH to hold the repository and tests/harness.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from ds_gpt.config import Hardware

RECORD = Path(__file__).with_name("traced_peaks.json")
CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"

# name -> layers, width, heads, context, vocabulary, micro-batch: each lets another kind of memory be the largest
MODELS = {
    "wide": (4, 512, 8, 256, 1000, 4),
    "vocabulary": (6, 256, 4, 128, 50304, 2),
    "long": (4, 256, 4, 1024, 65, 2),
    "deep": (16, 256, 4, 128, 4000, 2),
    "short": (4, 1024, 8, 64, 2000, 1),
}
# The same of sequences so long that a mask of T x T is most of what there is.
LONG = {"8192 narrow": (2, 64, 4, 8192, 65, 1), "8192": (4, 256, 4, 8192, 65, 2)}
# ranks, accumulation steps, dropout, reduce bucket
SYSTEMS = ((8, 1, 0.0, 50_000_000), (2, 2, 0.1, 1_000_000))

# The model's options: all that a Llama has, and those that change what attention keeps.
LLAMA = ("model.positions=rotary", "model.norm=rmsnorm", "model.ffn=swiglu", "model.kv_heads=2", "model.bias=false", "model.tied_head=false")
OPTIONS = {
    "llama": LLAMA,
    "llama qk_norm": (*LLAMA, "model.qk_norm=true"),
    "llama window": (*LLAMA, "model.sliding_window=64"),
    "window": ("model.sliding_window=512",),
    "window kv_heads": ("model.sliding_window=512", "model.kv_heads=2"),
    "rotary": ("model.positions=rotary",),
    "kv_heads": ("model.kv_heads=2",),
    "swiglu": ("model.ffn=swiglu",),
    "qk_norm": ("model.qk_norm=true",),
    "qk_norm bucket": ("model.qk_norm=true", "zero_optimization.reduce_bucket_size=100000"),
}
# name of the model and of the options, stage, policy, precision, system
OPTION_CASES = (
    ("long", "llama", 0, "null", "bf16", 0), ("wide", "llama", 1, "full", "fp32", 1), ("long", "llama", 2, "selective", "bf16", 0),
    ("deep", "llama", 3, "null", "bf16", 0), ("wide", "llama", 2, "null", "bf16", 1), ("long", "llama qk_norm", 1, "null", "bf16", 0),
    ("long", "llama window", 2, "null", "fp32", 0), ("long", "rotary", 0, "null", "fp32", 1), ("long", "kv_heads", 0, "null", "fp32", 0),
    ("long", "swiglu", 0, "full", "bf16", 0), ("long", "qk_norm", 2, "null", "bf16", 0),
    ("long", "qk_norm bucket", 2, "full", "fp32", 0), ("long", "qk_norm bucket", 2, "full", "fp32", 1),
)  # fmt: skip
# the same of LONG
LONG_CASES = (
    ("8192 narrow", "llama window", 0, "null", "bf16", 0), ("8192 narrow", "window kv_heads", 1, "null", "bf16", 0), ("8192", "window", 1, "selective", "fp32", 0),
    ("8192", "llama window", 2, "full", "bf16", 1), ("8192", "llama window", 3, "full", "bf16", 0), ("8192", "documents", 1, "full", "bf16", 0),
)  # fmt: skip
# options, chunk of the loss in tokens, stage, precision, system
CHUNK_CASES = (("", 64, 0, "bf16", 0), ("", 100, 2, "fp32", 1), ("llama", 64, 2, "bf16", 0), ("llama", 64, 3, "bf16", 1), ("", 64, 1, "bf16", 0))
# model, options, stage, policy, precision, system, degrees
DEGREE_CASES = (
    ("long", "llama", 1, "null", "bf16", 0, {"sequence": 2}), ("long", "", 3, "null", "bf16", 0, {"sequence": 2}),
    ("long", "qk_norm", 2, "full", "bf16", 0, {"sequence": 4}), ("wide", "llama", 2, "null", "bf16", 0, {"tensor": 2}),
    ("long", "", 1, "selective", "fp32", 1, {"tensor": 2}), ("long", "rotary", 2, "null", "bf16", 0, {"tensor": 2, "sequence": 2}),
)  # fmt: skip

# What is learned instead of next tokens by every weight.
_ALL_MAPS = "lora.targets=[qkv, out, up, down]"
TASKS = {
    "lora": ("lora.rank=8",),
    "lora everywhere": ("lora.rank=8", _ALL_MAPS, "lora.dropout=0.1"),
    "lora some": ("lora.rank=16", "lora.targets=['blocks.[01].*.up', down]"),
    "lora llama": (*LLAMA, "lora.rank=8", "lora.targets=[qkv, gate, up]"),
    "sft": ("stage=sft",),
    "sft lora": ("stage=sft", "lora.rank=8", _ALL_MAPS),
    "sft llama": ("stage=sft", *LLAMA),
    "dpo": ("stage=dpo",),
    "dpo lora": ("stage=dpo", "lora.rank=8", _ALL_MAPS),
    "dpo chunks": ("stage=dpo", "loss.chunk_tokens=100"),
    "dpo lora chunks": ("stage=dpo", "lora.rank=8", "loss.chunk_tokens=100"),
    "reward": ("stage=reward",),
    "reward lora": ("stage=reward", "lora.rank=8"),
    "masked": ("objective.name=masked",),
    "spans": ("objective.name=span_corruption",),
    "documents": ("data.corpus=/somewhere", "data.attend_across_documents=false"),
}
# model, task, stage, policy, precision, system
TASK_CASES = (
    ("wide", "lora", 0, "null", "bf16", 0), ("wide", "lora", 1, "null", "fp32", 1), ("wide", "lora", 2, "null", "bf16", 0),
    ("wide", "lora", 3, "null", "bf16", 0), ("vocabulary", "lora", 1, "null", "bf16", 0), ("long", "lora", 2, "full", "bf16", 1),
    ("deep", "lora", 3, "full", "bf16", 0), ("long", "lora", 0, "selective", "bf16", 0), ("long", "lora everywhere", 0, "null", "fp32", 0),
    ("wide", "lora everywhere", 3, "null", "bf16", 0), ("long", "lora everywhere", 1, "selective", "bf16", 1), ("long", "lora some", 2, "null", "bf16", 0),
    ("long", "lora llama", 0, "null", "bf16", 0), ("wide", "lora llama", 3, "full", "bf16", 1),
    ("long", "sft", 2, "null", "bf16", 0), ("wide", "sft", 1, "full", "fp32", 1), ("long", "sft lora", 1, "null", "bf16", 1), ("long", "sft llama", 2, "null", "bf16", 0),
    ("vocabulary", "dpo", 2, "null", "bf16", 0), ("wide", "dpo", 3, "full", "bf16", 1), ("vocabulary", "dpo chunks", 1, "null", "bf16", 0),
    ("vocabulary", "dpo chunks", 2, "null", "fp32", 1), ("long", "dpo lora", 0, "null", "bf16", 0), ("vocabulary", "dpo lora chunks", 3, "full", "bf16", 0),
    ("vocabulary", "reward", 2, "null", "bf16", 0), ("wide", "reward", 3, "null", "fp32", 1), ("long", "reward lora", 1, "null", "bf16", 0),
    ("long", "masked", 0, "null", "bf16", 0), ("long", "masked", 3, "full", "fp32", 1), ("long", "spans", 2, "selective", "bf16", 0),
    ("long", "documents", 1, "null", "bf16", 0),
)  # fmt: skip

Case = tuple[str, str, str, int, tuple[str, ...]]  # name, run, DeepSpeed JSON, ranks, overrides


def cases() -> Iterator[Case]:
    """Small models over stages, policies, precisions and systems; then the recipes themselves."""
    for model, stage, policy, precision, system in product(MODELS, range(4), ("null", "full", "selective"), ("bf16", "fp32"), SYSTEMS):
        yield _small(model, stage, policy, precision, system)
    for model, options, stage, policy, precision, number in OPTION_CASES:
        yield _small(model, stage, policy, precision, SYSTEMS[number], options, OPTIONS[options])
    for model, options, stage, policy, precision, number in LONG_CASES:
        yield _small(model, stage, policy, precision, SYSTEMS[number], options, (OPTIONS | TASKS)[options])
    for options, chunk, stage, precision, number in CHUNK_CASES:
        settings = (*OPTIONS.get(options, ()), f"loss.chunk_tokens={chunk}")
        yield _small("vocabulary", stage, "null", precision, SYSTEMS[number], f"{options} chunks".strip(), settings)
    for model, options, stage, policy, precision, number, degrees in DEGREE_CASES:
        named = " ".join([*options.split(), *(f"{name} {size}" for name, size in degrees.items())])
        settings = (*OPTIONS.get(options, ()), *(f"parallel.{name}={size}" for name, size in degrees.items()))
        yield _small(model, stage, policy, precision, SYSTEMS[number], named, settings)
    for model, task, stage, policy, precision, number in TASK_CASES:
        yield _small(model, stage, policy, precision, SYSTEMS[number], task, TASKS[task])
    yield _small("wide", 2, "null", "bf16", SYSTEMS[0], "lora everywhere tensor 2", (*TASKS["lora everywhere"], "parallel.tensor=2"))
    yield _small("long", 1, "null", "bf16", SYSTEMS[0], "sft sequence 2", (*TASKS["sft"], "parallel.sequence=2"))
    for stage, policy in ((0, "full"), (1, "full"), (2, "full"), (3, "full"), (2, "selective"), (2, "null")):
        yield f"gpt_1b zero{stage} {policy}", "gpt_1b", f"zero{stage}", 8, (_policy(policy),)
    yield "gpt_1b zero2 full DeepSpeed's buckets", "gpt_1b", "zero2", 8, (_policy("full"), "zero_optimization.reduce_bucket_size=500000000")
    for stage in (2, 3):
        yield f"gpt2_1558m zero{stage} full ranks64", "gpt2_1558m", f"zero{stage}", 64, (_policy("full"),)
        yield f"gpt_1b zero{stage} offload", "gpt_1b", f"zero{stage}_offload", 8, ()


def _small(
    model: str, stage: int, policy: str, precision: str, system: tuple[int, int, float, int], named: str = "", options: tuple[str, ...] = ()
) -> Case:
    layers, width, heads, context, vocabulary, micro = (MODELS | LONG)[model]
    ranks, steps, dropout, bucket = system
    overrides = (
        f"model.layers={layers}", f"model.width={width}", f"model.heads={heads}", f"model.context={context}", f"model.vocab_size={vocabulary}",
        f"batch.micro_batch_size={micro}", f"batch.global_batch_size={micro * ranks * steps}", f"model.dropout={dropout}",
        f"zero_optimization.reduce_bucket_size={bucket}", _policy(policy), *(["bf16.enabled=false"] if precision == "fp32" else []), *options,
    )  # fmt: skip
    name = " ".join(filter(None, (model, named, f"zero{stage}", policy, precision, f"ranks{ranks}")))
    return name, "quickstart", f"zero{stage}", ranks, overrides


def _policy(policy: str) -> str:
    return "activation_checkpointing=null" if policy == "null" else f"activation_checkpointing.policy={policy}"


def hardware(ranks: int) -> Hardware:
    return Hardware("cuda", "NVIDIA A100-SXM4-40GB", ranks, bf16=True)


def paths(case: Case) -> tuple[str, str]:
    return str(CONFIGS / "runs" / f"{case[1]}.yaml"), str(CONFIGS / f"{case[2]}.json")


def main() -> None:
    from ds_gpt.engine.trace import Request, trace_elsewhere

    record = {} if "--again" in sys.argv or not RECORD.exists() else json.loads(RECORD.read_text())
    for case in cases():
        if case[0] not in record and all(word in case[0] for word in sys.argv[1:] if word != "--again"):
            (traced,) = trace_elsewhere([Request(*paths(case), hardware(case[3]), case[4])], deadline_s=3600)
            record[case[0]] = {"peak_bytes": traced.peak_bytes, "phase": traced.peak_phase, "host_bytes": traced.host_bytes}
            RECORD.write_text("{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(record.items())) + "\n}\n")
            print(case[0], record[case[0]], flush=True)


if __name__ == "__main__":
    main()
