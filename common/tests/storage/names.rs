//! Untrusted names never escape their folder. The list follows path traversal bugs of MLflow and others.

use aitk_common::fsutil::names;
use proptest::prelude::*;
use std::path::{Component, Path};

#[test]
fn known_path_traversal_attacks_are_refused() {
    let attacks = [
        // CVE-2023-1177, CVE-2023-2356: relative and absolute paths.
        "..",
        "../a",
        "a/../b",
        "a/..",
        "/etc/passwd",
        "//etc/passwd",
        "./a",
        "a/./b",
        "a//b",
        "a/",
        "/",
        ".",
        "",
        // CVE-2023-2780: backslashes, drives and UNC.
        "..\\a",
        "a\\b",
        "\\\\server\\share",
        "C:\\a",
        "C:a",
        "c:/a",
        "file:///etc/passwd",
        "a:stream",
        // CVE-2023-6831, CVE-2024-1560: encoded once and twice, in either case.
        "%2e%2e/a",
        "%2E%2E%2Fa",
        "..%2f",
        "%252e%252e%252fa",
        "a%5cb",
        "a%00b",
        "a%3ab",
        // NUL, control and invisible characters.
        "a\0b",
        "a\nb",
        "a\rb",
        "\u{1b}[2Jx",
        "a\u{7f}",
        "a\u{85}b",
        "a\u{202e}gnp.exe",
        "a\u{200b}",
        "\u{feff}a",
        // Characters that normalisation turns into a separator or dots.
        "a\u{2215}b",
        "a\u{ff0f}b",
        "a\u{ff3c}b",
        "\u{ff0e}\u{ff0e}/a",
        "\u{2025}/a",
        "a\u{2044}b",
        // Names that Windows changes or reserves.
        "a.",
        "a ",
        " a",
        "CON",
        "con.txt",
        "nul",
        "NUL.tar.gz",
        "aux/x",
        "x/PRN",
        "COM1",
        "lpt9.log",
        "com¹",
        "CONIN$",
        "...",
        ".. ",
        "a/ ..",
    ];
    for attack in attacks {
        assert!(names::check(attack).is_err(), "{attack:?} passed");
        assert!(
            names::below(Path::new("/srv/data"), attack).is_err(),
            "{attack:?} became a path"
        );
    }
    assert!(names::check(&"a".repeat(256)).is_err() && names::check(&"a/".repeat(600)).is_err());
    assert!(names::check(&"a".repeat(255)).is_ok());
}

#[test]
fn the_error_for_a_long_name_is_short() {
    let message = names::check(&"../".repeat(100_000)).unwrap_err().to_string();
    assert!(message.len() < 400, "{message}");
}

proptest! {
    /// Accepted names consist of ordinary components and stay below their folder.
    #[test]
    fn accepted_names_stay_below_the_folder(name in r"([a-zA-Z.:%/\\ 0-9é\u{2024}\u{0}-\u{1f}]|\.\./|%2e|nul){0,40}") {
        if let Ok(path) = names::below(Path::new("/srv/data"), &name) {
            let rest = path.strip_prefix("/srv/data").unwrap();
            prop_assert!(rest.components().all(|part| matches!(part, Component::Normal(_))));
            prop_assert_eq!(rest.components().count(), name.split('/').count());
            prop_assert!(!name.contains(['\\', ':', '\0']));
        }
    }

    /// Any text is accepted or refused.
    #[test]
    fn check_never_panics(name in ".{0,200}") {
        let _ = names::check(&name);
    }
}
