//! Conversions between wire and domain types. All incoming messages are checked here.

mod certificates;
mod image_batches;
mod jobs;
mod shapes;
mod vocabulary;
mod workers;

use aitk_common::hash::ContentHash;

/// An invalid field in a message from a peer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct ConvertError {
    field: String,
    problem: String,
}

/// The length limit of field names and problems in characters. Both may quote the peer's input, and errors are sent in a header.
const MAX_CHARS: usize = 200;

fn truncated(mut text: String) -> String {
    if let Some((at, _)) = text.char_indices().nth(MAX_CHARS) {
        text.truncate(at);
        text.push('…');
    }
    text
}

impl ConvertError {
    /// Creates an error for a field, named as in the protobuf file (`register.devices[1].kind`). Long texts are truncated.
    #[must_use]
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self {
            field: truncated(field.into()),
            problem: truncated(problem.into()),
        }
    }

    /// Adds the name of the outer field.
    #[must_use]
    pub(crate) fn within(mut self, outer: &str) -> Self {
        self.field = format!("{outer}.{}", self.field);
        self
    }
}

impl From<ConvertError> for tonic::Status {
    fn from(error: ConvertError) -> Self {
        Self::invalid_argument(error.to_string())
    }
}

pub(crate) type Result<T> = std::result::Result<T, ConvertError>;

/// Adds the name of the outer field to an error.
pub(crate) trait Within<T> {
    fn within(self, outer: &str) -> Result<T>;
}

impl<T> Within<T> for Result<T> {
    fn within(self, outer: &str) -> Result<T> {
        self.map_err(|error| error.within(outer))
    }
}

pub(crate) fn required<T>(value: Option<T>, field: &str) -> Result<T> {
    value.ok_or_else(|| ConvertError::new(field, "missing"))
}

pub(crate) fn hash(text: &str, field: &str) -> Result<ContentHash> {
    ContentHash::parse(text).map_err(|e| ConvertError::new(field, e.to_string()))
}

pub(crate) fn optional_hash(text: &str, field: &str) -> Result<Option<ContentHash>> {
    if text.is_empty() {
        Ok(None)
    } else {
        hash(text, field).map(Some)
    }
}

/// Checks a short text: names, levels, labels. Control characters are refused, because they could fake additional lines.
pub(crate) fn short_text(text: String, field: &str) -> Result<String> {
    const MAX_BYTES: usize = 256;
    if text.len() > MAX_BYTES {
        return Err(ConvertError::new(
            field,
            format!("{} bytes long; at most {MAX_BYTES}", text.len()),
        ));
    }
    if text.chars().any(char::is_control) {
        return Err(ConvertError::new(field, "contains a control character"));
    }
    Ok(text)
}

/// Checks the name of an artifact: a relative path with `/` between folders, below the output root.
pub(crate) fn artifact_name(name: String, field: &str) -> Result<String> {
    let bad = |why: &str| {
        Err(ConvertError::new(
            field,
            format!("{name:?} is not a valid artifact name: {why}"),
        ))
    };
    if name.is_empty() || name.len() > 1024 {
        return bad("expected 1 to 1024 bytes");
    }
    if name.chars().any(|c| c.is_control() || c == '\\' || c == ':') {
        return bad("contains a control character, '\\' or ':'");
    }
    if name
        .split('/')
        .any(|part| part.is_empty() || part == "." || part == "..")
    {
        return bad("a part between '/' is empty, '.' or '..'");
    }
    Ok(name)
}

macro_rules! parse_id {
    ($name:ident, $type:ty) => {
        pub(crate) fn $name(text: &str, field: &str) -> Result<$type> {
            <$type>::parse(text).map_err(|e| ConvertError::new(field, e.to_string()))
        }
    };
}
parse_id!(job_id, aitk_common::id::JobId);
parse_id!(task_id, aitk_common::id::TaskId);
parse_id!(attempt_id, aitk_common::id::AttemptId);
parse_id!(worker_id, aitk_common::id::WorkerId);
parse_id!(user_name, aitk_common::id::UserName);

#[cfg(test)]
mod tests {
    use crate::v1;
    use aitk_common::control_plane::{Artifact, Submission};

    #[test]
    fn errors_stay_short_for_long_field_values() {
        let long = "é".repeat(1 << 20);
        let artifact = v1::Artifact {
            name: long.clone(),
            local_path: "x".into(),
            ..Default::default()
        };
        let submission = v1::SubmitRequest {
            config_format: "yaml".into(),
            inputs: [(long, "no hash".to_owned())].into(),
            ..Default::default()
        };
        let errors = [
            Artifact::try_from(artifact).unwrap_err(),
            Submission::try_from(submission).unwrap_err(),
        ];
        for (error, start) in errors.iter().zip(["name: \"éé", "inputs"]) {
            let text = error.to_string();
            assert!(text.starts_with(start) && text.len() < 2048, "{} bytes", text.len());
        }
    }
}
