//! Decompresses pages into exactly as many bytes as their headers declare: a page of a few bytes that grows without an end is refused.

use parquet::basic::Compression;
use std::io::Read;

/// Whether pages of a codec can be decompressed. Otherwise its name.
pub(super) fn check_codec(codec: Compression) -> Result<(), String> {
    let name = match codec {
        Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::GZIP(_) | Compression::ZSTD(_) => return Ok(()),
        Compression::LZ4_RAW | Compression::LZ4 => "LZ4",
        Compression::BROTLI(_) => "Brotli",
        Compression::LZO => "LZO",
    };
    Err(format!(
        "it is compressed with {name}, and Snappy, gzip, Zstandard and no compression are read: write it again, in Python with \
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
        other => check_codec(other)?,
    }
    match out.len() == length {
        true => Ok(out),
        false => Err(format!("a page declares {length} bytes and has {}", out.len())),
    }
}

/// Reads up to one byte more than `length`, which the caller notices.
fn read_to_end(decoder: impl Read, length: usize, out: &mut Vec<u8>) -> Result<(), String> {
    let read = decoder.take(length as u64 + 1).read_to_end(out);
    read.map(|_| ()).map_err(|error| error.to_string())
}
