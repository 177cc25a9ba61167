"""Decoding with a key/value cache against the loop that computes the whole window anew for each token: the same greedy tokens.

Models of the shipped recipes with random weights, which take as long as trained ones. Processor time, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.records import write
from ds_gpt.config.files import read_run_yaml
from ds_gpt.config.run import ModelConfig
from ds_gpt.config.shipped import SHIPPED
from ds_gpt.generation.decoding import generate, slide_tokens
from ds_gpt.generation.options import Sampling
from ds_gpt.model.gpt import GPT

SEED = 1337
PROMPT = [1, 2, 3, 4]
_VOCABULARY = 65
# name: (recipe, what is changed)
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "quickstart": ("quickstart", {}),
    "quickstart, context 512": ("quickstart", {"context": 512}),
    "shakespeare_char": ("shakespeare_char", {}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--rounds`` and ``--tokens``."""
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: 5)")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens (default: 256)")


def measure(options: argparse.Namespace) -> Path:
    """Time both on every model and record tokens a processor second, and their ratio."""
    cases = []
    for name, (recipe, changes) in MODELS.items():
        shape = {
            **read_run_yaml(SHIPPED / "runs" / f"{recipe}.yaml").values["model"],
            "vocab_size": _VOCABULARY,
            **changes,
        }
        torch.manual_seed(SEED)
        model = GPT(ModelConfig.model_validate(shape)).eval()
        cached, uncached = [], []
        for _ in range(options.rounds):
            fast = _timed(lambda: generate(model, [PROMPT], options.tokens, Sampling(temperature=0))[0], cached)
            slow = _timed(lambda: uncached_greedy(model, PROMPT, options.tokens), uncached)
            assert fast == slow, "both loops give the same tokens"
        ratio = statistics.median(uncached) / statistics.median(cached)
        rates = {
            "cached_tokens_per_cpu_s": [options.tokens / each for each in cached],
            "uncached_tokens_per_cpu_s": [options.tokens / each for each in uncached],
        }
        cases.append(
            {
                "model": name,
                "context": model.config.context,
                "new_tokens": options.tokens,
                "ratio_of_medians": ratio,
                **rates,
            }
        )
        print(
            f"{name}: cached {statistics.median(cached):.2f} s, uncached {statistics.median(uncached):.2f} s, {ratio:.1f} x"
        )
    command = [
        "python",
        "-m",
        "benchmarks",
        "generation",
        "--rounds",
        str(options.rounds),
        "--tokens",
        str(options.tokens),
    ]
    return write(
        options.records, "generation", command, f"CPU, {torch.get_num_threads()} threads", SEED, {"cases": cases}
    )


@torch.no_grad()
def uncached_greedy(model: GPT, prompt: list[int], new_tokens: int) -> list[int]:
    """The likeliest token each time, by a full forward pass over the same window as `Decoder`'s."""
    tokens, start = list(prompt), max(0, len(prompt) - model.config.context)
    for _ in range(new_tokens):
        if len(tokens) - start > model.config.context:
            start += slide_tokens(model.config.context)
        tokens.append(model(torch.tensor([tokens[start:]]))[0, -1].argmax().item())
    return tokens[len(prompt) :]


def _timed(decode: Callable[[], list[int]], seconds: list[float]) -> list[int]:
    started = time.process_time()
    tokens = decode()
    seconds.append(time.process_time() - started)
    return tokens
