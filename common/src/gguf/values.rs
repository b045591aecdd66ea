//! Reads all metadata of a GGUF file: language models have their config and their tokenizer there.

use super::{DEPTH_LIMIT, Source, bad, open};
use std::collections::BTreeMap;
use std::io::{self, Read};

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum MetadataValue {
    /// Text.
    Text(String),
    /// A whole number of any width. Unsigned numbers above `i64::MAX` become this number.
    Whole(i64),
    /// A float of any width.
    Float(f64),
    /// True or false.
    Flag(bool),
    /// A list of texts.
    Texts(Vec<String>),
    /// A list of whole numbers.
    Wholes(Vec<i64>),
    /// A list of floats.
    Floats(Vec<f32>),
    /// A list of lists, or of truth values, which no model needs.
    Skipped,
}

/// Reads the metadata of a file of `length` bytes, by their keys. Lists are as long as the header allows: at most as long as the file.
///
/// # Errors
/// When the file is not GGUF, is truncated, or its header is inconsistent.
pub fn read_metadata(file: impl Read, length: u64) -> io::Result<BTreeMap<String, MetadataValue>> {
    let mut source = Source::new(file, length);
    let (_, pairs) = open(&mut source)?;
    let mut values = BTreeMap::new();
    for _ in 0..pairs {
        let key = source.name()?;
        let kind = source.u32()?;
        values.insert(key, source.metadata_value(kind)?);
    }
    Ok(values)
}

impl<R: Read> Source<R> {
    fn metadata_value(&mut self, kind: u32) -> io::Result<MetadataValue> {
        Ok(match kind {
            0..=5 | 10 | 11 => MetadataValue::Whole(self.whole(kind)?),
            6 | 12 => MetadataValue::Float(self.float(kind)?),
            7 => MetadataValue::Flag(self.take::<1>()?[0] != 0),
            8 => MetadataValue::Text(self.long_text()?),
            9 => self.metadata_list()?,
            other => return Err(unknown_type(other)),
        })
    }

    fn metadata_list(&mut self) -> io::Result<MetadataValue> {
        let (kind, count) = (self.u32()?, self.u64()?);
        Ok(match kind {
            0..=5 | 10 | 11 => {
                self.check_fits(count, width(kind), "values in an array")?;
                MetadataValue::Wholes((0..count).map(|_| self.whole(kind)).collect::<io::Result<_>>()?)
            }
            6 | 12 => {
                self.check_fits(count, width(kind), "values in an array")?;
                let float = |_| self.float(kind).map(|number| number as f32);
                MetadataValue::Floats((0..count).map(float).collect::<io::Result<_>>()?)
            }
            7 => {
                self.skip(count)?;
                MetadataValue::Skipped
            }
            8 => {
                self.check_fits(count, 8, "strings in an array")?;
                MetadataValue::Texts((0..count).map(|_| self.long_text()).collect::<io::Result<_>>()?)
            }
            9 => {
                self.check_fits(count, 12, "arrays in an array")?;
                for _ in 0..count {
                    self.list(DEPTH_LIMIT - 1)?;
                }
                MetadataValue::Skipped
            }
            other => return Err(unknown_type(other)),
        })
    }

    /// A text of any length that the header has.
    fn long_text(&mut self) -> io::Result<String> {
        let length = self.u64()?;
        self.text(length)
    }

    fn whole(&mut self, kind: u32) -> io::Result<i64> {
        Ok(match kind {
            0 => self.take::<1>()?[0].into(),
            1 => i8::from_le_bytes(self.take()?).into(),
            2 => u16::from_le_bytes(self.take()?).into(),
            3 => i16::from_le_bytes(self.take()?).into(),
            4 => self.u32()?.into(),
            5 => i32::from_le_bytes(self.take()?).into(),
            10 => i64::try_from(self.u64()?).unwrap_or(i64::MAX),
            11 => i64::from_le_bytes(self.take()?),
            other => return Err(unknown_type(other)),
        })
    }

    fn float(&mut self, kind: u32) -> io::Result<f64> {
        match kind {
            6 => Ok(f32::from_le_bytes(self.take()?).into()),
            _ => Ok(f64::from_le_bytes(self.take()?)),
        }
    }
}

/// Bytes of a number.
fn width(kind: u32) -> u64 {
    match kind {
        0 | 1 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        _ => 8,
    }
}

fn unknown_type(kind: u32) -> io::Error {
    bad(format!(
        "its header has a value of the unknown type {kind}; the file is damaged"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(bytes: &mut Vec<u8>, text: &str) {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    }

    /// A file without tensors that has a value of each kind.
    fn file() -> Vec<u8> {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(0_u64.to_le_bytes());
        bytes.extend(5_u64.to_le_bytes());
        text(&mut bytes, "llama.block_count");
        bytes.extend([4_u32, 7].map(u32::to_le_bytes).concat());
        text(&mut bytes, "llama.epsilon");
        bytes.extend(6_u32.to_le_bytes());
        bytes.extend(0.5_f32.to_le_bytes());
        text(&mut bytes, "flag");
        bytes.extend(7_u32.to_le_bytes());
        bytes.push(1);
        text(&mut bytes, "tokens");
        bytes.extend([9_u32, 8].map(u32::to_le_bytes).concat());
        bytes.extend(2_u64.to_le_bytes());
        text(&mut bytes, "a");
        text(&mut bytes, "é");
        text(&mut bytes, "types");
        bytes.extend([9_u32, 5].map(u32::to_le_bytes).concat());
        bytes.extend(3_u64.to_le_bytes());
        [1_i32, -2, 3]
            .iter()
            .for_each(|number| bytes.extend(number.to_le_bytes()));
        bytes
    }

    #[test]
    fn values_of_every_kind_are_read() {
        let bytes = file();
        let values = read_metadata(bytes.as_slice(), bytes.len() as u64).unwrap();
        assert_eq!(values["llama.block_count"], MetadataValue::Whole(7));
        assert_eq!(values["llama.epsilon"], MetadataValue::Float(0.5));
        assert_eq!(values["flag"], MetadataValue::Flag(true));
        assert_eq!(values["tokens"], MetadataValue::Texts(vec!["a".into(), "é".into()]));
        assert_eq!(values["types"], MetadataValue::Wholes(vec![1, -2, 3]));
    }

    #[test]
    fn every_truncation_is_an_error_and_every_changed_byte_is_handled() {
        let bytes = file();
        for length in 0..bytes.len() {
            assert!(read_metadata(&bytes[..length], length as u64).is_err(), "{length}");
        }
        for at in 0..bytes.len() {
            for value in [0, 1, 9, 0x7F, 0xFF] {
                let mut changed = bytes.clone();
                changed[at] = value;
                let _ = read_metadata(changed.as_slice(), changed.len() as u64);
            }
        }
    }
}
