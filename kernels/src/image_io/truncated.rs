//! Finds image files whose end is missing, without decoding them.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// How many bytes at the end of a file are searched for the end marker. Programs may write data after the marker.
const MAX_TAIL: u64 = 64 << 10;

/// Segments of a JPEG before its image data; more belong to no image.
const MAX_SEGMENTS: usize = 1000;

/// Whether the end of a PNG, JPEG or WebP file seems to be missing, for example after an interrupted download.
///
/// It is also true for a complete image with much data after its end, such as a motion photo with its video; decode the
/// file to be sure. It is false for a file that cannot be read or has another format; opening the file gives the error.
#[must_use]
pub fn is_cut_off(path: &Path) -> bool {
    lacks_end(path).unwrap_or(false)
}

fn lacks_end(path: &Path) -> std::io::Result<bool> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let mut first = [0; 12];
    file.read_exact(&mut first)?;
    // The RIFF header holds the length.
    if first.starts_with(b"RIFF") && first.ends_with(b"WEBP") {
        let [_, _, _, _, a, b, c, d, ..] = first;
        return Ok(u64::from(u32::from_le_bytes([a, b, c, d])) + 8 > length);
    }
    let (marker, header): (&[u8], u64) = match first {
        [0xff, 0xd8, ..] => (&[0xff, 0xd9], jpeg_header(&mut file, length)?),
        [0x89, b'P', b'N', b'G', ..] => (b"IEND", 0),
        _ => return Ok(false),
    };
    // The marker is usually within the last 64 bytes.
    for tail in [64, MAX_TAIL] {
        file.seek(SeekFrom::Start(length.saturating_sub(tail).max(header)))?;
        let mut bytes = Vec::new();
        (&mut file).take(tail).read_to_end(&mut bytes)?;
        if bytes.windows(marker.len()).any(|window| window == marker) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The bytes of a JPEG before its image data, at most `length`, those of the file. The thumbnail of a photo is among them, and has an end
/// marker of its own.
fn jpeg_header(file: &mut File, length: u64) -> std::io::Result<u64> {
    let mut at = 2;
    for _ in 0..MAX_SEGMENTS {
        if at + 4 > length {
            return Ok(length);
        }
        let mut head = [0; 4];
        file.seek(SeekFrom::Start(at))?;
        file.read_exact(&mut head)?;
        match head {
            // A byte of padding.
            [0xff, 0xff, ..] => at += 1,
            // The end of an image without data.
            [0xff, 0xd9, ..] => return Ok(at),
            [0xff, marker, high, low] => {
                at += 2 + u64::from(u16::from_be_bytes([high, low]));
                if marker == 0xda {
                    return Ok(at.min(length));
                }
            }
            _ => return Ok(at),
        }
    }
    Ok(at)
}
