"""The ``ds-gpt`` command around its verbs, and ``show-config``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from jobs import CONFIGS, DS_GPT, REPOSITORY, TORCHRUN, ran

from ds_gpt import __version__
from ds_gpt.__main__ import VERBS
from ds_gpt.commands import show_config
from ds_gpt.commands.arguments import Parser, add_config_arguments
from ds_gpt.config import ConfigError
from ds_gpt.config.deepspeed_keys import KNOWN_KEYS

MODULE = (sys.executable, "-m", "ds_gpt")


def test_help_is_immediate(tmp_path: Path) -> None:
    ended = min((ran(tmp_path, *DS_GPT, "--help") for _ in range(3)), key=lambda ended: ended.seconds)
    assert ended.status == 0 and ended.err == ""
    assert ended.seconds < 0.5, "the fastest of three: other work on the machine does not count"
    assert all(verb in ended.out for verb in VERBS)
    assert ran(tmp_path, *DS_GPT).out == ended.out


def test_help_and_show_config_import_no_torch(tmp_path: Path) -> None:
    for arguments in (["--help"], ["train", "--help"], ["show-config"]):
        program = (
            "import atexit, sys\n"
            "atexit.register(lambda: print('heavy:', sorted({'torch', 'deepspeed'} & set(sys.modules))))\n"
            f"sys.argv[1:] = {arguments!r}\n"
            "from ds_gpt.__main__ import main\n"
            "main()\n"
        )
        ended = ran(tmp_path, sys.executable, "-c", program)
        assert ended.out.endswith("heavy: []\n"), ended.out + ended.err


def test_module_is_the_same_as_the_script(tmp_path: Path) -> None:
    assert ran(tmp_path, *MODULE, "--help").out == ran(tmp_path, *DS_GPT, "--help").out
    assert ran(tmp_path, *MODULE, "--version").out == f"ds_gpt {__version__}\n"
    assert ran(tmp_path, *MODULE, "show-config", "--json").out == ran(tmp_path, *DS_GPT, "show-config", "--json").out


def test_under_a_launcher_one_rank_speaks_for_all(tmp_path: Path) -> None:
    command = (*TORCHRUN, "--nproc-per-node", "2", "-m", "ds_gpt", "show-config", "--json")
    ended = ran(tmp_path, *command, PYTHONPATH=str(REPOSITORY))
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["train_batch_size"] > 0, "once, else it is no JSON"


@pytest.mark.parametrize("words", [["fly"], ["--fly"], ["Train"], [""]])
def test_unknown_verb(words: list[str], tmp_path: Path) -> None:
    ended = ran(tmp_path, *DS_GPT, *words)
    assert ended.status == 2 and ended.out == ""
    assert f"unknown verb '{words[0]}'" in ended.err and "show-config" in ended.err


def test_several_settings_after_one_set() -> None:
    parser = Parser(prog="ds-gpt show-config")
    add_config_arguments(parser)
    with pytest.raises(ConfigError, match="--set takes one setting each time: --set parallel.tensor=2 --set training.steps=3"):
        parser.parse_args(["--set", "seed=1", "parallel.tensor=2", "training.steps=3"])
    with pytest.raises(ConfigError, match="do:  usage"):
        parser.parse_args(["--colour=red"])


def test_show_config_into_a_closed_pipe(tmp_path: Path) -> None:
    """`| head` and `| less`, left early."""
    command = f"{' '.join(DS_GPT)} show-config | true; echo ${{PIPESTATUS[0]}}"
    ended = ran(tmp_path, "bash", "-c", command)
    assert (ended.out, ended.err) == ("0\n", "")


def test_show_config_refuses_like_training(tmp_path: Path) -> None:
    ended = ran(tmp_path, *DS_GPT, "show-config", "--devices", 3, "--set", "trainin.steps=2")
    assert ended.status == 2 and ended.out == ""
    assert "trainin" in ended.err and "Traceback" not in ended.err
    for words in (["--devices", "0"], ["--devices", "two"], ["--device", "tpu"]):
        ended = ran(tmp_path, *DS_GPT, "show-config", *words)
        assert ended.status == 2 and words[1] in ended.err and "Traceback" not in ended.err


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    show_config.main([str(word) for word in words])
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


@pytest.mark.parametrize("deepspeed", sorted(path.stem for path in CONFIGS.glob("*.json")))
@pytest.mark.parametrize("run", sorted(path.stem for path in (CONFIGS / "runs").glob("*.yaml")))
def test_every_shipped_pair_shows_every_key_with_its_owner(run: str, deepspeed: str, capsys: pytest.CaptureFixture[str]) -> None:
    pair = ("--config", CONFIGS / "runs" / f"{run}.yaml", "--deepspeed_config", CONFIGS / f"{deepspeed}.json", "--device", "cuda", "--devices", 8)
    run_table, deepspeed_table = shown(capsys, *pair).split("\n# what DeepSpeed gets", 1)
    rows = [line for line in (run_table + deepspeed_table.split("\nnote:")[0]).splitlines() if line and not line.startswith(("#", " ("))]
    for row in rows:
        assert owner(row), f"no owner: {row}"
    keys = {row.split()[0] for row in rows}
    values = json.loads(shown(capsys, *pair, "--json"))
    assert set(flat(values)) <= keys
    assert set(values) <= set(KNOWN_KEYS[""])
    assert "auto" not in json.dumps(values)


def owner(row: str) -> str:
    """The last column of a line: key, JSON value, owner."""
    _, _, rest = row.partition("  ")
    value, end = json.JSONDecoder().raw_decode(rest.lstrip())
    return rest.lstrip()[end:].strip()


def flat(values: dict[str, object], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key, value in values.items():
        keys += flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]
    return keys


def test_overrides_are_named_as_owners(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--set", "training.steps=7", "--set", "zero_optimization.stage=3")
    rows = {row.split()[0]: row for row in text.splitlines() if row.strip()}
    assert rows["training.steps"].endswith("run config (--set)")
    assert rows["zero_optimization.stage"].endswith("DeepSpeed config (--set)")
    assert rows["model.dropout"].endswith("default")


def test_showing_is_quick(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.perf_counter()
    shown(capsys)
    assert time.perf_counter() - start < 0.5
