//! Whether an image file seems to have its end, told without decoding it.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// Programs put notes behind an image's end; behind more than this it is not looked for.
const TAIL: u64 = 64 << 10;

/// Whether the end of a PNG, JPEG or WebP file seems to be missing, as after a broken download. A whole one with much behind it,
/// such as a photo with its film, seems so too: whoever decodes it knows. A file that cannot be read, or is of another format,
/// does not: whoever opens it says why.
#[must_use]
pub fn is_cut_off(path: &Path) -> bool {
    check(path).unwrap_or(false)
}

fn check(path: &Path) -> std::io::Result<bool> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let mut first = [0; 12];
    file.read_exact(&mut first)?;
    // RIFF says how long it is.
    if first.starts_with(b"RIFF") && first.ends_with(b"WEBP") {
        let [_, _, _, _, a, b, c, d, ..] = first;
        return Ok(u64::from(u32::from_le_bytes([a, b, c, d])) + 8 > length);
    }
    let end: &[u8] = match first {
        [0xff, 0xd8, ..] => &[0xff, 0xd9],
        [0x89, b'P', b'N', b'G', ..] => b"IEND",
        _ => return Ok(false),
    };
    // Mostly it is at the very end.
    for tail in [64, TAIL] {
        file.seek(SeekFrom::Start(length.saturating_sub(tail)))?;
        let mut bytes = Vec::new();
        (&mut file).take(tail).read_to_end(&mut bytes)?;
        if bytes.windows(end.len()).any(|window| window == end) {
            return Ok(false);
        }
    }
    Ok(true)
}
