//! The current fault of a test server, as text in a file.

use std::fmt;
use std::path::Path;

/// The access key of the coordinator, where it has one of its own.
pub const COORDINATOR_KEY: &str = "coordinator-key";

/// A fault of every request that begins now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServerFault {
    /// No fault.
    #[default]
    None,
    /// `fail`: status 500.
    Fail,
    /// `flaky N`: status 500 for every N-th request.
    Flaky(u64),
    /// `hang`: no answer; the connection is cut when the fault ends.
    Hang,
    /// `late`: the answer comes when the fault ends.
    Late,
    /// `cut-upload N`: the connection is cut after N bytes of the request's body.
    CutUpload(u64),
    /// `cut-answer N`: the connection is cut after N bytes of the answer's body.
    CutAnswer(u64),
    /// `slow N`: bodies are sent and received at N bytes per second.
    Slow(u64),
    /// `deny-coordinator`: status 403 for requests that are signed with [`COORDINATOR_KEY`].
    DenyCoordinator,
}

impl ServerFault {
    /// Reads the file. A missing or invalid file means no fault.
    #[must_use]
    pub fn read(file: &Path) -> Self {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        Self::parse(&text).unwrap_or_default()
    }

    /// Writes the file: requests have this fault from now on.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn write(self, file: &Path) {
        // Replaced atomically, so that a reader never sees an empty file.
        let temporary = file.with_extension("next");
        std::fs::write(&temporary, self.to_string()).expect("the fault file can be written");
        std::fs::rename(temporary, file).expect("the fault file can be replaced");
    }

    /// Parses the text of the file.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut fields = text.split_whitespace();
        let name = fields.next()?;
        let mut number = || fields.next()?.parse().ok();
        Some(match name {
            "none" => Self::None,
            "fail" => Self::Fail,
            "flaky" => Self::Flaky(number()?),
            "hang" => Self::Hang,
            "late" => Self::Late,
            "cut-upload" => Self::CutUpload(number()?),
            "cut-answer" => Self::CutAnswer(number()?),
            "slow" => Self::Slow(number()?),
            "deny-coordinator" => Self::DenyCoordinator,
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
            Self::DenyCoordinator => write!(f, "deny-coordinator"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_fault_is_read_again() {
        for fault in [
            ServerFault::None,
            ServerFault::Fail,
            ServerFault::Flaky(3),
            ServerFault::Hang,
            ServerFault::Late,
            ServerFault::CutUpload(10),
            ServerFault::CutAnswer(0),
            ServerFault::Slow(5),
            ServerFault::DenyCoordinator,
        ] {
            assert_eq!(ServerFault::parse(&fault.to_string()), Some(fault));
        }
        assert_eq!(ServerFault::parse("slow"), None);
        assert_eq!(ServerFault::read(Path::new("/no/such/file")), ServerFault::None);
    }
}
