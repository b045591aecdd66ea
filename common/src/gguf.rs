//! Reads headers of GGUF files: names, types, shapes and byte ranges of tensors. Tensor data is not read.
//!
//! Implements ggml's `docs/gguf.md`, versions 2 and 3, little-endian. Headers are untrusted: the header is read once from front
//! to back, every count and length is checked against the rest of the file before memory is allocated, and unused metadata is
//! skipped.

mod values;

pub use values::{MetadataValue, read_metadata};

use crate::fsutil::regular;
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The first bytes of a file.
pub const MAGIC: &[u8; 4] = b"GGUF";
/// The size limit of a header. Headers of language models contain the vocabulary.
const HEADER_LIMIT: u64 = 256 << 20;
/// The length limit of names of tensors and keys, in bytes.
const NAME_LIMIT: u64 = 1 << 10;
/// Longer metadata strings are skipped.
const TEXT_LIMIT: u64 = 1 << 16;
/// The most dimensions of a tensor (`GGML_MAX_DIMS`).
const MAX_DIMS: u32 = 4;
/// Longer arrays are skipped.
const LIST_LIMIT: u64 = 8;
/// The nesting limit of arrays.
const DEPTH_LIMIT: u32 = 4;
/// The metadata key under which ComfyUI-GGUF stores the shape that a tensor had before it was reshaped to fit the blocks.
const ORIGINAL_SHAPE: &str = "comfy.gguf.orig_shape.";

/// The GGUF file of the model at a path: the path itself, or the only GGUF file in a folder without `config.json`. `None`: the path is another
/// file, or a folder in which there is no such file.
#[must_use]
pub fn model_file(path: &Path) -> Option<PathBuf> {
    if path.is_file() {
        return is_gguf(path).then(|| path.to_path_buf());
    }
    if path.join("config.json").exists() {
        return None;
    }
    let files = std::fs::read_dir(path).ok()?.flatten().map(|entry| entry.path());
    let mut files = files.filter(|file| has_gguf_name(file));
    let first = files.next()?;
    files.next().is_none().then_some(first)
}

/// Whether a file is a GGUF file by its name or by its first bytes.
fn is_gguf(file: &Path) -> bool {
    let begins_as_gguf = || {
        let mut first = [0; MAGIC.len()];
        regular::open(file).is_ok_and(|(mut file, _)| file.read_exact(&mut first).is_ok() && first == *MAGIC)
    };
    has_gguf_name(file) || begins_as_gguf()
}

fn has_gguf_name(file: &Path) -> bool {
    file.extension()
        .is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"))
}

/// A tensor type: plain numbers, or blocks of quantised numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// ggml's name in lower case.
    pub name: &'static str,
    /// Numbers per block.
    pub block: u64,
    /// Bytes per block.
    pub bytes: u64,
}

/// The supported types by ggml's number (`enum ggml_type`).
const KINDS: [(u32, Kind); 13] = [
    (0, Kind::new("f32", 1, 4)),
    (1, Kind::new("f16", 1, 2)),
    (2, Kind::new("q4_0", 32, 18)),
    (3, Kind::new("q4_1", 32, 20)),
    (6, Kind::new("q5_0", 32, 22)),
    (7, Kind::new("q5_1", 32, 24)),
    (8, Kind::new("q8_0", 32, 34)),
    (10, Kind::new("q2_k", 256, 84)),
    (11, Kind::new("q3_k", 256, 110)),
    (12, Kind::new("q4_k", 256, 144)),
    (13, Kind::new("q5_k", 256, 176)),
    (14, Kind::new("q6_k", 256, 210)),
    (30, Kind::new("bf16", 1, 2)),
];

impl Kind {
    const fn new(name: &'static str, block: u64, bytes: u64) -> Self {
        Self { name, block, bytes }
    }

    /// The names of all supported types, separated by commas.
    #[must_use]
    pub fn names() -> String {
        KINDS.map(|(_, kind)| kind.name).join(", ")
    }
}

/// A tensor in the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The type, or ggml's number of an unsupported one.
    pub kind: Result<Kind, u32>,
    /// The shape in PyTorch's order: the file's dimensions reversed, or the original shape that ComfyUI-GGUF stored.
    pub shape: Vec<u64>,
    /// Start and end offset of the data in the file. They are equal for an unsupported type.
    pub byte_range: (u64, u64),
}

/// The header of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// The strings of the metadata.
    pub texts: BTreeMap<String, String>,
    /// Tensors by name.
    pub tensors: BTreeMap<String, TensorInfo>,
}

/// A tensor's entry in the header.
struct Entry {
    name: String,
    dims: Vec<u64>,
    kind: u32,
    offset: u64,
}

impl Header {
    /// Reads the header of a file of `length` bytes.
    ///
    /// # Errors
    /// When the file is not GGUF, is truncated, or its header is inconsistent.
    pub fn read(file: impl Read, length: u64) -> io::Result<Self> {
        let mut source = Source::new(file, length);
        let (tensors, pairs) = open(&mut source)?;
        let mut metadata = Metadata::default();
        for _ in 0..pairs {
            metadata.read_one(&mut source)?;
        }
        let mut entries = Vec::new();
        for _ in 0..tensors {
            entries.push(source.entry()?);
        }
        let alignment = metadata.alignment.unwrap_or(32);
        if !alignment.is_power_of_two() || alignment > 1 << 20 {
            return Err(bad(format!(
                "its header has the impossible alignment of {alignment} bytes"
            )));
        }
        let start = source.position().next_multiple_of(alignment);
        let mut header = Self {
            texts: metadata.texts,
            tensors: BTreeMap::new(),
        };
        for entry in entries {
            let original = metadata.shapes.get(&entry.name);
            let info = entry.tensor_info(start, alignment, length, original)?;
            if header.tensors.insert(entry.name.clone(), info).is_some() {
                return Err(bad(format!("tensor {:?} occurs twice", entry.name)));
            }
        }
        header.check_overlaps()?;
        Ok(header)
    }

    /// Checks that no two tensors overlap.
    fn check_overlaps(&self) -> io::Result<()> {
        let mut ranges: Vec<_> = self
            .tensors
            .iter()
            .map(|(name, info)| (info.byte_range, name))
            .collect();
        ranges.sort();
        for pair in ranges.windows(2) {
            if pair[0].0.1 > pair[1].0.0 {
                return Err(bad(format!("tensors {:?} and {:?} overlap", pair[0].1, pair[1].1)));
            }
        }
        Ok(())
    }
}

impl Entry {
    /// Computes and checks the tensor's byte range and shape.
    fn tensor_info(
        &self,
        start: u64,
        alignment: u64,
        length: u64,
        original: Option<&Vec<u64>>,
    ) -> io::Result<TensorInfo> {
        let Self { name, dims, .. } = self;
        let mut shape: Vec<u64> = dims.iter().rev().copied().collect();
        let impossible = || bad(format!("tensor {name:?} has the impossible shape {shape:?}"));
        let count = element_count(&shape).ok_or_else(impossible)?;
        let begin = start.checked_add(self.offset).ok_or_else(impossible)?;
        if !self.offset.is_multiple_of(alignment) {
            return Err(bad(format!(
                "tensor {name:?} begins at an offset that is not a multiple of {alignment} bytes"
            )));
        }
        let known = KINDS.iter().find(|(number, _)| *number == self.kind);
        let kind = known.map(|(_, kind)| *kind).ok_or(self.kind);
        let bytes = match kind {
            Err(_) => 0,
            Ok(kind) if !dims.first().unwrap_or(&1).is_multiple_of(kind.block) => {
                return Err(bad(format!(
                    "tensor {name:?} has rows of {} numbers, not a multiple of the block size {} ({})",
                    dims.first().unwrap_or(&1),
                    kind.block,
                    kind.name
                )));
            }
            Ok(kind) => (count / kind.block).checked_mul(kind.bytes).ok_or_else(impossible)?,
        };
        let end = begin.checked_add(bytes).ok_or_else(impossible)?;
        if end > length {
            return Err(bad(format!(
                "tensor {name:?} ends at byte {end} and the file at {length}, so the file is cut off; download or copy it again"
            )));
        }
        if let Some(original) = original {
            if element_count(original) != Some(count) {
                return Err(bad(format!(
                    "tensor {name:?} has the shape {shape:?} and the original shape {original:?}, which have different numbers of elements"
                )));
            }
            shape.clone_from(original);
        }
        Ok(TensorInfo {
            kind,
            shape,
            byte_range: (begin, end),
        })
    }
}

/// Reads what is before the metadata: the numbers of tensors and of entries of metadata.
fn open(source: &mut Source<impl Read>) -> io::Result<(u64, u64)> {
    if source.take::<4>()? != *MAGIC {
        return Err(bad("this is not a GGUF file"));
    }
    match source.u32()? {
        2 | 3 => {}
        version if (2..=3).contains(&version.swap_bytes()) => {
            return Err(bad(
                "this is a big-endian GGUF file; only little-endian files are supported",
            ));
        }
        version => {
            return Err(bad(format!(
                "this is version {version} of GGUF; versions 2 and 3 are supported"
            )));
        }
    }
    let (tensors, pairs) = (source.u64()?, source.u64()?);
    // The smallest entries: an empty name, and one dimension or a value of one byte.
    source.check_fits(tensors, 24, "tensors")?;
    source.check_fits(pairs, 13, "entries of metadata")?;
    Ok((tensors, pairs))
}

/// The number of elements of a shape; none if it overflows. Overflow of the other dimensions is detected even if one is zero.
fn element_count(shape: &[u64]) -> Option<u64> {
    let mut dims = shape.iter().filter(|dim| **dim > 0);
    let all = dims.try_fold(1_u64, |all, dim| all.checked_mul(*dim))?;
    // The elements must be indexable on this machine.
    usize::try_from(all).ok()?;
    Some(if shape.contains(&0) { 0 } else { all })
}

/// The metadata that aitk uses.
#[derive(Default)]
struct Metadata {
    alignment: Option<u64>,
    texts: BTreeMap<String, String>,
    shapes: BTreeMap<String, Vec<u64>>,
}

impl Metadata {
    fn read_one(&mut self, source: &mut Source<impl Read>) -> io::Result<()> {
        let key = source.name()?;
        let kind = source.u32()?;
        match source.value(kind, 0)? {
            Value::Text(text) => {
                self.texts.insert(key, text);
            }
            Value::Whole(number) if key == "general.alignment" => self.alignment = Some(number),
            Value::List(shape) => {
                if let Some(tensor) = key.strip_prefix(ORIGINAL_SHAPE) {
                    self.shapes.insert(tensor.to_owned(), shape);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// A value of the metadata.
enum Value {
    Text(String),
    Whole(u64),
    List(Vec<u64>),
    Skipped,
}

/// Reads the header from front to back, with limits.
struct Source<R> {
    file: io::BufReader<io::Take<R>>,
    read: u64,
    length: u64,
}

impl<R: Read> Source<R> {
    fn new(file: R, length: u64) -> Self {
        Self {
            file: io::BufReader::new(file.take(length.min(HEADER_LIMIT))),
            read: 0,
            length: length.min(HEADER_LIMIT),
        }
    }

    fn position(&self) -> u64 {
        self.read
    }

    fn remaining(&self) -> u64 {
        self.length.saturating_sub(self.read)
    }

    /// Checks that `count` items of at least `each` bytes fit into the rest of the header.
    fn check_fits(&self, count: u64, each: u64, what: &str) -> io::Result<()> {
        if count.checked_mul(each).is_none_or(|bytes| bytes > self.remaining()) {
            return Err(bad(format!(
                "its header is too short for the {count} {what} that it announces; the file is cut off or damaged"
            )));
        }
        Ok(())
    }

    fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.file.read_exact(&mut bytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => bad("the file is cut off within its header; download or copy it again"),
            _ => error,
        })?;
        self.read += N as u64;
        Ok(bytes)
    }

    fn u32(&mut self) -> io::Result<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> io::Result<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        self.check_fits(bytes, 1, "bytes")?;
        self.read += io::copy(&mut self.file.by_ref().take(bytes), &mut io::sink())?;
        Ok(())
    }

    fn text(&mut self, length: u64) -> io::Result<String> {
        self.check_fits(length, 1, "bytes of text")?;
        let mut bytes = Vec::new();
        self.read += self.file.by_ref().take(length).read_to_end(&mut bytes)? as u64;
        String::from_utf8(bytes).map_err(|_| bad("a string in its header is not UTF-8"))
    }

    fn name(&mut self) -> io::Result<String> {
        let length = self.u64()?;
        if length > NAME_LIMIT {
            return Err(bad(format!(
                "its header has a name of {length} bytes; the file is damaged"
            )));
        }
        self.text(length)
    }

    fn value(&mut self, kind: u32, depth: u32) -> io::Result<Value> {
        Ok(match kind {
            0 => Value::Whole(self.take::<1>()?[0].into()),
            2 => Value::Whole(u16::from_le_bytes(self.take()?).into()),
            4 => Value::Whole(self.u32()?.into()),
            // A negative number becomes a huge one, which is rejected as a shape or an alignment.
            5 => Value::Whole(u64::from(self.u32()?)),
            10 | 11 => Value::Whole(self.u64()?),
            8 => match self.u64()? {
                length if length > TEXT_LIMIT => {
                    self.skip(length)?;
                    Value::Skipped
                }
                length => Value::Text(self.text(length)?),
            },
            9 => self.list(depth)?,
            other => {
                self.skip(size_of_value(other)?)?;
                Value::Skipped
            }
        })
    }

    fn list(&mut self, depth: u32) -> io::Result<Value> {
        let (kind, count) = (self.u32()?, self.u64()?);
        match kind {
            // Vocabularies: each string has its own length.
            8 => {
                self.check_fits(count, 8, "strings in an array")?;
                for _ in 0..count {
                    let length = self.u64()?;
                    self.skip(length)?;
                }
            }
            9 if depth >= DEPTH_LIMIT => {
                return Err(bad(format!(
                    "its header has arrays nested more than {DEPTH_LIMIT} deep"
                )));
            }
            9 => {
                self.check_fits(count, 12, "arrays in an array")?;
                for _ in 0..count {
                    self.list(depth + 1)?;
                }
            }
            4 | 5 | 10 | 11 if count <= LIST_LIMIT => {
                let mut list = Vec::new();
                for _ in 0..count {
                    if let Value::Whole(number) = self.value(kind, depth)? {
                        list.push(number);
                    }
                }
                return Ok(Value::List(list));
            }
            kind => {
                let size = size_of_value(kind)?;
                self.check_fits(count, size, "values in an array")?;
                self.skip(count * size)?;
            }
        }
        Ok(Value::Skipped)
    }

    fn entry(&mut self) -> io::Result<Entry> {
        let name = self.name()?;
        let dims = self.u32()?;
        if dims > MAX_DIMS {
            return Err(bad(format!(
                "tensor {name:?} has {dims} dimensions; GGUF has at most {MAX_DIMS}"
            )));
        }
        let dims = (0..dims).map(|_| self.u64()).collect::<io::Result<_>>()?;
        Ok(Entry {
            name,
            dims,
            kind: self.u32()?,
            offset: self.u64()?,
        })
    }
}

/// The size in bytes of a number type.
fn size_of_value(kind: u32) -> io::Result<u64> {
    match kind {
        0 | 1 | 7 => Ok(1),
        2 | 3 => Ok(2),
        4..=6 => Ok(4),
        10..=12 => Ok(8),
        kind => Err(bad(format!(
            "its header has a value of the unknown type {kind}; the file is damaged"
        ))),
    }
}

fn bad(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(bytes: &mut Vec<u8>, text: &str) {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    }

    /// Builds a file of tensors (name, dimensions, type, bytes) with original shapes in its metadata.
    fn file(tensors: &[(&str, &[u64], u32, usize)], shapes: &[(&str, &[i32])]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(3_u32.to_le_bytes());
        bytes.extend((tensors.len() as u64).to_le_bytes());
        bytes.extend((shapes.len() as u64 + 2).to_le_bytes());
        text(&mut bytes, "general.architecture");
        bytes.extend(8_u32.to_le_bytes());
        text(&mut bytes, "sd1");
        text(&mut bytes, "vocabulary");
        bytes.extend([9_u32, 8].map(u32::to_le_bytes).concat());
        bytes.extend(2_u64.to_le_bytes());
        text(&mut bytes, "one");
        text(&mut bytes, "two");
        for (name, shape) in shapes {
            text(&mut bytes, &format!("{ORIGINAL_SHAPE}{name}"));
            bytes.extend([9_u32, 5].map(u32::to_le_bytes).concat());
            bytes.extend((shape.len() as u64).to_le_bytes());
            shape.iter().for_each(|side| bytes.extend(side.to_le_bytes()));
        }
        let mut offset = 0_u64;
        for (name, dims, kind, length) in tensors {
            text(&mut bytes, name);
            bytes.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|side| bytes.extend(side.to_le_bytes()));
            bytes.extend(kind.to_le_bytes());
            bytes.extend(offset.to_le_bytes());
            offset = (offset + *length as u64).next_multiple_of(32);
        }
        bytes.resize(bytes.len().next_multiple_of(32) + offset as usize, 0);
        bytes
    }

    fn read(bytes: &[u8]) -> io::Result<Header> {
        Header::read(bytes, bytes.len() as u64)
    }

    fn error_text(bytes: &[u8]) -> String {
        read(bytes).unwrap_err().to_string()
    }

    #[test]
    fn shapes_are_reversed_or_replaced_by_the_original_shape() {
        let bytes = file(
            &[
                ("a", &[64, 3], 8, 204),
                ("b", &[256, 2], 12, 288),
                ("c", &[5], 0, 20),
                ("d", &[7], 99, 3),
            ],
            &[("b", &[32, 4, 2, 2])],
        );
        let header = read(&bytes).unwrap();
        assert_eq!(header.texts["general.architecture"], "sd1");
        let shape = |name: &str| header.tensors[name].shape.clone();
        assert_eq!(
            [shape("a"), shape("b"), shape("c")],
            [vec![3, 64], vec![32, 4, 2, 2], vec![5]]
        );
        let kinds = ["a", "b", "c"].map(|name| header.tensors[name].kind.unwrap().name);
        assert_eq!(kinds, ["q8_0", "q4_k", "f32"]);
        assert_eq!(header.tensors["d"].kind, Err(99));
        let (begin, end) = header.tensors["b"].byte_range;
        assert_eq!((end - begin, begin % 32), (288, 0));
    }

    #[test]
    fn invalid_headers_are_errors() {
        assert!(error_text(b"GGU").contains("cut off"));
        assert!(error_text(b"safetensors").contains("not a GGUF"));
        assert!(error_text(b"GGUF\x01\0\0\0").contains("version 1"));
        assert!(error_text(b"GGUF\0\0\0\x03").contains("big-endian"));
        let counted = |tensors: u64, pairs: u64| {
            [
                &b"GGUF\x03\0\0\0"[..],
                &tensors.to_le_bytes(),
                &pairs.to_le_bytes(),
                &[0; 64],
            ]
            .concat()
        };
        assert!(error_text(&counted(u64::MAX, 0)).contains("too short"));
        assert!(error_text(&counted(0, 1 << 60)).contains("too short"));
        let overflowing = file(&[("w", &[1 << 40, 1 << 40, 0], 0, 0)], &[]);
        assert!(error_text(&overflowing).contains("impossible shape"));
        let broken = file(&[("w", &[48, 2], 8, 96)], &[]);
        assert!(
            error_text(&broken).contains("\"w\" has rows of 48"),
            "{}",
            error_text(&broken)
        );
        let other = file(&[("w", &[64], 8, 68)], &[("w", &[8, 9])]);
        assert!(error_text(&other).contains("different numbers"));
        let twice = file(&[("w", &[8], 0, 32), ("w", &[8], 0, 32)], &[]);
        assert!(error_text(&twice).contains("twice"));
        let deep = [
            &b"GGUF\x03\0\0\0"[..],
            &0_u64.to_le_bytes(),
            &1_u64.to_le_bytes(),
            &0_u64.to_le_bytes(),
        ]
        .concat();
        let deep = [deep, [&9_u32.to_le_bytes()[..], &[1; 0]].concat(), {
            [&9_u32.to_le_bytes()[..], &1_u64.to_le_bytes()].concat().repeat(64)
        }]
        .concat();
        assert!(error_text(&deep).contains("arrays nested"), "{}", error_text(&deep));
    }

    #[test]
    fn every_truncation_and_every_changed_byte_is_handled() {
        let bytes = file(
            &[("a", &[64, 3], 8, 204), ("b", &[256, 2], 12, 288)],
            &[("b", &[32, 16])],
        );
        for length in 0..bytes.len() {
            if let Ok(header) = read(&bytes[..length]) {
                // Only the padding after the last tensor was cut.
                assert!(
                    header.tensors.values().all(|info| info.byte_range.1 <= length as u64),
                    "{length}"
                );
            }
        }
        for at in 0..bytes.len() {
            for value in [0, 1, 0x7F, 0x80, 0xFF] {
                let mut changed = bytes.clone();
                changed[at] = value;
                if let Ok(header) = read(&changed) {
                    let inside = |info: &TensorInfo| {
                        info.byte_range.0 <= info.byte_range.1 && info.byte_range.1 <= bytes.len() as u64
                    };
                    assert!(header.tensors.values().all(inside), "byte {at} became {value}");
                }
            }
        }
    }
}
