//! Addresses of files on a hub.

use std::fmt::Write;

/// The address of a file of a repository. `endpoint` has no slash at its end. Characters of names that mean something else in a URL, such as `?`,
/// `#` and `%`, are percent-encoded.
#[must_use]
pub fn file_url(endpoint: &str, repo: &str, revision: &str, file: &str) -> String {
    let mut url = format!("{endpoint}/{repo}/resolve/");
    encode(revision, false, &mut url);
    url.push('/');
    encode(file, true, &mut url);
    url
}

/// Appends `text`. Everything is encoded but the unreserved characters of RFC 3986 and, where `keeps_slashes`, `/`.
fn encode(text: &str, keeps_slashes: bool, url: &mut String) {
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => url.push(char::from(byte)),
            b'/' if keeps_slashes => url.push('/'),
            _ => {
                let _ = write!(url, "%{byte:02X}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reqwest::Url;

    #[test]
    fn names_are_one_path_in_the_url() {
        let url = file_url("https://h", "org/name", "abc", "unet/a b?c#d%20é.json");
        assert_eq!(url, "https://h/org/name/resolve/abc/unet/a%20b%3Fc%23d%2520%C3%A9.json");
        let parsed = Url::parse(&url).unwrap();
        assert_eq!((parsed.query(), parsed.fragment()), (None, None));
        assert_eq!(parsed.as_str(), url);
        assert_eq!(
            file_url("https://h", "o/n", "refs/pr/1", "x"),
            "https://h/o/n/resolve/refs%2Fpr%2F1/x"
        );
    }
}
