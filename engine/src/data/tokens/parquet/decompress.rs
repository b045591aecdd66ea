//! Decompresses pages into exactly as many bytes as their headers declare: a page of a few bytes that grows without an end is refused.

use brotli_decompressor::{BrotliDecoderParameter, Decompressor};
use parquet::basic::Compression;
use std::io::Read;

/// Compressed bytes that the decoder of Brotli reads at a time.
const BROTLI_BUFFER: usize = 1 << 16;

/// Whether pages of a codec can be decompressed. Otherwise its name.
pub(super) fn check_codec(codec: Compression) -> Result<(), String> {
    let name = match codec {
        Compression::UNCOMPRESSED
        | Compression::SNAPPY
        | Compression::GZIP(_)
        | Compression::ZSTD(_)
        | Compression::BROTLI(_)
        | Compression::LZ4_RAW => return Ok(()),
        Compression::LZ4 => "LZ4 in Hadoop's form",
        Compression::LZO => "LZO",
    };
    Err(format!(
        "it is compressed with {name}, and Snappy, gzip, Zstandard, Brotli, LZ4_RAW and no compression are read: write it again, in Python with \
         `pandas.read_parquet(file).to_parquet(file, compression=\"zstd\")`"
    ))
}

/// Decompresses `bytes` to `length` bytes.
pub(super) fn decompress(codec: Compression, bytes: &[u8], length: usize) -> Result<Vec<u8>, String> {
    let mut out = Vec::new();
    match codec {
        Compression::UNCOMPRESSED => out.extend_from_slice(bytes),
        Compression::SNAPPY => {
            let declared = snap::raw::decompress_len(bytes).map_err(|error| error.to_string())?;
            if declared != length {
                return Err(format!(
                    "a page declares {length} bytes and its compressed data {declared}"
                ));
            }
            out = snap::raw::Decoder::new()
                .decompress_vec(bytes)
                .map_err(|error| error.to_string())?;
        }
        Compression::GZIP(_) => read_to_end(flate2::read::MultiGzDecoder::new(bytes), length, &mut out)?,
        Compression::ZSTD(_) => {
            let decoder = ruzstd::decoding::StreamingDecoder::new(bytes).map_err(|error| error.to_string())?;
            read_to_end(decoder, length, &mut out)?;
        }
        Compression::BROTLI(_) => {
            let mut decoder = Decompressor::new(bytes, BROTLI_BUFFER);
            // Windows of more than 16 MiB are not part of RFC 7932, and take up to a gigabyte.
            decoder.set_parameter(BrotliDecoderParameter::BROTLI_DECODER_PARAM_LARGE_WINDOW, 0);
            read_to_end(decoder, length, &mut out)?;
        }
        Compression::LZ4_RAW => decompress_lz4(bytes, length, &mut out)?,
        other => check_codec(other)?,
    }
    match out.len() == length {
        true => Ok(out),
        false => Err(format!("a page declares {length} bytes and has {}", out.len())),
    }
}

/// The shortest copy of an LZ4 block.
const LZ4_MIN_COPY: usize = 4;
/// The number of 4 bits that says that bytes follow which are added to it.
const LZ4_LONG: usize = 15;

/// Decompresses an LZ4 block (lz4/lz4, `doc/lz4_Block_format.md`): literals, and copies of what was decompressed before.
fn decompress_lz4(bytes: &[u8], length: usize, out: &mut Vec<u8>) -> Result<(), String> {
    let damaged = || "its LZ4 data are damaged".to_owned();
    let mut rest = bytes;
    loop {
        let token = usize::from(take_byte(&mut rest).ok_or_else(damaged)?);
        let literals = lz4_count(token >> 4, &mut rest).ok_or_else(damaged)?;
        let (copied, after) = rest.split_at_checked(literals).ok_or_else(damaged)?;
        if literals > length.saturating_sub(out.len()) {
            return Err(damaged());
        }
        out.extend_from_slice(copied);
        rest = after;
        // The last sequence has literals alone.
        if rest.is_empty() {
            return Ok(());
        }
        let (low, high) = (take_byte(&mut rest), take_byte(&mut rest));
        let (Some(low), Some(high)) = (low, high) else {
            return Err(damaged());
        };
        let offset = usize::from(u16::from_le_bytes([low, high]));
        let count = lz4_count(token & LZ4_LONG, &mut rest).ok_or_else(damaged)? + LZ4_MIN_COPY;
        if offset == 0 || offset > out.len() || count > length.saturating_sub(out.len()) {
            return Err(damaged());
        }
        // What is copied may be what this copy writes.
        let start = out.len() - offset;
        for index in 0..count {
            let byte = out[start + index];
            out.push(byte);
        }
    }
}

fn take_byte(rest: &mut &[u8]) -> Option<u8> {
    let (first, after) = rest.split_first()?;
    *rest = after;
    Some(*first)
}

/// A count of which a token has 4 bits.
fn lz4_count(bits: usize, rest: &mut &[u8]) -> Option<usize> {
    let mut count = bits;
    if bits == LZ4_LONG {
        loop {
            let byte = take_byte(rest)?;
            count = count.checked_add(usize::from(byte))?;
            if byte != u8::MAX {
                break;
            }
        }
    }
    Some(count)
}

/// Reads up to one byte more than `length`, which the caller notices.
fn read_to_end(decoder: impl Read, length: usize, out: &mut Vec<u8>) -> Result<(), String> {
    let read = decoder.take(length as u64 + 1).read_to_end(out);
    read.map(|_| ()).map_err(|error| error.to_string())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::decompress;
    use parquet::basic::Compression;

    /// RFC 7932: an empty stream, bytes that are stored as they are, and damaged ones.
    #[test]
    fn brotli_streams_are_read_and_damaged_ones_are_errors() {
        let read = |bytes: &[u8], length| decompress(Compression::BROTLI(Default::default()), bytes, length);
        assert_eq!(read(&[0x06], 0).unwrap(), b"");
        // A window of 16 bits; three bytes in an uncompressed block; an empty last block.
        let stored = [0x20, 0x00, 0x10, b'a', b'b', b'c', 0x03];
        assert_eq!(read(&stored, 3).unwrap(), b"abc");
        for (damaged, length) in [
            (&stored[..], 2),
            (&stored[..], 4),
            (&stored[..5], 3),
            (&[][..], 3),
            (&[0xff; 9][..], 3),
            // A window of 2^30 bytes, which only large windows have.
            (&[0x11, 30, 0x06][..], 0),
        ] {
            assert!(read(damaged, length).is_err(), "{damaged:?}");
        }
    }

    #[test]
    fn lz4_blocks_are_read_and_damaged_ones_are_errors() {
        let read = |bytes: &[u8], length| decompress(Compression::LZ4_RAW, bytes, length);
        assert_eq!(read(&[0x30, b'a', b'b', b'c'], 3).unwrap(), b"abc");
        assert_eq!(read(&[0x00], 0).unwrap(), b"");
        // A copy of its own bytes, with a length of further bytes, and the last literals.
        let long = [0x1f, b'a', 1, 0, 255, 0, 0x10, b'z'];
        let expected = [vec![b'a'; 1 + 15 + 255 + 4], vec![b'z']].concat();
        assert_eq!(read(&long, expected.len()).unwrap(), expected);
        for (damaged, length) in [
            (&[][..], 0),
            // Fewer literals than declared, and more than there is room for.
            (&[0x30, b'a'][..], 3),
            (&[0x30, b'a', b'b', b'c'][..], 2),
            // A copy from before the beginning, from nowhere, of half an offset, and of more than there is room for.
            (&[0x10, b'a', 2, 0, 0x10, b'z'][..], 6),
            (&[0x10, b'a', 0, 0, 0x10, b'z'][..], 6),
            (&[0x10, b'a', 1][..], 6),
            (&long[..], 20),
            (&[0xf0, 255, 255][..], 1000),
            // Not as many bytes as declared.
            (&[0x30, b'a', b'b', b'c'][..], 4),
        ] {
            assert!(read(damaged, length).is_err(), "{damaged:?}");
        }
    }
}
