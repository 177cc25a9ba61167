"""What ranks that share sequences do besides training: evaluate, generate, drop out, and hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import run_ranks
from measured_ranks import measured
from running import tiny_dataset
from tiny import tiny, tiny_loader

MODERN = ("model.positions=rotary", "model.kv_heads=2", "model.qk_norm=true", "model.sliding_window=7")


def evaluated(ranks: Any, deepspeed: str, overrides: list[str]) -> dict[str, Any]:
    """A few steps, then losses over windows, some of which are padding, and text; then another step."""
    from ds_gpt.config.run import SampleConfig
    from ds_gpt.engine.engine import Engine
    from ds_gpt.trainer.evaluation import Validation, sample_text

    composed = tiny(deepspeed, ranks.world_size, ["evaluation.sequences=5", *overrides])
    engine, dataset = Engine(composed, ranks), tiny_dataset()
    loader, validation = tiny_loader(composed, engine.grid.data_rank, engine.grid.data_ranks), Validation(dataset, engine)
    losses = [engine.step(step, loader.load(step), 0.01).loss for step in range(4)]
    losses += [validation.loss(), validation.probe_loss()]
    text = sample_text(engine, dataset, SampleConfig(prompt="t3 t8 t13", tokens=24))  # slides: the context is 16 tokens
    losses.append(engine.step(4, loader.load(4), 0.01).loss)
    slowest = engine.slowest_rank()
    loader.close()
    engine.close()
    return {"losses": losses, "text": text, "slowest": slowest}


@pytest.mark.parametrize("options", [(), MODERN], ids=["plain", "modern"])
def test_validation_and_samples_are_those_of_one_rank(options: tuple[str, ...]) -> None:
    (alone,) = run_ranks(1, evaluated, "zero1", list(options))
    ways = [(2, "zero3", []), (4, "zero1", [])]
    ways += [] if options else [(4, "zero2", ["parallel.tensor=2"])]  # which needs more key heads
    for world_size, deepspeed, more in ways:
        for found in run_ranks(world_size, evaluated, deepspeed, [*options, *more, "parallel.sequence=2"]):
            assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
            assert found["text"] == alone["text"]
            assert found["slowest"] is None  # a rank's forward pass waits for the other's


def dropped(ranks: Any, checkpointing: str) -> tuple[list[Any], np.ndarray]:
    """A curve with dropout, and what the embedding made of equal tokens."""
    from ds_gpt.engine.engine import Engine

    settings = ["model.dropout=0.5", "model.positions=rotary", "parallel.sequence=2", f"activation_checkpointing={checkpointing}"]
    composed = tiny("zero1", ranks.world_size, settings)
    engine = Engine(composed, ranks)
    loader = tiny_loader(composed, 0, 1)
    results = [engine.step(step, loader.load(step), 0.01) for step in range(3)]
    seen: list[torch.Tensor] = []
    engine.model.embedding.register_forward_hook(lambda module, inputs, x_BTD: seen.append(x_BTD.detach() != 0))
    engine.step(3, [(torch.zeros(16, 16, dtype=torch.int64),) * 2], 0.01)
    loader.close()
    engine.close()
    return [(result.loss, result.grad_norm) for result in results], seen[0].numpy()


def test_each_rank_drops_out_its_own_and_the_same_again_in_recomputation() -> None:
    by_policy = {policy: run_ranks(2, dropped, policy) for policy in ("null", "{policy: full}", "{policy: selective}")}
    first, second = (kept for _, kept in by_policy["null"])
    assert first.shape == second.shape == (16, 8, 32)
    assert (first == second).mean() == pytest.approx(0.5, abs=0.05)  # two independent fair coins
    curve = by_policy["null"][0][0]
    for ran in by_policy.values():
        for found, _ in ran:
            assert found == curve


def test_activations_and_optimizer_state_fall_as_the_arithmetic_says() -> None:
    layers, width, context, micro_batch = 3, 128, 256, 2
    shape = [f"model.layers={layers}", f"model.width={width}", f"model.context={context}"]
    batch = [f"batch.micro_batch_size={micro_batch}", f"batch.global_batch_size={micro_batch}"]

    def held(degree: int) -> tuple[int, dict[str, int]]:
        """What the forward pass of the second step keeps, and what is there between two steps."""
        composed = tiny("zero1", degree, [*shape, *batch, f"parallel.sequence={degree}"])
        real = run_ranks(degree, measured, composed)[0]
        names = [phase.name for phase in real.phases]
        second = len(names) - 1 - names[::-1].index("forward")
        return real.phases[second].bytes - real.phases[second - 1].bytes, real.resident

    alone, whole = held(1)
    for degree in (2, 4):
        shared, part = held(degree)
        # Everything is of 1 / degree of the tokens. Attention's results alone are kept twice: by the rank that attended,
        # and by the one whose tokens they are of.
        exchanged = layers * 4 * micro_batch * context // degree * width
        assert shared == pytest.approx(alone / degree + exchanged, rel=0.01)
        for kind in ("masters", "moments"):  # of ZeRO 1, over all ranks
            assert part[kind] == pytest.approx(whole[kind] / degree, rel=0.01)
        assert part["weights"] == whole["weights"]
