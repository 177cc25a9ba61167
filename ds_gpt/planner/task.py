"""What a run learns, as far as it costs memory or time: which weights, sequences or pairs, masks, and the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ds_gpt.config.run import RunConfig
from ds_gpt.config.stage import LoraConfig


@dataclass(frozen=True)
class Task:
    """What differs from the pre-training of every weight on next tokens.

    Attributes:
        lora: the adapters; without a rank every weight is trained.
        sequences: of one item of the batch: a pair of answers is two.
        loss: what follows the last norm: "tokens", a cross-entropy of logits; "answers", the log-probabilities of whole
            answers; "reward", one number.
        masked: whether a mask of T x T a sequence says what each token sees.
        own_positions: whether each token comes with its position.
        arrays: integers that come with each token.
    """

    lora: LoraConfig = LoraConfig()
    sequences: int = 1
    loss: Literal["tokens", "answers", "reward"] = "tokens"
    masked: bool = False
    own_positions: bool = False
    arrays: int = 2

    @classmethod
    def of(cls, run: RunConfig) -> Task:
        """The task of a run."""
        sft, documents = run.stage == "sft", run.keeps_documents_apart
        return cls(
            run.lora,
            run.sequences,
            {"dpo": "answers", "reward": "reward"}.get(run.stage, "tokens"),  # type: ignore[arg-type]
            documents or run.objective.name != "next_token",
            sft,
            2 + documents + sft,
        )

    @property
    def adapts(self) -> bool:
        """Whether adapters are trained, and the model is frozen."""
        return self.lora.rank is not None

    def rank(self, block: int, name: str) -> int | None:
        """Rank of the adapter of a linear map, by its block and its name there; None where it has none."""
        return self.lora.rank if self.lora.rank is not None and self.lora.adapts(f"blocks.{block}.{name}") else None


PRETRAINING = Task()
