//! Selects layers and tensors by their names, as the engine does.

/// Substrings of names.
#[derive(Clone, Debug, Default)]
pub(super) struct NameFilter {
    /// Empty: all names.
    pub(super) only_if_contains: Vec<String>,
    /// Takes precedence.
    pub(super) ignore_if_contains: Vec<String>,
}

impl NameFilter {
    /// Whether the tensor of this name is selected.
    pub(super) fn selects(&self, name: &str) -> bool {
        let contains_any = |parts: &[String]| parts.iter().any(|part| name.contains(part.as_str()));
        (self.only_if_contains.is_empty() || contains_any(&self.only_if_contains))
            && !contains_any(&self.ignore_if_contains)
    }

    /// Whether the layer of this dotted name gets a LoRA; `only_if_contains` may also match the name in LoRA files.
    pub(super) fn selects_layer(&self, dotted: &str) -> bool {
        let in_files = dotted.replace('.', "_");
        let only = &self.only_if_contains;
        (only.is_empty()
            || only
                .iter()
                .any(|part| dotted.contains(part.as_str()) || in_files.contains(part.as_str())))
            && !self
                .ignore_if_contains
                .iter()
                .any(|part| dotted.contains(part.as_str()))
    }
}

/// Whether a name matches a pattern: `*` stands for any text, `?` for one character.
pub(super) fn matches_glob(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // Where the last `*` is, and where its text ends so far.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(c) if *c == '?' || *c == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match star {
                Some((at, end)) => {
                    star = Some((at, end + 1));
                    p = at + 1;
                    n = end + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, matches) in [
            ("down_blocks.*", "down_blocks.0.resnets.0.conv1", true),
            ("*attn*", "mid_block.attentions.0.transformer_blocks.0.attn1.to_q", true),
            ("conv_in", "conv_in", true),
            ("conv_in", "conv_in2", false),
            ("conv_?n", "conv_in", true),
            ("*.0", "a.0.1", false),
            ("*", "", true),
            ("", "a", false),
        ] {
            assert_eq!(matches_glob(pattern, name), matches, "{pattern} {name}");
        }
    }
}
