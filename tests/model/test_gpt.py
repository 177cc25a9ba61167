"""The GPT against an independent reference in plain PyTorch, and its seams."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn

from ds_gpt.config import ModelConfig
from ds_gpt.model.gpt import GPT


def small(**changes) -> ModelConfig:
    return ModelConfig(**(dict(layers=3, width=32, heads=4, context=16, ffn_width=48, vocab_size=23) | changes))


def build(config: ModelConfig, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(config).eval()


def perturbed(config: ModelConfig) -> GPT:
    """A model whose biases and norms are not at their trivial initial values, so that a missing one shows."""
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tokens_for(config: ModelConfig, batch: int = 2, length: int | None = None) -> torch.Tensor:
    return torch.randint(config.vocabulary, (batch, length or config.context))


def reference_logits(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """Written from the papers with explicit loops over sequences and heads, sharing no code with the model."""
    w, config = dict(model.named_parameters()), model.config

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / deviation * w[name + ".weight"] + w[name + ".bias"]

    def linear(x, name):
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    def gelu(x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def attention(x, name):
        rows = linear(x, name + ".qkv")
        width, outputs = config.width // config.heads, []
        for head in range(config.heads):
            q, k, v = rows[:, 3 * width * head : 3 * width * (head + 1)].split(width, dim=1)
            mixtures = []
            for t in range(len(x)):
                scores = torch.stack([q[t] @ k[s] / math.sqrt(width) for s in range(t + 1)])
                mixtures.append((scores.exp() / scores.exp().sum()) @ v[: t + 1])
            outputs.append(torch.stack(mixtures))
        return linear(torch.cat(outputs, dim=1), name + ".out")

    sequences = []
    for sequence in tokens:
        x = w["embedding.tokens.weight"][sequence] + w["embedding.positions.weight"][: len(sequence)]
        for i in range(config.layers):
            x = x + attention(norm(x, f"blocks.{i}.attention_norm"), f"blocks.{i}.attention")
            h = gelu(linear(norm(x, f"blocks.{i}.feed_forward_norm"), f"blocks.{i}.feed_forward.up"))
            x = x + linear(h, f"blocks.{i}.feed_forward.down")
        sequences.append(norm(x, "norm") @ w["embedding.tokens.weight"].T)
    return torch.stack(sequences)


@pytest.mark.parametrize("length", [1, 7, 16])
def test_equals_an_independent_reference_with_its_gradients(length):
    config = small()
    model = perturbed(config).double()  # fp64: what is left is a mistake, not rounding
    tokens = tokens_for(config, length=length)
    mine, reference = model(tokens), reference_logits(model, tokens)
    torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-10)

    probe = torch.randn_like(mine)
    parameters = list(model.parameters())
    for a, b in zip(
        torch.autograd.grad((mine * probe).sum(), parameters),
        torch.autograd.grad((reference * probe).sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_initial_loss_is_that_of_a_uniform_guess():
    config = small(layers=4, width=64, vocab_size=65)
    tokens = tokens_for(config, batch=32)
    logits = build(config)(tokens)
    # Targets are drawn independently of the inputs: a tied head favours repeating the input token.
    targets = tokens_for(config, batch=32)
    loss = nn.functional.cross_entropy(logits.flatten(end_dim=1), targets.flatten())
    assert loss.item() == pytest.approx(math.log(65), abs=0.05)


def test_initialization_is_that_of_gpt2():
    config = small(layers=6, width=256, heads=8, context=128, ffn_width="auto", vocab_size=300)
    model = build(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.eq(0).all(), name
        elif "norm" in name:
            assert parameter.eq(1).all(), name
        else:
            adds_to_residual = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
            std = 0.02 / math.sqrt(12) if adds_to_residual else 0.02
            # The deviation of n samples is off by about 1/sqrt(2n); five of those.
            assert parameter.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * parameter.numel())), name
            assert abs(parameter.mean().item()) < 5 * std / math.sqrt(parameter.numel()), name


def test_head_and_embedding_are_one_parameter_of_two_modules():
    model = build(small())
    assert model.head.weight is model.embedding.tokens.weight
    assert "head.weight" not in dict(model.named_parameters())
    assert {"head.weight", "embedding.tokens.weight"} <= set(model.state_dict())


@pytest.mark.parametrize("changed", [0, 1, 9, 15])
def test_a_token_never_reaches_the_logits_before_it(changed):
    config = small()
    model, tokens = perturbed(config), tokens_for(config)
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % config.vocabulary
    before, after = model(tokens), model(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert (before[:, changed:] != after[:, changed:]).any(dim=-1).all()


def test_more_tokens_than_positions_is_an_error_with_both_numbers():
    config = small()
    with pytest.raises(ValueError, match=r"17 tokens .* 16 learned positions"):
        build(config)(tokens_for(config, length=17))


@pytest.mark.parametrize(
    "branch, other", [("attention.out", "feed_forward.down"), ("feed_forward.down", "attention.out")]
)
def test_dropout_acts_on_each_branch_and_not_on_the_stream(branch, other):
    block = perturbed(small(dropout=0.5)).blocks[0]
    block.attention.dropout = 0.0
    nn.init.zeros_(block.get_submodule(other).weight)
    nn.init.zeros_(block.get_submodule(other).bias)
    x = torch.randn(8, 16, 32)
    assert not (block(x) == x).any()
    block.train()
    assert (block(x) == x).float().mean().item() == pytest.approx(0.5, abs=0.04)  # five deviations of 4096 coins


def test_dropout_acts_on_the_embedding():
    embedding = perturbed(small(dropout=0.5)).embedding
    tokens = tokens_for(small(), batch=8)
    assert not embedding(tokens).eq(0).any()
    embedding.train()
    assert embedding(tokens).eq(0).float().mean().item() == pytest.approx(0.5, abs=0.04)


def test_dropout_acts_on_the_attention_weights_in_training_only():
    attention = perturbed(small(dropout=0.5)).blocks[0].attention
    x, asked = torch.randn(2, 16, 32), []
    default = attention.attend
    attention.attend = lambda q, k, v, dropout: asked.append(dropout) or default(q, k, v, dropout)
    assert torch.equal(attention(x), attention(x))
    attention.train()
    assert not torch.equal(attention(x), attention(x))
    assert asked == [0.0, 0.0, 0.5, 0.5]


def test_run_block_runs_every_block_and_attend_every_attention():
    model, tokens = build(small()), tokens_for(small())
    expected, ran, attended = model(tokens), [], []

    def run_block(block, x):
        ran.append(block)
        return block(x)

    model.run_block = run_block
    for block in model.blocks:
        default = block.attention.attend
        block.attention.attend = lambda q, k, v, dropout, d=default: attended.append(dropout) or d(q, k, v, dropout)
    assert torch.equal(model(tokens), expected)
    assert ran == list(model.blocks)
    assert attended == [0.0] * 3


def test_attend_can_be_a_module():
    class Zero(nn.Module):
        def forward(self, q, k, v, dropout):
            return torch.zeros_like(q)

    model = build(small())
    model.blocks[0].attention.attend = Zero()
    assert model(tokens_for(small())).shape == (2, 16, 23)


def test_as_layers_chained_is_forward_and_holds_every_parameter():
    model, tokens = build(small()), tokens_for(small())
    layers = model.as_layers()
    assert torch.equal(nn.Sequential(*layers)(tokens), model(tokens))
    assert set(nn.ModuleList(layers).parameters()) == set(model.parameters())


@pytest.mark.parametrize("degree", [2, 4])
def test_shards_by_contiguous_rows_add_up_to_the_whole(degree):
    """What tensor parallelism does: qkv and up by rows, out and down by columns, and a sum over ranks."""
    config = small()
    block = perturbed(config).blocks[0]
    x = torch.randn(2, 16, config.width)

    def shard(linear, rank, dim):
        part = nn.Linear(1, 1)
        part.weight = nn.Parameter(linear.weight.chunk(degree, dim)[rank])
        # A bias that comes after the sum over ranks is added once.
        part.bias = nn.Parameter(linear.bias.chunk(degree)[rank] if dim == 0 else linear.bias / degree)
        return part

    def total(module, into, out_of):
        expected, whole = module(x), (getattr(module, into), getattr(module, out_of))
        parts = 0
        for rank in range(degree):
            setattr(module, into, shard(whole[0], rank, 0))
            setattr(module, out_of, shard(whole[1], rank, 1))
            parts = parts + module(x)
        torch.testing.assert_close(parts, expected, rtol=1e-5, atol=1e-5)

    total(block.attention, "qkv", "out")
    total(block.feed_forward, "up", "down")


def test_saved_attention_maps_are_causal_distributions_and_change_nothing():
    config = small()
    model, tokens = perturbed(config), tokens_for(config)
    expected = model(tokens)
    assert not model.save_attention and model.attention_maps == []

    model.save_attention = True
    assert torch.equal(model(tokens), expected)
    assert len(model.attention_maps) == config.layers
    for maps in model.attention_maps:
        assert maps.shape == (2, 4, 16, 16) and not maps.requires_grad
        torch.testing.assert_close(maps.sum(-1), torch.ones(2, 4, 16))
        assert maps.triu(diagonal=1).eq(0).all() and maps.ge(0).all()


def test_saved_attention_maps_are_the_weights_that_attend_uses():
    config = small()
    model, seen = perturbed(config), []
    attention = model.blocks[1].attention
    default = attention.attend
    attention.attend = lambda q, k, v, dropout: seen.append((v, default(q, k, v, dropout))) or seen[-1][1]
    model.save_attention = True
    model(tokens_for(config))
    v, mixture = seen[0]
    torch.testing.assert_close(model.attention_maps[1] @ v, mixture)


def test_no_attention_map_outlives_its_use(monkeypatch):
    """Maps that stay alive after their step are the leak this guards against."""
    from ds_gpt.model import attention

    made = []
    compute = attention.attention_maps

    def watched(*args):
        maps = compute(*args)
        made.append(weakref.ref(maps))
        return maps

    monkeypatch.setattr(attention, "attention_maps", watched)
    model, tokens = build(small()).train(), tokens_for(small())
    model(tokens).sum().backward()
    assert made == []  # off by default: not even computed
    assert all(block.attention.attention_maps is None for block in model.blocks)

    model.save_attention = True
    model(tokens)
    first, made[:] = list(made), []
    model(tokens)
    gc.collect()
    assert all(ref() is None for ref in first)  # the last forward's only
    assert all(ref() is not None for ref in made)
    model.blocks[0].attention.save_attention = False
    model(tokens)  # one block's own switch drops at its next forward
    assert model.blocks[0].attention.attention_maps is None and len(model.attention_maps) == 2
    model.save_attention = False  # the model's drops at once
    gc.collect()
    assert all(ref() is None for ref in made)
    assert model.attention_maps == []
