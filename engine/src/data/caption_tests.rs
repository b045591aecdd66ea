//! Tests of captions.

use super::*;
use crate::rng::TorchGenerator;

fn rules() -> CaptionRules {
    CaptionRules::default()
}

fn build(raw: &str, rules: &CaptionRules) -> String {
    build_caption(raw, rules, &mut TorchGenerator::manual_seed(1))
}

/// What sd-scripts' `process_caption` gives, where nothing is random.
#[test]
fn tags_are_kept_as_in_sd_scripts() {
    let tags = |raw: &str, change: &dyn Fn(&mut TagRules)| {
        let mut rules = rules();
        change(&mut rules.tags);
        build(raw, &rules)
    };
    let text = |text: &str| Some(text.to_owned());
    // With a dropout of 1 only the tags stay that keep their places.
    assert_eq!(
        tags("sks, girl ,hat, dress", &|r| {
            (r.token_dropout_rate, r.keep_tokens, r.shuffle_keeps_tokens) = (1.0, 2, true);
        }),
        "sks, girl"
    );
    assert_eq!(
        tags("sks , girl||| hat, dress|||best,  , new", &|r| {
            (r.token_dropout_rate, r.keep_tokens_separator) = (1.0, text("|||"));
        }),
        "sks, girl, best, new"
    );
    // Without a rule that changes tags, the separator stays.
    assert_eq!(tags("a|||b", &|r| r.keep_tokens_separator = text("|||")), "a|||b");
    // A caption without it follows `kept`.
    assert_eq!(
        tags("a, b, c", &|r| {
            (r.token_dropout_rate, r.keep_tokens, r.shuffle_keeps_tokens) = (1.0, 1, true);
            r.keep_tokens_separator = text("|||");
        }),
        "a"
    );
    assert_eq!(
        tags("a;;b, c", &|r| {
            (r.token_dropout_rate, r.keep_tokens, r.shuffle_keeps_tokens) = (1.0, 1, true);
            r.secondary_separator = text(";;");
        }),
        "a,b"
    );
    assert_eq!(
        tags("b. c", &|r| {
            (r.separator, r.prefix, r.suffix) = (text("."), text("a."), text(".d"));
            (r.token_dropout_rate, r.keep_tokens, r.shuffle_keeps_tokens) = (0.001, 9, true);
        }),
        "a, b, c, d"
    );
    for (raw, expected) in [
        ("{{a|b}}", "{a|b}"),
        ("{a}", "a"),
        ("{}x{", "{}x{"),
        ("}{|}", "}"),
        ("{ü}ö}", "üö}"),
        ("{a|{b|c}}", "{a|{b|c}"),
    ] {
        assert_eq!(tags(raw, &|r| r.wildcards = true), expected, "{raw}");
    }
}

/// Where nothing is shuffled or dropped, sd-scripts leaves a caption as it is; where something is, it trims tags.
#[test]
fn captions_of_sd_scripts_change_no_more_than_there() {
    let tags = |raw: &str, change: &dyn Fn(&mut TagRules)| {
        let mut rules = rules();
        rules.tags.sd_scripts_captions = true;
        change(&mut rules.tags);
        build(raw, &rules)
    };
    let text = |text: &str| Some(text.to_owned());
    for raw in ["a,,b, ,c", "A circle. It is 0.5 cm. No", "x ||| y", ";;;", ""] {
        for separator in [None, text("."), text(" "), text("|"), text(";")] {
            let got = tags(raw, &|r| {
                (r.separator, r.keep_tokens, r.shuffle_keeps_tokens) = (separator.clone(), 2, true);
                r.keep_tokens_separator = text("|||");
            });
            assert_eq!(got, raw, "{separator:?}");
        }
    }
    assert_eq!(tags("  a , b \n c", &|_| {}), "a , b");
    assert_eq!(tags("\na", &|_| {}), "");
    assert_eq!(
        tags("a", &|r| (r.prefix, r.suffix) = (text("p"), text("s\nt"))),
        "p a s"
    );
    assert_eq!(
        tags("a;;b.c", &|r| (r.secondary_separator, r.separator) =
            (text(";;"), text("."))),
        "a.b.c"
    );
    // Every line that is not blank is one of several.
    let lines: std::collections::BTreeSet<String> = (0..40)
        .map(|seed| {
            let mut rules = rules();
            (rules.tags.sd_scripts_captions, rules.tags.wildcards) = (true, true);
            build_caption(" a, b \n\n {c|d}\t\r\n", &rules, &mut TorchGenerator::manual_seed(seed))
        })
        .collect();
    assert_eq!(lines.into_iter().collect::<Vec<_>>(), ["a, b", "c", "d"]);
    // Tags lose their blanks when others are dropped, and empty ones stay.
    assert_eq!(
        tags(" a ,, b , c ", &|r| {
            (r.token_dropout_rate, r.keep_tokens, r.shuffle_keeps_tokens) = (1e-9, 1, true);
        }),
        "a, , b, c"
    );
    assert_eq!(tags(" a ,, b , c ", &|r| r.token_dropout_rate = 1e-9), "a, , b, c");
}

#[test]
fn some_tags_are_shuffled_and_every_alternative_is_chosen() {
    let rules = CaptionRules {
        tags: TagRules {
            shuffle: true,
            keep_tokens: 1,
            shuffle_keeps_tokens: true,
            wildcards: true,
            ..TagRules::default()
        },
        random_triggers: vec!["last".into()],
        random_triggers_max: 1,
        ..rules()
    };
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..60 {
        let mut generator = TorchGenerator::manual_seed(seed);
        let got = build_caption("one, {x|y}, two\nonly", &rules, &mut generator);
        if got != "only, last" {
            assert!(got.starts_with("one, ") && got.ends_with(", last"), "{got}");
        }
        seen.insert(got);
    }
    let expected = [
        "one, two, x, last",
        "one, two, y, last",
        "one, x, two, last",
        "one, y, two, last",
        "only, last",
    ];
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), expected);
}

#[test]
fn captions_are_changed_in_ai_toolkits_order() {
    assert_eq!(build("a, b,c", &rules()), "a,  b, c");
    let sks = CaptionRules {
        trigger: Some("sks".into()),
        ..rules()
    };
    assert_eq!(build("a cat", &sks), "sks a cat");
    assert_eq!(build("a sks cat", &sks), "a sks cat");
    assert_eq!(build("[trigger] and [name]", &sks), "sks and sks");
    assert_eq!(build("a [trigger] cat", &rules()), "a  cat");
    let dropped = CaptionRules {
        caption_dropout: 1.0,
        process_trigger: Some("sks".into()),
        ..sks.clone()
    };
    assert_eq!(build("a cat", &dropped), "sks");
    assert_eq!(
        build(
            "a cat",
            &CaptionRules {
                caption_dropout: 1.0,
                ..rules()
            }
        ),
        ""
    );
    let tokens = CaptionRules {
        tags: TagRules {
            token_dropout_rate: 1.0,
            keep_tokens: 2,
            ..TagRules::default()
        },
        ..rules()
    };
    assert_eq!(build("a,b,c,d", &tokens), "a, b");
    let appended = |max: usize| CaptionRules {
        random_triggers: vec!["one".into()],
        random_triggers_max: max,
        ..rules()
    };
    assert_eq!(build("a", &appended(1)), "a, one");
    assert_eq!(build("a", &appended(0)), "a");
    let shuffled = build(
        "a,b,c,d,e,f,g",
        &CaptionRules {
            tags: TagRules {
                shuffle: true,
                ..TagRules::default()
            },
            ..rules()
        },
    );
    // The second time it is split at commas alone, as there.
    let mut letters: Vec<&str> = shuffled.split(", ").map(str::trim).collect();
    assert_ne!(letters, ["a", "b", "c", "d", "e", "f", "g"]);
    letters.sort_unstable();
    assert_eq!(letters.join(""), "abcdefg");
    let many = CaptionRules {
        random_triggers: vec!["x".into(), "y".into()],
        random_triggers_max: 2,
        ..rules()
    };
    for seed in 0..20 {
        let got = build_caption("a", &many, &mut TorchGenerator::manual_seed(seed));
        assert!(
            ["a", "a, x", "a, y", "a, x, y", "a, y, x"].contains(&got.as_str()),
            "{got}"
        );
    }
}

/// ai-toolkit shuffles the tags before and after it adds the trigger word, so that the word is not always the first one.
#[test]
fn a_trigger_word_is_shuffled_with_the_tags() {
    let first = |change: &dyn Fn(&mut TagRules)| {
        let mut rules = CaptionRules {
            trigger: Some("zorb".into()),
            ..rules()
        };
        rules.tags.shuffle = true;
        change(&mut rules.tags);
        let build = |seed| build_caption("a,b,c", &rules, &mut TorchGenerator::manual_seed(seed));
        (0..60).filter(|seed| build(*seed).trim().starts_with("zorb")).count()
    };
    let shuffled = first(&|_| {});
    // The word and the tag after it are one tag, of three.
    assert!((5..45).contains(&shuffled), "{shuffled} of 60");
    // sd-scripts has no trigger word, and its orders stay.
    assert_eq!(first(&|tags| tags.sd_scripts_captions = true), 60);
    assert_eq!(first(&|tags| tags.shuffle_keeps_tokens = true), 60);
    assert_eq!(first(&|tags| tags.secondary_separator = Some(";".into())), 60);
}

#[test]
fn caption_files_are_read_without_trimming() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("a.png");
    assert_eq!(read_caption(&image, ".txt", None).unwrap(), "");
    assert_eq!(read_caption(&image, ".txt", Some("it")).unwrap(), "it");
    std::fs::write(dir.path().join("a.txt"), "  \n").unwrap();
    assert_eq!(read_caption(&image, ".txt", Some("it")).unwrap(), "it");
    assert_eq!(read_caption(&image, ".txt", None).unwrap(), "  \n");
    std::fs::write(dir.path().join("a.txt"), " a cat\n").unwrap();
    assert_eq!(read_caption(&image, ".txt", Some("it")).unwrap(), " a cat\n");
    std::fs::write(dir.path().join("a.txt"), [0xe9, b't', 0xe9]).unwrap();
    let message = read_caption(&image, ".txt", None).unwrap_err().to_string();
    assert!(message.contains("a.txt") && message.contains("UTF-8"), "{message}");
}

#[test]
fn json_captions_are_read_from_their_caption_key() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("a.png");
    let file = dir.path().join("a.json");
    std::fs::write(&file, r#"{"caption": "a red circle", "caption_short": "circle"}"#).unwrap();
    assert_eq!(read_caption(&image, ".json", None).unwrap(), "a red circle");
    for wrong in ["a red circle", r#"{"text": "a red circle"}"#, r#"{"caption": 5}"#, "[]"] {
        std::fs::write(&file, wrong).unwrap();
        let message = read_caption(&image, ".json", None).unwrap_err().to_string();
        assert!(message.contains("a.json"), "{message}");
    }
    // A JSON data set with a caption of the wrong type.
    std::fs::write(&image, b"").unwrap();
    let set = dir.path().join("set.json");
    std::fs::write(&set, r#"{"a.png": "a red circle"}"#).unwrap();
    let message = discover(&set, false, false).unwrap_err().to_string();
    assert!(message.contains("a.png") && message.contains("caption"), "{message}");
}
