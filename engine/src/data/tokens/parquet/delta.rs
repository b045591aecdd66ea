//! Checks values that are encoded as differences, before the crate `parquet` allocates as many as they declare.
//!
//! Source: "Delta Encoding" of Parquet's `Encodings.md`.

use super::thrift::{ThriftError, ThriftReader};

/// The largest block, in values. Writers use 128 or 256.
const MAX_BLOCK: u64 = 1 << 16;

/// What numbers that are encoded as `DELTA_BINARY_PACKED` declare.
struct Header {
    /// Values of a block.
    block: u64,
    /// Parts of a block, each of which has a width.
    parts: u64,
    values: u64,
    /// The bytes of the header.
    length: usize,
}

/// Reads and checks the header of numbers of which there must be at most `max`.
fn read_header(bytes: &[u8], max: u32) -> Result<Header, String> {
    let mut reader = ThriftReader::new(bytes);
    let mut number = || reader.varint().map_err(damaged);
    let (block, parts, values) = (number()?, number()?, number()?);
    // The first value.
    number()?;
    if block == 0 || block > MAX_BLOCK || block % 128 != 0 {
        return Err(format!(
            "its differences are in blocks of {block} values, and blocks are multiples of 128 of up to {MAX_BLOCK}"
        ));
    }
    if parts == 0 || block % parts != 0 || (block / parts) % 32 != 0 {
        return Err(format!(
            "its differences are in {parts} parts of blocks of {block} values"
        ));
    }
    if values > u64::from(max) {
        return Err(format!("it declares {values} differences and {max} values"));
    }
    Ok(Header {
        block,
        parts,
        values,
        length: reader.position(),
    })
}

fn damaged(_: ThriftError) -> String {
    "its differences are damaged".to_owned()
}

/// Checks what numbers declare, of which there must be at most `max`.
pub(super) fn check_header(bytes: &[u8], max: u32) -> Result<(), String> {
    read_header(bytes, max).map(|_| ())
}

/// As [`check_header`]. Returns where the numbers end.
pub(super) fn check_numbers(bytes: &[u8], max: u32) -> Result<usize, String> {
    let Header {
        block,
        parts,
        values,
        length,
    } = read_header(bytes, max)?;
    let part = block / parts;
    // The first value is in the header.
    let mut left = values.saturating_sub(1);
    let mut at = length as u64;
    while left > 0 {
        let rest = usize::try_from(at).ok().and_then(|at| bytes.get(at..));
        let rest = rest.ok_or("it ends within its differences")?;
        let mut reader = ThriftReader::new(rest);
        reader.varint().map_err(damaged)?;
        let start = reader.position();
        let widths = start
            .checked_add(parts as usize)
            .and_then(|end| rest.get(start..end))
            .ok_or("it ends within its differences")?;
        at += (start + widths.len()) as u64;
        for width in widths {
            if left == 0 {
                break;
            }
            if *width > 64 {
                return Err(format!("a difference of {width} bits"));
            }
            at += u64::from(*width) * part / 8;
            left = left.saturating_sub(part);
        }
    }
    match usize::try_from(at) {
        Ok(end) if end <= bytes.len() => Ok(end),
        _ => Err("it ends within its differences".to_owned()),
    }
}

/// Checks texts that are encoded as `DELTA_BYTE_ARRAY`: the lengths of what each has in common with the text before it, then the lengths of
/// the rest.
pub(super) fn check_texts(bytes: &[u8], max: u32) -> Result<(), String> {
    let end = check_numbers(bytes, max)?;
    check_numbers(&bytes[end..], max).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_walked_and_counts_are_limited() {
        // 130 values: blocks of 128 in 4 parts of 32, the first value 0; the first block has 4 parts of 1 bit, the second one difference in a part of
        // 2 bits, whose other widths do not count.
        let header = [0x80, 0x01, 0x04, 0x82, 0x01, 0x00];
        let first = [&[0, 1, 1, 1, 1][..], &[0; 16]].concat();
        let second = [&[0, 2, 9, 9, 9][..], &[0; 8]].concat();
        let bytes = [&header[..], &first, &second, &[7, 7]].concat();
        assert_eq!(check_numbers(&bytes, 130), Ok(bytes.len() - 2));
        let message = check_numbers(&bytes, 129).unwrap_err();
        assert!(message.contains("130 differences and 129 values"), "{message}");
        for end in 0..bytes.len() - 2 {
            check_numbers(&bytes[..end], 130).unwrap_err();
        }
        // One value needs no block.
        assert_eq!(check_numbers(&[0x80, 0x01, 0x04, 1, 8], 1), Ok(5));
        for (block, parts) in [(0, 4), (127, 4), (128, 0), (128, 3), (128, 8)] {
            // One value, the number 8, after what is wrong.
            let bytes = [varint(block), vec![parts, 1, 16], vec![0; 20]].concat();
            check_numbers(&bytes, 1).unwrap_err();
        }
        let bytes = [varint(1 << 23), vec![4, 1, 16], vec![0; 20]].concat();
        assert!(check_numbers(&bytes, 1).unwrap_err().contains("8388608"));
    }

    fn varint(mut number: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        while number > 0x7f {
            bytes.push(number as u8 | 0x80);
            number >>= 7;
        }
        bytes.push(number as u8);
        bytes
    }
}
