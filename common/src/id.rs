//! One type per kind of identifier, so that a worker's id cannot be passed as a job's id.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use smol_str::{SmolStr, SmolStrBuilder};
use std::borrow::Borrow;
use std::fmt;

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        ///
        /// Cheap to clone and to compare, because the scheduler stores a copy in several indices: up to 23 bytes are stored
        /// inline, longer text is reference-counted.
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(SmolStr);

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.serialize_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                Ok(Self(SmolStr::from(String::deserialize(from)?)))
            }
        }

        /// Allows map lookups by `&str`. The id and its text have the same hash and order.
        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl $name {
            /// Wraps an identifier from a trusted source (our own store, a generator) without checks.
            /// Use [`Self::parse`] for text from the network.
            #[must_use]
            pub fn new(text: impl Into<String>) -> Self {
                Self(SmolStr::from(text.into()))
            }

            /// Builds `of-part` from trusted parts.
            #[must_use]
            pub fn joined(of: &str, part: &str) -> Self {
                let mut text = SmolStrBuilder::new();
                text.push_str(of);
                text.push('-');
                text.push_str(part);
                Self(text.finish())
            }

            /// Builds `of-number` from a trusted part and a number.
            #[must_use]
            pub fn numbered(of: &str, number: u64) -> Self {
                Self::joined(of, &number.to_string())
            }

            /// Accepts 1 to 64 characters of `a-z A-Z 0-9 - _`, so that an id is safe in a path and in a URL.
            ///
            /// # Errors
            /// [`BadId`] when the text is empty, too long, or has another character.
            pub fn parse(text: &str) -> Result<Self, BadId> {
                let fits = !text.is_empty()
                    && text.len() <= 64
                    && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
                if fits { Ok(Self(SmolStr::new(text))) } else { Err(BadId { kind: stringify!($name) }) }
            }

            /// The identifier as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

text_id!(
    /// A job: one submitted config file.
    JobId
);
text_id!(
    /// A task: the unit that a worker runs.
    TaskId
);
text_id!(
    /// An attempt: one run of a task on one worker.
    AttemptId
);
text_id!(
    /// A worker daemon.
    WorkerId
);
text_id!(
    /// The name of a user, such as a job's owner.
    UserName
);

impl Default for UserName {
    /// The user of requests that name none: `default`.
    fn default() -> Self {
        Self::new("default")
    }
}

/// A text that is not a valid identifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a {kind}: expected 1 to 64 letters, digits, '-' or '_'")]
pub struct BadId {
    kind: &'static str,
}

/// Numbers the attempts of a task. It only increases; a worker that holds an older epoch no longer owns the task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The epoch of the next attempt.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_and_its_text_find_the_same_map_entry() {
        for text in ["j1", "a name of an array that is longer than the inline capacity"] {
            let table = std::collections::HashMap::from([(JobId::new(text), 7)]);
            assert_eq!((table.get(text), table.get("j2")), (Some(&7), None));
        }
    }

    #[test]
    fn ids_are_built_from_parts() {
        for number in [0, 9, 10, 1_907, u64::MAX] {
            assert_eq!(AttemptId::numbered("j1", number).as_str(), format!("j1-{number}"));
        }
        assert_eq!(TaskId::joined("j1", "t0").as_str(), "j1-t0");
    }

    #[test]
    fn text_that_could_escape_a_folder_is_not_an_id() {
        for bad in ["", "..", "a/b", "a b", "é", &"x".repeat(65)] {
            assert!(JobId::parse(bad).is_err(), "{bad:?}");
        }
        assert_eq!(JobId::parse("j-01").unwrap().as_str(), "j-01");
    }
}
