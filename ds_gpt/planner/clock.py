"""Time of what one rank computes: matrices, attention, element-wise operations, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from ds_gpt.model.counts import linear_maps
from ds_gpt.planner.devices import Device
from ds_gpt.planner.shapes import Shapes


@dataclass(frozen=True)
class Constants:
    """Shares of a device's peaks that software reaches.

    Attributes:
        matrix: of the matrix peak, for matrices without end.
        half_size: dimension at which a matrix multiplication has lost half of that by this dimension alone.
        attention: of the matrix peak, FlashAttention 2, forward and backward, of the causal half.
        bandwidth: of the memory's, for element-wise kernels.
        launch_s: least time of a kernel, as PyTorch launches them one by one.
        link: of a link's bandwidth, for NCCL's collectives.
        hidden: share of the backward pass under which ZeRO 2 and 3 can hide communication.
        contention: seconds that computation loses for a second of communication beside it. Not fitted: NCCL's 24 channels on 8 A100 (the log
            in NVIDIA/nccl-tests issue 100) take as many of 108 multiprocessors; arXiv:2507.03114 states 18.9% on average.
        host_adam: parameters a second that the host's Adam updates for one rank (offload). A guess: no published run here offloads.
    """

    matrix: float = 0.80
    half_size: float = 256.0
    attention: float = 0.30
    bandwidth: float = 0.80
    launch_s: float = 15e-6
    link: float = 0.70
    hidden: float = 0.75
    contention: float = 0.20
    host_adam: float = 2e8


_KERNELS_A_BLOCK = {"forward": 16, "backward": 30}
# Bytes that plain attention reads and writes for each score: the scores, scaling, softmax and its product; with dropout, that and its mask; with
# autocast all in fp32 with casts on both sides. Backward as much again and its gradients.
_PLAIN, _PLAIN_DROPOUT = {2: (10, 14), 4: (24, 30)}, {2: (5, 5), 4: (15, 17)}


class Clock:
    """One pipeline stage: `forward_s` and `backward_s` of a micro-step, and `parts` of a whole optimizer step."""

    def __init__(self, shapes: Shapes, device: Device, constants: Constants, stage: int) -> None:
        self.shapes, self.device, self.constants = shapes, device, constants
        self.peak = device.peak(shapes.precision)
        self.bandwidth = device.bandwidth * constants.bandwidth
        parameters = shapes.parameters(stage)
        self.parameters = sum(parameter.elements for parameter in parameters)
        self.trained = sum(parameter.elements for parameter in parameters if parameter.trained)
        self.embedding = sum(parameter.elements for parameter in parameters if parameter.name in ("tokens", "positions"))
        self.forward_s = self.backward_s = 0.0
        self.blocks = shapes.blocks(stage)
        self.parts = self._compute(has_head=stage == shapes.pipeline - 1)

    def _compute(self, has_head: bool) -> dict[str, float]:
        """Matrices, attention, element-wise and recomputation, over all micro-steps."""
        shapes, model, tensor = self.shapes, self.shapes.model, self.shapes.tensor
        width, hidden, tokens = model.width, model.hidden_width, shapes.tokens
        layers = len(self.blocks)
        into = 2 if model.ffn == "swiglu" else 1  # matrices that make the hidden values
        projected = width + 2 * model.key_heads * model.head_width
        maps = ((width, projected // tensor), (width // tensor, width), *into * ((width, hidden // tensor),), (hidden // tensor, width))
        linear = sum(self._matrix(tokens, inputs, outputs) for inputs, outputs in maps)
        adapters, adapters_backward = self._adapters()
        vocabulary, task = shapes.vocabulary, shapes.task
        head = self._matrix(tokens, width, vocabulary) * has_head
        # What a frozen matrix has no gradient of is not computed. Of answers, each chunk's logits are computed twice.
        back = 1 if task.adapts else 2
        head_back = (1 if task.adapts and task.loss != "reward" else 2) + (task.loss == "answers" and tokens > (shapes.chunk or tokens))
        attention, attention_backward = self._attention()
        forward, backward = self._element_wise()
        loss = self._pass(self._bytes_of_loss * tokens * vocabulary, 10) * has_head
        recompute = 0.0
        if shapes.policy == "full":
            recompute = layers * (linear + attention + forward) + adapters
        elif shapes.policy == "selective":
            recompute = layers * (forward + (attention if model.dropout else 0))
        self.forward_s = layers * (linear + attention + forward) + adapters + head + loss / 2
        self.backward_s = layers * (back * linear + attention_backward + backward) + adapters_backward + head_back * head + loss / 2 + recompute
        steps = shapes.accumulation
        return {
            "matrices": steps * ((1 + back) * layers * linear + (1 + head_back) * head),
            **({"adapters": steps * (adapters + adapters_backward)} if task.adapts else {}),
            "attention": steps * layers * (attention + attention_backward),
            "element-wise": steps * (layers * (forward + backward) + loss),
            "recomputation": steps * recompute,
        }

    @property
    def _bytes_of_loss(self) -> int:
        """Read and written for each logit."""
        element = self.shapes.element
        return {"log_probs": 34 + 3 * element, "fused": 4 * element, "softmax": 16 + 3 * element}[self.shapes.trainer.loss]

    def _attention(self) -> tuple[float, float]:
        """Forward and backward."""
        shapes, model = self.shapes, self.shapes.model
        pairs = shapes.tokens * shapes.context * model.width / shapes.tensor
        if shapes.trainer.attention == "flash" and shapes.masked:
            # A kernel that takes a mask computes all scores, and reads the mask for each head.
            read = shapes.element * shapes.tokens * shapes.context * model.heads / shapes.tensor
            forward = max(4 * shapes.tokens * shapes.context * model.width / shapes.tensor / (self.peak * self.constants.attention), self._pass(read, 1))
            return forward, 2.5 * forward
        if shapes.trainer.attention == "flash":
            # Causal: half of the scores. Backward: 2.5 times the forward (FlashAttention recomputes the scores).
            forward = 2 * pairs / (self.peak * self.constants.attention) + self.constants.launch_s
            return forward, 2.5 * forward
        scores, head_width = shapes.tokens * shapes.context * model.heads / shapes.tensor, model.head_width
        arithmetic = self._matrix(shapes.tokens, head_width, shapes.context) * model.heads / shapes.tensor
        width = 4 if shapes.trainer.autocast else shapes.element
        moved = [plain + (dropped if model.dropout else 0) for plain, dropped in zip(_PLAIN[width], _PLAIN_DROPOUT[width], strict=True)]
        less = 0.6 if shapes.trainer.fused else 1.0  # scale, mask and softmax in one kernel
        return 2 * arithmetic + self._pass(less * moved[0] * scores, 6), 4 * arithmetic + self._pass(less * moved[1] * scores, 9)

    def _adapters(self) -> tuple[float, float]:
        """Forward and backward of all adapters: two narrow matrices each, and passes over the map's result: scaled, and added."""
        shapes, task = self.shapes, self.shapes.task
        forward = backward = 0.0
        if task.lora.rank is None:
            return forward, backward
        for block in self.blocks:
            for name, (inputs, outputs) in linear_maps(shapes.model).items():
                if (rank := task.rank(block, name)) is not None:
                    narrow = self._matrix(shapes.tokens, inputs, rank) + self._matrix(shapes.tokens, rank, outputs)
                    read, written = (shapes.element * shapes.tokens * size for size in (inputs, outputs))
                    dropout = self._pass(3 * read, 1) if task.lora.dropout else 0.0
                    forward += narrow + self._pass(5 * written, 2) + dropout
                    backward += 2 * narrow + self._pass(2 * written + 3 * read, 2) + dropout
        return forward, backward

    def _element_wise(self) -> tuple[float, float]:
        """Bytes read and written by two norms, two sums, GELU or SiLU and product, dropout; backward also by the stacking of q, k, v."""
        shapes, model, trainer = self.shapes, self.shapes.model, self.shapes.trainer
        spread = shapes.tensor if trainer.norms_parallel else 1
        x = shapes.element * shapes.tokens * model.width / spread * (1.5 if trainer.autocast else 1.0)  # half of it in fp32
        h = shapes.element * shapes.tokens * model.hidden_width / shapes.tensor
        dropout = 5 * x if model.dropout else 0
        less = 0.5 if trainer.fused else 1.0
        into = 2 if model.ffn == "swiglu" else 1
        heads = shapes.element * shapes.tokens * (model.heads + model.key_heads) * model.head_width / shapes.tensor
        # Queries and keys rotated by kernels for negation, concatenation, two products and their sum; an RMSNorm of each head.
        turned = (11 * heads if model.positions == "rotary" else 0) + (2 * heads if model.qk_norm else 0)
        forward = self._pass(less * (10 * x + (5 * into - 3) * h + dropout + turned), int(less * (_KERNELS_A_BLOCK["forward"] - 5)))
        backward = self._pass(less * (20 * x + (5 * into - 2) * h + dropout + turned), int(less * (_KERNELS_A_BLOCK["backward"] - 9)))
        return forward, backward

    def _matrix(self, rows: float, inputs: float, outputs: float) -> float:
        """One multiplication: limited by the arithmetic, the memory or its launch."""
        share = self.constants.matrix
        for size in (rows, inputs, outputs):
            share *= size / (size + self.constants.half_size)
        moved = self.shapes.element * (rows * inputs + inputs * outputs + rows * outputs)
        return max(2 * rows * inputs * outputs / (self.peak * share), moved / self.bandwidth, self.constants.launch_s)

    def _pass(self, size: float, kernels: int) -> float:
        return max(size / self.bandwidth, kernels * self.constants.launch_s)

    def optimizer(self) -> dict[str, float]:
        """Clipping, Adam, and what offload moves."""
        shapes = self.shapes
        trained = self.trained / (shapes.shards if shapes.stage else 1)
        if shapes.offload_optimizer:
            moved = trained * (4 if shapes.accumulates_fp32 else shapes.element) + trained * shapes.element
            parts = {"optimizer": trained / self.constants.host_adam, "offload": moved / self.device.host_link}
        else:
            # Norm and clipping read and write the fp32 gradients; Adam reads four numbers and writes three.
            parts = {"optimizer": trained * (12 + 28 + shapes.element) / self.bandwidth}
        if shapes.offload_weights:
            fetched = self.parameters / shapes.shards * shapes.element * 2 * shapes.accumulation
            parts["offload"] = parts.get("offload", 0.0) + fetched / self.device.host_link
        return parts
