//! Headers of GGUF files: names, kinds, shapes and places of tensors. What they hold is never read here.
//!
//! After ggml's `docs/gguf.md`, versions 2 and 3, little-endian. A header is a stranger's: it is read once from front to
//! back, every count and length is held against what is left of the file before anything is made of it, and metadata that
//! nobody here asks for is skipped, not kept.

use std::collections::BTreeMap;
use std::io::{self, Read};

/// How a file begins.
pub const MAGIC: &[u8; 4] = b"GGUF";
/// A header larger than this belongs to no model that we know. Those of language models hold their vocabulary.
const HEADER_LIMIT: u64 = 256 << 20;
/// Names of tensors and keys are shorter.
const NAME_LIMIT: u64 = 1 << 10;
/// Longer texts of the metadata are skipped.
const TEXT_LIMIT: u64 = 1 << 16;
/// Tensors have no more axes (`GGML_MAX_DIMS`).
const MOST_AXES: u32 = 4;
/// Longer lists are skipped.
const LIST_LIMIT: u64 = 8;
/// Lists within lists are read no deeper.
const DEPTH_LIMIT: u32 = 4;
/// Where ComfyUI-GGUF notes the shape that a tensor had before its rows were made to fit the blocks.
const ORIGINAL_SHAPE: &str = "comfy.gguf.orig_shape.";

/// A kind of numbers or blocks of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// What ggml calls it, in lower case.
    pub name: &'static str,
    /// Numbers in a block.
    pub block: u64,
    /// Bytes of a block.
    pub bytes: u64,
}

/// By ggml's number (`enum ggml_type`), those that can be read here.
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

    /// The names of all kinds that can be read, with commas.
    #[must_use]
    pub fn names() -> String {
        KINDS.map(|(_, kind)| kind.name).join(", ")
    }
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its kind, or ggml's number of one that cannot be read here.
    pub kind: Result<Kind, u32>,
    /// Its sides as PyTorch has them: the file's in reverse, or those that ComfyUI-GGUF noted.
    pub shape: Vec<u64>,
    /// Where it begins in the file, and where it ends; one that cannot be read ends where it begins.
    pub place: (u64, u64),
}

/// What a file says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Texts of the metadata.
    pub texts: BTreeMap<String, String>,
    /// Tensors by name.
    pub tensors: BTreeMap<String, TensorInfo>,
}

/// A tensor as its entry has it.
struct Entry {
    name: String,
    sides: Vec<u64>,
    kind: u32,
    offset: u64,
}

impl Header {
    /// Reads the header of a file of `length` bytes.
    ///
    /// # Errors
    /// When it is none, is cut off, or says what cannot be.
    pub fn read(file: impl Read, length: u64) -> io::Result<Self> {
        let mut source = Source::new(file, length);
        if source.take::<4>()? != *MAGIC {
            return Err(bad("this is no GGUF file"));
        }
        match source.u32()? {
            2 | 3 => {}
            version if (2..=3).contains(&version.swap_bytes()) => {
                return Err(bad("this is a big-endian GGUF file: only little-endian ones work"));
            }
            version => return Err(bad(format!("this is version {version} of GGUF: versions 2 and 3 work"))),
        }
        let (tensors, pairs) = (source.u64()?, source.u64()?);
        // The shortest of each: an empty name, and one axis or a byte.
        source.has_room(tensors, 24, "tensors")?;
        source.has_room(pairs, 13, "entries of metadata")?;
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
            return Err(bad(format!("an alignment of {alignment} bytes cannot be")));
        }
        let start = source.position().next_multiple_of(alignment);
        let mut header = Self {
            texts: metadata.texts,
            tensors: BTreeMap::new(),
        };
        for entry in entries {
            let original = metadata.shapes.get(&entry.name);
            let info = entry.settle(start, alignment, length, original)?;
            if header.tensors.insert(entry.name.clone(), info).is_some() {
                return Err(bad(format!("tensor {:?} is there twice", entry.name)));
            }
        }
        header.check_overlaps()?;
        Ok(header)
    }

    /// No two tensors lie in the same place.
    fn check_overlaps(&self) -> io::Result<()> {
        let mut places: Vec<_> = self.tensors.iter().map(|(name, info)| (info.place, name)).collect();
        places.sort();
        for pair in places.windows(2) {
            if pair[0].0.1 > pair[1].0.0 {
                return Err(bad(format!("tensors {:?} and {:?} overlap", pair[0].1, pair[1].1)));
            }
        }
        Ok(())
    }
}

impl Entry {
    /// Its place and shape, if they can be.
    fn settle(&self, start: u64, alignment: u64, length: u64, original: Option<&Vec<u64>>) -> io::Result<TensorInfo> {
        let Self { name, sides, .. } = self;
        let mut shape: Vec<u64> = sides.iter().rev().copied().collect();
        let impossible = || bad(format!("tensor {name:?} has the impossible shape {shape:?}"));
        let count = countable(&shape).ok_or_else(impossible)?;
        let begin = start.checked_add(self.offset).ok_or_else(impossible)?;
        if !self.offset.is_multiple_of(alignment) {
            return Err(bad(format!(
                "tensor {name:?} begins between two places of {alignment} bytes"
            )));
        }
        let known = KINDS.iter().find(|(number, _)| *number == self.kind);
        let kind = known.map(|(_, kind)| *kind).ok_or(self.kind);
        let bytes = match kind {
            Err(_) => 0,
            Ok(kind) if !sides.first().unwrap_or(&1).is_multiple_of(kind.block) => {
                return Err(bad(format!(
                    "tensor {name:?} has rows of {}, which are no whole blocks of {} ({})",
                    sides.first().unwrap_or(&1),
                    kind.block,
                    kind.name
                )));
            }
            Ok(kind) => (count / kind.block).checked_mul(kind.bytes).ok_or_else(impossible)?,
        };
        let end = begin.checked_add(bytes).ok_or_else(impossible)?;
        if end > length {
            return Err(bad(format!(
                "tensor {name:?} ends at byte {end} and the file at {length}, so it is cut off: download or copy it again"
            )));
        }
        if let Some(original) = original {
            if countable(original) != Some(count) {
                return Err(bad(format!(
                    "tensor {name:?} is of shape {shape:?} and was of {original:?}, which are not as many numbers"
                )));
            }
            shape.clone_from(original);
        }
        Ok(TensorInfo {
            kind,
            shape,
            place: (begin, end),
        })
    }
}

/// How many numbers a shape has; none where they cannot be counted. One side of zero does not hide how long the others are.
fn countable(shape: &[u64]) -> Option<u64> {
    let mut sides = shape.iter().filter(|side| **side > 0);
    let all = sides.try_fold(1_u64, |all, side| all.checked_mul(*side))?;
    // As many as an index of this machine can reach.
    usize::try_from(all).ok()?;
    Some(if shape.contains(&0) { 0 } else { all })
}

/// What is kept of the metadata.
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

/// The header's bytes, from front to back.
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

    fn left(&self) -> u64 {
        self.length.saturating_sub(self.read)
    }

    /// So many things of at least so many bytes each still fit.
    fn has_room(&self, count: u64, each: u64, what: &str) -> io::Result<()> {
        if count.checked_mul(each).is_none_or(|bytes| bytes > self.left()) {
            return Err(bad(format!(
                "its header speaks of {count} {what}, for which it is too short: the file is cut off or damaged"
            )));
        }
        Ok(())
    }

    fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.file.read_exact(&mut bytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => bad("the file is cut off within its header: download or copy it again"),
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
        self.has_room(bytes, 1, "bytes")?;
        self.read += io::copy(&mut self.file.by_ref().take(bytes), &mut io::sink())?;
        Ok(())
    }

    fn text(&mut self, length: u64) -> io::Result<String> {
        self.has_room(length, 1, "letters")?;
        let mut bytes = Vec::new();
        self.read += self.file.by_ref().take(length).read_to_end(&mut bytes)? as u64;
        String::from_utf8(bytes).map_err(|_| bad("a name or text in its header is no UTF-8"))
    }

    fn name(&mut self) -> io::Result<String> {
        let length = self.u64()?;
        if length > NAME_LIMIT {
            return Err(bad(format!(
                "its header has a name of {length} letters: the file is damaged"
            )));
        }
        self.text(length)
    }

    fn value(&mut self, kind: u32, depth: u32) -> io::Result<Value> {
        Ok(match kind {
            0 => Value::Whole(self.take::<1>()?[0].into()),
            2 => Value::Whole(u16::from_le_bytes(self.take()?).into()),
            4 => Value::Whole(self.u32()?.into()),
            // A signed one that is below zero is no shape and no alignment; what it becomes is refused there.
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
            // Vocabularies: each text has its own length.
            8 => {
                self.has_room(count, 8, "texts in a list")?;
                for _ in 0..count {
                    let length = self.u64()?;
                    self.skip(length)?;
                }
            }
            9 if depth >= DEPTH_LIMIT => return Err(bad("its header has lists in lists in lists")),
            9 => {
                self.has_room(count, 12, "lists in a list")?;
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
                self.has_room(count, size, "values in a list")?;
                self.skip(count * size)?;
            }
        }
        Ok(Value::Skipped)
    }

    fn entry(&mut self) -> io::Result<Entry> {
        let name = self.name()?;
        let axes = self.u32()?;
        if axes > MOST_AXES {
            return Err(bad(format!(
                "tensor {name:?} has {axes} axes, where GGUF has at most {MOST_AXES}"
            )));
        }
        let sides = (0..axes).map(|_| self.u64()).collect::<io::Result<_>>()?;
        Ok(Entry {
            name,
            sides,
            kind: self.u32()?,
            offset: self.u64()?,
        })
    }
}

/// Bytes of a value of a kind of numbers.
fn size_of_value(kind: u32) -> io::Result<u64> {
    match kind {
        0 | 1 | 7 => Ok(1),
        2 | 3 => Ok(2),
        4..=6 => Ok(4),
        10..=12 => Ok(8),
        kind => Err(bad(format!(
            "its header has a value of the unknown kind {kind}: the file is damaged"
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

    /// A file of tensors (name, sides, kind, bytes) and noted shapes.
    fn file(tensors: &[(&str, &[u64], u32, usize)], shapes: &[(&str, &[i32])]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(3_u32.to_le_bytes());
        bytes.extend((tensors.len() as u64).to_le_bytes());
        bytes.extend((shapes.len() as u64 + 2).to_le_bytes());
        text(&mut bytes, "general.architecture");
        bytes.extend(8_u32.to_le_bytes());
        text(&mut bytes, "sd1");
        text(&mut bytes, "words");
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
        for (name, sides, kind, length) in tensors {
            text(&mut bytes, name);
            bytes.extend((sides.len() as u32).to_le_bytes());
            sides.iter().for_each(|side| bytes.extend(side.to_le_bytes()));
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

    fn said(bytes: &[u8]) -> String {
        read(bytes).unwrap_err().to_string()
    }

    #[test]
    fn shapes_are_turned_round_or_those_that_were_noted() {
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
        let (begin, end) = header.tensors["b"].place;
        assert_eq!((end - begin, begin % 32), (288, 0));
    }

    #[test]
    fn what_cannot_be_is_told() {
        assert!(said(b"GGU").contains("cut off"));
        assert!(said(b"safetensors").contains("no GGUF"));
        assert!(said(b"GGUF\x01\0\0\0").contains("version 1"));
        assert!(said(b"GGUF\0\0\0\x03").contains("big-endian"));
        let counted = |tensors: u64, pairs: u64| {
            [
                &b"GGUF\x03\0\0\0"[..],
                &tensors.to_le_bytes(),
                &pairs.to_le_bytes(),
                &[0; 64],
            ]
            .concat()
        };
        assert!(said(&counted(u64::MAX, 0)).contains("too short"));
        assert!(said(&counted(0, 1 << 60)).contains("too short"));
        let endless = file(&[("w", &[1 << 40, 1 << 40, 0], 0, 0)], &[]);
        assert!(said(&endless).contains("impossible shape"));
        let broken = file(&[("w", &[48, 2], 8, 96)], &[]);
        assert!(said(&broken).contains("\"w\" has rows of 48"), "{}", said(&broken));
        let other = file(&[("w", &[64], 8, 68)], &[("w", &[8, 9])]);
        assert!(said(&other).contains("not as many numbers"));
        let twice = file(&[("w", &[8], 0, 32), ("w", &[8], 0, 32)], &[]);
        assert!(said(&twice).contains("twice"));
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
        assert!(said(&deep).contains("lists in lists"), "{}", said(&deep));
    }

    #[test]
    fn every_cut_and_every_changed_byte_is_an_answer() {
        let bytes = file(
            &[("a", &[64, 3], 8, 204), ("b", &[256, 2], 12, 288)],
            &[("b", &[32, 16])],
        );
        for length in 0..bytes.len() {
            if let Ok(header) = read(&bytes[..length]) {
                // Only the filling behind the last tensor was cut.
                assert!(
                    header.tensors.values().all(|info| info.place.1 <= length as u64),
                    "{length}"
                );
            }
        }
        for at in 0..bytes.len() {
            for value in [0, 1, 0x7F, 0x80, 0xFF] {
                let mut changed = bytes.clone();
                changed[at] = value;
                if let Ok(header) = read(&changed) {
                    let inside = |info: &TensorInfo| info.place.0 <= info.place.1 && info.place.1 <= bytes.len() as u64;
                    assert!(header.tensors.values().all(inside), "byte {at} became {value}");
                }
            }
        }
    }
}
