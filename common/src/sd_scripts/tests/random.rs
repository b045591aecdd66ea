//! Random configs: none panics, and what is accepted is a valid config.

use super::support::{base, folder, import_in, job};
use crate::sd_scripts::dataset_options::{DATASET, SHARED, SUBSET};
use crate::sd_scripts::option::{Kind, OptionRow};
use crate::sd_scripts::options;
use crate::sd_scripts::{Script, Source, SourceFormat, import};

/// xorshift64*, seeded.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % end.max(1)
    }

    fn of<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }

    /// A value for an option: usually one that it takes.
    fn value(&mut self, row: &OptionRow) -> String {
        if self.below(25) == 0 {
            return (*self.of(&[
                "1",
                "\"x\"",
                "true",
                "[1, 2]",
                "-7",
                "1e300",
                "0",
                "\"\"",
                "{a = 1}",
                "9223372036854775807",
            ]))
            .to_owned();
        }
        match row.kind {
            Kind::Flag => (*self.of(&["true", "false"])).to_owned(),
            Kind::Text => (*self.of(&[
                "\"images\"",
                "\"cats\"",
                "\"\"",
                "\"a: b # c\"",
                "\"prompts.txt\"",
                "\"${HOME}\"",
                "\"[name]\"",
                "\"ä\\n\"",
            ]))
            .to_owned(),
            Kind::Whole => (*self.of(&["0", "1", "2", "5", "64", "1000"])).to_owned(),
            Kind::Number => (*self.of(&["0", "0.1", "1", "1.5", "1e-4"])).to_owned(),
            Kind::Numbers => (*self.of(&["[1e-4, 1e-4]", "1e-4", "[]", "0"])).to_owned(),
            Kind::Texts => (*self.of(&[
                "[]",
                "[\"weight_decay=0.1\"]",
                "[\"conv_dim=4\", \"algo=loha\"]",
                "[\"a\"]",
                "[\"module_dropout=0.5\"]",
            ]))
            .to_owned(),
            Kind::Choice(names) => format!("\"{}\"", self.of(names)),
            Kind::Size => (*self.of(&["512", "\"512,768\"", "[64, 64]", "\"1024\""])).to_owned(),
            Kind::Table => "{}".to_owned(),
        }
    }

    fn options(&mut self, rows: &[&OptionRow], count: usize, text: &mut String) {
        let mut seen: Vec<&str> = Vec::new();
        for _ in 0..self.below(count + 1) {
            let row = *self.of(rows);
            if seen.contains(&row.name) || text.contains(&format!("{} = ", row.name)) {
                continue;
            }
            seen.push(row.name);
            let value = self.value(row);
            text.push_str(&format!("{} = {value}\n", row.name));
        }
    }
}

#[test]
fn random_configs_are_errors_or_valid_jobs() {
    let folder = folder();
    let rows: Vec<&OptionRow> = options::rows().collect();
    let translated: Vec<&OptionRow> = rows
        .iter()
        .copied()
        .filter(|row| matches!(row.fate, crate::sd_scripts::option::Fate::Translated(_)))
        .collect();
    let dataset: Vec<&OptionRow> = DATASET.iter().chain(SHARED).collect();
    let subset: Vec<&OptionRow> = SHARED.iter().chain(SUBSET).collect();
    let mut random = Random(0x5eed_0001);
    let (mut accepted, cases) = (0, 4000);
    for case in 0..cases {
        let script = *random.of(&Script::ALL);
        let mut text = base(script);
        let (pool, max) = if case % 2 == 0 { (&translated, 4) } else { (&rows, 12) };
        random.options(pool, max, &mut text);
        if random.below(3) == 0 && !text.contains("dataset_config") {
            text.push_str("dataset_config = \"random.toml\"\n");
            let mut data = String::new();
            if random.below(2) == 0 {
                data.push_str("[general]\n");
                random.options(&dataset, 3, &mut data);
            }
            for _ in 0..=random.below(2) {
                let mut one = "[[datasets]]\n".to_owned();
                random.options(&dataset, 3, &mut one);
                let mut inner = "[[datasets.subsets]]\nimage_dir = \"cats\"\n".to_owned();
                random.options(&subset, 4, &mut inner);
                data.push_str(&one);
                data.push_str(&inner);
            }
            std::fs::write(folder.path().join("random.toml"), data).unwrap();
        }
        match import_in(folder.path(), &text, (random.below(2) == 0).then_some(script)) {
            Ok(imported) => {
                accepted += 1;
                let job = job(&imported.yaml);
                assert!(job.unsupported().errors.is_empty(), "{text}\n{}", imported.yaml);
            }
            Err(errors) => {
                assert!(!errors.is_empty(), "{text}");
                for error in errors {
                    assert!(
                        error.to_string().lines().count() == 1 && error.message.len() < 1000,
                        "{text}\n{error}"
                    );
                }
            }
        }
    }
    assert!(accepted > cases / 20, "{accepted} of {cases} were accepted");
}

#[test]
fn random_texts_are_errors() {
    let folder = folder();
    let mut random = Random(7);
    let examples: Vec<String> = ["sdxl_lora.toml", "flux_lora.toml", "gui_flux.json"]
        .iter()
        .map(|name| std::fs::read_to_string(folder.path().join(name)).unwrap())
        .collect();
    for _ in 0..2000 {
        let mut text: Vec<char> = random.of(&examples).chars().collect();
        for _ in 0..=random.below(4) {
            let at = random.below(text.len());
            match random.below(3) {
                0 => text.truncate(at),
                1 => text.insert(at, *random.of(&['"', '[', ']', '=', '\n', '0', 'é', '{', '}', ','])),
                _ => {
                    text.remove(at.min(text.len().saturating_sub(1)));
                }
            }
            if text.is_empty() {
                break;
            }
        }
        let text: String = text.into_iter().collect();
        for format in [SourceFormat::Toml, SourceFormat::GuiPreset] {
            let result = import(Source {
                text: &text,
                format,
                file: "random",
                directory: folder.path(),
                dataset_config: None,
                script: None,
            });
            if let Ok(imported) = result {
                job(&imported.yaml);
            }
        }
    }
}
