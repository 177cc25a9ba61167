"""Built once, shared by all, and never trusted when damaged."""

import json
import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ds_gpt.config import ConfigError
from ds_gpt.config.run import DataConfig, SyntheticConfig
from ds_gpt.data import CharTokenizer, SyntheticTokenizer, prepare, tokens
from ds_gpt.data.cache import exclusive

TEXT = "the quick brown fox\r\njumps over the lazy dog\n" * 50


@pytest.fixture
def data(tmp_path):
    (tmp_path / "corpus.txt").write_bytes(TEXT.encode())
    return DataConfig(corpus=str(tmp_path / "corpus.txt"), cache_dir=str(tmp_path / "cache"))


def ids(dataset):
    """All its tokens."""
    return np.concatenate([split.read(np.array([0]), len(split))[0] for split in (dataset.train, dataset.val)])


def text(dataset):
    return dataset.tokenizer.decode(ids(dataset))


@pytest.fixture
def builds(monkeypatch):
    """The files built during the test."""
    built = []
    build = tokens._build
    monkeypatch.setattr(tokens, "_build", lambda path, data, seed: (built.append(path), build(path, data, seed)))
    return built


def test_the_tokens_are_the_text_split_at_one_position(data):
    dataset = prepare(data, seed=0)
    assert dataset.tokenizer == CharTokenizer.from_text(TEXT)
    for split in (dataset.train, dataset.val):
        ((array,),) = split.corpora
        assert isinstance(array, np.memmap) and not array.flags.writeable and array.dtype == np.uint16
    assert len(dataset.train) == int(0.9 * len(TEXT))
    assert text(dataset) == TEXT


def test_a_second_call_reads_what_the_first_built(data, builds):
    assert prepare(data, seed=0).digest == prepare(data, seed=1).digest
    assert len(builds) == 1
    names = sorted(path.suffix for path in (Path(data.cache_dir) / "tokens").iterdir())
    assert names == [".json", ".lock", ".npy"]  # nothing temporary stays


def test_a_changed_file_is_built_anew(data, builds):
    before = prepare(data, seed=0)
    Path(data.corpus).write_text(TEXT + "!")
    after = prepare(data, seed=0)
    assert len(builds) == 2 and before.digest != after.digest and text(after)[-1] == "!"
    assert text(before) == TEXT  # who still reads the old tokens is not disturbed


def test_the_same_file_by_another_path_is_not(data, builds, tmp_path):
    (tmp_path / "corpus_link").symlink_to(tmp_path)
    prepare(data, seed=0)
    prepare(data.model_copy(update={"corpus": str(tmp_path / "corpus_link" / "corpus.txt")}), seed=0)
    assert len(builds) == 1


def test_the_synthetic_corpus_follows_the_seed_and_its_settings(tmp_path, builds):
    data = DataConfig(corpus="synthetic", cache_dir=str(tmp_path), synthetic=SyntheticConfig(tokens=5000))
    first = prepare(data, seed=1)
    assert first.tokenizer == SyntheticTokenizer(64) and len(ids(first)) == 5000
    other = data.model_copy(update={"synthetic": SyntheticConfig(tokens=5000, branching=3)})
    digests = {first.digest, prepare(data, seed=2).digest, prepare(other, seed=1).digest, prepare(data, seed=1).digest}
    assert len(digests) == len(builds) == 3


def test_the_default_corpus_needs_nothing(tmp_path):
    dataset = prepare(DataConfig(cache_dir=str(tmp_path)), seed=0)
    assert len(ids(dataset)) > 300_000 and 80 < dataset.tokenizer.vocab_size < 1000


def truncate(npy, _):
    npy.write_bytes(npy.read_bytes()[:-100])


def empty(npy, _):
    npy.write_bytes(b"")


def foreign(npy, _):
    npy.write_bytes(b"PK\x03\x04 something else entirely" * 10)


def other_tokens(npy, _):
    np.save(npy, np.zeros(len(TEXT), dtype=np.uint16))


def other_type(npy, _):
    np.save(npy, np.zeros(len(TEXT), dtype=np.float64))


def same_bytes_of_another_type(npy, _):
    np.save(npy, np.load(npy).view(np.int8))


def other_shape(npy, _):
    np.save(npy, np.load(npy)[None])


def pickled(npy, _):
    np.save(npy, np.array([{}], dtype=object), allow_pickle=True)


def one_flipped_bit(npy, _):
    content = bytearray(npy.read_bytes())
    content[-1] ^= 1
    npy.write_bytes(content)


def no_description(_, description):
    description.unlink()


def broken_description(_, description):
    description.write_text("[1, 2")


def list_description(_, description):
    description.write_text("[]")


def other_tokenizer(_, description):
    fields = json.loads(description.read_text())
    fields["tokenizer"] = CharTokenizer.from_text(TEXT.upper()).to_dict()
    description.write_text(json.dumps(fields))


@pytest.mark.parametrize(
    "damage",
    [truncate, empty, foreign, other_tokens, other_type, same_bytes_of_another_type, other_shape, pickled]
    + [one_flipped_bit, no_description, broken_description, list_description, other_tokenizer],
)
def test_damaged_files_are_built_anew(damage, data, builds):
    digest = prepare(data, seed=0).digest
    damage(builds[0], builds[0].with_suffix(".json"))
    dataset = prepare(data, seed=0)
    assert len(builds) == 2 and dataset.digest == digest and text(dataset) == TEXT


def test_a_damaged_header_never_crashes(data, builds):
    prepare(data, seed=0)
    intact = builds[0].read_bytes()
    for position in range(128):
        for value in (0, 32, 255):
            damaged = bytearray(intact)
            damaged[position] = value
            builds[0].write_bytes(damaged)
            dataset = tokens._read(builds[0], 0.1)
            assert dataset is None or text(dataset) == TEXT


def test_a_cache_folder_that_cannot_be_written_is_named(data, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"data.cache_dir = '{tmp_path}/file/sub' cannot be written"):
        prepare(data.model_copy(update={"cache_dir": str(tmp_path / "file" / "sub")}), seed=0)


def test_a_full_disk_is_an_error_that_leaves_nothing_behind(data, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(ConfigError, match="cannot be written.*No space left"):
        prepare(data, seed=0)
    assert [path.suffix for path in (Path(data.cache_dir) / "tokens").iterdir()] == [".lock"]


def test_a_corpus_that_fails_is_not_blamed_on_the_cache(data):
    with pytest.raises(ConfigError, match="does not exist"):
        prepare(data.model_copy(update={"corpus": "/no/such/file"}), seed=0)
    Path(data.corpus).write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        prepare(data, seed=0)


def test_home_is_expanded_or_its_absence_named(data, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    prepare(data.model_copy(update={"cache_dir": "~/c"}), seed=0)
    assert (tmp_path / "home" / "c" / "tokens").is_dir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="'~nobody_here/c' has no meaning"):
        prepare(data.model_copy(update={"cache_dir": "~nobody_here/c"}), seed=0)


def prepare_in_process(data, barrier, log, answers, locks):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    if not locks:
        fcntl.flock = refuse
    build = tokens._build

    def logged_build(path, data, seed):
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        build(path, data, seed)

    tokens._build = logged_build
    barrier.wait()
    dataset = prepare(data, seed=0)
    answers.put((dataset.digest, len(ids(dataset)), int(ids(dataset).sum())))


@pytest.mark.parametrize("locks", [True, False], ids=["with locks", "on a disk without"])
def test_four_processes_at_once_build_once_and_agree(tmp_path, locks):
    data = DataConfig(corpus="python_docs", cache_dir=str(tmp_path / "cache"))
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(4), context.Queue()
    arguments = (data, barrier, str(tmp_path / "log"), answers, locks)
    processes = [context.Process(target=prepare_in_process, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    results = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert len(set(results)) == 1
    builders = len((tmp_path / "log").read_text().splitlines())
    assert builders == 1 if locks else builders >= 1


def hold_the_lock(lock_path, held):
    with exclusive(lock_path):
        held.set()
        signal.pause()


def test_a_killed_builder_leaves_no_lock(data, builds):
    prepare(data, seed=0)
    builds[0].write_bytes(b"half")
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    process = context.Process(target=hold_the_lock, args=(builds[0].with_suffix(".lock"), held))
    process.start()
    assert held.wait(timeout=60)
    process.kill()
    process.join(timeout=60)
    assert text(prepare(data, seed=0)) == TEXT


def test_importing_the_package_imports_no_torch():
    code = "import sys, ds_gpt.data; assert 'torch' not in sys.modules and 'deepspeed' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
