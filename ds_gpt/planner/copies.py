"""The two places where trainers differ most in memory: attention's scores, and the logits on their way through the loss."""

from __future__ import annotations

from collections.abc import Callable

from ds_gpt.planner.ledger import Ledger
from ds_gpt.planner.trainers import Trainer

ACTIVATIONS, LOGITS, BACKWARD = "activations", "logits and loss", "backward temporaries"


class Copies:
    """Copies that a trainer makes of scores and logits, in numbers of elements, put on a ledger.

    Scores are of attention that forms them: softmax, dropout, product with the values. Under autocast the softmax is fp32, its input is cast
    to it and what multiplies the values is cast back.
    """

    def __init__(self, ledger: Ledger, element: int, trainer: Trainer, dropout: bool) -> None:
        self.ledger, self.element, self.trainer, self.dropout = ledger, element, trainer, dropout
        self.softmax = 4 if trainer.autocast else element  # bytes

    def kept_scores(self, scores: int) -> int:
        """Bytes that autograd keeps: the softmax, the mask, and what multiplies the values where that is another tensor."""
        return scores * (self.softmax + (1 if self.dropout else 0) + self._multiplied)

    @property
    def _multiplied(self) -> int:
        return self.element if self.dropout or self.trainer.autocast else 0

    def forward_of_scores(self, scores: int) -> None:
        """The fullest moment before what is kept is settled: under autocast the scores, the softmax, its dropout and the mask."""
        size = scores * (self.element + 2 * self.softmax + (1 if self.dropout else 0)) if self.trainer.autocast else 0
        self.ledger.take(ACTIVATIONS, size)
        self.ledger.give(ACTIVATIONS, size)

    def backward_of_scores(self, scores: int) -> None:
        """Back through the product, the dropout, the softmax and the scaling."""
        ledger, softmax, element = self.ledger, self.softmax * scores, self.element * scores
        if not scores:
            return
        ledger.take(BACKWARD, element)
        ledger.give(ACTIVATIONS, self._multiplied * scores)
        if self.trainer.autocast:
            ledger.take(BACKWARD, softmax)
            ledger.give(BACKWARD, element)
        if self.dropout:
            ledger.take(BACKWARD, softmax)
            ledger.give(ACTIVATIONS, scores)
            ledger.give(BACKWARD, softmax)
        ledger.take(BACKWARD, softmax)
        ledger.give(ACTIVATIONS, softmax)
        ledger.give(BACKWARD, softmax)
        if self.trainer.autocast:
            ledger.take(BACKWARD, element)
            ledger.give(BACKWARD, softmax)
        ledger.give(BACKWARD, element)

    def forward_of_loss(self, logits: int) -> None:
        """Logits, and what is made of them for the loss."""
        ledger = self.ledger
        ledger.take(LOGITS, logits * self.element)
        if self.trainer.loss == "log_probs":
            copy = 4 * logits if self.element < 4 else 0
            ledger.take(LOGITS, copy + 4 * logits)
            ledger.give(LOGITS, copy + logits * self.element)
        elif self.trainer.loss == "softmax":
            ledger.take(LOGITS, 4 * logits)
            ledger.give(LOGITS, logits * self.element)

    def backward_of_loss(self, logits: int, begin: Callable[[], None]) -> None:
        """Back to the logits' gradient, which is what remains; `begin` is called where the backward pass begins."""
        ledger, gradient = self.ledger, logits * self.element
        if self.trainer.loss == "fused":
            begin()
            ledger.take(LOGITS, gradient)
            ledger.give(LOGITS, gradient)
            return
        begin()
        if self.trainer.loss == "log_probs":
            ledger.take(LOGITS, 8 * logits)  # gradients of the log-probabilities, and through the softmax
            ledger.give(LOGITS, 8 * logits)
            ledger.give(LOGITS, 4 * logits)
            ledger.take(LOGITS, gradient)
        else:
            ledger.take(LOGITS, gradient)
            ledger.give(LOGITS, 4 * logits)
