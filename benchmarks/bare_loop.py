"""The least that trains the same model on the same batches: PyTorch, AdamW, clipping, and nothing else.

Prints tokens a second after the warm-up.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F

from ds_gpt.commands.arguments import add_config_arguments
from ds_gpt.config import Hardware, load
from ds_gpt.config.parse import with_vocabulary
from ds_gpt.config.shipped import DEFAULT_DEEPSPEED, DEFAULT_RUN
from ds_gpt.data import prepare
from ds_gpt.data.loader import BatchLoader
from ds_gpt.learning.parameter_groups import parameter_groups
from ds_gpt.learning.schedule import schedule
from ds_gpt.model.gpt import GPT


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bare_loop")
    add_config_arguments(parser)
    parser.add_argument("--warmup-steps", type=int, required=True)
    options = parser.parse_args()
    composed = load(options.config or DEFAULT_RUN, options.deepspeed_config or DEFAULT_DEEPSPEED, Hardware("cpu", "CPU", 1, bf16=False), options.overrides)
    dataset = prepare(composed.run.data, composed.run.seed)
    run = with_vocabulary(composed.run, dataset.tokenizer.vocab_size)
    torch.manual_seed(run.seed)
    model = GPT(run.model)
    optimizer = torch.optim.AdamW(parameter_groups(model, run.optimizer.weight_decay), lr=run.optimizer.lr, betas=run.optimizer.betas, eps=run.optimizer.eps)
    sampler = dataset.train.sampler(run.model.context, run.batch.global_batch_size, run.seed)
    loader = BatchLoader(dataset.train, sampler, 0, 1, run.batch.global_batch_size, "cpu")
    learning_rate = schedule(run, 1)
    clipping = composed.deepspeed["gradient_clipping"]
    start = time.perf_counter()
    for step in range(run.training.steps):
        if step == options.warmup_steps:
            start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        ((inputs_BT, targets_BT),) = loader.load(step)
        loss = F.cross_entropy(model(inputs_BT).flatten(0, 1), targets_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
    seconds = time.perf_counter() - start
    loader.close()
    print((run.training.steps - options.warmup_steps) * composed.tokens_per_step / seconds)


if __name__ == "__main__":
    main()
