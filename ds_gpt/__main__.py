"""``ds-gpt VERB ...``, the same as ``python -m ds_gpt``. Imports nothing heavy until a verb is chosen."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from keyword import iskeyword

from ds_gpt import __version__

VERBS = {
    "plan": "predict memory and speed on GPUs that you do not have: what fits, what is fastest, and why",
    "prepare": "make a corpus into token shards: text, JSONL, Parquet, data sets of Hugging Face",
    "train": "train on this process alone; use the deepspeed launcher or torchrun for more ranks",
    "show-config": "print the composed configuration and who owns each number",
    "bench": "measure speed and memory by suites of cases, and compare records",
    "generate": "continue text with a trained model: one prompt, a file of them, or interactively",
    "eval": "measure a run's model: validation loss, perplexity, bits per byte, calibration, benchmarks of lm-eval",
    "export": "write a run's model for transformers, as safetensors, or for PyTorch",
    "import": "make a run of a GPT-2, Llama, Mistral or Qwen3 model that was trained elsewhere",
    "doctor": "check this machine, or under a launcher all ranks together, before a run: says what to fix",
    "diagnose": "say what is wrong with a run, finished or running, and draw its curves",
}

TOGETHER = ("train", "doctor")  # verbs that all ranks of a launcher carry out together


def usage() -> str:
    """The text of ``ds-gpt --help``."""
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {summary}" for verb, summary in VERBS.items()]
    return "\n".join(
        ["usage: ds-gpt VERB [options]", "", "Train and scale GPT models with DeepSpeed.", "", "verbs:", *lines, "", "ds-gpt VERB --help explains a verb."]
    )


def main() -> None:
    """Dispatch to ``ds_gpt.commands``."""
    # `deepspeed --module ds_gpt VERB` puts this first; the environment says the same.
    arguments = [word for word in sys.argv[1:2] if not word.startswith("--local_rank=")] + sys.argv[2:]
    if arguments[:1] == ["--version"]:
        print(f"ds_gpt {__version__}")
    elif not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
    elif arguments[0] not in VERBS:
        print(f"ds-gpt: unknown verb '{arguments[0]}'\n\n{usage()}", file=sys.stderr)
        sys.exit(2)
    else:
        if arguments[0] not in TOGETHER and int(os.environ.get("RANK", 0)) > 0:
            return  # started by a launcher: the first rank does it, or each would print, or write, the same
        module = arguments[0].replace("-", "_")
        # `import` cannot be a module's name in an import statement.
        verb = import_module(f"ds_gpt.commands.{module}_" if iskeyword(module) else f"ds_gpt.commands.{module}")
        verb.main(arguments[1:], prog=f"ds-gpt {arguments[0]}")


if __name__ == "__main__":
    main()
