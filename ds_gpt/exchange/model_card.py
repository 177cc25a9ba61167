"""The README of an exported model: what it is, how it was trained, how to load it."""

from __future__ import annotations

import json
import math
from typing import Any

from ds_gpt.checkpoint.saved_model import SavedModel
from ds_gpt.config import flatten
from ds_gpt.data import Tokenizer
from ds_gpt.exchange.importing import ORIGIN
from ds_gpt.model.counts import adapter_parameters, parameters

_USE = {
    "hf": """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = AutoModelForCausalLM.from_pretrained("PATH")
inputs = tokenizer("The ", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50, do_sample=True)[0]))
```""",
    "peft": """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("BASE")
model = PeftModel.from_pretrained(base, "PATH")
```

BASE is what `ds-gpt export RUN --format hf` makes of the run that this one started from (`init_from`).""",
    "safetensors": """The tensors have the names of `ds_gpt.model.gpt.GPT`. `ds-gpt import PATH` makes a run of it.""",
    "torch": """```python
import json
import torch
from ds_gpt.config import ModelConfig
from ds_gpt.model.gpt import GPT

model = GPT(ModelConfig(**json.load(open("PATH/config.json"))["model"]))
model.load_state_dict(torch.load("PATH/model.pt", weights_only=True))
```""",
}
_USE_WITH_BASE = """```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("PATH")
```

It loads BASE, and adds the adapters."""
_PURPOSE = {
    "pretrain": "It continues text; it was not trained to follow instructions or to be safe.",
    "sft": "It was tuned on examples of answers; it was not trained to be safe.",
    "dpo": "It was tuned on preferences between answers; that is what it knows of being helpful or safe.",
}
# Of the run's configuration, what tells how the model was trained; the whole is in the run's folder.
_TOLD = (
    "stage",
    "data.corpus",
    "data.val_fraction",
    "data.attend_across_documents",
    "batch.global_batch_size",
    "optimizer.",
    "schedule.",
    "loss.label_smoothing",
    "training.",
    "seed",
)


def model_card(saved: SavedModel, format: str, dtype: str, architecture: str | None, base: str | None = None) -> str:
    """Markdown with the front matter that the Hugging Face hub reads.

    Args:
        saved: the checkpoint.
        format: of the export.
        dtype: of the weights.
        architecture: the class of transformers that loads it, if any does.
        base: where that class finds the model that adapters are for, if it is known.
    """
    state, model, lora = saved.state, saved.run.model, saved.run.lora
    facts = state["facts"]
    loss, trained = state.get("val_loss"), state["step"] > 0
    zero_stage, versions = facts["deepspeed"]["zero_optimization"]["stage"], facts["versions"]
    rows = {
        "parameters": f"{parameters(model):,}",
        "adapters": f"{adapter_parameters(model, lora):,} parameters, rank {lora.rank}" if lora.rank else None,
        "class in transformers": architecture,
        "weights": dtype,
        "tokenizer": f"{_kind(saved.tokenizer)}, {saved.tokenizer.vocab_size:,} ids",
        "began from": _origin(saved),
        "optimizer steps": f"{state['step']:,}",
        "tokens trained on": f"{state['tokens']:,}",
        "validation loss": None if loss is None else _loss(loss, saved.run.stage),
        "trained on": f"{facts['world_size']} x {facts['device']}, {facts['precision']}, ZeRO stage {zero_stage}"
        if trained
        else None,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    title = saved.run.name
    shape = {f"model.{key}": value for key, value in model.model_dump(mode="json").items()}
    run = flatten(saved.run.model_dump(mode="json"))
    more = ("lora.",) * (lora.rank is not None) + ("preference.",) * (saved.run.stage == "dpo")
    told = {key: value for key, value in run.items() if key.startswith(_TOLD + more)}
    library = {"hf": "transformers", "peft": "peft"}.get(format, "pytorch")
    parts = [
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags:\n- ds_gpt\n---",
        f"# {title}",
        f"A GPT, {'trained with ds_gpt on DeepSpeed' if trained else 'as ds_gpt imported it'}. {_PURPOSE[saved.run.stage]}",
        _table({key: value for key, value in rows.items() if value is not None}),
        f"## Use\n\n{_USE_WITH_BASE.replace('BASE', base) if base else _USE[format]}",
        f"## Model\n\n{_table(shape)}",
        *([f"## Training\n\n{_table(told)}"] if trained else []),
    ]
    return "\n\n".join(parts) + "\n"


def _loss(loss: float, stage: str) -> str:
    return f"{loss:.4f} nats a pair" if stage == "dpo" else f"{loss:.4f} nats a token (perplexity {math.exp(loss):.2f})"


def _kind(tokenizer: Tokenizer) -> str:
    """A tokenizer's name, as ``data.tokenizer`` has it."""
    return type(tokenizer).__name__.removesuffix("Tokenizer").lower()


def _origin(saved: SavedModel) -> str | None:
    """Name of the model that the run was imported from."""
    path = saved.checkpoint.absolute().parent.parent / ORIGIN
    return json.loads(path.read_bytes())["name"] if path.is_file() else None


def _table(rows: dict[str, Any]) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in rows.items()}
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {key} | {text.replace('|', '&#124;')} |" for key, text in texts.items())]
    )
