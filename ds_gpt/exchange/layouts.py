"""Where the weights of one format lie in another: for each parameter of ours, the tensors that hold the same numbers.

Each rule looks at one parameter alone, so that a model is converted piece by piece, in either direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_gpt.config import ModelConfig
from ds_gpt.model.gpt import GPT

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """One parameter of ours and its counterpart.

    Attributes:
        ours: the parameter's name in `GPT`.
        theirs: names of the tensors that hold its numbers.
        outward: from the parameter to these tensors.
        inward: the inverse; it is given the tensors one by one.
    """

    ours: str
    theirs: tuple[str, ...]
    outward: Callable[[Tensor], Sequence[Tensor]]
    inward: Callable[..., Tensor]


@dataclass(frozen=True)
class Layout:
    """A format's tensors, in the order in which they are written.

    Attributes:
        rules: one for each parameter of ours.
        zeros: tensors that the format demands and ours has not, with their shapes; they are zero.
    """

    rules: tuple[Rule, ...]
    zeros: dict[str, Shape] = field(default_factory=dict)


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Shape of each parameter of the GPT by name, without making it. A tied head is no parameter of its own."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in GPT(model).named_parameters()}


def own_layout(model: ModelConfig) -> Layout:
    """Our names and shapes."""
    return Layout(tuple(_same(name, name) for name in parameter_shapes(model)))


def gpt2_layout(model: ModelConfig) -> Layout:
    """GPT2LMHeadModel: its `Conv1D` stores the transpose of a Linear, its biases cannot be left out."""
    rules = [
        _same("embedding.tokens.weight", "transformer.wte.weight"),
        _same("embedding.positions.weight", "transformer.wpe.weight"),
    ]
    norms, linears, widths = {"norm": "transformer.ln_f"}, {}, {}
    for i in range(model.layers):
        block, h = f"blocks.{i}", f"transformer.h.{i}"
        norms |= {f"{block}.attention_norm": f"{h}.ln_1", f"{block}.feed_forward_norm": f"{h}.ln_2"}
        linears |= {
            f"{block}.attention.out": f"{h}.attn.c_proj",
            f"{block}.feed_forward.up": f"{h}.mlp.c_fc",
            f"{block}.feed_forward.down": f"{h}.mlp.c_proj",
        }
        attention = f"{h}.attn.c_attn"
        widths |= {f"{h}.mlp.c_fc.bias": model.hidden_width, f"{attention}.bias": 3 * model.width}
        parts = Heads(model)
        rules.append(Rule(f"{block}.attention.qkv.weight", (f"{attention}.weight",), parts.to_gpt2, parts.from_gpt2))
        if model.bias:
            rules.append(Rule(f"{block}.attention.qkv.bias", (f"{attention}.bias",), parts.to_gpt2, parts.from_gpt2))
    rules += [_transposed(f"{ours}.weight", f"{theirs}.weight") for ours, theirs in linears.items()]
    rules += [_same(f"{ours}.weight", f"{theirs}.weight") for ours, theirs in norms.items()]
    biases = {f"{ours}.bias": f"{theirs}.bias" for ours, theirs in (linears | norms).items()}
    if model.bias:
        rules += [_same(ours, theirs) for ours, theirs in biases.items()]
    if not model.tied_head:
        rules.append(_same("head.weight", "lm_head.weight"))
    zeros = {name: (widths.get(name, model.width),) for name in (*biases.values(), *widths)}
    return Layout(tuple(rules), {} if model.bias else zeros)


def llama_layout(model: ModelConfig) -> Layout:
    """LlamaForCausalLM of transformers, and those that name their tensors as it does (Mistral, Qwen3)."""
    rules = [_same("embedding.tokens.weight", "model.embed_tokens.weight")]
    parts = Heads(model)
    for i in range(model.layers):
        block, layer = f"blocks.{i}", f"model.layers.{i}"
        attention = f"{layer}.self_attn"
        linears = {f"{block}.attention.out": f"{attention}.o_proj"}
        linears |= {f"{block}.feed_forward.{name}": f"{layer}.mlp.{name}_proj" for name in ("gate", "up", "down")}
        for kind in ("weight", "bias") if model.bias else ("weight",):
            projections = tuple(f"{attention}.{name}_proj.{kind}" for name in "qkv")
            rules.append(Rule(f"{block}.attention.qkv.{kind}", projections, parts.split, parts.join))
            rules += [_same(f"{ours}.{kind}", f"{theirs}.{kind}") for ours, theirs in linears.items()]
        norms = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
        if model.qk_norm:
            norms |= {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
        rules += [_same(f"{block}.{ours}.weight", f"{layer}.{theirs}.weight") for ours, theirs in norms.items()]
    rules.append(_same("norm.weight", "model.norm.weight"))
    if not model.tied_head:
        rules.append(_same("head.weight", "lm_head.weight"))
    return Layout(tuple(rules))


class Heads:
    """The rows of `qkv`, which lie group by group, (G, H/G + 2, K), and elsewhere kind by kind."""

    def __init__(self, model: ModelConfig) -> None:
        self._groups, self._shared, self._width = model.key_heads, model.heads // model.key_heads, model.head_width

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the queries, of the keys and of the values, head by head."""
        grouped = qkv.unflatten(0, (self._groups, self._shared + 2, self._width))
        q, k, v = grouped.split((self._shared, 1, 1), dim=1)
        return q.flatten(end_dim=2), k.flatten(end_dim=2), v.flatten(end_dim=2)

    def join(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The inverse of `split`."""
        of_group = (
            q.unflatten(0, (self._groups, self._shared, self._width)),
            *(x.unflatten(0, (self._groups, 1, self._width)) for x in (k, v)),
        )
        return torch.cat(of_group, dim=1).flatten(end_dim=2)

    def to_gpt2(self, qkv: Tensor) -> tuple[Tensor]:
        """All queries, all keys, all values, as columns."""
        return (torch.cat(self.split(qkv)).t(),)

    def from_gpt2(self, c_attn: Tensor) -> Tensor:
        """The inverse of `to_gpt2`."""
        return self.join(*c_attn.t().chunk(3))


def _same(ours: str, theirs: str) -> Rule:
    return Rule(ours, (theirs,), lambda tensor: (tensor,), lambda tensor: tensor)


def _transposed(ours: str, theirs: str) -> Rule:
    return Rule(ours, (theirs,), lambda tensor: (tensor.t(),), lambda tensor: tensor.t())


def foreign_shapes(layout: Layout, ours: dict[str, Shape]) -> Iterable[tuple[str, Shape]]:
    """Name and shape of every tensor of the format, in the order in which it is written."""
    for rule in layout.rules:
        parts = rule.outward(torch.empty(ours[rule.ours], device="meta"))
        yield from ((name, tuple(part.shape)) for name, part in zip(rule.theirs, parts, strict=True))
    yield from layout.zeros.items()
