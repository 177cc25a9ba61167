"""What the records of suite ``device_smoke`` must show: judged from the records alone, on whatever GPU they were made.

A check whose case did not run (a small GPU runs out of memory) is open; it is not passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.prediction import predict_record
from benchmarks.results import Record, peak_bytes, read
from ds_gpt.planner import Prediction

SUITE = "device_smoke"
# Rounding of bf16 (8 bits) in weights and activations: on a CPU every stage's first 20 losses of a small model are within
# 8e-4 of plain PyTorch's (autocast). Another model, data order or scale of the gradients is off by more than this at once.
CURVE_TOLERANCE = 0.01
# The planner counts what is asked for; cuBLAS's workspaces, which it does not know, come on top.
MEMORY_TOLERANCE = 0.10
# Below, something else than the GPU is timed; above 1, the clock did not wait for it.
MFU_RANGE = (0.10, 1.0)
TOTAL_S = 8 * 60
_STAGES = (0, 1, 2, 3)
_FLASH = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention")  # cuDNN's is a flash attention
_GIB = 2**30

ABOUT = "What the suite is for, judged from its records. A check is open where it could not be judged: where a case ran out of memory, or no peak or prediction is known."

Predict = Callable[[Record], Prediction | None]


@dataclass(frozen=True)
class Check:
    """One thing that was checked.

    Attributes:
        what: in words.
        found: what the records say.
        wanted: what they should.
        passed: None where it could not be judged.
    """

    what: str
    found: str
    wanted: str
    passed: bool | None

    @property
    def verdict(self) -> str:
        """In a word."""
        return {True: "passed", False: "FAILED", None: "open"}[self.passed]


def judge(records: Sequence[Record], predict: Predict) -> list[Check]:
    """Every check of the suite that these records can answer: those of the chosen cases."""
    found = {record["case"]: record for record in records}
    checks = [*_stages(found), *_curves(found), *_attention(found), *_savings(found, predict), *_peaks(found, predict), *_speed(found), *_compiled(found)]
    if checks:
        seconds = sum(record["wall_s"] for record in records)
        checks.append(Check("the whole suite", f"{seconds:.0f} s", f"at most {TOTAL_S} s", seconds <= TOTAL_S))
    return checks


def table(checks: Sequence[Check]) -> list[list[str]]:
    """A row a check."""
    return [["check", "found", "wanted", "verdict"], *([check.what, check.found, check.wanted, check.verdict] for check in checks)]


def say(folder: Path) -> int:
    """Print the checks of a folder of records, where its suite has any. 1: a check failed."""
    records = read(folder)
    if not records or records[0]["suite"] != SUITE:
        return 0
    checks = judge(records, predict_record)
    for check in checks:
        print(f"{check.verdict:<7} {check.what}: {check.found} (wanted: {check.wanted})")
    return int(any(check.passed is False for check in checks))


def _ran(record: Record | None) -> bool:
    return record is not None and record["status"] == "ok"


def _unjudged(what: str, wanted: str, *records: Record) -> Check:
    """A crash or a time-out is a failure; a GPU that is too small is not."""
    bad = [record for record in records if not _ran(record)]
    said = "; ".join(f"{record['case']}: {record['status'].replace('_', ' ')}" for record in bad)
    return Check(what, said, wanted, None if all(record["status"] == "out_of_memory" for record in bad) else False)


def _stages(found: Mapping[str, Record]) -> Iterator[Check]:
    for stage in _STAGES:
        if record := found.get(f"10m-z{stage}"):
            what, wanted = f"ZeRO {stage} runs in bf16", "bf16"
            yield Check(what, record["precision"], wanted, record["precision"] == "bf16") if _ran(record) else _unjudged(what, wanted, record)


def _curves(found: Mapping[str, Record]) -> Iterator[Check]:
    reference = found.get("10m-plain")
    for name, record in found.items():
        if reference is None or record is reference or not name.startswith("10m-"):
            continue
        what, wanted = f"losses of {name} are those of plain PyTorch", f"within {CURVE_TOLERANCE:.0%}"
        if _ran(record) and _ran(reference):
            off = loss_difference(record, reference)
            yield Check(what, f"{off:.2%}", wanted, off <= CURVE_TOLERANCE)
        else:
            yield _unjudged(what, wanted, record, reference)


def loss_difference(record: Record, reference: Record) -> float:
    """Largest relative difference of a step's loss; not a number where a loss is none."""
    differences = [abs(loss - wanted) / abs(wanted) for loss, wanted in zip(record["losses"], reference["losses"], strict=False)]
    return max(differences) if all(difference == difference for difference in differences) else float("nan")


def _attention(found: Mapping[str, Record]) -> Iterator[Check]:
    for name, record in found.items():
        if not _ran(record):
            continue
        asked, (ops, kernels) = record["definition"]["attention"], attention_used(record)
        said = ", ".join([*ops, *(kernel.split("(")[0][:60] for kernel in kernels[:2])]) or "none seen"
        if asked == "math":
            yield Check(f"{name} forms the whole score matrix", said, "the plain kernel", bool(ops) and not kernels and not set(ops) & set(_FLASH))
        elif record["precision"] != "fp32":
            wanted = _FLASH[:1] if asked == "flash" else _FLASH
            yield Check(f"{name} attends with a flash kernel", said, "a flash kernel, and no other", bool(ops) and set(ops) <= set(wanted) and bool(kernels))
    flash, plain = found.get("10m-z1-flash"), found.get("10m-z1-math")
    if flash and plain and _ran(flash) and _ran(plain):
        peaks = [peak_bytes(record["measured"]) for record in (flash, plain)]
        said = f"{peaks[0] / _GIB:.2f} against {peaks[1] / _GIB:.2f} GiB"
        yield Check("flash attention needs less memory than the plain kernel", said, "less", peaks[0] < peaks[1])


def attention_used(record: Record) -> tuple[list[str], list[str]]:
    """Operators and fused kernels of attention that the profiler saw on any rank."""
    seen = [rank["overlap"] for repeat in record["repeats"] for rank in repeat["by_rank"]]
    return tuple(sorted({name for each in seen for name in each[key]}) for key in ("attention", "attention_kernels"))  # type: ignore[return-value]


def _savings(found: Mapping[str, Record], predict: Predict) -> Iterator[Check]:
    off = found.get("1b-z2-off")
    for policy in ("full", "selective"):
        record = found.get(f"1b-z2-{policy}")
        if off is None or record is None:
            continue
        what, wanted = f"{policy} checkpointing saves what the planner says", f"within {MEMORY_TOLERANCE:.0%}"
        if not (_ran(off) and _ran(record)):
            yield _unjudged(what, wanted, off, record)
            continue
        measured, predicted = saved_bytes(off, record), predicted_saving(off, record, predict)
        said = f"{measured / _GIB:.2f} GiB, predicted {predicted / _GIB:.2f}" if predicted else f"{measured / _GIB:.2f} GiB, no prediction"
        yield Check(what, said, wanted, abs(measured / predicted - 1) <= MEMORY_TOLERANCE if predicted else None)


def saved_bytes(off: Record, on: Record) -> int:
    """By how much the peak is lower."""
    return peak_bytes(off["measured"]) - peak_bytes(on["measured"])


def predicted_saving(off: Record, on: Record, predict: Predict) -> int | None:
    """The same as the planner foresees it."""
    before, after = predict(off), predict(on)
    return before.peak_bytes - after.peak_bytes if before and after else None


def _peaks(found: Mapping[str, Record], predict: Predict) -> Iterator[Check]:
    for name, record in found.items():
        definition = record["definition"]
        # The planner knows neither what a compiler fuses nor the score matrix of the plain kernel.
        if not _ran(record) or definition["compile"] or definition["attention"] == "math":
            continue
        if foreseen := predict(record):
            peak = peak_bytes(record["measured"])
            off = foreseen.peak_bytes / peak - 1
            said = f"{peak / _GIB:.2f} GiB, predicted {foreseen.peak_bytes / _GIB:.2f} ({off:+.1%})"
            yield Check(f"peak of {name} is the planner's", said, f"within {MEMORY_TOLERANCE:.0%}", abs(off) <= MEMORY_TOLERANCE)


def _speed(found: Mapping[str, Record]) -> Iterator[Check]:
    for name, record in found.items():
        if not name.startswith("1b-"):
            continue
        what, wanted = f"1.011B parameters, context 2048: {name}", f"MFU of {MFU_RANGE[0]:.0%} to {MFU_RANGE[1]:.0%}"
        if not _ran(record):
            yield _unjudged(what, wanted, record)
            continue
        measured = record["measured"]
        share = measured["mfu"]
        said = f"{measured['tokens_per_s']:,.0f} tokens/s, MFU {f'{share:.1%}' if share else 'not known'}, peak {peak_bytes(measured) / _GIB:.2f} GiB"
        yield Check(what, said, wanted, MFU_RANGE[0] <= share <= MFU_RANGE[1] if share else None)


def _compiled(found: Mapping[str, Record]) -> Iterator[Check]:
    compiled, eager = found.get("10m-z1-compile"), found.get("10m-z1")
    if compiled is None or eager is None:
        return
    what, wanted = "torch.compile on, against off", "both run"
    if not (_ran(compiled) and _ran(eager)):
        yield _unjudged(what, wanted, compiled, eager)
        return
    ratio = compiled["measured"]["tokens_per_s"] / eager["measured"]["tokens_per_s"]
    yield Check(what, f"{ratio:.2f} x the tokens/s", wanted, True)
