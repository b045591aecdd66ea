//! `submit --sweep` and `--array`: expands an array into its members and names them.

use crate::failure::Failure;
use crate::output::format::printable;
use aitk_common::control_plane::MAX_ARRAY_MEMBERS;
use aitk_common::job::change::Change;

/// With a longer suffix the members are numbered instead.
const MAX_SUFFIX_LENGTH: usize = 60;

/// A key of the config and the values to try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sweep {
    key: String,
    values: Vec<String>,
}

/// One member of an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its index, from 0.
    pub index: usize,
    /// The repeat that the member belongs to. Members with the same number get the same seed and differ only in swept
    /// keys.
    pub seed_group: u32,
    /// Its changes to the config.
    pub changes: Vec<Change>,
    /// The suffix of its name; empty without a sweep.
    pub suffix: String,
}

impl Sweep {
    /// Parses `KEY=V1,V2`. A comma inside quotes does not separate values.
    ///
    /// # Errors
    /// When the text has another form, a value is empty, or a value is given twice.
    pub fn parse(text: &str) -> Result<Self, Failure> {
        let wrong = |why: &str| {
            Failure::usage(format!("--sweep '{}': {why}", printable(text)))
                .hint("give a key and its values, such as --sweep train.lr=1e-4,2e-4")
        };
        let (key, values) = text.split_once('=').ok_or_else(|| wrong("there is no '='"))?;
        let key = key.trim();
        if key.is_empty() {
            return Err(wrong("there is no key before '='"));
        }
        let values: Vec<String> = split_at_commas(values)
            .iter()
            .map(|value| value.trim().to_owned())
            .collect();
        if values.iter().any(String::is_empty) {
            return Err(wrong("a value is empty; null is written as null, an empty text as ''"));
        }
        for (index, value) in values.iter().enumerate() {
            if values[..index].contains(value) {
                return Err(wrong(&format!("'{value}' is given twice")));
            }
        }
        Ok(Self {
            key: key.to_owned(),
            values,
        })
    }

    /// Returns the label of a value: the last part of the key and the value, `_lr1e-4`.
    fn label(&self, value: &str) -> String {
        let last = self.key.rsplit('.').next().unwrap_or_default();
        let plain = |text: &str| -> String {
            let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.');
            let text: String = text.chars().map(|c| if is_allowed(c) { c } else { '-' }).collect();
            text.trim_matches('-').to_owned()
        };
        let sign = if value.starts_with('-') { "-" } else { "" };
        format!(
            "_{}{sign}{}",
            plain(last.split('[').next().unwrap_or_default()),
            plain(value)
        )
    }
}

/// Splits at commas that are not inside quotes.
fn split_at_commas(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut quote = None;
    for c in text.chars() {
        match quote {
            Some(open) if c == open => quote = None,
            None if matches!(c, '\'' | '"') && parts.last().is_some_and(|part| part.trim().is_empty()) => {
                quote = Some(c);
            }
            None if c == ',' => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        if let Some(part) = parts.last_mut() {
            part.push(c);
        }
    }
    parts
}

/// Returns every combination of the values, each `repeats` times. The last key changes fastest.
///
/// # Errors
/// When a key is given twice, there is only one combination, or there are too many.
pub fn members(sweeps: &[Sweep], repeats: usize) -> Result<Vec<Member>, Failure> {
    for (index, sweep) in sweeps.iter().enumerate() {
        if sweeps[..index].iter().any(|other| other.key == sweep.key) {
            let key = printable(&sweep.key);
            return Err(Failure::usage(format!(
                "--sweep {key}: given twice; give all values with one flag"
            )));
        }
    }
    let count = sweeps
        .iter()
        .try_fold(repeats, |count, sweep| count.checked_mul(sweep.values.len()));
    let count = count.filter(|count| *count <= MAX_ARRAY_MEMBERS).ok_or_else(|| {
        Failure::usage(format!(
            "these are more than {MAX_ARRAY_MEMBERS} jobs, the maximum of an array"
        ))
    })?;
    if count < 2 {
        return Err(Failure::usage(
            "this is one job, not an array; leave --sweep and --array out, or give more values",
        ));
    }
    let mut all = vec![(Vec::new(), String::new())];
    for sweep in sweeps {
        let mut longer = Vec::with_capacity(all.len() * sweep.values.len());
        for (changes, suffix) in &all {
            for value in &sweep.values {
                let mut changes: Vec<Change> = changes.clone();
                changes.push(Change {
                    key: sweep.key.clone(),
                    value: value.clone(),
                });
                longer.push((changes, format!("{suffix}{}", sweep.label(value))));
            }
        }
        all = longer;
    }
    let width = (count - 1).to_string().len();
    let mut names: Vec<&String> = all.iter().map(|(_, suffix)| suffix).collect();
    names.sort_unstable();
    let readable =
        names.iter().all(|name| name.len() <= MAX_SUFFIX_LENGTH) && names.windows(2).all(|two| two[0] != two[1]);
    let repeated = (0..repeats).flat_map(|seed_group| all.iter().map(move |one| (seed_group, one)));
    let member = |(index, (seed_group, (changes, suffix))): (usize, (usize, &(Vec<Change>, String)))| Member {
        index,
        seed_group: u32::try_from(seed_group).unwrap_or(u32::MAX),
        changes: changes.clone(),
        suffix: match (sweeps.is_empty(), readable, repeats) {
            (true, ..) => String::new(),
            (false, true, 1) => suffix.clone(),
            (false, true, _) => format!("{suffix}_{seed_group}"),
            (false, false, _) => format!("_{index:0width$}"),
        },
    };
    Ok(repeated.enumerate().map(member).collect())
}

/// Returns the suffix with the member's index, for members whose names would otherwise be equal.
#[must_use]
pub fn numbered_suffix(index: usize, count: usize) -> String {
    let width = count.saturating_sub(1).to_string().len();
    format!("_{index:0width$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sweeps(texts: &[&str]) -> Vec<Sweep> {
        texts.iter().map(|text| Sweep::parse(text).unwrap()).collect()
    }

    #[test]
    fn every_combination_is_named_after_its_values() {
        let members_made = members(&sweeps(&["train.lr=1e-4, 2e-4", "network.linear=16,32"]), 1).unwrap();
        let names: Vec<&str> = members_made.iter().map(|member| member.suffix.as_str()).collect();
        assert_eq!(
            names,
            [
                "_lr1e-4_linear16",
                "_lr1e-4_linear32",
                "_lr2e-4_linear16",
                "_lr2e-4_linear32"
            ]
        );
        assert_eq!(
            (
                members_made[3].changes[0].value.as_str(),
                members_made[3].changes[1].key.as_str()
            ),
            ("2e-4", "network.linear")
        );
        assert!(
            members_made.iter().all(|member| member.seed_group == 0),
            "only the keys differ"
        );
        let twice = members(&sweeps(&["train.seed=-1,1"]), 2).unwrap();
        let names: Vec<_> = twice
            .iter()
            .map(|member| (member.seed_group, member.suffix.as_str()))
            .collect();
        assert_eq!(
            names,
            [(0, "_seed-1_0"), (0, "_seed1_0"), (1, "_seed-1_1"), (1, "_seed1_1")]
        );
        let same = members(&[], 12).unwrap();
        assert_eq!(
            (same.len(), same[11].seed_group, same[11].suffix.as_str()),
            (12, 11, "")
        );
        assert_eq!(numbered_suffix(3, 12), "_03");
    }

    #[test]
    fn long_or_equal_names_become_numbers() {
        let long = format!("sample.neg='{}','b, c'", "a".repeat(80));
        let members_made = members(&sweeps(&[&long]), 1).unwrap();
        assert_eq!(
            (members_made[0].suffix.as_str(), members_made[1].suffix.as_str()),
            ("_0", "_1")
        );
        assert_eq!(members_made[1].changes[0].value, "'b, c'");
        let members_made = members(&sweeps(&["model.name_or_path=a/b,a b"]), 1).unwrap();
        assert_eq!(members_made[1].suffix, "_1");
    }

    #[test]
    fn invalid_sweeps_are_refused() {
        for (text, says) in [
            ("train.lr", "no '='"),
            ("=1", "no key"),
            ("train.lr=", "a value is empty"),
            ("train.lr=1,,2", "a value is empty"),
            ("train.lr=1,2,1", "twice"),
        ] {
            assert!(Sweep::parse(text).unwrap_err().to_string().contains(says), "{text}");
        }
        assert!(
            members(&sweeps(&["a=1"]), 1)
                .unwrap_err()
                .to_string()
                .contains("one job")
        );
        assert!(
            members(&sweeps(&["a=1,2", "a=3,4"]), 1)
                .unwrap_err()
                .to_string()
                .contains("given twice")
        );
        assert!(members(&[], 1001).unwrap_err().to_string().contains("more than 1000"));
    }
}
