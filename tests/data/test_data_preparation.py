"""`ds-gpt prepare`: every document once, the same shards however they came about, in constant memory."""

import gzip
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ds_gpt.config import ConfigError
from ds_gpt.config.run import DataConfig, MixturePart
from ds_gpt.data import CharTokenizer, prepare, preparation
from ds_gpt.data.documents import Reading
from ds_gpt.data.preparation import Settings, prepare_corpus
from ds_gpt.data.prepared import open_prepared
from ds_gpt.data.workers import each

CHAR, BPE = Settings("char", val_fraction=0.2), Settings("bpe", bpe_vocab_size=400, val_fraction=0.2)


def texts(count, seed=0):
    generator = random.Random(seed)
    words = ["shard", "of", "tokens", "größer", "漢字", "👩‍👩‍👧", "\n", "the", "x" * 30]
    return [f"{i} " + " ".join(generator.choices(words, k=generator.randrange(1, 60))) for i in range(count)]


def write_jsonl(path, documents):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(path)


def made(folder, sources, settings=CHAR, processes=1, report=lambda *_: None):
    return prepare_corpus(folder, sources, settings, processes, report)


def documents(corpus, split):
    """The text of every document, in order, its separator checked and removed."""
    found = []
    for shard in getattr(corpus, split):
        first = 0
        for end in shard.document_ends().astype(int).tolist():
            ids = shard.tokens()[first:end]
            assert ids[0] == corpus.tokenizer.separator
            found.append(corpus.tokenizer.decode(ids[1:]))
            first = end
    return found


def content(folder):
    """Digest of every file that decides the corpus."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (".lock", "plan.json"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(preparation, "SPAN_BYTES", 4000)


@pytest.mark.parametrize("settings", [CHAR, BPE], ids=["char", "bpe"])
def test_every_document_is_in_one_split_by_its_text_alone(tmp_path, settings, small_pieces):
    written = texts(300)
    source = write_jsonl(tmp_path / "a.jsonl", [*written, *written[:50]])
    corpus = made(tmp_path / "out", [source], settings)
    train, val = (documents(corpus, split) for split in ("train", "val"))
    assert len(corpus.train) > 10 and len(train) + len(val) == 350
    assert sorted(train + val) == sorted([*written, *written[:50]])
    assert not set(train) & set(val)  # a document that stands there twice is not trained and validated on
    assert 35 < len(val) < 105
    kept = set(val)
    assert val == [text for text in [*written, *written[:50]] if text in kept]  # in the order of the source
    shards = (*corpus.train, *corpus.val)
    assert sum(shard.n_text_bytes for shard in shards) == sum(len(text.encode()) for text in train + val)
    corpus.verify()


def test_all_kinds_of_sources_together(tmp_path):
    (tmp_path / "d").mkdir()
    for number, text in enumerate(texts(30)):
        (tmp_path / "d" / f"{number:02d}.txt").write_text(text)
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in texts(20, 1)).encode()))
    corpus = made(tmp_path / "out", [str(tmp_path / "d" / "*.txt"), str(tmp_path / "e.jsonl.gz"), str(tmp_path / "d" / "03.txt")])
    assert sorted(documents(corpus, "train") + documents(corpus, "val")) == sorted(texts(30) + texts(20, 1))  # 03.txt once
    assert len(corpus.train) == 1  # small files do not become as many shards


def test_the_same_shards_by_any_number_of_processes(tmp_path, small_pieces):
    source = write_jsonl(tmp_path / "a.jsonl", texts(120))
    for processes in (1, 3):
        told = []
        made(tmp_path / f"{processes}", [source], BPE, processes, lambda *now, told=told: told.append(now))
        what, total, counts = told[-1]
        assert what == "tokens" and counts.source_bytes == total == os.path.getsize(source)
        assert counts.documents == 120 and counts.text_bytes == sum(len(text.encode()) for text in texts(120))
    assert content(tmp_path / "1") == content(tmp_path / "3")


def test_what_is_there_and_intact_is_not_made_again(tmp_path, small_pieces):
    source = write_jsonl(tmp_path / "a.jsonl", texts(60))
    made(tmp_path / "out", [source])
    before = content(tmp_path / "out")
    shards = sorted((tmp_path / "out" / "train").iterdir())
    written = {path: path.stat().st_mtime_ns for path in shards}
    shards[1].unlink()
    (tmp_path / "out" / "corpus.json").unlink()
    with pytest.raises(ConfigError, match="is not fully prepared"):
        open_prepared(tmp_path / "out")
    made(tmp_path / "out", [source])
    assert content(tmp_path / "out") == before
    assert [path for path in shards if path.stat().st_mtime_ns != written[path]] == [shards[1]]


def test_a_damaged_shard_is_named_when_going_on_and_when_verifying(tmp_path, small_pieces):
    source = write_jsonl(tmp_path / "a.jsonl", texts(60))
    corpus = made(tmp_path / "out", [source])
    damaged = bytearray(corpus.train[1].path.read_bytes())
    damaged[200] ^= 1
    corpus.train[1].path.write_bytes(damaged)
    for read in (lambda: made(tmp_path / "out", [source]), open_prepared(tmp_path / "out").verify):
        with pytest.raises(ConfigError, match="train/000001.tokens' is damaged"):
            read()


_KILLED = """
import sys
from pathlib import Path
from ds_gpt.data import preparation
from ds_gpt.data.preparation import Settings, prepare_corpus
if __name__ == "__main__":
    preparation.SPAN_BYTES = 4000
    print("begun", flush=True)
    prepare_corpus(Path(sys.argv[1]), sys.argv[2:], Settings("bpe", bpe_vocab_size=400, val_fraction=0.2), 2, lambda *_: None)
"""


def test_a_killed_preparation_goes_on_and_its_processes_end(tmp_path, small_pieces):
    source = write_jsonl(tmp_path / "a.jsonl", texts(800))
    (tmp_path / "script.py").write_text(_KILLED)
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, tmp_path / "script.py", out, source], start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while len(list(out.glob("train/*.tokens"))) < 3:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
        while group_lives(process.pid):
            assert time.monotonic() < deadline, "its workers outlive it"
            time.sleep(0.05)
    finally:
        if group_lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
    there = {path.name: path.stat().st_mtime_ns for path in out.glob("train/*.tokens")}
    assert not (out / "corpus.json").exists() and len(there) >= 3
    corpus = made(out, [source], BPE)
    assert len(corpus.train) > len(there)
    kept = [name for name, written in there.items() if (out / "train" / name).stat().st_mtime_ns == written]
    assert len(kept) >= len(there) - 2  # of a piece that each process was at, the other split's shard may be missing
    made(tmp_path / "whole", [source], BPE)
    assert content(out) == {**content(tmp_path / "whole")}


def group_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


_MEASURED = """
import sys
from pathlib import Path
from ds_gpt.data.preparation import Settings, prepare_corpus
prepare_corpus(Path(sys.argv[1]), [sys.argv[2]], Settings(sys.argv[3], val_fraction=0.1), 1, lambda *_: None)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))  # KiB; ru_maxrss is also the parent's
"""


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz"])
def test_memory_does_not_grow_with_the_corpus(tmp_path, name):
    peaks_kib = []
    for mib in (4, 32):
        document = ("words of a document, some more of them\n" * 400)[:15_000]
        lines = document if name == "a.txt" else json.dumps({"text": document}) + "\n"
        repeats = [f"{i} {lines}" if name == "a.txt" else lines.replace("words", str(i)) for i in range((mib << 20) // len(lines))]
        path = tmp_path / f"{mib}{name}"
        path.write_bytes((gzip.compress if name.endswith("gz") else bytes)("".join(repeats).encode()))
        del repeats
        command = [sys.executable, "-c", _MEASURED, tmp_path / f"out{mib}", path, "char"]
        peaks_kib.append(int(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout))
    assert peaks_kib[1] < peaks_kib[0] + 3 * 1024  # 28 MiB of text more


def test_what_cannot_be_prepared_is_said_at_once(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", texts(30))
    with pytest.raises(ConfigError, match="'/no/such' is no file(.|\n)*is no file, but a folder(.|\n)*write a glob"):
        made(tmp_path / "out", ["/no/such", source, str(tmp_path)])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="full' holds something else"):
        made(tmp_path / "full", [source])
    made(tmp_path / "begun", [source])
    with pytest.raises(ConfigError, match="begun' was begun with other settings"):
        made(tmp_path / "begun", [source], BPE)
    write_jsonl(tmp_path / "a.jsonl", texts(31))
    with pytest.raises(ConfigError, match="begun' was begun with other sources"):
        made(tmp_path / "begun", [source])
    with pytest.raises(ConfigError, match="of the 1 documents none fell into the (training|validation) split"):
        made(tmp_path / "one", [write_jsonl(tmp_path / "b.jsonl", texts(1))])
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n{"text"\n')
    for processes in (1, 2):
        with pytest.raises(ConfigError, match="c.jsonl' is not JSONL at byte 14"):
            made(tmp_path / f"bad{processes}", [str(tmp_path / "c.jsonl"), str(tmp_path / "a.jsonl")], CHAR, processes)


def test_a_first_try_that_came_to_nothing_does_not_claim_the_folder(tmp_path):
    """Mistyped sources and settings are corrected in the same folder; what it holds of others is never taken for ours."""
    source, out = write_jsonl(tmp_path / "a.jsonl", texts(30)), tmp_path / "out"
    with pytest.raises(ConfigError, match="is no file"):
        made(out, ["/no/such"])
    (out / ".plan.json.0123.partial").touch()  # killed while it wrote its plan
    with pytest.raises(ConfigError, match="name the field by --field"):
        made(out, [source], Settings("char", reading=Reading("txt")))
    assert sum(shard.n_documents for shard in made(out, [source]).train) > 0
    assert not list(out.glob(".*.partial"))
    (tmp_path / "others" / "train").mkdir(parents=True)
    (tmp_path / "others" / "train" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="others' holds something else"):
        made(tmp_path / "others", [source])


def test_a_full_disk_is_told_and_gone_on_from(tmp_path):
    source, limits = write_jsonl(tmp_path / "a.jsonl", texts(300)), resource.getrlimit(resource.RLIMIT_FSIZE)
    made(tmp_path / "whole", [source])
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as a full disk, the kernel refuses to write more
    try:
        with pytest.raises(ConfigError, match="out' cannot be finished: .*File too large"):
            made(tmp_path / "out", [source])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    made(tmp_path / "out", [source])
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def dies(item, counters):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_is_told():
    with pytest.raises(ConfigError, match="ended from outside(.|\n)*fewer --processes"):
        each(dies, [1, 2], 2)


def test_an_error_in_a_worker_is_the_users_to_read(tmp_path, small_pieces):
    source = write_jsonl(tmp_path / "a.jsonl", [*texts(100), "z"])
    CharTokenizer.from_text("".join(texts(100)) + "\n").save(tmp_path / "t.json")
    with pytest.raises(ConfigError, match=r"does not know: 'z' \(U\+007A\)"):
        made(tmp_path / "out", [source], Settings(str(tmp_path / "t.json"), val_fraction=0.2), 2)


def test_two_at_once_in_a_folder_are_refused(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", texts(30))
    seen = []

    def again(*_):
        if not seen:
            seen.append(1)
            with pytest.raises(ConfigError, match="is being prepared by another process"):
                made(tmp_path / "out", [source])

    made(tmp_path / "out", [source], report=again)
    assert seen


def test_a_data_set_of_hugging_face(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "set").mkdir()
    for part in range(3):
        write_jsonl(tmp_path / "set" / f"{part}.jsonl", texts(40, part))
    reading = Reading(hf_split="train")
    corpus = made(tmp_path / "out", [f"hf:{tmp_path}/set"], Settings("char", val_fraction=0.2, reading=reading))
    assert sorted(documents(corpus, "train") + documents(corpus, "val")) == sorted(text for part in range(3) for text in texts(40, part))
    assert len(corpus.train) == 3


def run_on(*corpora, **options):
    parts = corpora[0] if len(corpora) == 1 else tuple(MixturePart(corpus=c, weight=i + 1) for i, c in enumerate(corpora))
    return DataConfig(corpus=parts, **options)


@pytest.fixture
def two(tmp_path):
    """Two prepared corpora of one tokenizer, and one of another."""
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", texts(100, seed=ord(name)))
    made(tmp_path / "a", [str(tmp_path / "a.jsonl")])
    made(tmp_path / "b", [str(tmp_path / "b.jsonl")], Settings(str(tmp_path / "a" / "tokenizer.json"), val_fraction=0.2))
    made(tmp_path / "c", [str(tmp_path / "a.jsonl")], BPE)
    return [str(tmp_path / name) for name in "abc"]


def test_a_run_reads_what_was_prepared(two, tmp_path):
    a, b, _ = two
    dataset = prepare(run_on(a, attend_across_documents=False), seed=0)
    corpus = open_prepared(Path(a))
    assert dataset.digest == corpus.digest and dataset.tokenizer.identity == corpus.tokenizer.identity
    assert (len(dataset.train), len(dataset.val)) == (sum(s.n_tokens for s in corpus.train), sum(s.n_tokens for s in corpus.val))
    mixed = prepare(run_on(a, b), seed=0)
    assert mixed.train.lengths == (len(dataset.train), len(prepare(run_on(b), seed=0).train)) and mixed.train.weights == (1, 2)
    assert len({mixed.digest, dataset.digest, prepare(run_on(b, a), seed=0).digest}) == 3
    assert not list(tmp_path.glob(".cache"))


def test_a_run_that_states_otherwise_is_refused(two, tmp_path):
    a, b, c = two
    prepare(run_on(a, tokenizer="char", val_fraction=0.2), seed=0)
    prepare(run_on(a, tokenizer=f"{b}/tokenizer.json"), seed=0)
    with pytest.raises(ConfigError, match="data.val_fraction = 0.1, but(.|\n)*data.tokenizer = 'gpt2', but"):
        prepare(run_on(a, tokenizer="gpt2", val_fraction=0.1), seed=0)
    with pytest.raises(ConfigError, match=f"the tokenizer of '{c}' is not that of '{a}'"):
        prepare(run_on(a, c), seed=0)
    (tmp_path / "text.txt").write_text("some text\n" * 100)
    with pytest.raises(ConfigError, match="does not say where documents end"):
        prepare(run_on(str(tmp_path / "text.txt"), cache_dir=str(tmp_path / "cache"), attend_across_documents=False), seed=0)


def test_a_manifest_or_tokenizer_that_was_changed_is_refused(two):
    a, _, c = two
    manifest = Path(a) / "corpus.json"
    stated = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**stated, "format": 9}))
    with pytest.raises(ConfigError, match="its format is 9, not 1"):
        open_prepared(Path(a))
    stated["shards"]["val"][0][-1] = "0" * 64
    manifest.write_text(json.dumps(stated))
    with pytest.raises(ConfigError, match="val/000000.tokens' is not the shard that the corpus lists"):
        open_prepared(Path(a))
    Path(c, "tokenizer.json").write_bytes(Path(a, "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match="is not the tokenizer of the corpus"):
        open_prepared(Path(c))


def test_a_text_given_directly_may_have_any_tokenizer(tmp_path):
    written = "\n".join(texts(200))
    (tmp_path / "text.txt").write_text(written)
    data = DataConfig(corpus=str(tmp_path / "text.txt"), cache_dir=str(tmp_path / "cache"), tokenizer="bpe", bpe_vocab_size=300)
    dataset = prepare(data, seed=0)
    assert dataset.tokenizer.vocab_size == 300
    ids = [split.read(np.array([0]), len(split))[0] for split in (dataset.train, dataset.val)]
    assert dataset.tokenizer.decode(np.concatenate(ids)) == written
    assert prepare(data.model_copy(update={"bpe_vocab_size": 301}), seed=0).tokenizer.vocab_size == 301
    assert prepare(data.model_copy(update={"tokenizer": "auto"}), seed=0).tokenizer == CharTokenizer.from_text(written)
