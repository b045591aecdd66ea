//! The header of a page: `PageHeader` of Parquet's `parquet.thrift`.

use super::thrift::{ThriftError, ThriftReader, ThriftType};
use parquet::basic::Encoding;

/// What a page contains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PageKind {
    /// The distinct values of a column, to which data pages refer.
    Dictionary,
    /// Values.
    Data {
        definition_levels: i64,
        repetition_levels: i64,
    },
    /// Values after levels that are not compressed.
    DataV2 {
        nulls: u32,
        rows: u32,
        definition_bytes: u32,
        repetition_bytes: u32,
        is_compressed: bool,
    },
    /// Nothing that is needed to read values.
    Other,
}

/// The header of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PageHeader {
    pub(super) kind: PageKind,
    /// The number of values, nulls included.
    pub(super) values: u32,
    /// The encoding of the values, as Parquet numbers encodings.
    pub(super) encoding: i64,
    /// Bytes after the header, as they are in the file.
    pub(super) compressed_bytes: u32,
    /// The same bytes when they are decompressed.
    pub(super) uncompressed_bytes: u32,
    /// The checksum of the bytes in the file.
    pub(super) crc: Option<u32>,
}

/// The encoding with a number. `None`: there is none.
pub(super) fn encoding(number: i64) -> Option<Encoding> {
    #[expect(deprecated, reason = "files may still have it, and it is refused by name")]
    let bit_packed = Encoding::BIT_PACKED;
    Some(match number {
        0 => Encoding::PLAIN,
        2 => Encoding::PLAIN_DICTIONARY,
        3 => Encoding::RLE,
        4 => bit_packed,
        5 => Encoding::DELTA_BINARY_PACKED,
        6 => Encoding::DELTA_LENGTH_BYTE_ARRAY,
        7 => Encoding::DELTA_BYTE_ARRAY,
        8 => Encoding::RLE_DICTIONARY,
        9 => Encoding::BYTE_STREAM_SPLIT,
        _ => return None,
    })
}

/// The fields of a header of values, of all kinds of pages.
#[derive(Default)]
struct Numbers {
    ints: [Option<i64>; 8],
    is_compressed: Option<bool>,
}

impl Numbers {
    /// Reads a struct whose fields are numbers, and truth values and statistics, which are not needed.
    fn read(reader: &mut ThriftReader<'_>) -> Result<Self, ThriftError> {
        let (mut numbers, mut last) = (Self::default(), 0);
        while let Some((id, kind)) = reader.field(&mut last)? {
            match kind {
                ThriftType::Int if (1..=8).contains(&id) => numbers.ints[id as usize - 1] = Some(reader.int()?),
                ThriftType::True | ThriftType::False if id == 7 => {
                    numbers.is_compressed = Some(kind == ThriftType::True)
                }
                _ => reader.skip(kind)?,
            }
        }
        Ok(numbers)
    }

    /// The number of a field, which Parquet counts from 1.
    fn int(&self, id: usize) -> Result<i64, ThriftError> {
        self.ints[id - 1].ok_or(ThriftError::Invalid)
    }

    fn count(&self, id: usize) -> Result<u32, ThriftError> {
        count(self.int(id)?)
    }
}

/// A count, which Parquet writes as a number with a sign.
fn count(number: i64) -> Result<u32, ThriftError> {
    u32::try_from(number)
        .ok()
        .filter(|count| *count <= i32::MAX as u32)
        .ok_or(ThriftError::Invalid)
}

impl PageHeader {
    /// Reads the header at the beginning of some bytes. Returns its length too.
    pub(super) fn read(bytes: &[u8]) -> Result<(Self, usize), ThriftError> {
        let mut reader = ThriftReader::new(bytes);
        let mut ints: [Option<i64>; 4] = [None; 4];
        // Of data, of a dictionary, of data in version 2.
        let mut parts: [Option<Numbers>; 3] = [None, None, None];
        let mut last = 0;
        while let Some((id, kind)) = reader.field(&mut last)? {
            match (id, kind) {
                (1..=4, ThriftType::Int) => ints[id as usize - 1] = Some(reader.int()?),
                (5, ThriftType::Struct) => parts[0] = Some(Numbers::read(&mut reader)?),
                (7, ThriftType::Struct) => parts[1] = Some(Numbers::read(&mut reader)?),
                (8, ThriftType::Struct) => parts[2] = Some(Numbers::read(&mut reader)?),
                _ => reader.skip(kind)?,
            }
        }
        let [Some(kind), Some(uncompressed), Some(compressed), crc] = ints else {
            return Err(ThriftError::Invalid);
        };
        let part = |index: usize| parts[index].as_ref().ok_or(ThriftError::Invalid);
        let (kind, values, encoding) = match kind {
            0 => {
                let part = part(0)?;
                let kind = PageKind::Data {
                    definition_levels: part.int(3)?,
                    repetition_levels: part.int(4)?,
                };
                (kind, part.count(1)?, part.int(2)?)
            }
            2 => {
                let part = part(1)?;
                (PageKind::Dictionary, part.count(1)?, part.int(2)?)
            }
            3 => {
                let part = part(2)?;
                let kind = PageKind::DataV2 {
                    nulls: part.count(2)?,
                    rows: part.count(3)?,
                    definition_bytes: part.count(5)?,
                    repetition_bytes: part.count(6)?,
                    is_compressed: part.is_compressed.unwrap_or(true),
                };
                (kind, part.count(1)?, part.int(4)?)
            }
            _ => (PageKind::Other, 0, 0),
        };
        let header = Self {
            kind,
            values,
            encoding,
            compressed_bytes: count(compressed)?,
            uncompressed_bytes: count(uncompressed)?,
            // Written as a number with a sign.
            crc: crc.map(|crc| crc as u32),
        };
        Ok((header, reader.position()))
    }
}
