//! Licence expressions of SPDX: `MIT OR Apache-2.0`, `(MIT AND BSD-3-Clause) OR GPL-2.0-only WITH Classpath-exception-2.0`.

use std::collections::BTreeSet;

/// The most characters of an expression, and of parentheses inside each other.
const MAX_LENGTH: usize = 1000;
const MAX_DEPTH: usize = 16;

/// A licence's identifier as it is compared: in small letters, `GPL-2.0-only` as `gpl-2.0`, `GPL-2.0+` as `gpl-2.0-or-later`.
pub(super) fn normalized(identifier: &str) -> String {
    let lower = identifier.trim().to_ascii_lowercase();
    if let Some(base) = lower.strip_suffix("-only") {
        return base.to_owned();
    }
    match lower.strip_suffix('+') {
        Some(base) => format!("{base}-or-later"),
        None => lower,
    }
}

/// Whether an expression is satisfied by licences of a set: of `OR` one side must be, of `AND` both. An exception after `WITH` gives more rights,
/// and is ignored. What is not an expression is not satisfied.
pub(super) fn is_satisfied(expression: &str, allowed: &BTreeSet<String>) -> bool {
    if expression.len() > MAX_LENGTH {
        return false;
    }
    let spaced = expression.replace('(', " ( ").replace(')', " ) ");
    let mut parser = Parser {
        words: spaced.split_whitespace().collect(),
        at: 0,
        allowed,
    };
    let value = parser.either(0);
    parser.at == parser.words.len() && value == Some(true)
}

struct Parser<'a> {
    words: Vec<&'a str>,
    at: usize,
    allowed: &'a BTreeSet<String>,
}

impl Parser<'_> {
    /// Takes the next word if it is this one, in any case.
    fn takes(&mut self, word: &str) -> bool {
        let is_next = self
            .words
            .get(self.at)
            .is_some_and(|next| next.eq_ignore_ascii_case(word));
        self.at += usize::from(is_next);
        is_next
    }

    fn either(&mut self, depth: usize) -> Option<bool> {
        let mut value = self.both(depth)?;
        while self.takes("OR") {
            value |= self.both(depth)?;
        }
        Some(value)
    }

    fn both(&mut self, depth: usize) -> Option<bool> {
        let mut value = self.single(depth)?;
        while self.takes("AND") {
            value &= self.single(depth)?;
        }
        Some(value)
    }

    fn single(&mut self, depth: usize) -> Option<bool> {
        if self.takes("(") {
            let value = (depth < MAX_DEPTH).then(|| self.either(depth + 1))??;
            return self.takes(")").then_some(value);
        }
        let identifier = *self.words.get(self.at)?;
        self.at += 1;
        if self.takes("WITH") {
            self.at += 1;
        }
        Some(self.allowed.contains(&normalized(identifier)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_satisfied_by_the_licences_that_they_need() {
        let allowed: BTreeSet<String> = ["MIT", "Apache-2.0", "GPL-2.0"].into_iter().map(normalized).collect();
        for (expression, expected) in [
            ("MIT", true),
            ("mit", true),
            ("GPL-2.0-only", true),
            ("GPL-2.0-or-later", false),
            ("GPL-2.0+", false),
            ("GPL-2.0-only WITH Classpath-exception-2.0", true),
            ("MIT OR GPL-3.0-only", true),
            ("MIT AND GPL-3.0-only", false),
            ("GPL-3.0-only OR MIT AND Apache-2.0", true),
            ("(GPL-3.0-only OR MIT) AND (ISC)", false),
            ("((MIT))", true),
            ("MIT OR", false),
            ("(MIT", false),
            ("MIT)", false),
            ("", false),
            ("MIT Apache-2.0", false),
        ] {
            assert_eq!(is_satisfied(expression, &allowed), expected, "{expression}");
        }
        assert!(!is_satisfied(&"(".repeat(900), &allowed));
    }
}
