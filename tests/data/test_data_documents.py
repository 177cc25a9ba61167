"""The documents of every kind of source, however it is cut, and what is wrong with those that cannot be read."""

import gzip
import json
import random
import time

import pyarrow
import pyarrow.parquet
import pytest

from ds_gpt.config import ConfigError
from ds_gpt.data import documents as module
from ds_gpt.data.documents import Reading, _separated, documents, spans

TEXTS = ["first\nwith two lines", "zweite: ä, 漢字, 👩", "x", "  indented ", "last " * 20]
READING = Reading()


def read(path, span_bytes=1 << 20, reading=READING):
    return [text for span in spans([str(path)], reading, span_bytes) for text in documents(span, reading)]


def zstd(content):
    return pyarrow.compress(content, codec="zstd", asbytes=True)


def jsonl(texts, field="text"):
    return b"".join(json.dumps({"id": i, field: text}, ensure_ascii=i % 2 == 0).encode() + b"\n" for i, text in enumerate(texts))


COMPRESSED = [("", bytes), (".gz", gzip.compress), (".zst", zstd)]


@pytest.mark.parametrize("ending, compress", COMPRESSED)
def test_jsonl(tmp_path, ending, compress):
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(compress(jsonl([*TEXTS, "", " \n"])))  # blank documents are left out
    for span_bytes in (1, 7, 50, 10**6):
        assert read(path, span_bytes) == TEXTS
    path.write_bytes(compress(jsonl(TEXTS).rstrip(b"\n")))
    assert read(path) == TEXTS


def test_a_file_of_several_compressed_parts_is_read_to_its_end(tmp_path):
    for ending, compress in COMPRESSED[1:]:
        path = tmp_path / f"a.jsonl{ending}"
        path.write_bytes(compress(jsonl(TEXTS[:2])) + compress(jsonl(TEXTS[2:])))
        assert read(path) == TEXTS


@pytest.mark.parametrize("ending, compress", COMPRESSED)
@pytest.mark.parametrize("lines", ["many", "one"])
def test_a_long_text_is_cut_but_nothing_of_it_is_lost(tmp_path, monkeypatch, ending, compress, lines):
    monkeypatch.setattr(module, "_TEXT_BYTES", 64)
    text = "".join(f"{i}:ä漢👩\r\n" * (i % 4) for i in range(300))
    if lines == "one":
        text = text.replace("\r\n", "")
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(compress(text.encode()))
    for span_bytes in (1, 2, 3, 50, 1000, 10**6):
        found = read(path, span_bytes)
        assert "".join(found) == text and all(len(document.encode()) <= 2 * 64 + 3 for document in found)
    if lines == "many":
        assert all(document.endswith("\n") for document in found)


def test_a_short_text_is_one_document(tmp_path):
    (tmp_path / "a").write_bytes("\ufeffä\r\nb".encode())
    (tmp_path / "empty.txt").touch()
    assert read(tmp_path / "a") == ["\ufeffä\r\nb"] and read(tmp_path / "empty.txt") == []


def test_where_a_text_comes_to_pieces_does_not_matter_to_its_separators():
    chance = random.Random(1)
    for _ in range(500):
        text = "".join(chance.choices("ab|", k=chance.randrange(40)))
        separator = chance.choice(["|", "ab", "aba", "a|a", "||"])
        cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randrange(8)))
        found = [text[first:last] for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert list(_separated(iter(found), separator)) == text.split(separator)


def test_a_separator_that_never_comes_is_looked_for_once():
    """Each piece is read once, not all before it again: 32 MiB took half a minute."""
    pieces, started = ("x" * (1 << 16) for _ in range(512)), time.process_time()
    assert list(map(len, _separated(pieces, "<|endoftext|>"))) == [1 << 25]
    assert time.process_time() - started < 3


@pytest.mark.parametrize("ending, compress", COMPRESSED)
@pytest.mark.parametrize("separator", ["|", "<|endoftext|>", "\n\n"])
def test_a_text_is_parted_at_its_separators(tmp_path, monkeypatch, ending, compress, separator):
    texts = ["a" * n + "é\n!" for n in range(1, 150, 7)]
    for text_bytes in (3, 20, 10**6):
        monkeypatch.setattr(module, "_TEXT_BYTES", text_bytes)
        path = tmp_path / f"{text_bytes}.txt{ending}"
        path.write_bytes(compress(separator.join([*texts, ""]).encode()))
        assert read(path, 10, Reading(separator=separator)) == texts


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_parquet(tmp_path, rows):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"n": range(len(TEXTS)), "text": TEXTS}), path, row_group_size=rows)
    for span_bytes in (1, 10**6):
        cut = spans([str(path)], READING, span_bytes)
        assert len(cut) == (-(-len(TEXTS) // rows) if span_bytes == 1 else 1)
        assert read(path, span_bytes) == TEXTS


def test_another_field(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS, "content"))
    pyarrow.parquet.write_table(pyarrow.table({"content": TEXTS}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        assert read(tmp_path / name, reading=Reading("content")) == TEXTS
        with pytest.raises(ConfigError, match=f"{name}' has .*'text'.*it has .*'content'"):
            read(tmp_path / name)


def test_a_streamed_data_set_of_hugging_face(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for number in range(3):
        (tmp_path / f"part{number}.jsonl").write_bytes(jsonl(TEXTS[number * 2 : number * 2 + 2]))
    source = f"hf:{tmp_path}"
    cut = spans([source], READING)
    assert len(cut) == 3 and [text for span in cut for text in documents(span, READING)] == TEXTS
    with pytest.raises(ConfigError, match=f"'{source}' cannot be opened.*nosuch"):
        spans([source], Reading(hf_split="nosuch"))


def test_lone_surrogates_of_json_become_replacements(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b \\ud83d\\ude00"}\n')
    assert read(tmp_path / "a.jsonl") == ["a\ufffdb 😀"]


def test_progress_adds_up_to_the_bytes_of_the_source(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"some words\n" * 20_000)
    for ending, compress in COMPRESSED:
        (tmp_path / f"a.jsonl{ending}").write_bytes(compress(jsonl(TEXTS * 2000)))
    for name in ("a.txt", *(f"a.jsonl{ending}" for ending, _ in COMPRESSED)):
        told = []
        for span in spans([str(tmp_path / name)], READING, 50_000):
            for _ in documents(span, READING, told.append):
                pass
        size = (tmp_path / name).stat().st_size
        assert all(count >= 0 for count in told) and sum(told) == size, name


def cut_short(content):
    return content[:-5]


def changed(content):
    return content[:30] + bytes([content[30] ^ 0xFF]) + content[31:]


@pytest.mark.parametrize("damage", [cut_short, changed])
@pytest.mark.parametrize("ending, compress", COMPRESSED[1:])
def test_a_damaged_compressed_file_is_named(tmp_path, ending, compress, damage):
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(damage(compress(jsonl([str(i) for i in range(5000)]))))
    with pytest.raises(ConfigError, match=f"a.jsonl{ending}' (cannot be read|is not JSONL)"):
        read(path)


@pytest.mark.parametrize(
    "name, content, wrong",
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "is not JSONL at byte 14"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": 3}\n', "record without text in 'text' at byte 15"),
        ("a.jsonl", b"[1]\n", "it is no object"),
        ("a.txt", b"ab\n\xff", "is not UTF-8: byte 0xff at offset 3"),
        ("a.txt", "ä".encode()[:1], "is not UTF-8: byte 0xc3 at offset 0"),
        ("a.parquet", b"PAR1 no", "is not a Parquet file"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(tmp_path, name, content, wrong):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}'.*{wrong}"):
        read(tmp_path / name)


def test_a_damaged_page_of_a_parquet_file_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [str(i) * 30 for i in range(500)]})
    pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[300:400] = bytes(100)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="a.parquet' (is a damaged Parquet file|cannot be read)"):
        read(path)
