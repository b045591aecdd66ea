//! What goes wrong with a server of the tests: a word in a file.

use std::fmt;
use std::path::Path;

/// What goes wrong with every request that begins now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServerFault {
    /// Nothing.
    #[default]
    None,
    /// `fail`: it is answered with status 500.
    Fail,
    /// `flaky N`: every N-th one is.
    Flaky(u64),
    /// `hang`: it is never answered; when the hanging ends, its connection is cut.
    Hang,
    /// `late`: it is answered when the hanging ends.
    Late,
    /// `cut-upload N`: the connection is cut after N bytes of the request's body.
    CutUpload(u64),
    /// `cut-answer N`: the connection is cut after N bytes of the answer's body.
    CutAnswer(u64),
    /// `slow N`: bodies travel at N bytes per second.
    Slow(u64),
}

impl ServerFault {
    /// Reads the file. No file, or nothing sensible in it, is no fault.
    #[must_use]
    pub fn read(file: &Path) -> Self {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        Self::parse(&text).unwrap_or_default()
    }

    /// Writes the file: from now on this goes wrong.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn write(self, file: &Path) {
        // Whole at every moment: a reader in between must not see nothing.
        let beside = file.with_extension("next");
        std::fs::write(&beside, self.to_string()).expect("the switch can be written");
        std::fs::rename(beside, file).expect("the switch can be put in place");
    }

    /// Reads the word and its number.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        let word = words.next()?;
        let mut number = || words.next()?.parse().ok();
        Some(match word {
            "none" => Self::None,
            "fail" => Self::Fail,
            "flaky" => Self::Flaky(number()?),
            "hang" => Self::Hang,
            "late" => Self::Late,
            "cut-upload" => Self::CutUpload(number()?),
            "cut-answer" => Self::CutAnswer(number()?),
            "slow" => Self::Slow(number()?),
            _ => return None,
        })
    }
}

impl fmt::Display for ServerFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => write!(f, "none"),
            Self::Fail => write!(f, "fail"),
            Self::Flaky(every) => write!(f, "flaky {every}"),
            Self::Hang => write!(f, "hang"),
            Self::Late => write!(f, "late"),
            Self::CutUpload(bytes) => write!(f, "cut-upload {bytes}"),
            Self::CutAnswer(bytes) => write!(f, "cut-answer {bytes}"),
            Self::Slow(rate) => write!(f, "slow {rate}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for fault in [
            ServerFault::None,
            ServerFault::Fail,
            ServerFault::Flaky(3),
            ServerFault::Hang,
            ServerFault::Late,
            ServerFault::CutUpload(10),
            ServerFault::CutAnswer(0),
            ServerFault::Slow(5),
        ] {
            assert_eq!(ServerFault::parse(&fault.to_string()), Some(fault));
        }
        assert_eq!(ServerFault::parse("slow"), None);
        assert_eq!(ServerFault::read(Path::new("/no/such/file")), ServerFault::None);
    }
}
