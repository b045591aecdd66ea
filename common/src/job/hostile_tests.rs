//! Hostile and random files: any input gives a job or an error, in bounded time: a test that does not end has found one that does not.

use super::tests::{MINIMAL, load_yaml};
use super::*;
use proptest::prelude::*;

/// A large text that is no job.
fn refused(what: &str, text: &str) {
    assert!(
        parse(text, Format::Yaml, None, &LoadOptions::default()).is_err(),
        "{what}"
    );
}

#[test]
fn alias_bombs_deep_nesting_and_large_files_are_refused_quickly() {
    let mut bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n".to_owned();
    for level in 1..12 {
        let inner = format!("*a{},", level - 1).repeat(10);
        bomb.push_str(&format!("a{level}: &a{level} [{}]\n", inner.trim_end_matches(',')));
    }
    let error = load_yaml(&bomb).unwrap_err();
    assert!(error.to_string().contains("grows beyond"), "{error}");
    for (text, format) in [
        ("[".repeat(100_000), Format::Yaml),
        ("- ".repeat(100_000), Format::Yaml),
        ("{a: ".repeat(100_000), Format::Yaml),
        ("[".repeat(100_000), Format::Json),
        ("[".repeat(300) + &"]".repeat(300), Format::Json),
        ("{\"a\":".repeat(100_000), Format::Jsonc),
    ] {
        let error = parse(&text, format, None, &LoadOptions::default()).unwrap_err();
        assert!(error.to_string().contains("inside each other"), "{error}");
    }
    let error = load_yaml(&"a".repeat(11 << 20)).unwrap_err();
    assert!(error.to_string().contains("larger than 10 MiB"), "{error}");
    let many = |line: fn(usize) -> String, count| (0..count).map(line).collect::<String>();
    refused("many keys", &many(|i| format!("key{i}: {i}\n"), 20_000));
    refused("one long line", &"a ".repeat(1 << 18));
    refused("quotes", &"'".repeat(1 << 16));
    refused("anchors", &many(|i| format!("- &a{i} x\n"), 5_000));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let text = String::from_utf8_lossy(&bytes);
        for format in [Format::Yaml, Format::Json, Format::Jsonc] {
            let _ = parse(&text, format, None, &LoadOptions::default());
        }
    }

    #[test]
    fn arbitrary_yaml_like_text_never_panics(text in "([a-z]{1,3}|: |- |\n|  |\\[|\\]|\\{|\\}|,|&a|\\*a|<<: |'|\"|\\||>|#|!!|\\$\\{A\\}|1e4|\t){0,60}") {
        let _ = load_yaml(&text);
        let _ = parse(&text, Format::Jsonc, None, &LoadOptions::default());
    }

    #[test]
    fn a_config_with_one_character_replaced_never_panics(at in 0usize..MINIMAL.len(), replacement in ".{0,3}") {
        let mut text = MINIMAL.to_owned();
        text.replace_range(at..=at, &replacement);
        if let Ok(job) = load_yaml(&text) {
            let _ = job.spec.unsupported();
            let _ = job.spec.inputs();
            let json = serde_json::to_string(&job.spec).unwrap();
            prop_assert_eq!(serde_json::from_str::<JobSpec>(&json).unwrap(), job.spec);
        }
    }

    #[test]
    fn arbitrary_prompts_are_parsed(text in ".{0,80}") {
        let flags = prompt::PromptFlags::parse(&text);
        prop_assert!(flags.width.is_none_or(|w| w >= 64 && w % 8 == 0));
    }
}
