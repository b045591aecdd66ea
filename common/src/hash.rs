//! Content hashes: SHA-256, written as 64 lower-case hexadecimal digits.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fmt;
use std::io::{self, Read};

/// A SHA-256 digest. Blobs are named by it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ContentHash([u8; 32]);

/// A text that is not a content hash.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a content hash: expected 64 hexadecimal digits")]
pub struct BadHash;

impl ContentHash {
    /// Hashes bytes in memory.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// Hashes a reader to its end. Returns the hash and the number of bytes.
    ///
    /// # Errors
    /// The errors of the reader.
    pub fn of_reader(mut reader: impl Read) -> io::Result<(Self, u64)> {
        let mut hasher = Sha256::new();
        let mut buffer = vec![0_u8; 1 << 20];
        let mut total = 0_u64;
        loop {
            let read = reader.read(&mut buffer)?;
            if read == 0 {
                return Ok((Self(hasher.finalize().into()), total));
            }
            hasher.update(&buffer[..read]);
            total += read as u64;
        }
    }

    /// Wraps a finished digest.
    #[must_use]
    pub fn from_digest(digest: [u8; 32]) -> Self {
        Self(digest)
    }

    /// Parses 64 hexadecimal digits.
    ///
    /// # Errors
    /// [`BadHash`] for anything else.
    pub fn parse(text: &str) -> Result<Self, BadHash> {
        let mut digest = [0_u8; 32];
        hex::decode_to_slice(text, &mut digest).map_err(|_| BadHash)?;
        Ok(Self(digest))
    }

    /// The hash as 64 lower-case hexadecimal digits.
    #[must_use]
    pub fn to_hex(self) -> String {
        hex::encode(self.0)
    }
}

impl fmt::Display for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_hex())
    }
}

impl fmt::Debug for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ContentHash({self})")
    }
}

impl TryFrom<String> for ContentHash {
    type Error = BadHash;

    fn try_from(text: String) -> Result<Self, BadHash> {
        Self::parse(&text)
    }
}

impl From<ContentHash> for String {
    fn from(hash: ContentHash) -> Self {
        hash.to_hex()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reader_and_slice_agree_with_the_published_vector() {
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(ContentHash::of(b"abc").to_hex(), expected);
        let (hash, bytes) = ContentHash::of_reader(&b"abc"[..]).unwrap();
        assert_eq!((hash.to_hex().as_str(), bytes), (expected, 3));
        assert!(ContentHash::parse("zz").is_err());
    }
}
