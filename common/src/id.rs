//! Identifiers as types, so that a worker's id cannot be passed where a job's is wanted.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use smol_str::{SmolStr, SmolStrBuilder};
use std::borrow::Borrow;
use std::fmt;

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        ///
        /// Cheap to copy and to compare, for the core keeps one in every index that knows of it: up to 23 bytes lie in
        /// place, more are shared.
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

        /// So that a table is looked into with text that is no id yet. Both hash and compare alike.
        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl $name {
            /// Wraps an identifier that came from a trusted place (our own store, a generator).
            /// Text that came over a wire goes through [`Self::parse`].
            #[must_use]
            pub fn new(text: impl Into<String>) -> Self {
                Self(SmolStr::from(text.into()))
            }

            /// `of-part`, of trusted parts.
            #[must_use]
            pub fn joined(of: &str, part: &str) -> Self {
                let mut text = SmolStrBuilder::new();
                text.push_str(of);
                text.push('-');
                text.push_str(part);
                Self(text.finish())
            }

            /// `of-number`, of trusted parts.
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
    /// What a user submitted: one config file.
    JobId
);
text_id!(
    /// The unit a worker runs.
    TaskId
);
text_id!(
    /// One try of a task on one worker.
    AttemptId
);
text_id!(
    /// The daemon on a machine.
    WorkerId
);
text_id!(
    /// Whose job it is.
    UserName
);

impl Default for UserName {
    /// Whoever did not say.
    fn default() -> Self {
        Self::new("default")
    }
}

/// A piece of text that is not an identifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a {kind}: expected 1 to 64 letters, digits, '-' or '_'")]
pub struct BadId {
    kind: &'static str,
}

/// Counts the attempts of a task. It only grows; whoever holds an older one has lost the task.
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
    fn an_id_and_its_text_lead_to_the_same_place_in_a_table() {
        for text in ["j1", "a name of an array that is longer than what lies in place"] {
            let table = std::collections::HashMap::from([(JobId::new(text), 7)]);
            assert_eq!((table.get(text), table.get("j2")), (Some(&7), None));
        }
    }

    #[test]
    fn an_id_is_put_together() {
        for number in [0, 9, 10, 1_907, u64::MAX] {
            assert_eq!(AttemptId::numbered("j1", number).as_str(), format!("j1-{number}"));
        }
        assert_eq!(TaskId::joined("j1", "t0").as_str(), "j1-t0");
    }

    #[test]
    fn ids_refuse_what_could_leave_a_folder() {
        for bad in ["", "..", "a/b", "a b", "é", &"x".repeat(65)] {
            assert!(JobId::parse(bad).is_err(), "{bad:?}");
        }
        assert_eq!(JobId::parse("j-01").unwrap().as_str(), "j-01");
    }
}
