//! Unknown keys that another section of their process has, also by the name of another trainer: the warning names it.

use super::extract::{ExtractProcess, RescaleLoraProcess};
use super::foreign_keys::meant_key;
use super::lm_export::LmExportProcess;
use super::lm_generate::LmGenerateProcess;
use super::lm_trainer::LmTrainerProcess;
use super::process::{GenerateProcess, Img2ImgProcess, Process, ProcessKind, TrainerProcess};
use super::schema::{ReadContext, SectionInfo, join};

/// Sections that a warning names at most. A key of more sections, such as `dtype`, says nothing about where it belongs.
const MAX_SECTIONS: usize = 2;

/// Adds the sections that have a key to the warning that another section does not.
pub(super) fn name_sections(process: &[Process], cx: &mut ReadContext) {
    let ReadContext { warnings, unknown, .. } = cx;
    for warning in warnings.iter_mut().filter(|warning| unknown.contains(&warning.key)) {
        // A key of the whole config may be one of its first process.
        let index = warning.key.strip_prefix("config.process[").and_then(|rest| {
            let (index, _) = rest.split_once(']')?;
            index.parse::<usize>().ok()
        });
        let described = process
            .get(index.unwrap_or(0))
            .and_then(|process| describe(&process.kind));
        let name = warning.key.rsplit('.').next().unwrap_or("");
        let Some(described) = described.filter(|_| warning.message.contains(&format!("has no key `{name}`"))) else {
            continue;
        };
        let mut sections = Vec::new();
        find_key(&described, name, "", &mut sections);
        if (1..=MAX_SECTIONS).contains(&sections.len()) {
            let addition = format!(" (it is a key of {})", sections.join(" and of "));
            warning.message.push_str(&addition);
            continue;
        }
        let mut meant = Vec::new();
        find_meant(&described, name, "", &mut meant);
        if sections.is_empty() && (1..=MAX_SECTIONS).contains(&meant.len()) {
            let addition = format!(" (did you mean {}?)", meant.join(" or "));
            warning.message.push_str(&addition);
        }
    }
}

/// The keys of a process.
fn describe(kind: &ProcessKind) -> Option<SectionInfo> {
    match kind {
        ProcessKind::Train(_) => Some(TrainerProcess::describe()),
        ProcessKind::LmTrain(_) => Some(LmTrainerProcess::describe()),
        ProcessKind::Generate(_) => Some(GenerateProcess::describe()),
        ProcessKind::Img2Img(_) => Some(Img2ImgProcess::describe()),
        ProcessKind::LmGenerate(_) => Some(LmGenerateProcess::describe()),
        ProcessKind::LmExport(_) => Some(LmExportProcess::describe()),
        ProcessKind::Extract(_) => Some(ExtractProcess::describe()),
        ProcessKind::RescaleLora(_) => Some(RescaleLoraProcess::describe()),
        ProcessKind::Caption(_) | ProcessKind::Extension(_) | ProcessKind::Rare(_) => None,
    }
}

/// Lists the sections that have a key, in quotes. `path` is that of `section` in the process; empty for the process itself.
fn find_key(section: &SectionInfo, key: &str, path: &str, found: &mut Vec<String>) {
    for field in &section.fields {
        if field.key == key {
            let name = if path.is_empty() { "process" } else { path };
            found.push(format!("`{name}`"));
        }
        if let Some(nested) = &field.nested {
            find_key(nested, key, &join(path, field.key), found);
        }
    }
}

/// Lists the keys, in quotes and with their sections, that another trainer calls `key`.
fn find_meant(section: &SectionInfo, key: &str, path: &str, found: &mut Vec<String>) {
    let is_known = |known: &str| section.fields.iter().any(|field| field.key == known);
    if let Some(meant) = meant_key(section.title, key, is_known) {
        found.push(format!("`{}`", join(path, meant)));
    }
    for field in &section.fields {
        if let Some(nested) = &field.nested {
            find_meant(nested, key, &join(path, field.key), found);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::job::tests::{load_yaml, with_line_after};

    #[test]
    fn an_unknown_key_of_another_section_is_named_with_it() {
        for (after, line, expected) in [
            (
                "training_folder",
                "      gradient_checkpointing: true",
                "`process` has no key `gradient_checkpointing`; it is ignored (it is a key of `train`)",
            ),
            (
                "steps: 10",
                "        folder_path: images",
                "`train` has no key `folder_path`; it is ignored (it is a key of `datasets`)",
            ),
            (
                "name: cat",
                "  max_step_saves_to_keep: 3",
                "`config` has no key `max_step_saves_to_keep`; it is ignored (it is a key of `save`)",
            ),
            (
                "steps: 10",
                "        training_folder: out",
                "`train` has no key `training_folder`; it is ignored (it is a key of `process`)",
            ),
            (
                "training_folder",
                "      learning_rate: 1e-4",
                "`process` has no key `learning_rate`; it is ignored (did you mean `train.lr`?)",
            ),
            (
                "name: cat",
                "  network_dim: 16",
                "`config` has no key `network_dim`; it is ignored (did you mean `network.linear`?)",
            ),
            (
                "steps: 10",
                "        nothing_has_it: 1",
                "`train` has no key `nothing_has_it`; it is ignored",
            ),
        ] {
            let job = load_yaml(&with_line_after(after, line)).unwrap();
            let messages: Vec<&str> = job.warnings.iter().map(|warning| warning.message.as_str()).collect();
            assert_eq!(messages, [expected]);
        }
    }
}
