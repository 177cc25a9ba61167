"""Names that end in dimensions must not lie: every suffixed local of ds_gpt/model, against its real shape."""

import re
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import ds_gpt.model.cache
from ds_gpt.config import ModelConfig
from ds_gpt.model.cache import KeyValueCache
from ds_gpt.model.gpt import GPT

# All differ but S, which is T where a sequence attends to itself.
SIZES = {"B": 2, "T": 5, "S": 5, "D": 24, "H": 6, "G": 3, "K": 4, "F": 7, "V": 11}
OPTIONS = {
    "positions": "rotary", "norm": "rmsnorm", "ffn": "swiglu", "bias": False, "qk_norm": True, "tied_head": False,
}  # fmt: skip
SUFFIX = re.compile(r"_([BTSDHGKFVR]+)$")
MODEL_FILES = frozenset(str(path) for path in Path(ds_gpt.model.__file__).parent.glob("*.py"))


class Suffixes:
    """What the watched code called its tensors, and where that was wrong."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.seen: set[str] = set()
        self.wrong: set[str] = set()

    def check(self, frame) -> None:
        for name, value in frame.f_locals.items():
            match = SUFFIX.search(name)
            if match and isinstance(value, torch.Tensor):
                self.seen.add(name)
                if tuple(value.shape) != tuple(self.sizes[letter] for letter in match[1]):
                    self.wrong.add(f"{frame.f_code.co_qualname}: {name} is {tuple(value.shape)}")


@contextmanager
def watching(files, sizes=SIZES):
    """Check the locals of every function in `files` at every line it runs and where it returns."""
    suffixes = Suffixes(sizes)

    def on_line(frame, event, argument):
        if event in ("line", "return"):
            suffixes.check(frame)
        return on_line

    def on_call(frame, event, argument):
        return on_line if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield suffixes
    finally:
        sys.settrace(before)


def test_sizes_tell_dimensions_apart():
    sizes = [size for letter, size in SIZES.items() if letter != "S"]
    assert len(set(sizes)) == len(sizes) and SIZES["D"] == SIZES["H"] * SIZES["K"]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kv_heads", ["auto", SIZES["G"]])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["gpt2", "modern"])
def test_every_suffix_in_the_model_is_right(options, kv_heads, window):
    config = ModelConfig(
        layers=2, width=SIZES["D"], heads=SIZES["H"], context=9, ffn_width=SIZES["F"], vocab_size=SIZES["V"],
        kv_heads=kv_heads, sliding_window=window, **options,
    )  # fmt: skip
    model = GPT(config)
    model.save_attention = True
    with watching(MODEL_FILES, SIZES | {"G": config.key_heads}) as suffixes:
        logits_BTV = model(torch.zeros(SIZES["B"], SIZES["T"], dtype=torch.long))
    assert logits_BTV.shape == (SIZES["B"], SIZES["T"], SIZES["V"])
    assert suffixes.wrong == set()
    assert suffixes.seen >= {"tokens_BT", "x_BTD", "q_BHTK", "k_BGSK", "v_BGSK", "k_BHSK", "scores_BHTS",
                             "seen_TS", "y_BHTK", "h_BTF"}  # fmt: skip


@pytest.mark.parametrize("lengths", [[7, 7], [8, 5]], ids=["equally many", "unequally many"])
@pytest.mark.parametrize("window", [None, 3])
def test_every_suffix_in_the_cache_is_right(window, lengths):
    """One token a row more, beside what is kept: T is 1, S what any row sees. The model takes S for T."""
    options = OPTIONS | {"sliding_window": window, "kv_heads": SIZES["G"], "ffn_width": 37}
    model = GPT(ModelConfig(layers=2, width=SIZES["D"], heads=SIZES["H"], context=19, vocab_size=SIZES["V"], **options))
    cache = KeyValueCache(model, SIZES["B"], 17)
    with watching(MODEL_FILES, SIZES | {"F": 37}) as suffixes, cache.filling(torch.arange(SIZES["B"])):
        model(torch.zeros(SIZES["B"], SIZES["T"], dtype=torch.long))
    sizes = SIZES | {"F": 37, "T": 1, "S": max(lengths) + 1 - (max(0, min(lengths) + 1 - window) if window else 0)}
    with watching({ds_gpt.model.cache.__file__}, sizes) as extended, cache.extending(lengths, torch.device("cpu")) as positions_BT:
        model(torch.zeros(SIZES["B"], 1, dtype=torch.long), positions_BT)
    assert suffixes.wrong == extended.wrong == set()
    assert suffixes.seen >= {"k_BGTK", "v_BGTK", "rows_B"} and extended.seen >= {"k_BGSK", "k_BGTK", "q_BHTK"}


def wrong_order(x_BTD):
    return x_BTD.transpose(1, 2)


def wrong_for_one_line(x_BTD):
    x_BTD = x_BTD.sum(dim=0)
    x_BTD = x_BTD.expand(SIZES["B"], -1, -1)
    return x_BTD


def too_few(x_BT):
    return x_BT


@pytest.mark.parametrize(
    "function, shape, wrong",
    [
        (wrong_order, "BTD", None),
        (wrong_order, "BDT", "wrong_order: x_BTD is (2, 24, 5)"),
        (wrong_for_one_line, "BTD", "wrong_for_one_line: x_BTD is (5, 24)"),
        (too_few, "BTD", "too_few: x_BT is (2, 5, 24)"),
    ],
)
def test_a_wrong_suffix_is_caught(function, shape, wrong):
    with watching({__file__}) as suffixes:
        function(torch.zeros([SIZES[letter] for letter in shape]))
    assert suffixes.wrong == ({wrong} if wrong else set())
