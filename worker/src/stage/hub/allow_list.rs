//! The repositories for which jobs of other users may use the worker's own token.

use aitk_common::job::repository::is_repository;

/// Repositories that the owner of a worker lists: `ORG/NAME`, or `ORG/*` for all of an organisation. Empty: none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AllowList(Vec<(String, Option<String>)>);

impl AllowList {
    /// Parses the entries.
    ///
    /// # Errors
    /// The first invalid entry.
    pub(crate) fn parse(entries: &[String]) -> Result<Self, String> {
        let entry = |text: &String| {
            let parsed = match text.trim().split_once('/') {
                Some((org, "*")) if is_repository(&format!("{org}/x")) => Some((org.to_owned(), None)),
                Some((org, name)) if is_repository(text.trim()) => Some((org.to_owned(), Some(name.to_owned()))),
                _ => None,
            };
            parsed.ok_or_else(|| text.clone())
        };
        entries.iter().map(entry).collect::<Result<_, _>>().map(Self)
    }

    /// Returns whether a repository is listed. The hub ignores case.
    pub(super) fn contains(&self, repo: &str) -> bool {
        let Some((org, name)) = repo.split_once('/') else {
            return false;
        };
        self.0.iter().any(|(listed, name_filter)| {
            listed.eq_ignore_ascii_case(org)
                && name_filter
                    .as_ref()
                    .is_none_or(|name_filter| name_filter.eq_ignore_ascii_case(name))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn organisations_and_single_repositories_are_listed() {
        let list = AllowList::parse(&["lab/*".to_owned(), " me/private-model ".to_owned()]).unwrap();
        for (repo, listed) in [
            ("lab/x", true),
            ("LAB/y", true),
            ("me/private-model", true),
            ("me/other", false),
            ("labs/x", false),
            ("lab", false),
        ] {
            assert_eq!(list.contains(repo), listed, "{repo}");
        }
        assert!(!AllowList::default().contains("lab/x"));
        for bad in ["", "*", "*/*", "lab", "lab/", "../*", "a/b/c", "lab/x*"] {
            assert_eq!(AllowList::parse(&[bad.to_owned()]), Err(bad.to_owned()));
        }
    }
}
