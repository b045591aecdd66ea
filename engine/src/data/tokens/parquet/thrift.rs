//! Reads Thrift's compact protocol, in which Parquet's footer and page headers are written, without trusting any length in it.
//!
//! Source: the specification of the protocol, `thrift/doc/specs/thrift-compact-protocol.md` of Apache Thrift.

/// The deepest nesting of structs and lists. Parquet's own structs have six levels.
const MAX_DEPTH: u32 = 32;
/// The most items of a list: a data set has fewer columns and row groups.
const MAX_ITEMS: u64 = 1 << 20;

/// What is wrong with the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ThriftError {
    /// They end too early.
    End,
    /// They are no valid Thrift.
    Invalid,
}

/// The type of a value. Values of other types have no field in Parquet's structs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ThriftType {
    True,
    False,
    Byte,
    /// Of 16, 32 or 64 bits.
    Int,
    Double,
    Binary,
    List,
    Map,
    Struct,
    Uuid,
}

impl ThriftType {
    fn read(bits: u8) -> Result<Self, ThriftError> {
        Ok(match bits {
            1 => Self::True,
            2 => Self::False,
            3 => Self::Byte,
            4..=6 => Self::Int,
            7 => Self::Double,
            8 => Self::Binary,
            9 | 10 => Self::List,
            11 => Self::Map,
            12 => Self::Struct,
            13 => Self::Uuid,
            _ => return Err(ThriftError::Invalid),
        })
    }
}

/// Reads values one after another.
#[derive(Clone, Debug)]
pub(super) struct ThriftReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> ThriftReader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// The number of bytes that were read.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    fn byte(&mut self) -> Result<u8, ThriftError> {
        let byte = *self.bytes.get(self.at).ok_or(ThriftError::End)?;
        self.at += 1;
        Ok(byte)
    }

    fn take(&mut self, count: u64) -> Result<&'a [u8], ThriftError> {
        let count = usize::try_from(count).map_err(|_| ThriftError::Invalid)?;
        let end = self.at.checked_add(count).ok_or(ThriftError::Invalid)?;
        let taken = self.bytes.get(self.at..end).ok_or(ThriftError::End)?;
        self.at = end;
        Ok(taken)
    }

    /// A number without a sign, seven bits in each byte.
    pub(super) fn varint(&mut self) -> Result<u64, ThriftError> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(ThriftError::Invalid)
    }

    /// A number with a sign.
    pub(super) fn int(&mut self) -> Result<i64, ThriftError> {
        let number = self.varint()?;
        Ok((number >> 1) as i64 ^ -((number & 1) as i64))
    }

    /// The next field of a struct: its number and the type of its value, which follows. `None`: the struct ends. `last`: the number of the field
    /// before it, 0 for the first.
    pub(super) fn field(&mut self, last: &mut i16) -> Result<Option<(i16, ThriftType)>, ThriftError> {
        let header = self.byte()?;
        if header & 0xf == 0 {
            return Ok(None);
        }
        let kind = ThriftType::read(header & 0xf)?;
        let id = match header >> 4 {
            0 => i16::try_from(self.int()?).ok(),
            delta => last.checked_add(i16::from(delta)),
        };
        *last = id.ok_or(ThriftError::Invalid)?;
        Ok(Some((*last, kind)))
    }

    /// The number of items of a list and their type. The items follow.
    pub(super) fn list(&mut self) -> Result<(u64, ThriftType), ThriftError> {
        let header = self.byte()?;
        if header == 0 {
            // As some writers write an empty list.
            return Ok((0, ThriftType::Byte));
        }
        let kind = ThriftType::read(header & 0xf)?;
        let count = match header >> 4 {
            15 => self.varint()?,
            count => u64::from(count),
        };
        match count <= MAX_ITEMS {
            true => Ok((count, kind)),
            false => Err(ThriftError::Invalid),
        }
    }

    /// Skips the value of a field.
    pub(super) fn skip(&mut self, kind: ThriftType) -> Result<(), ThriftError> {
        self.skip_value(kind, false, MAX_DEPTH)
    }

    /// `in_list`: truth values take a byte there.
    fn skip_value(&mut self, kind: ThriftType, in_list: bool, depth: u32) -> Result<(), ThriftError> {
        if depth == 0 {
            return Err(ThriftError::Invalid);
        }
        match kind {
            ThriftType::True | ThriftType::False if in_list => self.take(1).map(|_| ()),
            ThriftType::True | ThriftType::False => Ok(()),
            ThriftType::Byte => self.take(1).map(|_| ()),
            ThriftType::Int => self.varint().map(|_| ()),
            ThriftType::Double => self.take(8).map(|_| ()),
            ThriftType::Uuid => self.take(16).map(|_| ()),
            ThriftType::Binary => {
                let count = self.varint()?;
                self.take(count).map(|_| ())
            }
            ThriftType::List => {
                let (count, kind) = self.list()?;
                (0..count).try_for_each(|_| self.skip_value(kind, true, depth - 1))
            }
            // Parquet has no maps.
            ThriftType::Map => Err(ThriftError::Invalid),
            ThriftType::Struct => {
                let mut last = 0;
                while let Some((_, kind)) = self.field(&mut last)? {
                    self.skip_value(kind, false, depth - 1)?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_and_skipped() {
        // Field 1: 150. Field 2: a list of two texts. Field 20: true. Field 21: a struct with field 1: -3. The end.
        let bytes = [
            0x15, 0xac, 0x02, 0x19, 0x28, 1, b'a', 2, b'b', b'c', 0x01, 40, 0x1c, 0x15, 0x05, 0, 0, 99,
        ];
        let mut reader = ThriftReader::new(&bytes);
        let mut last = 0;
        assert_eq!(reader.field(&mut last), Ok(Some((1, ThriftType::Int))));
        assert_eq!(reader.int(), Ok(150));
        assert_eq!(reader.field(&mut last), Ok(Some((2, ThriftType::List))));
        reader.skip(ThriftType::List).unwrap();
        assert_eq!(reader.field(&mut last), Ok(Some((20, ThriftType::True))));
        assert_eq!(reader.field(&mut last), Ok(Some((21, ThriftType::Struct))));
        let mut inner = 0;
        assert_eq!(reader.field(&mut inner), Ok(Some((1, ThriftType::Int))));
        assert_eq!(reader.int(), Ok(-3));
        assert_eq!(reader.field(&mut inner), Ok(None));
        assert_eq!(reader.field(&mut last), Ok(None));
        assert_eq!(reader.position(), bytes.len() - 1);
        for end in 0..bytes.len() - 1 {
            let mut cut = ThriftReader::new(&bytes[..end]);
            assert_eq!(cut.skip(ThriftType::Struct), Err(ThriftError::End), "{end}");
        }
    }

    #[test]
    fn lengths_and_depths_are_limited() {
        let skip = |bytes: &[u8], kind| ThriftReader::new(bytes).skip(kind);
        // A text and a list of 2^63 bytes or items.
        let huge = [0xff; 9];
        assert_eq!(
            skip(&[&huge[..], &[0x7f]].concat(), ThriftType::Binary),
            Err(ThriftError::Invalid)
        );
        assert_eq!(
            skip(&[&[0xfc][..], &huge[..8], &[0x7f]].concat(), ThriftType::List),
            Err(ThriftError::Invalid)
        );
        // Lists in lists without an end.
        assert_eq!(skip(&[0x19; 100_000], ThriftType::List), Err(ThriftError::Invalid));
        assert_eq!(skip(&[0xff; 20], ThriftType::Int), Err(ThriftError::Invalid));
    }
}
