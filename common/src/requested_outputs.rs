//! What a user asks a running training for.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The outputs that a user asks a running training for: it makes them after its current step, and goes on.
///
/// As JSON this is a line from a worker daemon to the child process of an attempt; see [`crate::attempt`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestedOutputs {
    /// A checkpoint and a save, as `save_every` makes them.
    pub save: bool,
    /// The samples of the config, as `sample_every` makes them.
    pub samples: bool,
}

impl RequestedOutputs {
    /// A save.
    pub const SAVE: Self = Self {
        save: true,
        samples: false,
    };
    /// Samples.
    pub const SAMPLES: Self = Self {
        save: false,
        samples: true,
    };

    /// Whether nothing is asked for.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self == Self::default()
    }

    /// What one or the other asks for.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            save: self.save || other.save,
            samples: self.samples || other.samples,
        }
    }
}

impl fmt::Display for RequestedOutputs {
    /// As a verb: `save`, `sample`, `save and sample`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.save, self.samples) {
            (true, true) => "save and sample",
            (true, false) => "save",
            (false, true) => "sample",
            (false, false) => "do nothing",
        })
    }
}
