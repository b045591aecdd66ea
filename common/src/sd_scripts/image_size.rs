//! Width and height of an image, from the first bytes of its file, as stored: EXIF rotation is not applied.

use crate::fsutil::regular;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// Segments of a JPEG before its size; more belong to no image.
const MAX_SEGMENTS: usize = 1000;

/// Reads the size of a PNG, JPEG, WebP or BMP file. `None` if it is none of these.
pub(super) fn image_size(path: &Path) -> Option<(u32, u32)> {
    let (mut file, _) = regular::open(path).ok()?;
    let mut start = Vec::new();
    Read::by_ref(&mut file).take(32).read_to_end(&mut start).ok()?;
    let size = match start.get(..4)? {
        b"\x89PNG" => (big(start.get(16..20)?), big(start.get(20..24)?)),
        b"RIFF" => webp(&start)?,
        [0xff, 0xd8, ..] => jpeg(&mut file)?,
        [b'B', b'M', ..] => (
            little(start.get(18..22)?),
            (little(start.get(22..26)?) as i32).unsigned_abs(),
        ),
        _ => return None,
    };
    (size.0 > 0 && size.1 > 0).then_some(size)
}

fn big(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |number, byte| number << 8 | u32::from(*byte))
}

fn little(bytes: &[u8]) -> u32 {
    bytes
        .iter()
        .rev()
        .fold(0, |number, byte| number << 8 | u32::from(*byte))
}

fn webp(start: &[u8]) -> Option<(u32, u32)> {
    match start.get(12..16)? {
        b"VP8 " => Some((little(start.get(26..28)?) & 0x3fff, little(start.get(28..30)?) & 0x3fff)),
        b"VP8L" => {
            let bits = little(start.get(21..25)?);
            Some(((bits & 0x3fff) + 1, (bits >> 14 & 0x3fff) + 1))
        }
        b"VP8X" => Some((little(start.get(24..27)?) + 1, little(start.get(27..30)?) + 1)),
        _ => None,
    }
}

fn jpeg(file: &mut (impl Read + Seek)) -> Option<(u32, u32)> {
    file.seek(SeekFrom::Start(2)).ok()?;
    for _ in 0..MAX_SEGMENTS {
        let mut head = [0; 4];
        file.read_exact(&mut head).ok()?;
        let [0xff, marker, high, low] = head else { return None };
        if marker == 0xff {
            // A byte of padding.
            file.seek(SeekFrom::Current(-3)).ok()?;
            continue;
        }
        let length = u16::from_be_bytes([high, low]);
        let is_frame = (0xc0..=0xcf).contains(&marker) && !matches!(marker, 0xc4 | 0xc8 | 0xcc);
        if is_frame {
            let mut frame = [0; 5];
            file.read_exact(&mut frame).ok()?;
            return Some((big(frame.get(3..5)?), big(frame.get(1..3)?)));
        }
        file.seek(SeekFrom::Current(i64::from(length) - 2)).ok()?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_from_the_first_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let size = |bytes: &[u8]| {
            let path = folder.path().join("image");
            std::fs::write(&path, bytes).unwrap();
            image_size(&path)
        };
        let png = [
            b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".as_slice(),
            &640_u32.to_be_bytes(),
            &480_u32.to_be_bytes(),
        ]
        .concat();
        assert_eq!(size(&png), Some((640, 480)));
        // A comment, a byte of padding, then the frame: height before width.
        let jpeg = b"\xff\xd8\xff\xfe\0\x04ab\xff\xff\xc0\0\x11\x08\x01\xe0\x02\x80";
        assert_eq!(size(jpeg), Some((640, 480)));
        let lossy = b"RIFF\0\0\0\0WEBPVP8 \0\0\0\0\0\0\0\x9d\x01\x2a\x80\x02\xe0\x01";
        assert_eq!(size(lossy), Some((640, 480)));
        let lossless = b"RIFF\0\0\0\0WEBPVP8L\0\0\0\0\x2f\x7f\xc2\x77\0";
        assert_eq!(size(lossless), Some((640, 480)));
        let extended = b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\x7f\x02\0\xdf\x01\0";
        assert_eq!(size(extended), Some((640, 480)));
        let bmp = [
            b"BM".as_slice(),
            &[0; 16],
            &640_u32.to_le_bytes(),
            &(-480_i32).to_le_bytes(),
        ]
        .concat();
        assert_eq!(size(&bmp), Some((640, 480)));
        for other in [
            b"".as_slice(),
            b"GIF89a",
            b"\xff\xd8",
            b"\xff\xd8\xff\xd9\0\0",
            b"RIFF",
            &png[..20],
        ] {
            assert_eq!(size(other), None, "{other:?}");
        }
    }
}
