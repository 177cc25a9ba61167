"""That DeepSpeed answers with tracebacks what ``ds_gpt.config.refusals`` refuses. A case that fails here may be dropped there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forked_ranks import run_ranks
from tiny import tiny

from ds_gpt.config import Composed

MASTERS = {"enabled": True, "fp16_master_weights_and_grads": True}
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "prescale": ("zero2", {"prescale_gradients": True}, {}, "pre-scale gradients is not yet supported"),
    "predivide": ("zero3", {"gradient_predivide_factor": 2.0}, {}, "gradient_predivide_factor != 1.0"),
    "no norm": ("zero1", {}, {"compute_grad_norm": False}, "requires gradient_clipping=0"),
    "legacy": ("zero1", {}, {"legacy_stage1": True}, "deprecated version of ZeRO Stage 1"),
    "zenflow": ("zero2", {}, {"zenflow": {"topk_ratio": 0.1}}, "cpu offload"),
    "ratio": ("zero3", {}, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "Only Supports DeepSpeedCPUAdam"),
    "super": ("zero3", {}, {"offload_optimizer": {"device": "cpu", "super_offload": True}}, "SuperOffload only supports NVIDIA"),
    "nvme": ("zero3", {}, {"offload_optimizer": {"device": "nvme"}}, "not NoneType"),
    "dtype": ("zero1", {"data_types": {"grad_accum_dtype": "fp23"}}, {}, "not a valid DtypeEnum"),
    "masters": ("zero1", {"fp16": MASTERS}, {}, "requires ZeRO-1 Offload"),
    "eigenvalue": ("zero1", {"eigenvalue": {"enabled": False}}, {}, "has been removed"),
}


def words_of(ranks: Any, cases: dict[str, Composed]) -> dict[str, str]:
    from ds_gpt.engine.engine import Engine

    said = {}
    for name, composed in cases.items():
        try:
            Engine(composed, ranks).close()
        except Exception as error:
            said[name] = str(error)
        else:
            said[name] = "it was built"
    return said


def past_our_checks(stage: str, top: dict[str, Any], zero: dict[str, Any]) -> Composed:
    composed = tiny(stage, 1, ["bf16.enabled=false"])
    composed = replace(composed, precision="fp16" if "fp16" in top else composed.precision)
    return replace(composed, deepspeed={**composed.deepspeed, **top, "zero_optimization": {**composed.deepspeed["zero_optimization"], **zero}})


def test_deepspeed_refuses_with_a_traceback() -> None:
    (said,) = run_ranks(1, words_of, {name: past_our_checks(*case[:3]) for name, case in REFUSED.items()})
    for name, (*_, words) in REFUSED.items():
        assert words in said[name], (name, said[name])


def spread(ranks: Any, composed: Composed) -> float:
    import deepspeed

    from ds_gpt.engine.engine import Engine

    engine = Engine(composed, ranks)
    parameter = engine.model.blocks[0].feed_forward.up.weight
    with deepspeed.zero.GatheredParameters(parameter):
        found = float(parameter.std())
    engine.close()
    return found


def test_without_its_own_apply_zero_3_starts_from_other_weights() -> None:
    """In silence: nothing is said, and training begins at a loss several times too high."""
    expected, found = (run_ranks(1, spread, past_our_checks("zero3", {}, zero))[0] for zero in ({}, {"override_module_apply": False}))
    assert 0.01 < expected < 0.03 and found > 2 * expected  # drawn with 0.02
