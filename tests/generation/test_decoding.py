"""Decoding with a cache, against the definition: a full forward pass over the window for every token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from variants import CASES, perturbed

from ds_gpt.config import ConfigError
from ds_gpt.generation.decoding import Decoder, generate, row_seeds, slide_tokens
from ds_gpt.generation.options import Sampling
from ds_gpt.generation.sampling import sample_next
from ds_gpt.model.cache import KeyValueCache
from ds_gpt.model.gpt import GPT

CONTEXT, VOCABULARY = 12, 23  # of the variants
GREEDY = Sampling(temperature=0)


def uncached(model: GPT, prompt: Sequence[int], new_tokens: int, sampling: Sampling, seed: int) -> list[int]:
    """The definition: one sequence, the whole window anew for each token; a full window drops its oldest quarter."""
    tokens, generator = list(prompt), torch.Generator().manual_seed(seed)
    start, context = max(0, len(tokens) - model.config.context), model.config.context
    for _ in range(new_tokens):
        if len(tokens) - start > context:
            start += max(1, context // 4)
        with torch.no_grad():
            logits_BV = model(torch.tensor([tokens[start:]]))[:, -1]
        seen_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
        seen_BV[0, tokens] = True
        tokens.append(
            sample_next(logits_BV, sampling, torch.rand(1, generator=generator, dtype=torch.float64), seen_BV).item()
        )
    return tokens[len(prompt) :]


def prompts() -> list[list[int]]:
    """Of unequal length, one of a single token, one that fills the context, one beyond it."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in (5, 1, 12, 31, 8)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(0.9, top_k=9, top_p=0.95, repetition_penalty=1.2)], ids=["greedy", "sampled"]
)
def test_cached_and_uncached_give_the_same_tokens(case: str, sampling: Sampling) -> None:
    model, seeds = perturbed(**CASES[case]), row_seeds(7, 5)
    expected = [uncached(model, prompt, 40, sampling, seed) for prompt, seed in zip(prompts(), seeds, strict=True)]
    assert generate(model, prompts(), 40, sampling, seed=7) == expected
    assert len({token for row in expected for token in row}) > (
        2 if sampling == GREEDY else 10
    )  # not one over and over


@pytest.mark.parametrize("case", CASES)
def test_cached_decoding_is_the_full_forward_at_every_position(case: str) -> None:
    model = perturbed(**CASES[case])
    tokens_BT = torch.randint(VOCABULARY, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected_BTV = model(tokens_BT)
        for ahead in (0, 3):  # rows equally long, and one ahead of the other
            cache, lengths = KeyValueCache(model, 2, CONTEXT), [1 + ahead, 1]
            with cache.filling(torch.arange(2)):
                filled_BTV = model(tokens_BT[:, : 1 + ahead])
            torch.testing.assert_close(filled_BTV, expected_BTV[:, : 1 + ahead], rtol=0, atol=1e-5)
            while max(lengths) < CONTEXT:
                newest_BT = torch.stack([tokens_BT[row, length] for row, length in enumerate(lengths)])[:, None]
                with cache.extending(lengths, torch.device("cpu")) as positions_BT:
                    logits_BTV = model(newest_BT, positions_BT)
                for row, length in enumerate(lengths):
                    torch.testing.assert_close(logits_BTV[row, 0], expected_BTV[row, length], rtol=0, atol=1e-5)
                lengths = [length + 1 for length in lengths]


@pytest.mark.parametrize("context", [1, 2, 3, 5])
def test_any_context_slides(context: int) -> None:
    model = perturbed(context=context)
    expected = uncached(model, [4, 2], 17, GREEDY, 0)
    assert generate(model, [[4, 2]], 17, GREEDY) == [expected]


def positions_computed(model: GPT) -> list[int]:
    """The token positions, batch x time, of each forward pass from now on."""
    computed: list[int] = []
    model.embedding.register_forward_pre_hook(lambda module, arguments: computed.append(arguments[0].numel()))
    return computed


def test_every_token_is_computed_once_within_the_context() -> None:
    model = perturbed(context=300)
    computed = positions_computed(model)
    generate(model, [[1, 2, 3, 4]], 256, GREEDY)
    assert computed == [4, *[1] * 255]
    computed.clear()
    uncached(model, [1, 2, 3, 4], 256, GREEDY, 0)
    assert sum(computed) == sum(range(4, 260)) > 100 * (4 + 255)


def test_beyond_the_context_each_token_costs_few() -> None:
    """A window of 9 to 12 tokens is computed anew for every 3 tokens: without the newest, so 9 at a time."""
    model = perturbed()
    computed = positions_computed(model)
    decoder = Decoder(model, [[1, 2, 3, 4]], 100, GREEDY, [0])
    while decoder.running:
        decoder.step()
    # 4 in the prompt, 8 more fill the window; the 99th token is the last that is computed
    slides = -(-(100 - 1 - 8) // slide_tokens(CONTEXT))
    assert computed.count(9) == decoder.slides == slides
    assert sum(computed) == 4 + 99 + 9 * slides


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    model, sampling, seeds = perturbed(), Sampling(), row_seeds(5, 5)
    together = generate(model, prompts(), 20, sampling, seed=5)
    for prompt, seed, expected in zip(prompts(), seeds, together, strict=True):
        decoder, alone = Decoder(model, [prompt], 20, sampling, [seed]), []
        while decoder.running:
            alone.append(decoder.step()[0])
        assert alone == expected
    assert row_seeds(5, 2, first=3) == seeds[3:]
    assert generate(model, prompts(), 20, sampling, seed=6) != together


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_rows_that_finish_leave_the_others_as_they_were(penalty: float) -> None:
    model, sampling, seeds = (
        perturbed(kv_heads=2, sliding_window=5),
        Sampling(repetition_penalty=penalty),
        row_seeds(5, 5),
    )
    expected = generate(model, prompts(), 30, sampling, seed=5)
    decoder = Decoder(model, prompts(), 30, sampling, seeds)
    rows: list[list[int]] = [[] for _ in range(5)]
    last = [30, 1, 14, 6, 30]
    while decoder.running:
        for index, token in decoder.step().items():
            rows[index].append(token)
        decoder.finish({index for index in range(5) if len(rows[index]) == last[index]})
    assert rows == [row[:length] for row, length in zip(expected, last, strict=True)]
    decoder = Decoder(model, prompts(), 30, sampling, seeds)
    decoder.step()
    decoder.finish({0, 1, 2, 3, 4})
    assert not decoder.running


def test_the_cache_has_the_heads_of_the_keys_and_no_more_room_than_needed() -> None:
    model = perturbed(kv_heads=2)
    for new_tokens, capacity in ((3, 8), (100, CONTEXT)):
        decoder = Decoder(model, [[1, 2, 3], [1, 2, 3, 4, 5]], new_tokens, GREEDY, [0, 0])
        decoder.step()
        for layer in decoder._cache._layers:
            assert layer._keys.shape == layer._values.shape == (2, 2, capacity, 8)


def test_the_model_is_left_as_it_was() -> None:
    model = perturbed(sliding_window=3)
    before = [block.attention.attend for block in model.blocks]
    tokens_BT = torch.tensor([[1, 2, 3, 4]])
    expected_BTV = model(tokens_BT)
    generate(model, [[1, 2, 3]], 5, GREEDY)
    assert [block.attention.attend for block in model.blocks] == before
    assert torch.equal(model(tokens_BT), expected_BTV)

    def interrupted(*arguments: object, **options: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, [[1, 2, 3]], 5, GREEDY, forward=interrupted)
    assert [block.attention.attend for block in model.blocks] == before


def test_ids_beyond_the_tokenizer_are_never_chosen() -> None:
    model = perturbed()
    assert max(generate(model, [[1]], 200, Sampling(3.0))[0]) > 9
    assert max(generate(model, [[1]], 200, Sampling(3.0), vocab_size=10)[0]) == 9


def test_nothing_is_chosen_from_logits_that_are_not_finite() -> None:
    model = perturbed()
    with torch.no_grad():
        model.blocks[0].feed_forward.down.weight[0, 0] = torch.nan
    with pytest.raises(ConfigError, match="not finite"):
        generate(model, [[1, 2]], 5, Sampling())


def test_no_new_tokens_and_no_prompts() -> None:
    assert generate(perturbed(), [[1, 2]], 0, GREEDY) == [[]]
    assert generate(perturbed(), [], 3, GREEDY) == []


def test_bf16_keeps_bf16_keys() -> None:
    model = perturbed(**CASES["modern"]).bfloat16()
    decoder = Decoder(model, [[1, 2, 3], [4]], 30, GREEDY, [0, 0])
    while decoder.running:
        decoder.step()
    assert decoder._cache._layers[0]._keys.dtype == torch.bfloat16
