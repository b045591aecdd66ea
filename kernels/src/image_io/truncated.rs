//! Finds image files whose end is missing, without decoding them.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// How many bytes at the end of a file are searched for the end marker. Programs may write data after the marker.
const MAX_TAIL: u64 = 64 << 10;

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
    let marker: &[u8] = match first {
        [0xff, 0xd8, ..] => &[0xff, 0xd9],
        [0x89, b'P', b'N', b'G', ..] => b"IEND",
        _ => return Ok(false),
    };
    // The marker is usually within the last 64 bytes.
    for tail in [64, MAX_TAIL] {
        file.seek(SeekFrom::Start(length.saturating_sub(tail)))?;
        let mut bytes = Vec::new();
        (&mut file).take(tail).read_to_end(&mut bytes)?;
        if bytes.windows(marker.len()).any(|window| window == marker) {
            return Ok(false);
        }
    }
    Ok(true)
}
