"""``ds-gpt generate``: text from a trained model."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ds_gpt.commands.arguments import Parser, add_device_argument, torch_device
from ds_gpt.commands.failure import print_or_fail

if TYPE_CHECKING:
    import torch

    from ds_gpt.data import Tokenizer
    from ds_gpt.generation.completion import Completion
    from ds_gpt.generation.options import Sampling
    from ds_gpt.generation.prompts import Prompt
    from ds_gpt.model.gpt import GPT


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Parse the command line and generate; ends the process with status 2 on bad input."""
    print_or_fail(lambda: generate(parser(prog).parse_args(arguments)))


def parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The command line of generation."""
    result = Parser(
        prog=prog,
        description="Continue text with a trained model. Text goes to stdout, all else to stderr.",
        allow_abbrev=False,
    )
    result.add_argument(
        "run", metavar="RUN", help="a run folder (its newest intact checkpoint is used), or the folder of a checkpoint"
    )
    what = result.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    what.add_argument(
        "--batch-file",
        metavar="FILE",
        help='a prompt a line, or a .jsonl with {"prompt": ...} a line; answers with JSON lines in this order',
    )
    what.add_argument(
        "--interactive", action="store_true", help="ask for prompts: Ctrl-C stops an answer, Ctrl-D leaves"
    )
    result.add_argument(
        "--chat", action="store_true", help="the prompt is what a user says: it goes through the run's chat template"
    )
    result.add_argument(
        "--max-new-tokens", type=int, default=200, metavar="N", help="tokens added to a prompt (default: 200)"
    )
    _add_sampling_arguments(result)
    result.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end where this text would begin; may be given several times",
    )
    result.add_argument(
        "--num-samples", type=int, default=1, metavar="N", help="continuations of each prompt (default: 1)"
    )
    result.add_argument(
        "--batch-size", type=int, default=16, metavar="N", help="continuations computed together (default: 16)"
    )
    result.add_argument("--stream", action="store_true", help="show the text while it grows")
    add_device_argument(result)
    result.add_argument(
        "--precision",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="default: bf16 if the run was trained in it and the device is fast at it",
    )
    return result


def _add_sampling_arguments(result: argparse.ArgumentParser) -> None:
    result.add_argument(
        "--temperature", type=float, default=0.8, metavar="X", help="0 always takes the likeliest token (default: 0.8)"
    )
    result.add_argument("--top-k", type=int, metavar="N", help="choose among the N likeliest tokens only")
    result.add_argument(
        "--top-p",
        type=float,
        metavar="X",
        help="choose among the likeliest tokens only that together have this probability",
    )
    result.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="above 1: what occurred before is less likely (default: 1)",
    )
    result.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="of the random choices; the same one gives the same text (default: another each time)",
    )


def generate(options: argparse.Namespace) -> None:
    """Load what is needed and do what was asked for.

    Raises:
        ConfigError: bad input of any kind.
    """
    sampling = check(options)
    # Only after the options are known to be sound: PyTorch takes a second.
    from ds_gpt.checkpoint.saved_model import find_saved_model
    from ds_gpt.data.chat import Chat
    from ds_gpt.generation.prompts import encode_prompt, read_prompts

    # "replace": a lone surrogate may be a token like others.
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    saved = find_saved_model(options.run, say)
    prompts = []
    if options.prompt is not None:
        chat = Chat.of(saved.tokenizer, saved.run.examples.template)
        if options.chat and not saved.tokenizer.ends and chat.ending:  # no token says that an answer is over
            options.stop = [*options.stop, chat.ending]
        prompts = [encode_prompt(chat.ask(options.prompt) if options.chat else options.prompt, saved.tokenizer)]
    elif options.batch_file is not None:
        prompts = read_prompts(options.batch_file, saved.tokenizer)
    model = saved.load(*place(options, saved.state["facts"].get("precision")))
    writer = Writer(model, saved.tokenizer, sampling, options)
    if options.interactive:
        say(f"{saved.checkpoint}: Ctrl-C stops an answer, Ctrl-D leaves")
        interact(writer)
    elif options.stream:
        stream(writer, prompts[0])
    else:
        answer(writer, prompts, options)


def place(options: argparse.Namespace, trained_in: str | None) -> tuple[torch.device, torch.dtype]:
    """Where the model computes, and in what. Raises ConfigError where there is no such device."""
    import torch

    from ds_gpt.engine.ranks import Ranks

    device = torch_device(options.device)
    fast = trained_in == "bf16" and Ranks(0, 1, 0, 1, device).hardware().bf16
    return device, torch.bfloat16 if options.precision == "bf16" or (
        options.precision == "auto" and fast
    ) else torch.float32


class Writer:
    """A model, how the user wants it to write, and how fast it did."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, sampling: Sampling, options: argparse.Namespace) -> None:
        self.tokenizer = tokenizer
        self._model, self._sampling, self._options = model, sampling, options
        self._seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
        self._asked, self._tokens, self._seconds, self._slid = 0, 0, 0.0, 0

    def complete(self, prompts: Sequence[Sequence[int]], show: Callable[[str], None] | None = None) -> list[Completion]:
        """Continue prompts. The seed and how many there were before settle their random numbers, whatever the batch."""
        from ds_gpt.generation.completion import complete
        from ds_gpt.generation.decoding import row_seeds

        options, started = self._options, time.perf_counter()
        seeds = row_seeds(self._seed, len(prompts), self._asked)
        self._asked += len(prompts)
        completions = complete(
            self._model, self.tokenizer, prompts, options.max_new_tokens, self._sampling, seeds, options.stop, show
        )
        self._seconds += time.perf_counter() - started
        self._tokens += sum(completion.tokens for completion in completions)
        self._slid += sum(completion.slid for completion in completions)
        return completions

    def tell(self) -> None:
        """Say how fast it was since the last call, with what seed, and what went past the context."""
        from ds_gpt.generation.decoding import slide_tokens

        context = self._model.config.context
        if self._slid:
            what = "a text" if self._slid == 1 else f"{self._slid} texts"
            seen = f"the last {context - slide_tokens(context) + 1} to {context}"
            say(f"{what} went past the context of {context} tokens: the model sees {seen}")
        seed = f", seed {self._seed}" if self._sampling.temperature > 0 else ""
        say(f"{self._tokens:,} tokens in {self._seconds:.2f} s: {self._tokens / self._seconds:,.0f} tokens/s{seed}")
        self._tokens, self._seconds, self._slid = 0, 0.0, 0


def stream(writer: Writer, prompt: Prompt) -> None:
    """Show a prompt and what follows it while it grows."""
    write(prompt.text)
    writer.complete([prompt.tokens], show=write)
    write("\n")
    writer.tell()


def answer(writer: Writer, prompts: Sequence[Prompt], options: argparse.Namespace) -> None:
    """All continuations of all prompts, in order: as text, or as JSON lines where the prompts came from a file."""
    requests = [(prompt, sample) for prompt in prompts for sample in range(options.num_samples)]
    for first in range(0, len(requests), options.batch_size):
        batch = requests[first : first + options.batch_size]
        for (prompt, sample), completion in zip(
            batch, writer.complete([prompt.tokens for prompt, _ in batch]), strict=True
        ):
            if options.batch_file is not None:
                found = {
                    "prompt": prompt.text,
                    "completion": completion.text,
                    "sample": sample,
                    "tokens": completion.tokens,
                    "finish": completion.finish,
                }
                write(json.dumps({**prompt.fields, **found}) + "\n")
                continue
            if options.num_samples > 1:
                write(f"--- {sample + 1} of {options.num_samples}\n")
            write(f"{prompt.text}{completion.text}\n")
    writer.tell()


def interact(writer: Writer) -> None:
    """Ask for prompts and answer each, until the input ends."""
    from ds_gpt.config import ConfigError
    from ds_gpt.generation.prompts import encode_prompt

    if sys.stdin.isatty():
        import readline  # noqa: F401  importing it gives `input` a line to edit, and a history
    while True:
        try:
            if text := input("> " if sys.stdin.isatty() else ""):
                stream(writer, encode_prompt(text, writer.tokenizer))
        except EOFError:
            return
        except ConfigError as error:
            say(str(error))
        except KeyboardInterrupt:  # ends the answer, or the line that is being typed
            write("\n")


def write(text: str) -> None:
    """To whoever reads the texts, at once."""
    print(text, end="", flush=True)


def say(text: str) -> None:
    """To the user, beside the texts."""
    print(text, file=sys.stderr, flush=True)


def check(options: argparse.Namespace) -> Sampling:
    """What can be judged without the model. Raises ConfigError with all that is wrong."""
    from ds_gpt.config import ConfigError, Problem
    from ds_gpt.generation.options import Sampling

    problems = []
    for name in ("max_new_tokens", "num_samples", "batch_size"):
        if getattr(options, name) < 1:
            problems.append(
                Problem(f"--{name.replace('_', '-')} {getattr(options, name)} asks for nothing", fix="give 1 or more")
            )
    if options.seed is not None and options.seed < 0:
        problems.append(Problem(f"--seed {options.seed} is negative", fix="give 0 or more"))
    if "" in options.stop:
        problems.append(Problem("--stop '' is found before the first character", fix="give a text, or leave it out"))
    if options.stream and (options.batch_file is not None or options.num_samples > 1):
        problems.append(
            Problem(
                "--stream shows one text while it grows", fix="leave out --stream, or --batch-file and --num-samples"
            )
        )
    if options.interactive and options.num_samples > 1:
        problems.append(Problem("--interactive gives one answer at a time", fix="leave out --num-samples"))
    try:
        sampling = Sampling(options.temperature, options.top_k, options.top_p, options.repetition_penalty)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return sampling
