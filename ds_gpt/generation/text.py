"""From a growing list of tokens to text: whole characters only, and up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from ds_gpt.data import Tokenizer

_REPLACEMENT = "\ufffd"  # what tokenizers print for bytes that are no character, or not yet one


class TextStream:
    """The text that tokens add to a prompt, in pieces that never change again.

    Works with any tokenizer: it decodes the latest tokens together with some before them, so that what a token prints
    may depend on its neighbours; and it holds back a last character of which bytes are still to come.

    Args:
        tokenizer: of the model.
        prompt: token ids that the text follows.
        stop: the text ends where the first of these begins.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = tokenizer.decode, stop
        # Tokens from which on text is decoded, and how much of that is known already. They begin at a whole character.
        self._recent = list(map(int, prompt))
        self._known = len(self._decode(self._recent))
        self._settled = len(self._recent)  # so many of the tokens end at a whole character
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; returns the text that is certain now and was not before. Once `stopped`, nothing may follow."""
        self._recent.append(token)
        decoded = self._decode(self._recent)
        # An incomplete character prints as one replacement, or (byte fallback, as Llama 2 has it) as one for each of its
        # bytes and of those before it: what comes before them all is settled.
        end = len(decoded.rstrip(_REPLACEMENT))
        added, self._known = decoded[self._known : end], max(end, self._known)
        if end == len(decoded):
            self._recent = self._recent[self._settled :] if added else self._recent
            self._known, self._settled = len(self._decode(self._recent)), len(self._recent)
        return self._released(added, ended=False)

    def flush(self) -> str:
        """The text that was held back, once no token follows."""
        return "" if self.stopped else self._released(self._decode(self._recent)[self._known :], ended=True)

    def _released(self, added: str, ended: bool) -> str:
        """What of the text held so far no stop string can begin in any more."""
        self._held += added
        begins = [place for place in (self._held.find(stop) for stop in self._stop) if place >= 0]
        if begins:
            self.stopped = True
            released, self._held = self._held[: min(begins)], ""
        else:
            kept = 0 if ended else max((_overlap(self._held, stop) for stop in self._stop), default=0)
            released = self._held[: len(self._held) - kept]
            self._held = self._held[len(released) :]
        self.text += released
        return released


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that is a beginning of `stop`, not the whole."""
    return next((length for length in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:length])), 0)
