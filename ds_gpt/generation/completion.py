"""From prompts to texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ds_gpt.data import Tokenizer
from ds_gpt.generation.decoding import Decoder
from ds_gpt.generation.options import Sampling
from ds_gpt.generation.text import TextStream
from ds_gpt.model.gpt import GPT


@dataclass(frozen=True)
class Completion:
    """What followed a prompt.

    Attributes:
        text: without the prompt, up to a stop string.
        tokens: how many were chosen for it.
        finish: ``length``, the number that was asked for; ``stop``, a stop string; ``end``, the separator of documents
            or another end of a text.
        slid: whether it went past the context, so that its end was written without knowledge of the beginning.
    """

    text: str
    tokens: int
    finish: Literal["length", "stop", "end"]
    slid: bool


def complete(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int],
    stop: Sequence[str] = (),
    show: Callable[[str], None] | None = None,
) -> list[Completion]:
    """Continue all prompts together, each up to a stop string, the end of its document, or `new_tokens`.

    Args:
        model: in evaluation mode.
        tokenizer: of the model.
        prompts: token ids, one or more each.
        new_tokens: at most so many are added to each.
        sampling: how tokens are chosen.
        seeds: of the random numbers of each.
        stop: a text ends where one of these would begin.
        show: called with each piece of text as soon as it is certain.
    """
    decoder = Decoder(model, prompts, new_tokens, sampling, seeds, tokenizer.vocab_size)
    streams, counts = [TextStream(tokenizer, prompt, stop) for prompt in prompts], [0] * len(prompts)
    ended = set[int]()
    while decoder.running:
        added = decoder.step()
        for index, token in added.items():
            counts[index] += 1
            if token in tokenizer.ends:
                ended.add(index)
            else:
                _shown(streams[index].push(token), show)
        decoder.finish({index for index in added if streams[index].stopped or index in ended})
    for stream in streams:
        _shown(stream.flush(), show)
    return [
        Completion(
            stream.text,
            counts[index],
            "stop" if stream.stopped else "end" if index in ended else "length",
            slid=len(prompts[index]) + counts[index] - 1
            > model.config.context,  # nothing follows the last token: it is not computed
        )
        for index, stream in enumerate(streams)
    ]


def _shown(piece: str, show: Callable[[str], None] | None) -> None:
    if piece and show is not None:
        show(piece)
