//! Names of Hugging Face model repositories in configs: `ORG/NAME`.

/// Maximum bytes of the organisation and of the name.
const MAX_PART_BYTES: usize = 96;
/// File extensions: a name with one of them is a path, not a repository.
const FILES: [&str; 7] = [".safetensors", ".gguf", ".ckpt", ".pt", ".bin", ".json", ".txt"];
/// Endings that the hub refuses.
const REFUSED: [&str; 2] = [".git", ".ipynb"];

/// Whether this is a valid repository name: `org/name` in the characters that the hub allows. Does not check whether a folder
/// of that name exists.
#[must_use]
pub fn is_repository(text: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty()
            && part.len() <= MAX_PART_BYTES
            && !part.starts_with(['.', '-'])
            && !part.ends_with(['.', '-'])
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
            // The hub allows neither, and `--` separates the two in cache folder names.
            && !part.contains("--")
            && !part.contains("..")
    };
    !FILES.iter().chain(&REFUSED).any(|ending| text.ends_with(ending))
        && text.split_once('/').is_some_and(|(org, name)| part(org) && part(name))
}

/// Whether this is the id of one commit: 40 hexadecimal digits, or 64.
#[must_use]
pub fn is_commit(text: &str) -> bool {
    matches!(text.len(), 40 | 64) && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_org_slash_name_is_a_repository() {
        for good in [
            "stable-diffusion-v1-5/stable-diffusion-v1-5",
            "a/b",
            "A.b/c_d-e",
            "o/sd-v1.5",
        ] {
            assert!(is_repository(good), "{good}");
        }
        for path in [
            "",
            "models",
            "./a",
            "../a",
            "/a/b",
            "a/b/c",
            "a/",
            "/a",
            "~/a",
            "a b/c",
            "a/b.safetensors",
            "a/b.gguf",
            "a/..",
            "../..",
            "a/.b",
            "-a/b",
            "a--b/c",
            "a/b..c",
            "a/b-",
            "a\\b/c",
            "a/b\0",
            "é/b",
            "a/b?x",
            "a/b.git",
        ] {
            assert!(!is_repository(path), "{path:?}");
        }
        assert!(!is_repository(&format!("a/{}", "x".repeat(97))));
    }

    #[test]
    fn only_lower_case_hexadecimal_is_a_commit() {
        assert!(is_commit(&"0a".repeat(20)) && is_commit(&"f".repeat(64)));
        assert!(!is_commit("main") && !is_commit(&"0A".repeat(20)) && !is_commit(&"../".repeat(13)));
    }
}
