//! Processes of the type `extension:NAME`: a program that the worker's owner allows by name (docs/extensions.md).

use super::declare::section;
use super::limits::MAX_EXTENSION_INPUTS;
use super::node::{Node, shorten};
use super::schema::{FieldValue, Input, InputKind, PresentKeys, ReadContext, join};
use super::values::FreeMap;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the type of such a process begins with.
pub const EXTENSION_PREFIX: &str = "extension:";
/// The longest name of an extension or of an input, in bytes.
const MAX_NAME_BYTES: usize = 64;

/// Checks the name of an extension, or of one of its inputs.
///
/// # Errors
/// What is expected of a name.
pub fn check_extension_name(name: &str) -> Result<(), String> {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let mut bytes = name.bytes();
    let starts_plain = bytes.next().is_some_and(is_plain);
    if starts_plain && name.len() <= MAX_NAME_BYTES && bytes.all(|byte| is_plain(byte) || matches!(byte, b'-' | b'_')) {
        return Ok(());
    }
    Err(format!(
        "`{}`: expected 1 to {MAX_NAME_BYTES} of a-z, 0-9, `-` and `_`, beginning with a letter or a digit",
        shorten(name)
    ))
}

/// The type of a process that runs an extension: `extension:NAME`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ExtensionType(String);

impl ExtensionType {
    /// The extension's name.
    #[must_use]
    pub fn extension(&self) -> &str {
        self.0.strip_prefix(EXTENSION_PREFIX).unwrap_or(&self.0)
    }
}

impl FieldValue for ExtensionType {
    fn kind() -> String {
        "`extension:NAME`".into()
    }

    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        let text = String::read(node, cx)?;
        match text.strip_prefix(EXTENSION_PREFIX).map(check_extension_name) {
            Some(Ok(())) => Some(Self(text)),
            Some(Err(why)) => {
                cx.error(format!("the name of an extension, {why}"));
                None
            }
            None => {
                cx.wrong_type(node, "`extension:NAME`");
                None
            }
        }
    }

    fn show(&self) -> String {
        self.0.clone()
    }

    fn is_falsy(&self) -> bool {
        false
    }
}

/// The inputs of an extension: files and folders by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ExtensionInputs(pub BTreeMap<String, String>);

impl FieldValue for ExtensionInputs {
    const HAS_INPUTS: bool = true;

    fn kind() -> String {
        "map of names to paths".into()
    }

    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        let entries = cx.read_map(node, "inputs")?;
        if entries.len() > MAX_EXTENSION_INPUTS {
            cx.error(format!("{} inputs; at most {MAX_EXTENSION_INPUTS}", entries.len()));
            return None;
        }
        let mut inputs = BTreeMap::new();
        for entry in entries {
            let path = cx.descend(&entry.key, entry.mark, |cx| {
                if let Err(why) = check_extension_name(&entry.key) {
                    cx.error(format!("the name of an input, {why}"));
                    return None;
                }
                let path = String::read(&entry.node, cx)?;
                if path.is_empty() {
                    cx.error("expected the path of a file or a folder".to_owned());
                    return None;
                }
                Some(path)
            })?;
            inputs.insert(entry.key.clone(), path);
        }
        Some(Self(inputs))
    }

    fn show(&self) -> String {
        if self.0.is_empty() { "{}".into() } else { "{…}".into() }
    }

    fn is_falsy(&self) -> bool {
        self.0.is_empty()
    }

    fn collect_inputs(&self, path: &str, out: &mut Vec<Input>) {
        out.extend(self.0.iter().map(|(name, config_path)| Input {
            config_path: config_path.clone(),
            kind: InputKind::Dataset,
            key: join(path, name),
        }));
    }
}

section! {
    /// A process that runs a program of the worker's owner.
    pub struct ExtensionProcess("process") {
        /// `extension:` and the name of the extension, which the worker's owner must allow (`--allow-extension`).
        kind as "type": ExtensionType = ExtensionType::default(), Works, shown "required";
        /// Name of the run folder.
        name: Option<String> = None, Works, shown "`config.name`";
        /// The run folder is `training_folder/name`.
        training_folder: Option<String> = None, Works, shown "the job's";
        /// Device to use; ignored.
        device: Option<String> = None, Accepted("the scheduler assigns the device; `cluster.device` requests a kind");
        /// Seed for the program. Absent: chosen once per job.
        training_seed: Option<i64> = None, Works;
        /// Files and folders that the program may read, by names that it knows.
        inputs: ExtensionInputs = ExtensionInputs::default(), Works;
        /// Settings for the program, which checks them by its own schema.
        config: FreeMap = FreeMap::new(), Works;
    }
    finish = finish_extension;
}

fn finish_extension(process: &mut ExtensionProcess, _present: &PresentKeys, cx: &mut ReadContext) {
    // A type that could not be read has its own error.
    if process.kind.0.is_empty() && cx.errors.is_empty() {
        cx.error_at("type", "expected `extension:NAME`");
    }
}

#[cfg(test)]
mod tests {
    use super::check_extension_name;

    #[test]
    fn names_are_short_and_plain() {
        for good in ["a", "0", "my-tool_2", &"a".repeat(64)] {
            assert!(check_extension_name(good).is_ok(), "{good}");
        }
        for bad in ["", "-a", "_a", "A", "a b", "a/b", "a.b", "ä", &"a".repeat(65)] {
            assert!(check_extension_name(bad).is_err(), "{bad}");
        }
    }
}
