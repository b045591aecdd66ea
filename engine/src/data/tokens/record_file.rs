//! Reads JSON and JSONL files record by record: memory is bounded by the longest record.

use super::file_list::has_ending;
use super::record::{Columns, Field, RawRecord, Record};
use crate::error::{EngineError, Result};
use aitk_common::fsutil::regular;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

/// The longest line of a JSONL file, in bytes.
const MAX_LINE_BYTES: u64 = 256 << 20;
/// The names of a list of records in a JSON file that is an object.
const LISTS: [&str; 2] = ["sequences", "data"];

/// Reads records and passes each to `each`, with its place for messages: `a.jsonl:3`.
///
/// # Errors
/// When the file is damaged or a record is not one, with the line.
pub(super) fn read_records(
    path: &Path,
    columns: &Columns,
    vocabulary: usize,
    each: &mut dyn FnMut(Record, &str) -> Result<()>,
) -> Result<()> {
    let mut checked = |raw: RawRecord, line: u64| {
        let place = format!("{}:{line}", path.display());
        let record = raw
            .read(columns, vocabulary)
            .map_err(|problem| EngineError::bad_input(format!("{place}: {problem}")))?;
        each(record, &place)
    };
    let (file, _) = regular::open(path).map_err(|error| EngineError::io(path, error))?;
    match has_ending(&path.to_string_lossy(), "json") {
        true => read_json(path, file, &mut checked),
        false => read_lines(path, file, &mut checked),
    }
}

fn read_lines(path: &Path, file: impl Read, each: &mut dyn FnMut(RawRecord, u64) -> Result<()>) -> Result<()> {
    let mut reader = BufReader::new(file);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let read = (&mut reader).take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut line);
        if read.map_err(|error| EngineError::io(path, error))? == 0 {
            return Ok(());
        }
        let bad = |problem: String| EngineError::bad_input(format!("{}:{number}: {problem}", path.display()));
        if line.len() as u64 > MAX_LINE_BYTES {
            return Err(bad(format!("a line of more than {} MiB", MAX_LINE_BYTES >> 20)));
        }
        let bytes = match number {
            1 => line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&line),
            _ => &line,
        };
        let text = std::str::from_utf8(bytes).map_err(|error| {
            bad(format!(
                "it is not UTF-8 text: the byte at position {} is wrong; convert the file to UTF-8",
                error.valid_up_to() + 1
            ))
        })?;
        if text.trim().is_empty() {
            continue;
        }
        let record = serde_json::from_str(text)
            .map_err(|error| bad(format!("expected a JSON record on each line: {}", without_line(&error))))?;
        each(record, number)?;
    }
    Ok(())
}

/// serde_json's message without its line number, which is always 1.
fn without_line(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.replace("line 1 column ", "column ")
}

/// Counts the lines of what is read.
struct LineCounter<'a, R> {
    inner: R,
    line: &'a Cell<u64>,
}

impl<R: Read> Read for LineCounter<'_, R> {
    /// One byte at a time, so that the line is that of the parser.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Some(first) = buffer.first_mut() else {
            return Ok(0);
        };
        let read = self.inner.read(std::slice::from_mut(first))?;
        if read == 1 && *first == b'\n' {
            self.line.set(self.line.get() + 1);
        }
        Ok(read)
    }
}

fn read_json(path: &Path, file: impl Read, each: &mut dyn FnMut(RawRecord, u64) -> Result<()>) -> Result<()> {
    let mut reader = BufReader::with_capacity(1 << 16, file);
    // A byte order mark is not JSON.
    let start = reader.fill_buf().map_err(|error| EngineError::io(path, error))?;
    if start.starts_with(b"\xef\xbb\xbf") {
        reader.consume(3);
    }
    let line = Cell::new(1);
    let counter = LineCounter {
        inner: reader,
        line: &line,
    };
    let failed = RefCell::new(None);
    let mut json = serde_json::Deserializer::from_reader(counter);
    let file = JsonFile {
        each: RefCell::new(each),
        line: &line,
        failed: &failed,
    };
    let read = (&file).deserialize(&mut json).and_then(|()| json.end());
    if let Some(error) = failed.into_inner() {
        return Err(error);
    }
    read.map_err(|error| {
        EngineError::bad_input(format!(
            "{}: expected a list of token sequences or records as JSON: {error}",
            path.display()
        ))
    })
}

/// A JSON file: a list of records, one sequence, or an object with a list or with the fields of one record.
struct JsonFile<'a> {
    each: RefCell<&'a mut dyn FnMut(RawRecord, u64) -> Result<()>>,
    line: &'a Cell<u64>,
    /// The error of `each`, which ends the parsing.
    failed: &'a RefCell<Option<EngineError>>,
}

impl JsonFile<'_> {
    fn pass<E: serde::de::Error>(&self, record: RawRecord) -> Result<(), E> {
        let passed = (self.each.borrow_mut())(record, self.line.get());
        passed.map_err(|error| {
            *self.failed.borrow_mut() = Some(error);
            E::custom("a record is wrong")
        })
    }

    fn pass_list<'de, A: SeqAccess<'de>>(&self, mut items: A) -> Result<(), A::Error> {
        let mut numbers: Vec<i64> = Vec::new();
        let mut has_records = false;
        while let Some(record) = items.next_element::<RawRecord>()? {
            match record {
                RawRecord::Number(number) if !has_records => numbers.push(number),
                _ if !numbers.is_empty() => {
                    return Err(A::Error::custom(
                        "expected a list of token ids, which are whole numbers",
                    ));
                }
                record => {
                    has_records = true;
                    self.pass(record)?;
                }
            }
        }
        match numbers.is_empty() {
            true => Ok(()),
            false => self.pass(RawRecord::Tokens(numbers)),
        }
    }
}

impl<'de> DeserializeSeed<'de> for &JsonFile<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(DocumentVisitor(self))
    }
}

struct DocumentVisitor<'a, 'b>(&'a JsonFile<'b>);

impl<'de> Visitor<'de> for DocumentVisitor<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list or an object")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<(), A::Error> {
        self.0.pass_list(items)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut fields: BTreeMap<String, Field> = BTreeMap::new();
        let mut has_list = false;
        while let Some(name) = map.next_key::<String>()? {
            if LISTS.contains(&name.as_str()) {
                map.next_value_seed(List(self.0))?;
                has_list = true;
            } else {
                fields.insert(name, map.next_value()?);
            }
        }
        match has_list {
            // Other fields describe the list.
            true => Ok(()),
            false => self.0.pass(RawRecord::Fields(fields)),
        }
    }
}

/// A list of records.
struct List<'a, 'b>(&'a JsonFile<'b>);

impl<'de> DeserializeSeed<'de> for List<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for List<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of token sequences or records")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<(), A::Error> {
        self.0.pass_list(items)
    }
}
