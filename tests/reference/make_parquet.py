"""Parquet files of pyarrow, and the same records as JSONL: `engine/src/data/tokens/parquet/tests.rs` compares them.

    make_parquet.py                        writes tests/fixtures/parquet
    make_parquet.py FOLDER COUNT [SEED]    writes COUNT random pairs of files into FOLDER; then
    AITK_PARQUET_FILES=FOLDER cargo test -p aitk-engine --lib parquet
"""

import json
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "parquet"
INTS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
DELTAS = ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"]


def write(folder, name, table, records, **options):
    pq.write_table(table, folder / f"{name}.parquet", **options)
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def text(rng):
    """A text: of code, of any characters, or nothing."""
    kind = rng.randrange(4)
    if kind == 0:
        return f"def f{rng.randrange(5)}(x):\n    return x + {rng.randrange(9)}\n" * rng.randrange(4)
    if kind == 1:
        return "".join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(0xA1, 0x2FF), 0x1F600])) for _ in range(rng.randrange(40)))
    return "" if kind == 2 else "größer\n" * rng.choice([1, 2, 200])


def random_case(rng):
    """A table, its records and how it is written."""
    rows = rng.choice([0, 1, 2, 7, 40, 300])
    columns, records, encodings = {}, [{} for _ in range(rows)], {}
    for name in rng.choice([["text"], ["prompt", "completion"], ["input_ids"], ["tokens"]]):
        if name in ("input_ids", "tokens"):
            kind = rng.choice(INTS)
            most = 127 if kind == pa.int8() else 255
            length = rng.choice([3, 40, 700])
            same = rng.random() < 0.2
            values = [[7 if same else rng.randrange(most + 1) for _ in range(rng.randrange(length))] for _ in range(rows)]
            inner = pa.field("item", kind, nullable=rng.random() < 0.5)
            columns[name] = pa.array(values, rng.choice([pa.list_, pa.large_list])(inner))
            path, choices = f"{name}.list.element", ["PLAIN", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"]
        else:
            values = [text(rng) for _ in range(rows)]
            columns[name] = pa.array(values, rng.choice([pa.string(), pa.large_string(), pa.string(), pa.dictionary(pa.int32(), pa.string())]))
            path, choices = name, ["PLAIN", *DELTAS]
        encodings[path] = rng.choice(choices)
        for record, value in zip(records, values):
            record[name] = value
    # Columns that are not used.
    columns["path"] = pa.array([None if index % 3 else f"a{index}.py" for index in range(rows)], pa.string())
    columns["score"] = pa.array([0.5] * rows, pa.float64())
    columns["turns"] = pa.array([[{"role": "a", "text": "b"}] * (index % 3) for index in range(rows)])
    if rows == 0:
        columns["turns"] = pa.array([], pa.list_(pa.struct({"role": pa.string()})))
    names = list(columns)
    rng.shuffle(names)
    nullable = rng.random() < 0.5
    fields = [pa.field(name, columns[name].type, nullable=nullable or name not in records[0] if records else True) for name in names]
    table = pa.Table.from_arrays([columns[name] for name in names], schema=pa.schema(fields))
    has_dictionary = rng.random() < 0.5
    compliant = rng.random() < 0.8
    options = {
        "compression": rng.choice(["none", "snappy", "gzip", "zstd", "brotli", "lz4"]),
        "use_dictionary": has_dictionary,
        "data_page_version": rng.choice(["1.0", "2.0"]),
        "data_page_size": rng.choice([16, 300, 4096, 1 << 20]),
        "write_batch_size": rng.choice([1, 5, 64, 1024]),
        "row_group_size": rng.choice([1, 3, 50, 100_000]) if rows < 100 else rng.choice([50, 100_000]),
        "dictionary_pagesize_limit": rng.choice([64, 1 << 20]),
        "version": rng.choice(["1.0", "2.4", "2.6"]),
        "write_page_index": rng.random() < 0.3,
        "write_page_checksum": rng.random() < 0.5,
        "write_statistics": rng.random() < 0.5,
        "store_schema": rng.random() < 0.5,
        "use_compliant_nested_type": compliant,
    }
    if not has_dictionary and compliant:
        options["column_encoding"] = encodings
    return table, records, options


def fixtures():
    FIXTURES.mkdir(parents=True, exist_ok=True)
    few = {"store_schema": False, "write_statistics": False}
    texts = ["def f():\n    return 1\n", "größe = 2\n", "", "def f():\n    return 2\n", "def f():\n    return 1\n", "x" * 70]
    table = pa.table({"content": texts})
    records = [{"content": text} for text in texts]
    write(FIXTURES, "texts_snappy", table, records, compression="snappy", **few)
    write(FIXTURES, "texts_gzip", table, records, compression="gzip", **few)
    write(FIXTURES, "texts_brotli", table, records, compression="brotli", **few)
    write(FIXTURES, "texts_zstd_groups", table, records, compression="zstd", data_page_version="2.0", row_group_size=4, write_page_checksum=True, **few)
    write(FIXTURES, "texts_lz4", table, records, compression="lz4", use_dictionary=False, write_page_checksum=True, **few)
    plain = {"use_dictionary": False, "data_page_size": 16, "write_batch_size": 1}
    write(FIXTURES, "texts_pages", table, records, compression="none", **plain, **few)
    plain["column_encoding"] = {"content": "DELTA_BYTE_ARRAY"}
    write(FIXTURES, "texts_delta", table, records, compression="snappy", data_page_version="2.0", use_dictionary=False, column_encoding=plain["column_encoding"], **few)
    ids = [[1, 2, 3], [], [4], list(range(5, 40)), [7] * 20]
    records = [{"input_ids": values} for values in ids]
    write(FIXTURES, "ids_dictionary", pa.table({"input_ids": pa.array(ids, pa.list_(pa.int32()))}), records, compression="snappy", **few)
    kind = pa.list_(pa.field("element", pa.int64(), nullable=False))
    encoding = {"input_ids.list.element": "DELTA_BINARY_PACKED"}
    write(FIXTURES, "ids_delta", pa.table({"input_ids": pa.array(ids, kind)}), records, compression="zstd", use_dictionary=False, column_encoding=encoding, **few)
    pairs = [("a = ", "1\n"), ("def g", "():\n    pass\n"), ("", "b")]
    table = pa.table({
        "prompt": [pair[0] for pair in pairs],
        "turns": [[{"role": "user"}], [], None],
        "completion": [pair[1] for pair in pairs],
    })
    records = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    encoding = {"prompt": "DELTA_LENGTH_BYTE_ARRAY", "completion": "PLAIN"}
    write(FIXTURES, "pairs", table, records, compression="snappy", use_dictionary=False, column_encoding=encoding, **few)
    for name, what in [("texts", "texts_snappy"), ("ids", "ids_delta")]:
        # The same records for all files of a kind.
        (FIXTURES / f"{what}.jsonl").rename(FIXTURES / f"{name}.jsonl")
        for other in FIXTURES.glob(f"{name}_*.jsonl"):
            other.unlink()


def main():
    if len(sys.argv) < 3:
        return fixtures()
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        rng = random.Random(f"{sys.argv[3] if len(sys.argv) > 3 else 0}-{number}")
        table, records, options = random_case(rng)
        write(folder, f"{number:05}", table, records, **options)


main()
