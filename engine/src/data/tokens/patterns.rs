//! Patterns of file names: `*.rs`, `src/**/*.py`.

use wildmatch::WildMatch;

/// Patterns that paths below a folder match. `*` and `?` match within a name, `**` any number of folders. A pattern without `/` is for names of
/// files.
#[derive(Clone, Debug, Default)]
pub(super) struct Patterns(Vec<Vec<Segment>>);

#[derive(Clone, Debug)]
enum Segment {
    /// `**`.
    AnyFolders,
    Name(WildMatch),
}

impl Patterns {
    pub(super) fn new(patterns: &[String]) -> Self {
        let parse = |pattern: &String| {
            let pattern = pattern.strip_prefix("./").unwrap_or(pattern);
            let names = pattern.split('/').filter(|name| !name.is_empty());
            let segments = names.map(|name| match name {
                "**" => Segment::AnyFolders,
                name => Segment::Name(WildMatch::new(name)),
            });
            let is_name = !pattern.contains('/');
            is_name
                .then_some(Segment::AnyFolders)
                .into_iter()
                .chain(segments)
                .collect()
        };
        Self(patterns.iter().map(parse).collect())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a path, with `/` between its names, matches one of the patterns.
    pub(super) fn matches(&self, path: &str) -> bool {
        let names: Vec<&str> = path.split('/').collect();
        self.0.iter().any(|pattern| matches_segments(pattern, &names))
    }
}

/// Whether all names match all segments. The work is their product, whatever the pattern.
fn matches_segments(segments: &[Segment], names: &[&str]) -> bool {
    // Whether the segments so far match the first names, by their number.
    let mut reached = vec![false; names.len() + 1];
    reached[0] = true;
    for segment in segments {
        let mut next = vec![false; names.len() + 1];
        for count in 0..=names.len() {
            next[count] = match segment {
                Segment::AnyFolders => reached[count] || (count > 0 && next[count - 1]),
                Segment::Name(name) => count > 0 && reached[count - 1] && name.matches(names[count - 1]),
            };
        }
        reached = next;
    }
    reached[names.len()]
}

#[cfg(test)]
mod tests {
    use super::Patterns;

    #[test]
    fn patterns_match_names_and_paths() {
        let matches = |pattern: &str, path: &str| Patterns::new(&[pattern.to_owned()]).matches(path);
        for (pattern, path) in [
            ("*.rs", "main.rs"),
            ("*.rs", "src/deep/main.rs"),
            ("src/*.rs", "src/main.rs"),
            ("src/**/*.rs", "src/main.rs"),
            ("src/**/*.rs", "src/a/b/main.rs"),
            ("**/tests/**", "a/tests/x.py"),
            ("./src/?.c", "src/a.c"),
            ("/src/a.c", "src/a.c"),
        ] {
            assert!(matches(pattern, path), "{pattern} {path}");
        }
        for (pattern, path) in [
            ("*.rs", "main.rs.bak"),
            ("src/*.rs", "src/a/main.rs"),
            ("src/**/*.rs", "lib/main.rs"),
            ("main.rs", "src/main.rsx"),
            ("a/b", "a/b/c"),
        ] {
            assert!(!matches(pattern, path), "{pattern} {path}");
        }
        assert!(!matches(&("**/".repeat(200) + "b"), &"a/".repeat(400)));
    }
}
