//! Documents, rows and batches.

use super::*;
use crate::models::causal_lm::{FimTokens, TextTokenizer};
use crate::testing::byte_tokenizer::{END, write_tokenizer};
use crate::testing::compute_on_this_thread;
use proptest::prelude::*;
use serde_json::json;
use std::path::Path;

/// A token that begins texts.
const BEGIN: u32 = 260;

fn source(path: &Path) -> DataSource {
    DataSource {
        path: path.to_path_buf(),
        kind: SourceKind::Auto,
        include: Vec::new(),
        exclude: Vec::new(),
        licenses: Vec::new(),
        text_column: "text".into(),
        prompt_column: "prompt".into(),
        completion_column: "completion".into(),
        repeats: 1,
        stay_in_folder: false,
        is_held_out: false,
    }
}

fn tokenizer(folder: &Path) -> DocumentTokenizer {
    write_tokenizer(folder, 264);
    std::fs::write(
        folder.join("tokenizer_config.json"),
        json!({"eos_token": "<|endoftext|>"}).to_string(),
    )
    .unwrap();
    DocumentTokenizer::open(folder, 264).unwrap().unwrap()
}

fn options<'a>(folder: &'a Path, tokenizer: Option<&'a DocumentTokenizer>, context: usize) -> ReadOptions<'a> {
    ReadOptions {
        context,
        vocabulary: 264,
        fim: FimRates::default(),
        seed: 3,
        held_out: 0.0,
        tokenizer,
        model: folder,
    }
}

fn read(sources: &[DataSource], options: ReadOptions<'_>) -> ReadData {
    compute_on_this_thread();
    read_documents(sources, options, options.model, &mut |_| Ok(())).unwrap()
}

/// The ids of the documents, and for each whether it is trained on.
fn ids(data: &ReadData, documents: &[Document]) -> Vec<(Vec<u32>, Vec<bool>)> {
    let tokens = |document: &Document| data.store.read(*document).unwrap().into_iter();
    documents
        .iter()
        .map(|document| tokens(document).map(|token| (token.id, token.has_loss)).unzip())
        .collect()
}

#[test]
fn files_of_a_folder_are_documents_in_the_order_of_their_paths() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, model) = (dir.path().join("src"), dir.path().join("model"));
    for name in ["b", "a/deep", ".git"] {
        std::fs::create_dir_all(folder.join(name)).unwrap();
    }
    std::fs::create_dir_all(&model).unwrap();
    for (name, text) in [
        ("b/two.rs", "two"),
        ("a/deep/one.rs", "one"),
        ("a/deep/one_test.rs", "test"),
        ("b/notes.md", "notes"),
        (".git/hidden.rs", "hidden"),
    ] {
        std::fs::write(folder.join(name), text).unwrap();
    }
    std::fs::write(folder.join("b/binary.rs"), b"a\0b").unwrap();
    std::fs::write(folder.join("b/latin.rs"), b"caf\xe9").unwrap();
    let tokenizer = tokenizer(&model);
    let sources = [DataSource {
        include: vec!["**/*.rs".into()],
        exclude: vec!["*_test.rs".into()],
        repeats: 2,
        ..source(&folder)
    }];
    let data = read(&sources, options(&model, Some(&tokenizer), 16));
    let texts: Vec<String> = ids(&data, &data.trained)
        .iter()
        .map(|(ids, _)| {
            assert_eq!(ids.last(), Some(&END));
            tokenizer.decode(ids).unwrap()
        })
        .collect();
    assert_eq!(texts, ["one", "one", "two", "two"]);
    // Without a licence no file belongs to the data set, but for one that has its own.
    std::fs::write(
        folder.join("b/three.rs"),
        "// SPDX-License-Identifier: MIT OR GPL-3.0-only",
    )
    .unwrap();
    let licensed = [DataSource {
        licenses: vec!["mit".into()],
        ..sources[0].clone()
    }];
    let found = read(&licensed, options(&model, Some(&tokenizer), 64));
    assert_eq!(found.trained.len(), 2);
    let notes = found.notes.join("\n");
    assert!(
        notes.contains("2 files have none of the `licenses`") && notes.contains("one.rs (no licence found)"),
        "{notes}"
    );
    assert_eq!(data.notes.len(), 1);
    assert!(data.notes[0].contains("2 files are not UTF-8 text") && data.notes[0].contains("binary.rs"));
}

#[test]
fn long_documents_are_split_and_prompts_have_no_loss() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let file = dir.path().join("data.json");
    let long: Vec<u32> = (0..10).collect();
    let records = json!([long, {"prompt": "ab", "completion": "c"}, {"prompt": "abcdefgh", "completion": "i"}, {"tokens": [7]}, []]);
    std::fs::write(&file, records.to_string()).unwrap();
    let data = read(&[source(&file)], options(dir.path(), Some(&tokenizer), 4));
    let found = ids(&data, &data.trained);
    let lengths: Vec<usize> = found.iter().map(|(ids, _)| ids.len()).collect();
    // Of the second prompt, two windows have nothing to train on.
    assert_eq!(lengths, [4, 4, 2, 4, 2]);
    assert_eq!(found[2].0, [8, 9]);
    assert_eq!(found[3].1, [false, false, true, true]);
    assert_eq!(found[4].1, [true, true]);
    let notes = data.notes.join("\n");
    for note in [
        "documents that are longer than the context of 4 tokens: 2, which are split into 6 pieces",
        "documents of fewer than two tokens, or such ends of longer ones, in which nothing can be predicted, are left out: 2",
        "pieces of 4 tokens that consist of a prompt alone are left out: 2",
    ] {
        assert!(notes.contains(note), "{notes}");
    }
    // One sequence in a file, and a list below a name.
    for text in [
        "[1, 2, 3]",
        "{\"about\": {\"x\": [1]}, \"sequences\": [[1, 2, 3]]}",
        "{\"input_ids\": [1, 2, 3]}",
    ] {
        std::fs::write(&file, format!("\u{feff}{text}")).unwrap();
        let data = read(&[source(&file)], options(dir.path(), None, 4));
        assert_eq!(ids(&data, &data.trained)[0].0, [1, 2, 3], "{text}");
    }
    // Ten megabytes of tokens in one sequence.
    let many = vec!["11"; 3 << 20].join(",");
    std::fs::write(&file, format!("[[{many}]]")).unwrap();
    let data = read(&[source(&file)], options(dir.path(), None, 1 << 12));
    assert_eq!(data.trained.len(), (3 << 20) >> 12);
    assert_eq!(data.store.tokens(), 3 << 20);
}

#[test]
fn held_out_documents_are_a_share_that_the_seed_chooses() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("data.jsonl");
    let lines: Vec<String> = (0..400)
        .map(|index| format!("[{}, {}]\n", index % 200, index / 200))
        .collect();
    std::fs::write(&file, lines.concat()).unwrap();
    let sources = [DataSource {
        repeats: 3,
        ..source(&file)
    }];
    let with = |seed| {
        let options = ReadOptions {
            seed,
            held_out: 0.2,
            ..options(dir.path(), None, 8)
        };
        let data = read(&sources, options);
        assert_eq!(data.trained.len() + 3 * data.held_out.len(), 1200);
        assert!((50..110).contains(&data.held_out.len()), "{}", data.held_out.len());
        let trained = ids(&data, &data.trained);
        assert!(
            ids(&data, &data.held_out)
                .iter()
                .all(|document| !trained.contains(document))
        );
        data.held_out
    };
    assert_eq!(with(1), with(1));
    assert_ne!(with(1), with(2));
}

#[test]
fn cuts_keep_every_character_and_repeats_are_cut_anew() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let file = dir.path().join("a.rs");
    let text = "fn größe(x: i32) -> i32 { x + 1 } // ß".repeat(3);
    std::fs::write(&file, &text).unwrap();
    let sources = [DataSource {
        repeats: 40,
        ..source(&file)
    }];
    let fim = FimRates {
        rate: 1.0,
        spm_rate: 0.5,
    };
    let options = ReadOptions {
        fim,
        ..options(dir.path(), Some(&tokenizer), 64)
    };
    let data = read(&sources, options);
    let marks = tokenizer.fim_tokens().unwrap();
    let pieces = data.trained.len() / 40;
    assert!(pieces > 1);
    let all = ids(&data, &data.trained);
    let (mut orders, mut different) = ([0, 0], std::collections::BTreeSet::new());
    for repeat in all.chunks(pieces) {
        let mut joined = String::new();
        for (ids, _) in repeat {
            assert!(ids.len() <= 64 && ids.last() == Some(&END));
            let at = |mark: u32| ids.iter().position(|id| *id == mark).unwrap();
            let (prefix, middle, suffix) = (at(marks.prefix), at(marks.middle.unwrap()), at(marks.suffix));
            let decode = |range: std::ops::Range<usize>| tokenizer.decode(&ids[range]).unwrap();
            let end = ids.len() - 1;
            // Of SPM, prefix and middle are one piece after the mark of the middle.
            let (before, after) = match suffix == prefix + 1 {
                true => (decode(middle + 1..end), decode(suffix + 1..middle)),
                false => (
                    decode(prefix + 1..suffix) + &decode(middle + 1..end),
                    decode(suffix + 1..middle),
                ),
            };
            orders[usize::from(suffix == prefix + 1 && middle > suffix)] += 1;
            joined += &(before + &after);
        }
        assert_eq!(joined, text);
        different.insert(repeat.to_vec());
    }
    assert!(orders.iter().all(|count| *count > 10), "{orders:?}");
    assert!(different.len() > 35);
}

/// A prefix has one space more than the text, which decoding takes away; middle and suffix have none of the tokenizer, and `▁<EOT>` ends
/// the middle.
#[test]
fn gaps_of_code_llama_have_its_spaces_and_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = std::fs::read(crate::testing::fixtures().join("fim.json")).unwrap();
    let fixture: serde_json::Value = serde_json::from_slice(&fixture).unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), fixture["tokenizer"].to_string()).unwrap();
    let tokenizer = DocumentTokenizer::open(dir.path(), 264).unwrap().unwrap();
    let file = dir.path().join("a.py");
    let text = "def fox(a):\n  a = b + 0\n    ba d\n";
    std::fs::write(&file, text).unwrap();
    let sources = [DataSource {
        repeats: 40,
        ..source(&file)
    }];
    let fim = FimRates {
        rate: 1.0,
        spm_rate: 0.5,
    };
    let options = ReadOptions {
        fim,
        ..options(dir.path(), Some(&tokenizer), 64)
    };
    let data = read(&sources, options);
    assert_eq!(data.trained.len(), 40);
    let marks = tokenizer.fim_tokens().unwrap();
    let mut orders = [0, 0];
    for (ids, _) in ids(&data, &data.trained) {
        // As a prompt, it begins with `<s>`.
        assert_eq!(ids[0], tokenizer.encode("", true).unwrap()[0]);
        let ids = &ids[1..];
        assert_eq!((ids[0], ids.last().copied()), (marks.prefix, marks.end));
        let at = |mark: u32| ids.iter().position(|id| *id == mark).unwrap();
        let (suffix, middle, end) = (at(marks.suffix), at(marks.middle.unwrap()), ids.len() - 1);
        let is_spm = suffix == 1;
        orders[usize::from(is_spm)] += 1;
        // Of SPM, prefix and middle are one piece.
        let parts = match is_spm {
            true => [&ids[middle + 1..end], &ids[suffix + 1..middle]].concat(),
            false => [&ids[1..suffix], &ids[middle + 1..end], &ids[suffix + 1..middle]].concat(),
        };
        assert_eq!(tokenizer.decode(&parts).unwrap(), text);
    }
    assert!(orders.iter().all(|count| *count > 5), "{orders:?}");
}

/// A folder with a byte tokenizer that names the marks of a gap like this, and puts `<begin>` before each text if `begins`.
fn write_fim_tokenizer(folder: &Path, names: [&str; 3], begins: bool) {
    drop(tokenizer(folder));
    let path = folder.join("tokenizer.json");
    let mut text = std::fs::read_to_string(&path).unwrap();
    for (old, new) in ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"].into_iter().zip(names) {
        text = text.replace(old, new);
    }
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    if begins {
        json["added_tokens"].as_array_mut().unwrap().push(json!({
            "id": BEGIN, "content": "<begin>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
        }));
        json["post_processor"] = json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<begin>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<begin>": {"id": "<begin>", "ids": [BEGIN], "tokens": ["<begin>"]}},
        });
    }
    std::fs::write(path, json.to_string()).unwrap();
}

/// Before, a document with a gap had no token at its beginning, and every prompt of DeepSeek-Coder, Code Llama and Codestral has one.
#[test]
fn documents_with_gaps_are_prompts_with_gaps_and_what_fills_them() {
    let (of_names, of_code_llama) = (|names, begins| Some((names, begins)), None);
    let fixture = std::fs::read(crate::testing::fixtures().join("fim.json")).unwrap();
    let fixture: serde_json::Value = serde_json::from_slice(&fixture).unwrap();
    for family in [
        // StarCoder and StarCoder2; Qwen2.5-Coder: their tokenizers begin no text with a token.
        of_names(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], false),
        of_names(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], false),
        // DeepSeek-Coder and Codestral.
        of_names(["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], true),
        of_names(["[PREFIX]", "[SUFFIX]", "[MIDDLE]"], true),
        of_code_llama,
    ] {
        let dir = tempfile::tempdir().unwrap();
        let text = "def fox(a):\n  a = b + 0\n    ba d\n";
        match family {
            Some((names, begins)) => write_fim_tokenizer(dir.path(), names, begins),
            None => std::fs::write(dir.path().join("tokenizer.json"), fixture["tokenizer"].to_string()).unwrap(),
        }
        let tokenizer = DocumentTokenizer::open(dir.path(), 264).unwrap().unwrap();
        let of_prompts = TextTokenizer::open(dir.path(), 264).unwrap();
        let begin = tokenizer.encode("", true).unwrap();
        assert_eq!(
            begin.len(),
            usize::from(family.is_none_or(|(_, begins)| begins)),
            "{family:?}"
        );
        let end = tokenizer.fim_tokens().unwrap().end.or(tokenizer.end());
        // Each way to cut the text, as a prompt and what fills its gap.
        let mut possible = std::collections::HashSet::new();
        for first in 0..=text.len() {
            for second in first..=text.len() {
                let mut ids = of_prompts.encode_fim(&text[..first], &text[second..]).unwrap();
                ids.extend(of_prompts.encode_continuation(&text[first..second]).unwrap());
                ids.extend(end);
                possible.insert(ids);
            }
        }
        let file = dir.path().join("a.py");
        std::fs::write(&file, text).unwrap();
        let sources = [DataSource {
            repeats: 40,
            ..source(&file)
        }];
        let options = ReadOptions {
            fim: FimRates {
                rate: 1.0,
                spm_rate: 0.0,
            },
            ..options(dir.path(), Some(&tokenizer), 64)
        };
        let data = read(&sources, options);
        assert_eq!(data.trained.len(), 40);
        for (ids, _) in ids(&data, &data.trained) {
            assert!(possible.contains(&ids), "{family:?}: {ids:?}");
        }
        // Token sequences begin in the same way, also those that have the token already. Pieces fit the context.
        let lines = [
            vec![10_u32, 11, 12, 13],
            [begin.as_slice(), &[10, 11, 12, 13]].concat(),
            vec![9; 100],
        ];
        let file = dir.path().join("ids.jsonl");
        std::fs::write(&file, lines.map(|line| json!(line).to_string()).join("\n")).unwrap();
        let options = ReadOptions { context: 16, ..options };
        let data = read(&[source(&file)], options);
        let found = ids(&data, &data.trained);
        assert!(found.len() > 8);
        for (ids, _) in &found {
            assert!(ids.len() <= 16 && ids.starts_with(&begin), "{family:?}: {ids:?}");
            let count = ids.iter().filter(|id| begin.contains(id)).count();
            assert_eq!(count, begin.len(), "{family:?}: {ids:?}");
        }
        assert_eq!(found[0].0.len(), found[1].0.len());
    }
}

/// Pieces of a long text fit the context with the token at the beginning, which only the first piece has when it is not cut.
#[test]
fn a_long_text_that_is_not_cut_begins_once() {
    let dir = tempfile::tempdir().unwrap();
    write_fim_tokenizer(dir.path(), ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], true);
    let tokenizer = DocumentTokenizer::open(dir.path(), 264).unwrap().unwrap();
    let file = dir.path().join("a.py");
    let text = "fn a() {}".repeat(20);
    std::fs::write(&file, &text).unwrap();
    let options = |rate| ReadOptions {
        fim: FimRates { rate, spm_rate: 0.5 },
        ..options(dir.path(), Some(&tokenizer), 16)
    };
    let data = read(&[source(&file)], options(1e-9));
    let whole: Vec<u32> = ids(&data, &data.trained).into_iter().flat_map(|(ids, _)| ids).collect();
    let mut expected = tokenizer.encode(&text, true).unwrap();
    expected.push(END);
    assert_eq!(expected[0], BEGIN);
    assert_eq!(whole, expected);
    let data = read(&[source(&file)], options(1.0));
    for (ids, _) in ids(&data, &data.trained) {
        assert!(
            ids[0] == BEGIN && ids.len() <= 16 && ids.last() == Some(&END),
            "{ids:?}"
        );
    }
}

#[test]
fn cut_parts_are_shortened_to_the_context() {
    let marks = FimTokens {
        prefix: 100,
        middle: Some(101),
        suffix: 102,
        end: None,
        has_separate_parts: false,
    };
    let parts: [&[u32]; 3] = [&[1, 2, 3], &[4, 5], &[6, 7, 8]];
    assert_eq!(marks.join(parts, false, 99), [100, 1, 2, 3, 102, 6, 7, 8, 101, 4, 5]);
    assert_eq!(marks.join(parts, true, 99), [100, 102, 6, 7, 8, 101, 1, 2, 3, 4, 5]);
    assert_eq!(marks.join(parts, false, 9), [100, 1, 2, 3, 102, 6, 101, 4, 5]);
    assert_eq!(marks.join(parts, true, 7), [100, 102, 101, 2, 3, 4, 5]);
    assert_eq!(marks.join(parts, false, 4), [100, 102, 101, 4]);
    // Without a mark of the middle, as Codestral has it, the suffix is first.
    let two = FimTokens { middle: None, ..marks };
    for is_spm in [false, true] {
        assert_eq!(two.join(parts, is_spm, 99), [102, 6, 7, 8, 100, 1, 2, 3, 4, 5]);
        assert_eq!(two.join(parts, is_spm, 8), [102, 6, 100, 1, 2, 3, 4, 5]);
    }
}

#[test]
fn rows_have_their_documents_and_what_is_predicted() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("data.jsonl");
    std::fs::write(&file, "[1,2,3]\n[4,5]\n[6,7,8,9]\n").unwrap();
    let data = read(&[source(&file)], options(dir.path(), None, 8));
    let plan = RowPlan::packed(data.trained.clone(), 8, 1);
    assert_eq!(plan.len(), 2);
    let batch = TokenBatch::read(&data.store, &plan, &[0, 1]).unwrap();
    assert_eq!((batch.rows, batch.length, batch.tokens), (2, 7, 9));
    // Rows hold documents in the order of the files.
    assert_eq!(batch.ids, [1, 2, 3, 6, 7, 8, 9, 4, 5, 0, 0, 0, 0, 0]);
    assert_eq!(batch.documents, [0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1]);
    assert_eq!(batch.positions, [0, 1, 3, 4, 5, 7]);
    assert_eq!(batch.targets, [2, 3, 7, 8, 9, 5]);
    let single = RowPlan::single(data.trained);
    let batch = TokenBatch::read(&data.store, &single, &[2, 1]).unwrap();
    assert_eq!(batch.ids, [6, 7, 8, 9, 4, 5, 0, 0]);
    assert_eq!(batch.targets, [7, 8, 9, 5]);
}

#[test]
fn every_epoch_has_every_row_once() {
    let mut order = RowOrder::new(11, 2, 2, 5);
    assert_eq!(order.steps_per_epoch(), 3);
    let mut epochs = Vec::new();
    for epoch in 0..3 {
        let steps: Vec<Vec<Vec<usize>>> = (0..3).map(|step| order.batches(3 * epoch + step)).collect();
        assert_eq!(steps[2].iter().map(Vec::len).collect::<Vec<_>>(), [2, 1]);
        let rows = steps.concat().concat();
        let mut sorted = rows.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..11).collect::<Vec<_>>());
        epochs.push(rows);
    }
    assert_ne!(epochs[0], epochs[1]);
    // Any step alone gives the same rows.
    let mut resumed = RowOrder::new(11, 2, 2, 5);
    assert_eq!(resumed.batches(7), order.batches(7));
    assert_eq!(resumed.batches(1), order.batches(1));
}

proptest! {
    #[test]
    fn packed_rows_are_full_and_have_every_document_once(lengths in proptest::collection::vec(2usize..40, 1..60), context in 40usize..90) {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("data.jsonl");
        let line = |(index, length): (usize, &usize)| format!("{:?}\n", vec![index; *length]);
        let lines: Vec<String> = lengths.iter().enumerate().map(line).map(|line| line.to_string()).collect();
        std::fs::write(&file, lines.concat()).unwrap();
        let data = read(&[source(&file)], options(dir.path(), None, context));
        let plan = RowPlan::packed(data.trained.clone(), context, 9);
        let mut seen = Vec::new();
        let mut sums = Vec::new();
        for row in 0..plan.len() {
            let documents = plan.row(row);
            let sum: usize = documents.iter().map(|document| document.length as usize).sum();
            prop_assert!(sum <= context);
            sums.push(sum);
            seen.extend(ids(&data, documents).into_iter().map(|(ids, _)| ids[0] as usize));
        }
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..lengths.len()).collect::<Vec<_>>());
        // No two rows could be one.
        sums.sort_unstable();
        prop_assert!(sums.len() < 2 || sums[0] + sums[1] > context);
    }
}

/// Some tokenizers add the end of a text themselves. A text has one, and there is none between prompt and completion.
#[test]
fn what_a_tokenizer_adds_at_the_end_is_not_added_twice() {
    let dir = tempfile::tempdir().unwrap();
    let plain = tokenizer(dir.path());
    let file = dir.path().join("tokenizer.json");
    let mut json: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let special = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
    json["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [special("<fim_prefix>"), {"Sequence": {"id": "A", "type_id": 0}}, special("<|endoftext|>")],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<fim_prefix>": {"id": "<fim_prefix>", "ids": [257], "tokens": ["<fim_prefix>"]},
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [END], "tokens": ["<|endoftext|>"]},
        },
    });
    std::fs::write(&file, json.to_string()).unwrap();
    let adding = DocumentTokenizer::open(dir.path(), 264).unwrap().unwrap();
    for text in ["", "fn a", "<|endoftext|>", "a<|endoftext|>"] {
        let expected = plain.encode(text, false).unwrap();
        assert_eq!(adding.encode(text, false).unwrap(), expected, "{text}");
        assert_eq!(
            adding.encode(text, true).unwrap(),
            [&[257], expected.as_slice()].concat(),
            "{text}"
        );
    }
    // One token may be at the beginning and at the end.
    let one = |value: &str| value.replace("<fim_prefix>", "<|endoftext|>").replace("[257]", "[256]");
    let both_ends = dir.path().join("both");
    std::fs::create_dir_all(&both_ends).unwrap();
    let mut both = json.clone();
    both["post_processor"] = serde_json::from_str(&one(&json["post_processor"].to_string())).unwrap();
    std::fs::write(both_ends.join("tokenizer.json"), both.to_string()).unwrap();
    std::fs::copy(
        dir.path().join("tokenizer_config.json"),
        both_ends.join("tokenizer_config.json"),
    )
    .unwrap();
    let both = DocumentTokenizer::open(&both_ends, 264).unwrap().unwrap();
    assert_eq!(both.encode("", true).unwrap(), [END]);
    assert_eq!(both.encode("a", true).unwrap()[..1], [END]);
    assert_eq!(both.encode("a", true).unwrap().len(), 2);
    let data = dir.path().join("data.jsonl");
    let lines = [json!({"text": "ab"}), json!({"prompt": "c", "completion": "d"})];
    std::fs::write(&data, lines.map(|line| line.to_string()).join("\n")).unwrap();
    let found = read(&[source(&data)], options(dir.path(), Some(&adding), 16));
    let [a, b, c, d] = ["a", "b", "c", "d"].map(|letter| plain.encode(letter, false).unwrap()[0]);
    let documents: Vec<Vec<u32>> = ids(&found, &found.trained).into_iter().map(|(ids, _)| ids).collect();
    assert_eq!(documents, [vec![257, a, b, END], vec![257, c, d, END]]);
}

#[test]
fn records_in_two_formats_and_fields_of_texts_are_not_guessed() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let folder = dir.path().join("hub");
    std::fs::create_dir_all(&folder).unwrap();
    let fixture = crate::testing::fixtures().join("parquet").join("texts_snappy.parquet");
    std::fs::copy(fixture, folder.join("train-1.parquet")).unwrap();
    std::fs::write(folder.join("train-2.jsonl"), json!({"content": "ab"}).to_string()).unwrap();
    std::fs::write(folder.join("README.md"), "# Data\n").unwrap();
    let records = DataSource {
        text_column: "content".into(),
        ..source(&folder)
    };
    let options = options(dir.path(), Some(&tokenizer), 32);
    let error = |source: &DataSource| {
        compute_on_this_thread();
        let read = read_documents(std::slice::from_ref(source), options, dir.path(), &mut |_| Ok(()));
        read.map(drop).unwrap_err().to_string()
    };
    let found = error(&records);
    assert!(
        found.contains("in Parquet and in JSONL") && found.contains("`include`"),
        "{found}"
    );
    let chosen = |pattern: &str| DataSource {
        include: vec![pattern.into()],
        ..records.clone()
    };
    let count = |source: &DataSource| read(std::slice::from_ref(source), options).trained.len();
    assert_eq!(count(&chosen("*.jsonl")), 1);
    assert_eq!(count(&chosen("train-*")), count(&chosen("*.parquet")) + 1);
    // A folder of text has no fields.
    std::fs::write(folder.join("a.rs"), "fn a() {}").unwrap();
    let found = error(&records);
    assert!(
        found.contains("`text_column`") && found.contains("`kind: records`"),
        "{found}"
    );
}

/// The files of a data set of Hugging Face in Parquet are the documents of its JSONL: the same tokens in the same order.
#[test]
fn documents_of_parquet_are_those_of_jsonl() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let fixture = |name: &str| crate::testing::fixtures().join("parquet").join(name);
    let folder = dir.path().join("hub");
    std::fs::create_dir_all(folder.join("data")).unwrap();
    for (name, file) in [
        ("data/train-00000-of-00002.parquet", "texts_snappy.parquet"),
        ("data/train-00001-of-00002.parquet", "texts_delta.parquet"),
        ("data/validation-00000-of-00001.parquet", "texts_zstd_groups.parquet"),
    ] {
        std::fs::copy(fixture(file), folder.join(name)).unwrap();
    }
    std::fs::write(folder.join("README.md"), "---\ndataset_info:\n  features: []\n---\n").unwrap();
    let with = |path: &Path, is_held_out| DataSource {
        text_column: "content".into(),
        is_held_out,
        ..source(path)
    };
    let fim = FimRates {
        rate: 0.5,
        spm_rate: 0.5,
    };
    let options = ReadOptions {
        fim,
        ..options(dir.path(), Some(&tokenizer), 32)
    };
    let lines = fixture("texts.jsonl");
    let expected = read(&[with(&lines, false), with(&lines, false), with(&lines, true)], options);
    let found = read(&[with(&folder, false), with(&folder, true)], options);
    assert_eq!(found.store.fingerprint(), expected.store.fingerprint());
    assert_eq!(ids(&found, &found.trained), ids(&expected, &expected.trained));
    assert_eq!(ids(&found, &found.held_out), ids(&expected, &expected.held_out));
    let note = &found.notes[0];
    assert!(
        note.contains("2 of its 3 files with records, such as data/train-00000"),
        "{note}"
    );
    // One file, and token ids without a tokenizer.
    let without = ReadOptions {
        fim: FimRates::default(),
        tokenizer: None,
        ..options
    };
    let [lines, file] = ["ids.jsonl", "ids_dictionary.parquet"].map(fixture);
    let [lines, file] = [lines, file].map(|path| read(&[with(&path, false)], without).store.fingerprint());
    assert_eq!(lines, file);
}
