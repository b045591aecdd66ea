//! Compares texts with those of transformers' `generate` (`tests/reference/make_decoder.py`), and checks what ends a text.

use super::{Completion, SamplingParams, StopReason, TextEvents, TextRequest, TextSettings, generate_texts};
use crate::error::Result;
use crate::models::causal_lm::{CausalLm, CausalLmOptions, TextTokenizer};
use crate::testing::byte_tokenizer::{END, write_tokenizer};
use crate::testing::formula_weights::{expected, write_model};
use crate::testing::{compute_on_this_thread, in_portable_mode};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A tiny model with a tokenizer.
struct Tiny {
    folder: tempfile::TempDir,
    value: Value,
    vocab_size: usize,
}

impl Tiny {
    fn new(name: &str) -> Self {
        compute_on_this_thread();
        let value = expected()["models"][name].clone();
        let vocab_size = value["config"]["vocab_size"].as_u64().unwrap() as usize;
        let folder = tempfile::tempdir().unwrap();
        write_model(folder.path(), &value["config"]);
        write_tokenizer(folder.path(), vocab_size);
        Self {
            folder,
            value,
            vocab_size,
        }
    }

    fn prompt(&self, length: usize) -> Vec<u32> {
        let rows: Vec<Vec<u32>> = serde_json::from_value(self.value["ids"].clone()).unwrap();
        rows[0][..length].to_vec()
    }

    fn greedy(&self, penalty: &str) -> Vec<u32> {
        serde_json::from_value(self.value["greedy"][penalty].clone()).unwrap()
    }

    fn generate(&self, settings: &TextSettings, prompts: &[Vec<u32>]) -> Result<Report> {
        let model = CausalLm::load(self.folder.path(), &CausalLmOptions::cpu()).unwrap();
        let tokenizer = TextTokenizer::open(self.folder.path(), self.vocab_size).unwrap();
        let requests: Vec<TextRequest> = prompts
            .iter()
            .zip(0..)
            .map(|(prompt, number)| TextRequest {
                prompt: prompt.clone(),
                number,
            })
            .collect();
        let mut report = Report::default();
        report.is_complete = generate_texts(&model, &tokenizer, settings, &requests, &mut report)?;
        Ok(report)
    }
}

/// What a generation reported.
#[derive(Default)]
struct Report {
    lines: BTreeMap<u64, Vec<String>>,
    completions: BTreeMap<u64, Completion>,
    steps: usize,
    max_steps: Option<usize>,
    is_complete: bool,
}

impl TextEvents for Report {
    fn before_step(&mut self) -> bool {
        self.steps += 1;
        self.max_steps.is_none_or(|max| self.steps <= max)
    }

    fn line(&mut self, number: u64, line: &str) -> Result<()> {
        assert!(!self.completions.contains_key(&number));
        self.lines.entry(number).or_default().push(line.to_owned());
        Ok(())
    }

    fn complete(&mut self, number: u64, completion: Completion) -> Result<()> {
        let lines = self.lines.get(&number).cloned().unwrap_or_default();
        let text = completion.text.strip_suffix('\n').unwrap_or(&completion.text);
        assert_eq!(lines.join("\n"), text);
        assert!(self.completions.insert(number, completion).is_none());
        Ok(())
    }
}

fn settings(max_new_tokens: usize) -> TextSettings {
    TextSettings {
        choice: SamplingParams::default(),
        max_new_tokens,
        stop: Vec::new(),
        seed: 7,
        batch_size: 1,
    }
}

#[test]
fn greedy_texts_are_those_of_transformers() {
    for name in expected()["models"].as_object().unwrap().keys() {
        let tiny = Tiny::new(name);
        for penalty in ["1.0", "1.4"] {
            let mut settings = settings(64);
            settings.choice.repetition_penalty = penalty.parse().unwrap();
            let report = tiny.generate(&settings, &[tiny.prompt(7)]).unwrap();
            assert_eq!(report.completions[&0].tokens, tiny.greedy(penalty), "{name}, {penalty}");
            assert_eq!(report.completions[&0].reason, StopReason::MaxNewTokens);
            assert!(report.is_complete);
        }
    }
}

#[test]
fn a_text_does_not_depend_on_its_neighbours() {
    for name in ["starcoder2", "llama", "starcoder"] {
        let tiny = Tiny::new(name);
        let prompts: Vec<Vec<u32>> = [3, 11, 1, 7].into_iter().map(|length| tiny.prompt(length)).collect();
        let mut settings = settings(12);
        settings.choice.temperature = 0.9;
        settings.choice.top_p = 0.95;
        let alone = tiny.generate(&settings, &prompts).unwrap().completions;
        assert_eq!(alone.len(), 4);
        for batch_size in [2, 3, 8] {
            settings.batch_size = batch_size;
            assert_eq!(tiny.generate(&settings, &prompts).unwrap().completions, alone, "{name}");
        }
        // Another seed gives other texts.
        settings.seed = 8;
        assert_ne!(tiny.generate(&settings, &prompts).unwrap().completions, alone, "{name}");
    }
}

#[test]
fn an_end_token_ends_a_text() {
    let tiny = Tiny::new("starcoder2");
    let greedy = tiny.greedy("1.0");
    let end = greedy[4];
    let first = greedy.iter().position(|id| *id == end).unwrap();
    let config = json!({"eos_token_id": [END, end], "temperature": 0.7});
    std::fs::write(tiny.folder.path().join("generation_config.json"), config.to_string()).unwrap();
    let found = tiny.generate(&settings(64), &[tiny.prompt(7)]).unwrap().completions[&0].clone();
    assert_eq!(found.reason, StopReason::EndToken);
    assert_eq!(found.tokens, greedy[..=first]);
    let tokenizer = TextTokenizer::open(tiny.folder.path(), tiny.vocab_size).unwrap();
    assert_eq!(found.text, tokenizer.decode(&greedy[..first]).unwrap());
}

#[test]
fn without_an_end_token_of_the_model_that_of_its_tokenizer_ends_a_text() {
    let tiny = Tiny::new("starcoder2");
    let greedy = tiny.greedy("1.0");
    let end = greedy[4];
    let first = greedy.iter().position(|id| *id == end).unwrap();
    let tokenizer = TextTokenizer::open(tiny.folder.path(), tiny.vocab_size).unwrap();
    let name = tokenizer.inner().0.id_to_token(end).unwrap();
    let write = |file: &str, value: Value| std::fs::write(tiny.folder.path().join(file), value.to_string()).unwrap();
    write("tokenizer_config.json", json!({"eos_token": {"content": name}}));
    let generate = || tiny.generate(&settings(64), &[tiny.prompt(7)]).unwrap().completions[&0].clone();
    let found = generate();
    assert_eq!(found.reason, StopReason::EndToken);
    assert_eq!(found.tokens, greedy[..=first]);
    // The model's own tokens come first.
    let other = (0..tiny.vocab_size as u32).find(|id| !greedy.contains(id)).unwrap();
    write("generation_config.json", json!({"eos_token_id": other}));
    assert_eq!(generate().reason, StopReason::MaxNewTokens);
}

#[test]
fn a_stop_text_ends_a_text_before_it() {
    let tiny = Tiny::new("llama");
    let whole = tiny.generate(&settings(64), &[tiny.prompt(7)]).unwrap().completions[&0].clone();
    let text: Vec<char> = whole.text.chars().collect();
    assert!(text.len() > 20, "{:?}", whole.text);
    for length in [1, 3, 6] {
        let stop: String = text[10..10 + length].iter().collect();
        let at = whole.text.find(&stop).unwrap();
        let mut settings = settings(64);
        settings.stop = vec!["this never appears".into(), stop.clone()];
        let found = tiny.generate(&settings, &[tiny.prompt(7)]).unwrap().completions[&0].clone();
        assert_eq!(found.reason, StopReason::StopText, "{stop:?}");
        assert_eq!(found.text, whole.text[..at], "{stop:?}");
        assert!(found.tokens.len() < whole.tokens.len());
    }
}

#[test]
fn the_context_ends_a_text_and_longer_prompts_are_refused() {
    let tiny = Tiny::new("starcoder");
    let found = tiny.generate(&settings(500), &[tiny.prompt(7)]).unwrap().completions[&0].clone();
    assert_eq!((found.reason, found.tokens.len()), (StopReason::Context, 96 - 7));
    let error = |prompt: Vec<u32>| {
        tiny.generate(&settings(5), &[prompt])
            .map(drop)
            .unwrap_err()
            .to_string()
    };
    let message = error(vec![1; 96]);
    assert!(
        message.contains("96 tokens") && message.contains("context has 96"),
        "{message}"
    );
    assert!(error(Vec::new()).contains("no tokens"));
    assert_eq!(
        tiny.generate(&settings(5), &[vec![1; 95]]).unwrap().completions[&0]
            .tokens
            .len(),
        1
    );
}

#[test]
fn a_generation_stops_between_steps() {
    let tiny = Tiny::new("qwen2");
    let model = CausalLm::load(tiny.folder.path(), &CausalLmOptions::cpu()).unwrap();
    let tokenizer = TextTokenizer::open(tiny.folder.path(), tiny.vocab_size).unwrap();
    let request = TextRequest {
        prompt: tiny.prompt(7),
        number: 0,
    };
    let mut report = Report {
        max_steps: Some(5),
        ..Report::default()
    };
    assert!(!generate_texts(&model, &tokenizer, &settings(64), &[request], &mut report).unwrap());
    assert!(report.completions.is_empty());
}

/// Code Llama's `▁<EOT>`, which no config names.
#[test]
fn the_end_of_what_fills_a_gap_ends_a_text() {
    let tiny = Tiny::new("starcoder2");
    let prompt = [tiny.prompt(7)];
    let greedy = tiny.greedy("1.0");
    let end = greedy[3];
    assert!(!greedy[..3].contains(&end));
    let path = tiny.folder.path().join("tokenizer.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let text = [
        ("<fim_prefix>", "▁<PRE>"),
        ("<fim_suffix>", "▁<SUF>"),
        ("<fim_middle>", "▁<MID>"),
    ]
    .into_iter()
    .fold(text, |text, (old, new)| text.replace(old, new));
    let mut json: Value = serde_json::from_str(&text).unwrap();
    let vocab = json["model"]["vocab"].as_object_mut().unwrap();
    let name = vocab.iter().find(|(_, id)| **id == json!(end)).unwrap().0.clone();
    vocab.remove(&name);
    vocab.insert("▁<EOT>".into(), json!(end));
    std::fs::write(&path, json.to_string()).unwrap();
    let report = tiny.generate(&settings(10), &prompt).unwrap();
    let completion = &report.completions[&0];
    assert_eq!(completion.tokens, greedy[..4]);
    assert_eq!(completion.reason, StopReason::EndToken);
}

#[test]
fn tokenizers_of_other_models_are_refused() {
    let tiny = Tiny::new("starcoder2");
    let open = |size| TextTokenizer::open(tiny.folder.path(), size);
    let message = open(259).unwrap_err().to_string();
    assert!(
        message.contains("id 259") && message.contains("259 tokens"),
        "{message}"
    );
    let tokenizer = open(260).unwrap();
    let ids = tokenizer.encode_fim("a", "b").unwrap();
    assert_eq!((ids.len(), ids[0], ids[2], ids[4]), (5, 257, 258, 259));
    assert_eq!(
        tokenizer.decode(&tokenizer.encode("größe <x>\n").unwrap()).unwrap(),
        "größe <x>\n"
    );
    let fim = tokenizer.fim_tokens().unwrap();
    assert_eq!([fim.prefix, fim.suffix, fim.middle.unwrap()], [257, 258, 259]);
    assert_eq!(tokenizer.token_id("<|endoftext|>"), Some(END));

    let none = Tiny::new("qwen2");
    let tokenizer = TextTokenizer::open(none.folder.path(), none.vocab_size).unwrap();
    let message = tokenizer.encode_fim("a", "b").unwrap_err().to_string();
    assert!(message.contains("no tokens for gaps"), "{message}");
    std::fs::write(none.folder.path().join("tokenizer.json"), "{}").unwrap();
    let message = TextTokenizer::open(none.folder.path(), 47).unwrap_err().to_string();
    assert!(message.contains("not a tokenizer"), "{message}");
    std::fs::remove_file(none.folder.path().join("tokenizer.json")).unwrap();
    let message = TextTokenizer::open(none.folder.path(), 47).unwrap_err().to_string();
    assert!(message.contains("does not have this file"), "{message}");
}

in_portable_mode! {
    a_text_does_not_depend_on_its_neighbours,
    greedy_texts_are_those_of_transformers,
}
