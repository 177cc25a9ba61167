"""Rotary positions, grouped-query attention and the other options: each against what defines it."""

import itertools

import pytest
import torch
from torch import nn
from variants import CASES, MODERN, SMALL, perturbed

from ds_gpt.config import ModelConfig
from ds_gpt.engine.allocations import Allocations
from ds_gpt.model.attention import attend, attention_maps, mask
from ds_gpt.model.gpt import GPT
from ds_gpt.model.positions import rotate, rotation

def tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(23, (batch, length))


@pytest.mark.parametrize("case", CASES)
def test_no_logit_depends_on_a_later_token_nor_on_one_outside_the_window(case):
    model = perturbed(**CASES[case] | {"layers": 1})  # of two layers the second sees two windows
    embedded = []
    model.embedding.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    logits = model(tokens(1))
    window = model.config.sliding_window or 12
    for t in range(12):
        (gradient,) = torch.autograd.grad(logits[0, t].square().sum(), embedded[0], retain_graph=True)
        reached = gradient[0].ne(0).any(dim=-1)
        assert reached.tolist() == [t - window < s <= t for s in range(12)]


def test_rotary_scores_depend_on_distance_only():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 1, 16, dtype=torch.float64)

    def score(t: int, s: int) -> float:
        turned_q, turned_k = (rotate(x, rotation(torch.tensor([place]), 16, 100.0)) for x, place in ((q, t), (k, s)))
        return (turned_q * turned_k).sum().item()

    for distance in (0, 1, 7):
        scores = [score(s + distance, s) for s in (0, 1, 5, 40)]
        assert scores == pytest.approx([scores[0]] * 4, abs=2e-5)  # angles are fp32: 47 x 2^-24
    assert score(0, 0) == pytest.approx((q * k).sum().item())
    assert len({round(score(d, 0), 3) for d in range(8)}) == 8


def test_rotation_turns_pairs_by_the_papers_angles():
    """RoFormer, equation 15, in complex numbers: channel pair k is multiplied by exp(i t theta^(-2k/K))."""
    torch.manual_seed(0)
    heads, places = torch.randn(2, 6, 3, 1, 8), torch.tensor([0, 1, 2, 9, 100, 1000])
    pairs = torch.complex(heads[..., :4], heads[..., 4:])
    frequencies = torch.tensor([500.0 ** (-2 * k / 8) for k in range(4)])
    turned = pairs * torch.exp(1j * places[:, None] * frequencies)[:, None, None, :]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(rotate(heads, rotation(places, 8, 500.0)), expected, rtol=1e-4, atol=1e-4)


def test_rotation_is_rounded_once_in_a_bf16_model():
    """Not its angles: in bf16 positions beyond 256 are no whole numbers any more."""
    model = perturbed(positions="rotary").bfloat16()
    places = torch.arange(1000, 1012)
    (turns,) = model.shared(model.embedding(tokens()), places)
    assert torch.equal(turns, rotation(places, 8, 10_000.0).bfloat16())
    assert not list(model.buffers())


@pytest.mark.parametrize("case", ["gpt2", "modern"])
def test_positions_are_those_that_are_given(case):
    model, ids = perturbed(**CASES[case]), tokens()
    expected = model(ids)
    assert torch.equal(model(ids, torch.arange(12)), expected)
    assert torch.equal(model(ids, torch.arange(12).expand(2, -1)), expected)
    swapped = torch.stack((torch.arange(12), torch.arange(12).flip(0)))
    torch.testing.assert_close(model(ids, swapped)[0], expected[0])
    torch.testing.assert_close(model(ids, swapped)[1:], model(ids[1:], swapped[1]))
    assert (model(ids, swapped)[1] - expected[1]).abs().max() > 1e-3


def test_a_sequence_moved_as_a_whole_is_the_same_to_rotary_positions_only():
    ids = tokens()
    rotary, learned = perturbed(**MODERN), perturbed(context=40)
    torch.testing.assert_close(rotary(ids, torch.arange(12) + 1000), rotary(ids), rtol=1e-3, atol=1e-4)
    assert (learned(ids, torch.arange(12) + 20) - learned(ids)).abs().max() > 1e-2


@pytest.mark.parametrize("case", ["gpt2", "modern", "modern, all"])
def test_layers_given_the_stream_alone_are_the_model(case):
    model, ids = perturbed(**CASES[case]), tokens()
    torch.testing.assert_close(nn.Sequential(*model.as_layers())(ids), model(ids))
    assert set(nn.ModuleList(model.as_layers()).parameters()) == set(model.parameters())


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_shared_heads_are_equal_heads(kv_heads):
    """A model with a copy of each key/value head for each of its queries is the same function."""
    grouped, full = perturbed(kv_heads=kv_heads), perturbed()
    shared = 4 // kv_heads
    with torch.no_grad():
        for (name, parameter), (_, other) in zip(full.named_parameters(), grouped.named_parameters(), strict=True):
            if "qkv" not in name:
                parameter.copy_(other)
                continue
            groups = other.unflatten(0, (kv_heads, shared + 2, 8))
            rows = [(group[head], group[-2], group[-1]) for group in groups for head in range(shared)]
            parameter.copy_(torch.cat([torch.cat(row) for row in rows]))
    ids = tokens()
    torch.testing.assert_close(grouped(ids), full(ids))
    grouped.save_attention = full.save_attention = True
    grouped(ids), full(ids)
    for mine, other in zip(grouped.attention_maps, full.attention_maps, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("window", [None, 1, 3, 8, 20])
@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (1, 8), (3, 8)])
@pytest.mark.parametrize("shared", [1, 2])
def test_attend_is_attention_over_the_last_keys_of_the_window(shared, queries, keys, window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 8) for heads, length in ((4, queries), *2 * ((4 // shared, keys),)))
    mixtures = torch.zeros_like(q)
    for b, h, t in itertools.product(range(2), range(4), range(queries)):
        last = keys - queries + t
        seen = slice(max(0, last + 1 - (window or keys)), last + 1)
        scores = k[b, h // shared, seen] @ q[b, h, t] / 8**0.5
        mixtures[b, h, t] = scores.softmax(dim=0) @ v[b, h // shared, seen]
    torch.testing.assert_close(attend(q, k, v, 0.0, window), mixtures)
    torch.testing.assert_close(attention_maps(q, k, window) @ v.repeat_interleave(shared, dim=1), mixtures)


def test_a_mask_costs_its_own_bytes_to_make_and_no_more():
    mask.cache_clear()
    with Allocations() as allocations:
        made = mask(512, 512, 100, torch.bfloat16, torch.device("cpu"))
        allocations.mark("mask")
    ((phase, _),) = allocations.phases()
    assert phase.peak_bytes < 1.05 * made.nbytes == 1.05 * 512**2 * 2
    assert made.is_contiguous() and (made == 0).sum(dim=1).tolist() == [min(t + 1, 100) for t in range(512)]


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_shards_by_contiguous_rows_add_up_to_the_whole(kv_heads, qk_norm):
    """What tensor parallelism does: qkv, gate and up by rows, out and down by columns, and a sum over ranks."""
    block = perturbed(**MODERN | {"kv_heads": kv_heads, "qk_norm": qk_norm}).blocks[0]
    x = torch.randn(2, 12, 32)

    def total(module: nn.Module, into: list[str], out_of: str) -> torch.Tensor:
        whole = {name: getattr(module, name) for name in [*into, out_of]}
        parts = torch.zeros(())
        for rank in range(2):
            for name, linear in whole.items():
                shard = nn.Linear(1, 1, bias=False)
                shard.weight = nn.Parameter(linear.weight.chunk(2, 0 if name in into else 1)[rank])
                setattr(module, name, shard)
            parts = parts + module(x)
        return parts

    for module, into, out_of in ((block.attention, ["qkv"], "out"), (block.feed_forward, ["gate", "up"], "down")):
        expected = module(x)
        torch.testing.assert_close(total(module, into, out_of), expected, rtol=1e-5, atol=1e-5)


def test_no_bias_leaves_none_and_an_untied_head_is_its_own():
    names = dict(perturbed(bias=False, tied_head=False).named_parameters())
    assert not [name for name in names if name.endswith("bias")]
    assert names["head.weight"] is not names["embedding.tokens.weight"]
    assert [name for name in dict(perturbed().named_parameters()) if name.endswith("bias")]


def test_qk_norm_bounds_the_scores():
    """Normalized queries and keys have length sqrt(K), so that no score exceeds sqrt(K), however large the weights."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(**SMALL | {"qk_norm": True, "positions": "rotary"}))
    with torch.no_grad():
        model.blocks[0].attention.qkv.weight.mul_(1000)
    q, k, _ = model.blocks[0].attention.project(torch.randn(2, 12, 32))
    assert (q @ k.transpose(-2, -1)).abs().max() / 8**0.5 <= 8**0.5 * 1.0001


def test_all_layers_share_one_mask():
    """Each keeps its mask for the backward pass, T x T: a mask of its own would be as large as everything else."""
    model, kept = perturbed(sliding_window=3), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == (12, 12):
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens())
    assert len(kept) == 1


def test_a_mask_made_in_inference_mode_serves_training_too():
    model, ids = perturbed(sliding_window=5), tokens(length=11)
    with torch.inference_mode():
        model(ids)
    model(ids).sum().backward()


def test_the_values_are_all_that_autograd_keeps_of_the_projection():
    """A view of them would keep the queries and keys from before their rotation too."""
    attention = perturbed(**MODERN).blocks[0].attention
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(64, 12, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        q, k, v = attention.project(x)
        attend(q, k, v, 0.0)
    assert (64 * 12 * (4 + 2 * 2) * 8 * 4) not in kept.values()
