"""``ds-gpt plan`` as it is typed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_gpt.commands.train import parser as train_parser
from ds_gpt.config import Hardware, load
from ds_gpt.planner.memory import memory

REPOSITORY = Path(__file__).resolve().parents[2]
GPT_1B = ("--config", "ds_configs/runs/gpt_1b.yaml", "--device", "a100-40gb", "--devices", "8")
HARDWARE = Hardware("cuda", "NVIDIA A100-SXM4-40GB", 8, bf16=True)
TINY = (
    "training.steps=2", "model.layers=2", "model.width=32", "model.heads=2", "model.context=16", "model.vocab_size=65", "batch.global_batch_size=8",
    "data.corpus=synthetic", "data.synthetic.vocab_size=65", "evaluation.sequences=4", "sample.tokens=0", "logging.level=DEBUG",
)  # fmt: skip


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ds_gpt", "plan", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)


def test_it_answers_at_once_and_recommends_what_can_be_typed() -> None:
    start = time.process_time()
    result = plan(*GPT_1B)
    assert result.returncode == 0, result.stderr
    assert "fastest that fits" in result.stdout and "tokens/s, MFU" in result.stdout
    command = shlex.split(result.stdout.strip().splitlines()[-1])
    assert command[:4] == ["deepspeed", "--num_gpus", "8", "ds_gpt/train.py"]
    options = train_parser().parse_args(command[4:])
    assert options.config == "ds_configs/runs/gpt_1b.yaml"
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((), "vocabulary: 100, assumed for a tokenizer of characters"),
        (("data.tokenizer=gpt2",), "vocabulary: 50,257, GPT-2's"),
        (("data.tokenizer=bpe", "data.bpe_vocab_size=4096"), "vocabulary: 4,096, data.bpe_vocab_size"),
        (("data.corpus=synthetic", "data.synthetic.vocab_size=77"), "vocabulary: 77, data.synthetic.vocab_size"),
    ],
)
def test_without_a_vocabulary_it_says_which_it_takes(settings: tuple[str, ...], said: str) -> None:
    result = plan(*(part for setting in settings for part in ("--set", setting)))
    assert result.returncode == 0, result.stderr
    assert said in result.stdout and "tokens/s, MFU" in result.stdout


def test_json_lists_every_candidate() -> None:
    found = json.loads(plan(*GPT_1B, "--json").stdout)
    assert {candidate["zero_stage"] for candidate in found} == {0, 1, 2, 3}
    assert {candidate["activation_checkpointing"] for candidate in found} == {None, "selective", "full"}
    for candidate in found:
        assert {"micro_batch", "fits", "peak_bytes", "step_s", "tokens_per_s", "mfu"} <= set(candidate)
        assert sum(candidate["bytes"].values()) == candidate["peak_bytes"]


def test_what_fits_nowhere_is_said_with_the_reason() -> None:
    result = plan("--config", "ds_configs/runs/gpt_1b.yaml", "--device", "l4", "--devices", "1", "--set", "model.layers=200")
    assert "most of it: host memory" in result.stdout
    assert result.returncode == 0
    assert re.search(r"nothing fits\. Nearest, .* GiB short", result.stdout)
    assert re.search(r"it cannot be trained on 1 x NVIDIA L4: .* of 10\.1B parameters .* at least \d+ are needed", result.stdout)


def test_why_names_the_remedy() -> None:
    result = plan(*GPT_1B[:2], "--device", "l4", "--devices", "8", "--why")
    assert re.search(r"activations .* GiB of 22\.5, .* too much; (full|selective) checkpointing would bring them to", result.stdout)
    assert "every setting fits\n" in plan(*GPT_1B[:2], "--device", "h100", "--why").stdout


@pytest.mark.parametrize(("steps", "unit"), [(15, "seconds"), (600, "minutes"), (45_000, "hours"), (1_500_000, "days")])
def test_durations_have_the_unit_that_reads_best(steps: int, unit: str) -> None:
    one = ("--deepspeed_config", "ds_configs/zero2.json")
    said = plan(*GPT_1B[:2], *one, "--device", "h100", "--set", f"training.steps={steps}", "--search").stdout
    step_ms, total = re.search(rf"  ([\d,]+) ms a step .*?{steps:,} steps: ([\d.]+) {unit} \(between", said, re.DOTALL).groups()  # type: ignore[union-attr]
    seconds = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}[unit]
    assert float(total) == pytest.approx(steps * float(step_ms.replace(",", "")) / 1000 / seconds, abs=0.06, rel=0.002)
    assert re.search(rf"  h100 .* USD +[\d.]+ {unit} ", said)


def test_a_small_model_is_counted_in_small_units() -> None:
    said = plan("--devices", "1", "--set", "training.steps=1", "--price", "0.01").stdout
    assert "allocated MiB" in said and not re.search(r"\D0\.00? (GiB|MiB|minutes|USD)", said)
    assert "less than 0.01 USD at 0.01 a device and hour" in said and "nvidia-smi" in said
    on_cpu = plan("--devices", "1", "--device", "cpu").stdout
    assert "with what the allocator wastes" in on_cpu and "nvidia-smi" not in on_cpu


def test_what_cannot_be_traced_is_told_before_anything_else() -> None:
    for arguments, said in ((("--pipeline", "2"), "a pipeline's stages wait for each other"), (("--json",), "--trace with --json")):
        result = plan("--trace", *arguments)
        assert result.returncode == 2 and said in result.stderr and not result.stdout


ON_PAPER = ("--tensor", "2", "--deepspeed_config", "ds_configs/zero3.json")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "a100-41gb"), "did you mean 'a100-40gb'?; or describe it in a --device-file"),
        (("--devices", "0"), "--devices 0 is not a number of GPUs"),
        (("--devices", "7"), "batch.global_batch_size = 64 is not 7 ranks"),
        (("--price", "-1"), "--price -1.0 is not a price"),
        (("--price", "nan"), "--price nan is not a price"),
        (("--set", "model.heads=3"), "model.heads"),
        (("--tensor", "3"), "8 ranks are not a whole number of times tensor 3"),
        (("--pipeline", "64", "--devices", "64"), "parallel.pipeline = 64 is more than model.layers = 20"),
        (("--device-file", "no_such.yaml"), "the device file 'no_such.yaml' cannot be read"),
        (("--tensor", "0"), "--tensor 0 is not a number of devices"),
        (("--pipeline", "2", "--trace"), "--trace: pipeline 2 at ZeRO "),
        ((*ON_PAPER, "--trace"), "--trace: tensor 2 at ZeRO 3"),
        ((*ON_PAPER, "--write", "never.json"), "--write never.json: tensor 2 at ZeRO 3 is on paper only"),
        (("--write", "no_such_folder/out.json"), "--write no_such_folder/out.json: No such file or directory"),
        (("--plot", "picture.word"), "--plot picture.word: Format 'word' is not supported"),
        (("--colour",), "--colour"),
    ],
)
def test_bad_input_is_told_plainly(arguments: tuple[str, ...], said: str) -> None:
    result = plan("--config", "ds_configs/runs/gpt_1b.yaml", *arguments)
    assert result.returncode == 2
    assert said in result.stderr and "Traceback" not in result.stderr


def test_the_search_looks_at_splits_and_other_devices_in_time() -> None:
    start = time.process_time()
    result = plan(*GPT_1B, "--search")
    assert re.search(r"^tensor 2 .* tokens/s|^(tensor|sequence|pipeline) ", result.stdout, re.MULTILINE)
    assert re.search(r"cheapest devices that would do, 8 of each.*\n +\S+ +[\d.,]+ USD", result.stdout)
    command = shlex.split(result.stdout.strip().splitlines()[-1])
    assert command[0] == "deepspeed"  # what ds_gpt can run
    assert time.process_time() - start < 10


def test_a_split_that_was_never_proved_is_on_paper() -> None:
    result = plan(*GPT_1B, "--tensor", "2", "--pipeline", "2", "--sequence", "2")
    assert re.search(r"fastest that fits.*: tensor 2 x pipeline 2 x sequence 2, ZeRO [01],", result.stdout) and "on paper only" in result.stdout
    assert "train.py" not in result.stdout


def test_what_is_on_paper_says_so_in_every_row() -> None:
    said = plan(*GPT_1B, "--tensor", "2").stdout
    rows = re.findall(r"^tensor 2 +(\d).*?( on paper)?$", said, re.MULTILINE)
    assert rows and all((stage == "3") == bool(paper) for stage, paper in rows)
    assert "on paper: ds_gpt does not train" in said
    assert "on paper" not in plan(*GPT_1B).stdout


def test_the_cheapest_devices_are_of_the_degrees_that_were_asked_for() -> None:
    priced = plan(*GPT_1B, "--tensor", "2", "--search").stdout.partition("cheapest devices")[2]
    lines = re.findall(r"^ +\S+ +[\d.,]+ USD .*", priced, re.MULTILINE)
    assert lines and all("tensor 2, ZeRO" in line for line in lines)


def test_the_degrees_that_go_with_the_json_are_in_the_command(tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    printed = plan(*GPT_1B, "--sequence", "2", "--tensor", "2", "--write", str(written)).stdout
    command = shlex.split(printed.strip().splitlines()[-1])
    settings = [value for flag, value in zip(command, command[1:], strict=False) if flag == "--set"]
    assert {"parallel.sequence=2", "parallel.tensor=2"} <= set(settings)
    run = load(GPT_1B[1], written, HARDWARE, settings)
    assert run.data_ranks == 2 and f"micro-batch {run.micro_batch_size} x {run.accumulation_steps}" in printed


def test_json_has_degrees_and_offload() -> None:
    found = json.loads(plan(*GPT_1B, "--sequence", "4", "--json").stdout)
    assert {(candidate["sequence"], candidate["on_paper"]) for candidate in found} == {(4, False)}
    assert {candidate["offload_optimizer"] for candidate in found} == {False, True}


def test_offload_is_recommended_where_nothing_else_fits_and_its_time_called_a_guess() -> None:
    result = plan(*GPT_1B[:2], "--device", "rtx-4090", "--devices", "1", "--set", "model.layers=60")
    assert re.search(r"fastest that fits.*: ZeRO [23] \+ offload", result.stdout)
    assert "GiB of host memory for each device" in result.stdout and "is a guess" in result.stdout


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "devices.yaml"
    path.write_text("mine: {name: My GPU, memory_gib: 60, bandwidth: 2000, link: 50, network: 5, host_link: 30, price: 1, peaks: {half: 400, fp32: 200}}\n")
    result = plan(*GPT_1B[:2], "--device", "mine", "--device-file", str(path), "--devices", "4")
    assert "on 4 x My GPU (60.0 GiB), bf16" in result.stdout and "USD at 1 a device" in result.stdout


def test_two_nodes_are_started_by_the_script_for_it() -> None:
    last = plan(*GPT_1B[:4], "--devices", "16").stdout.strip().splitlines()[-1]
    assert last.startswith("launch/multi_node.sh --hostfile hostfile --num_nodes 2 --config ds_configs/runs/gpt_1b.yaml")


def test_the_picture_shows_the_limit_and_every_kind(tmp_path: Path) -> None:
    from ds_gpt.planner.devices import device_named
    from ds_gpt.planner.plots import draw
    from ds_gpt.planner.report import rows
    from ds_gpt.planner.search import candidates

    path = tmp_path / "plan.png"
    assert plan(*GPT_1B, "--plot", str(path)).returncode == 0
    assert path.read_bytes()[:4] == b"\x89PNG"
    device = device_named("l4")  # at micro-batch 16 some of them do not fit
    shown = rows(candidates(GPT_1B[1], [f"ds_configs/zero{stage}.json" for stage in range(4)], device, 8, ["batch.global_batch_size=128", "batch.micro_batch_size=16"]))
    (axes,) = draw(shown, device, "title").axes
    stacked = [sum(bar[place].get_width() for bar in axes.containers[:-1]) for place in range(len(shown))]
    assert stacked == pytest.approx([candidate.memory.peak.bytes / 2**30 for candidate in shown])
    assert axes.lines[0].get_xdata()[0] == pytest.approx(22.5)
    assert len(axes.texts) == len(shown) and any("does not fit" in text.get_text() for text in axes.texts)


@pytest.mark.parametrize("stage", range(4))
def test_what_is_written_composes_to_what_was_planned(stage: int, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    settings = ("--set", "zero_optimization.reduce_bucket_size=12345678")
    result = plan(*GPT_1B, "--deepspeed_config", f"ds_configs/zero{stage}.json", *settings, "--write", str(path))
    options = train_parser().parse_args(shlex.split(result.stdout.strip().splitlines()[-1])[4:])
    assert options.deepspeed_config == str(path)
    written = load(options.config, path, HARDWARE, options.overrides)
    (best,) = (candidate for candidate in json.loads(plan(*GPT_1B, "--deepspeed_config", f"ds_configs/zero{stage}.json", *settings, "--json").stdout)[:1])
    assert written.deepspeed["zero_optimization"]["reduce_bucket_size"] == 12345678
    assert (written.zero_stage, written.micro_batch_size, written.accumulation_steps) == (stage, best["micro_batch"], best["accumulation"])
    assert written.checkpoint_policy == best["activation_checkpointing"]
    assert memory(written).peak.bytes == best["peak_bytes"]


def test_what_is_written_trains(tmp_path: Path) -> None:
    """The command as it is printed, on this machine's CPU; without the launcher, which is tested elsewhere."""
    path, tiny = tmp_path / "out.json", [f"--set={setting}" for setting in TINY]
    last = plan("--config", "ds_configs/runs/quickstart.yaml", "--device", "cpu", "--devices", "1", *tiny, "--write", str(path)).stdout.strip().splitlines()[-1]
    command = shlex.split(last)
    assert command[:3] == ["deepspeed", "--num_gpus", "1"] and str(path) in command
    folder = tmp_path / "run"
    ran = [sys.executable, "-m", "ds_gpt", "train", *command[4:], "--run-dir", str(folder)]
    result = subprocess.run(ran, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert len((folder / "metrics.jsonl").read_text().splitlines()) >= 2


def test_the_planner_loads_neither_torch_nor_deepspeed() -> None:
    code = "import sys, ds_gpt.planner.search, ds_gpt.commands.plan; print({'torch', 'deepspeed', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY).stdout.strip() == "set()"
