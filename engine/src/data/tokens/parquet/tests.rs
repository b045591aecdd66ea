//! Files of pyarrow are the same records as their JSONL, and damaged or hostile files are errors.

use super::super::record::Columns;
use super::super::record_file::read_records;
use super::*;
use std::fmt::Write as _;
use std::path::PathBuf;

fn fixture(name: &str) -> PathBuf {
    crate::testing::fixtures().join("parquet").join(name)
}

fn columns(text: &str) -> Columns {
    Columns {
        text: text.into(),
        prompt: "prompt".into(),
        completion: "completion".into(),
    }
}

/// The records of a file and their places.
fn records(path: &Path, text: &str, vocabulary: usize) -> Result<Vec<(Record, String)>> {
    let mut found = Vec::new();
    let read = match path.extension().is_some_and(|ending| ending == "parquet") {
        true => read_parquet,
        false => read_records,
    };
    read(path, &columns(text), vocabulary, &mut |record, place| {
        found.push((record, place.to_owned()));
        Ok(())
    })?;
    Ok(found)
}

fn without_places(found: Vec<(Record, String)>) -> Vec<Record> {
    found.into_iter().map(|(record, _)| record).collect()
}

/// The fixtures of pyarrow, each with its JSONL.
fn fixtures() -> Vec<(PathBuf, PathBuf)> {
    let names = [
        ("ids_delta", "ids"),
        ("ids_dictionary", "ids"),
        ("pairs", "pairs"),
        ("texts_brotli", "texts"),
        ("texts_delta", "texts"),
        ("texts_gzip", "texts"),
        ("texts_lz4", "texts"),
        ("texts_pages", "texts"),
        ("texts_snappy", "texts"),
        ("texts_zstd_groups", "texts"),
    ];
    let pairs = names.map(|(name, lines)| (fixture(&format!("{name}.parquet")), fixture(&format!("{lines}.jsonl"))));
    pairs.to_vec()
}

#[test]
fn files_of_pyarrow_have_the_records_of_their_jsonl() {
    for (file, lines) in fixtures() {
        let expected = without_places(records(&lines, "content", 264).unwrap());
        assert!(expected.len() > 2);
        let found = records(&file, "content", 264).unwrap();
        assert!(found[2].1.ends_with(".parquet: row 3"), "{}", found[2].1);
        assert_eq!(without_places(found), expected, "{}", file.display());
    }
    // Random ones: tests/reference/make_parquet.py
    let Some(folder) = std::env::var_os("AITK_PARQUET_FILES") else {
        return;
    };
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let file = entry.unwrap().path();
        if file.extension().is_some_and(|ending| ending == "parquet") {
            let expected = without_places(records(&file.with_extension("jsonl"), "text", 264).unwrap());
            let found = records(&file, "text", 264).map_err(|error| error.to_string()).unwrap();
            assert!(without_places(found) == expected, "{}", file.display());
            count += 1;
        }
    }
    println!("{count} random files compared");
}

#[test]
fn other_columns_and_ids_are_refused_with_their_names() {
    let of = |name: &str, text: &str, vocabulary: usize| {
        let path = fixture(&format!("{name}.parquet"));
        let message = records(&path, text, vocabulary).unwrap_err().to_string();
        assert!(message.starts_with(&path.display().to_string()), "{message}");
        message
    };
    let message = of("texts_snappy", "text", 264);
    assert!(
        message.contains("its columns are: `content`.") && message.contains("`text_column`"),
        "{message}"
    );
    let message = of("ids_delta", "text", 30);
    assert!(message.contains("row 4: the token id 30 at position 25"), "{message}");
    // A list of structs is no text, and a pair of which one half has another name is none.
    let message = of("pairs", "turns", 264);
    assert!(message.contains("`turns`: expected text, found a list of"), "{message}");
}

/// Random numbers of a seed.
struct Random(u64);

impl Random {
    /// A number below `limit`.
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % limit as u64) as usize
    }
}

/// Damaged copies of the fixtures are read, or refused with one message. `AITK_PARQUET_CASES` sets how many, `AITK_PARQUET_SEED` which.
#[test]
fn damaged_files_are_errors() {
    let number = |name: &str, default: u64| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let (cases, seed) = (number("AITK_PARQUET_CASES", 3000), number("AITK_PARQUET_SEED", 1));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("damaged.parquet");
    let files: Vec<Vec<u8>> = fixtures()
        .iter()
        .map(|(file, _)| std::fs::read(file).unwrap())
        .collect();
    let (mut read, mut refused) = (0, 0);
    for case in 0..cases {
        let mut random = Random(seed.wrapping_mul(1_000_003).wrapping_add(case));
        let mut bytes = files[random.below(files.len())].clone();
        for _ in 0..1 + random.below(4) {
            let at = random.below(bytes.len());
            match random.below(6) {
                0 => bytes[at] ^= 1 << random.below(8),
                1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xfe, 0xff][random.below(6)],
                2 => bytes[at] = random.below(256) as u8,
                3 => {
                    // A number that is larger than all others.
                    let end = (at + 4).min(bytes.len());
                    bytes[at..end].fill(0xff);
                }
                4 => bytes.truncate(at.max(1)),
                _ => {
                    let other = &files[random.below(files.len())];
                    let from = random.below(other.len());
                    let count = random.below(40).min(other.len() - from).min(bytes.len() - at);
                    bytes[at..at + count].copy_from_slice(&other[from..from + count]);
                }
            }
        }
        std::fs::write(&path, &bytes).unwrap();
        match records(&path, "content", 264) {
            Ok(_) => read += 1,
            Err(error) => {
                let message = error.to_string();
                assert!(
                    matches!(error, EngineError::BadInput(_)) && message.starts_with(&path.display().to_string()),
                    "case {case} of seed {seed}: {message}"
                );
                refused += 1;
            }
        }
    }
    // A change of a name that is not used, or of a text, is none that can be noticed.
    assert!(refused > cases / 2 && read > 0, "{read} read, {refused} refused");
}

#[test]
fn a_file_that_is_cut_anywhere_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cut.parquet");
    for (file, _) in fixtures() {
        let bytes = std::fs::read(&file).unwrap();
        for end in 0..bytes.len() {
            std::fs::write(&path, &bytes[..end]).unwrap();
            records(&path, "content", 264).unwrap_err();
        }
    }
}

/// Writes Thrift's compact protocol.
#[derive(Default)]
struct Thrift {
    bytes: Vec<u8>,
    last: u8,
}

impl Thrift {
    fn varint(mut self, mut number: u64) -> Self {
        while number > 0x7f {
            self.bytes.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.bytes.push(number as u8);
        self
    }

    fn field(mut self, id: u8, kind: u8) -> Self {
        self.bytes.push((id - self.last) << 4 | kind);
        self.last = id;
        self
    }

    /// A number of 32 (`kind` 5) or 64 bits (6).
    fn int(self, id: u8, kind: u8, number: i64) -> Self {
        self.field(id, kind).varint(((number << 1) ^ (number >> 63)) as u64)
    }

    fn text(self, id: u8, text: &str) -> Self {
        self.field(id, 8).varint(text.len() as u64).raw(text.as_bytes())
    }

    fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    fn inner(self, id: u8, inner: Self) -> Self {
        self.field(id, 12).raw(&inner.end())
    }

    fn list(self, id: u8, kind: u8, items: &[Vec<u8>]) -> Self {
        let mut list = self.field(id, 9);
        list.bytes.push(0xf0 | kind);
        list.varint(items.len() as u64).raw(&items.concat())
    }

    fn end(mut self) -> Vec<u8> {
        self.bytes.push(0);
        self.bytes
    }
}

/// A column of a schema. `kind`: as Parquet numbers physical types; `repetition`: 0 required, 1 optional, 2 repeated.
fn column(name: &str, kind: i64, repetition: i64) -> Vec<u8> {
    Thrift::default()
        .int(1, 5, kind)
        .int(3, 5, repetition)
        .text(4, name)
        .end()
}

fn group(name: &str, children: i64) -> Vec<u8> {
    Thrift::default().int(3, 5, 0).text(4, name).int(5, 5, children).end()
}

/// A page of `content`. `part`: the number and the fields of its kind.
fn page(kind: i64, (uncompressed, content): (i64, &[u8]), part: (u8, Thrift)) -> Vec<u8> {
    let header = Thrift::default()
        .int(1, 5, kind)
        .int(2, 5, uncompressed)
        .int(3, 5, content.len() as i64)
        .inner(part.0, part.1);
    [header.end(), content.to_vec()].concat()
}

fn data_page(values: i64, encoding: i64, content: &[u8]) -> Vec<u8> {
    let part = Thrift::default()
        .int(1, 5, values)
        .int(2, 5, encoding)
        .int(3, 5, 3)
        .int(4, 5, 3);
    page(0, (content.len() as i64, content), (5, part))
}

fn dictionary_page(values: i64, content: &[u8]) -> Vec<u8> {
    let part = Thrift::default().int(1, 5, values).int(2, 5, 0);
    page(2, (content.len() as i64, content), (7, part))
}

/// What a file says, and its pages.
struct File {
    schema: Vec<Vec<u8>>,
    kind: i64,
    codec: i64,
    rows: i64,
    values: i64,
    pages: Vec<u8>,
}

impl File {
    /// A file of a column `text` that is required.
    fn texts(pages: Vec<u8>) -> Self {
        Self {
            schema: vec![group("schema", 1), column("text", 6, 0)],
            kind: 6,
            codec: 0,
            rows: 1,
            values: i64::from(i32::MAX),
            pages,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let chunk = Thrift::default()
            .int(1, 5, self.kind)
            .list(2, 5, &[])
            .list(3, 8, &[])
            .int(4, 5, self.codec)
            .int(5, 6, self.values)
            .int(6, 6, self.pages.len() as i64)
            .int(7, 6, self.pages.len() as i64)
            .int(9, 6, 4);
        let column = Thrift::default().int(2, 6, 4).inner(3, chunk).end();
        let group = Thrift::default()
            .list(1, 12, &[column])
            .int(2, 6, 1)
            .int(3, 6, self.rows)
            .end();
        let footer = Thrift::default()
            .int(1, 5, 1)
            .list(2, 12, &self.schema)
            .int(3, 6, self.rows)
            .list(4, 12, &[group])
            .end();
        let length = (footer.len() as u32).to_le_bytes();
        [&b"PAR1"[..], &self.pages, &footer, &length, b"PAR1"].concat()
    }
}

fn delta_header(values: u64) -> Vec<u8> {
    Thrift::default().varint(128).varint(4).varint(values).varint(0).bytes
}

#[test]
fn files_that_declare_more_than_they_have_are_refused_before_memory_is_allocated() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("hostile.parquet");
    let hi = [&2_u32.to_le_bytes()[..], b"hi"].concat();
    let whole = File {
        values: 1,
        ..File::texts(data_page(1, 0, &hi))
    };
    std::fs::write(&path, whole.bytes()).unwrap();
    assert_eq!(
        without_places(records(&path, "text", 9).unwrap()),
        [Record::Text("hi".into())]
    );

    let max = i64::from(i32::MAX);
    let gzip = {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        std::io::Write::write_all(&mut encoder, &vec![0; 10 << 20]).unwrap();
        encoder.finish().unwrap()
    };
    let part = || Thrift::default().int(1, 5, 1).int(2, 5, 0).int(3, 5, 3).int(4, 5, 3);
    // A row of 2^30 numbers: all but the first continue it. Levels of 1 bit in a run of 2^30.
    let run = |level: u8| {
        let run = Thrift::default().varint(1 << 31).raw(&[level]).bytes;
        [&(run.len() as u32).to_le_bytes()[..], &run].concat()
    };
    let numbers = [run(1), run(1)].concat();
    let deep = |count: usize| {
        let mut schema: Vec<Vec<u8>> = (0..count).map(|_| group("a", 1)).collect();
        schema.push(column("text", 6, 0));
        schema
    };
    let no_end = [&delta_header(3)[..], &[0, 1, 1, 1, 1], &[0; 4], &delta_header(1 << 40)].concat();
    let cases = [
        (
            File::texts(dictionary_page(max, &hi)),
            "2147483647 distinct values do not fit into 6 bytes",
        ),
        (File::texts(data_page(1, 8, &hi)), "there is none before it"),
        (
            File::texts(data_page(1, 6, &delta_header(1 << 40))),
            "declares 1099511627776 differences and 1 values",
        ),
        (
            File::texts(data_page(max, 7, &no_end)),
            "declares 1099511627776 differences",
        ),
        (File::texts(data_page(1, 77, &hi)), "encoded as number 77"),
        (
            File::texts(page(0, (max, &hi), (5, part()))),
            "pages of up to 1024 MiB are read",
        ),
        (
            File {
                codec: 1,
                ..File::texts(page(0, (1 << 20, &[0x80, 0x80, 0x80, 0x80, 4]), (5, part())))
            },
            "declares 1048576 bytes and its compressed data 1073741824",
        ),
        (
            File {
                codec: 2,
                ..File::texts(page(0, (100, &gzip), (5, part())))
            },
            "declares 100 bytes and has 101",
        ),
        (
            File {
                codec: 5,
                ..File::texts(data_page(1, 0, &hi))
            },
            "compressed with LZ4 in Hadoop's form, and Snappy, gzip, Zstandard",
        ),
        (
            File {
                schema: vec![group("schema", 1), column("tokens", 1, 2)],
                kind: 1,
                values: 1 << 40,
                ..File::texts(data_page(1 << 30, 0, &numbers))
            },
            "more than 67108864 values",
        ),
        (
            File {
                schema: vec![group("schema", max), column("text", 6, 0)],
                ..File::texts(Vec::new())
            },
            "more columns than there are",
        ),
        (
            File {
                schema: deep(5000),
                ..File::texts(Vec::new())
            },
            "nested in more than 64 groups",
        ),
        (
            File {
                schema: deep(10_001),
                ..File::texts(Vec::new())
            },
            "it has 10002 columns",
        ),
        (
            File {
                schema: vec![group("schema", 2), column("text", 6, 0), column("text", 6, 0)],
                ..File::texts(Vec::new())
            },
            "Column",
        ),
        (
            File {
                rows: i64::MAX,
                values: i64::MAX,
                ..File::texts(data_page(1, 0, &hi))
            },
            "row 2 (row group 1): `text`: it has fewer rows",
        ),
        (
            File {
                values: 2,
                ..File::texts([data_page(1, 0, &hi), data_page(1, 0, &hi)].concat())
            },
            "more rows than the row group",
        ),
        (
            File {
                schema: vec![group("schema", 1), column("text", 2, 0)],
                kind: 2,
                ..File::texts(Vec::new())
            },
            "`text`: expected text, found INT64",
        ),
        (
            File {
                schema: vec![group("schema", 1), column("text", 6, 1)],
                ..File::texts(data_page(1, 0, &[0xff, 0, 0, 0, 2, 0]))
            },
            "within its levels",
        ),
        (
            File {
                schema: vec![group("schema", 1), column("text", 6, 1)],
                values: 1,
                ..File::texts(data_page(1, 0, &[2, 0, 0, 0, 2, 0]))
            },
            "row 1: `text`: expected text",
        ),
        (
            File::texts(data_page(1, 0, &[2, 0, 0, 0, 0xff, 0xfe])),
            "it is not UTF-8 text",
        ),
    ];
    let mut wrong = String::new();
    for (file, expected) in cases {
        std::fs::write(&path, file.bytes()).unwrap();
        match records(&path, "text", 9) {
            Ok(found) => writeln!(wrong, "{expected}: read {found:?}").unwrap(),
            Err(error) if error.to_string().contains(expected) => {}
            Err(error) => writeln!(wrong, "{expected}: {error}").unwrap(),
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    // A footer that is longer than the file.
    std::fs::write(&path, b"PAR1\x00\x00\x00\x01PAR1").unwrap();
    assert!(
        records(&path, "text", 9)
            .unwrap_err()
            .to_string()
            .contains("its footer has 16777216 bytes")
    );
    std::fs::write(&path, b"PAR1\x00\x00\x00\x01PARE").unwrap();
    assert!(
        records(&path, "text", 9)
            .unwrap_err()
            .to_string()
            .contains("it is encrypted")
    );
}
