//! The demo of code models: trains a small model from scratch on Rust files, and shows what it makes of a function before and after.
//!
//! The files are some of aitk's own, which the program contains, or those of a folder. The tokenizer is trained on them. The rest is a job
//! like any other: its config is in the output folder.

use super::existing_files::{has_text, keep_edited, refuse_other_folder};
use crate::args::DemoArgs;
use crate::commands::run::{RunOptions, run_embedded};
use crate::context::Context;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::output::Ui;
use crate::output::format::{printable, shell_word, size};
use crate::run_folder;
use aitk_common::fsutil;
use aitk_common::fsutil::regular;
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use aitk_common::step_metrics::StepMetrics;
use aitk_engine::data::tokens::read_texts;
use aitk_engine::models::causal_lm::{END_TOKEN, train_tokenizer};
use include_dir::{Dir, DirEntry, include_dir};
use serde_json::{Value, json};
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Rust files to train on: many of one kind, so that a small model learns much of them in two minutes.
static SOURCES: [(&str, Dir<'_>); 2] = [
    ("optim", include_dir!("$CARGO_MANIFEST_DIR/../kernels/src/optim")),
    ("samplers", include_dir!("$CARGO_MANIFEST_DIR/../engine/src/samplers")),
];
const MODEL_CONFIG: &str = include_str!("code_files/config.json");
const TRAIN: &str = include_str!("code_files/train.yaml");
const GENERATE: &str = include_str!("code_files/generate.yaml");
/// The name of the training in its config.
const NAME: &str = "rust_coder";
/// The files that are trained on, as in the config.
const PATTERN: &str = "*.rs";
/// Text by which the demo recognises its own train.yaml.
const MARK: &str = "`aitk demo code` wrote this file";
/// Bytes of the texts on which the tokenizer is trained.
const MAX_TOKENIZER_BYTES: u64 = 4 << 20;
/// Steps whose losses are averaged for the end of the curve.
const LAST_STEPS: usize = 20;

/// Runs the demo. Interrupted, it continues when it is run again with the same arguments; complete, it starts from the beginning.
///
/// # Errors
/// When the folder cannot be written, `--data` has no Rust files, or as [`run_embedded`].
pub(super) async fn run(context: &Context, args: DemoArgs) -> CommandResult {
    let ui = context.ui(args.no_progress);
    let output = args.output.unwrap_or_else(|| PathBuf::from("aitk-code-demo"));
    let folder = Folder::new(context.directory.join(&output))?;
    let data = args.data.map(|data| context.directory.join(data));
    let written = folder.clone();
    let prepared = tokio::task::spawn_blocking(move || written.prepare(data.as_deref())).await;
    let tokenizer_bytes = prepared.map_err(|error| Failure::failed(error.to_string()))??;
    ui.notice(&announcement(tokenizer_bytes, &output));
    let options = RunOptions {
        device: args.device,
        ..RunOptions::default()
    };
    let config = folder.path.join("train.yaml");
    let configs = std::slice::from_ref(&config);
    let report = run_embedded(&ui, &context.paths, &context.directory, configs, &options).await?;
    if report.exit != Exit::Ok {
        return Ok(report.exit);
    }
    folder.show(&ui, &output)?;
    Ok(Exit::Ok)
}

/// What the demo says before the training. The tokenizer is trained on a part of large data.
fn announcement(tokenizer_bytes: u64, output: &Path) -> String {
    format!(
        "Training a code model from scratch on Rust files, its tokenizer on {} of them.\n\
         Model, tokenizer and configs are in {}.",
        size(tokenizer_bytes),
        output.display()
    )
}

/// The output folder.
#[derive(Clone)]
struct Folder {
    path: PathBuf,
    /// Its path as text, for configs.
    text: String,
}

impl Folder {
    fn new(path: PathBuf) -> Result<Self, Failure> {
        let text = path.to_str().map(str::to_owned);
        let text = text.ok_or_else(|| Failure::usage("the output folder's path is not UTF-8 text"))?;
        Ok(Self { path, text })
    }

    /// A path in the folder as a value of a YAML config.
    fn quoted(&self, below: &str) -> String {
        Value::from(format!("{}/{below}", self.text)).to_string()
    }

    /// A path in the folder for a shell command in a comment.
    fn shell_path(&self, below: &str) -> String {
        shell_word(&printable(&format!("{}/{below}", self.text)))
    }

    fn run_folder(&self) -> PathBuf {
        self.path.join("output").join(NAME)
    }

    /// Writes data, tokenizer, model config and configs. Returns the size of the texts that the tokenizer is trained on, in bytes. A training
    /// that is complete, or began with other files, is removed.
    fn prepare(&self, data: Option<&Path>) -> Result<u64, Failure> {
        refuse_other_folder(&self.path, MARK, "aitk demo code")?;
        let own = self.path.join("data");
        let data = match data {
            Some(data) => data.to_path_buf(),
            None => {
                self.write_sources(&own)?;
                own
            }
        };
        let patterns = [PATTERN.to_owned()];
        let texts = read_texts(&data, (&patterns, &[]), MAX_TOKENIZER_BYTES);
        let texts = texts.map_err(|error| Failure::failed(error.to_string()))?;
        if texts.is_empty() {
            let message = format!(
                "{}: there is no Rust file ({PATTERN}) in this folder or below it",
                printable(&data.display().to_string())
            );
            return Err(Failure::failed(message).hint("to train on other files, write a config: aitk help code-models"));
        }
        let config: Value = serde_json::from_str(MODEL_CONFIG).map_err(|error| Failure::failed(error.to_string()))?;
        let vocabulary = config.get("vocab_size").and_then(Value::as_u64).unwrap_or_default();
        let tokenizer = train_tokenizer(&texts, usize::try_from(vocabulary).unwrap_or_default());
        let tokenizer = tokenizer.map_err(|error| Failure::failed(error.to_string()))?;
        let data = data.to_str().map(|data| Value::from(data).to_string());
        let data = data.ok_or_else(|| Failure::usage("the path of the data is not UTF-8 text"))?;
        let training = TRAIN
            .replace("TRAIN_CONFIG", &self.shell_path("train.yaml"))
            .replace("OUTPUT_FOLDER", &self.quoted("output"))
            .replace("MODEL_FOLDER", &self.quoted("model"))
            .replace("DATA_FOLDER", &data);
        let generation = GENERATE
            .replace("GENERATE_CONFIG", &self.shell_path("generate.yaml"))
            .replace("COMPLETIONS_FOLDER", &self.quoted("completions"))
            .replace("TRAINED_FOLDER", &self.quoted(&format!("output/{NAME}/{NAME}")));
        let files = [
            ("train.yaml", training),
            ("model/tokenizer.json", tokenizer),
            ("model/config.json", MODEL_CONFIG.to_owned()),
            (
                "model/tokenizer_config.json",
                format!("{:#}\n", json!({"eos_token": END_TOKEN})),
            ),
            ("generate.yaml", generation),
        ];
        // What decides the training: its config, tokenizer and model config. The others do not change it.
        let is_same = files[..3]
            .iter()
            .all(|(name, text)| has_text(&self.path.join(name), text));
        let is_complete = self.run_folder().join(NAME).exists();
        if is_complete || !is_same {
            // Not the folder above it: trainings under other names are the user's own.
            fsutil::remove(&self.run_folder()).map_err(|error| Failure::failed(error.to_string()))?;
        }
        for (name, text) in &files {
            if name.ends_with(".yaml") {
                keep_edited(&self.path.join(name), text)?;
            }
            self.write(name, text)?;
        }
        Ok(texts.iter().map(|text| text.len() as u64).sum())
    }

    /// Writes the files that the program contains, without their tests.
    fn write_sources(&self, folder: &Path) -> Result<(), Failure> {
        // Files of another version of the program would be trained on too.
        fsutil::remove(folder).map_err(|error| Failure::failed(error.to_string()))?;
        for (name, dir) in &SOURCES {
            self.write_sources_of(&format!("data/{name}"), dir)?;
        }
        Ok(())
    }

    fn write_sources_of(&self, below: &str, dir: &Dir<'_>) -> Result<(), Failure> {
        for entry in dir.entries() {
            let name = entry
                .path()
                .file_name()
                .and_then(|name| name.to_str())
                .unwrap_or_default();
            let below = format!("{below}/{name}");
            match entry {
                DirEntry::Dir(dir) => self.write_sources_of(&below, dir)?,
                DirEntry::File(file) if !name.contains("tests") => {
                    self.write(&below, file.contents_utf8().unwrap_or_default())?;
                }
                DirEntry::File(_) => {}
            }
        }
        Ok(())
    }

    fn write(&self, name: &str, text: &str) -> Result<(), Failure> {
        let path = self.path.join(name);
        let written = fsutil::create_dir_all(fsutil::folder_of(&path))
            .and_then(|()| fsutil::write_atomic(&path, |out| out.write_all(text.as_bytes())));
        written.map_err(|error| Failure::failed(error.to_string()))
    }

    /// Prints the completions before and after, the loss, and what to do next.
    fn show(&self, ui: &Ui, output: &Path) -> Result<(), Failure> {
        let samples = self.completions()?;
        if let (Some((_, before)), Some((step, after))) = (samples.first(), samples.last()) {
            ui.data("\nbefore the training, the model completes the function like this:\n")?;
            ui.data(&indented(before))?;
            ui.data(&format!("\nafter {step} steps:\n"))?;
            ui.data(&indented(after))?;
            ui.data("")?;
        }
        for line in loss_lines(&run_folder::metrics(&self.run_folder())?) {
            ui.data(&line)?;
        }
        let here = output.display();
        let word = |below: &str| shell_word(&format!("{here}/{below}"));
        ui.data(&format!(
            "the model          {here}/output/{NAME}/{NAME}   (transformers loads it too)"
        ))?;
        ui.data(&format!("the config         {here}/train.yaml"))?;
        ui.notice("");
        ui.notice("Next:");
        ui.notice(&format!(
            "  complete other functions with it:                       aitk run {}",
            word("generate.yaml")
        ));
        ui.notice(&format!(
            "  see the curve of the loss:                              aitk plot {}",
            word(&format!("output/{NAME}"))
        ));
        ui.notice("  train on your own code, in another folder:              aitk demo code --data my_project/src -o my_code_demo");
        ui.notice(&format!(
            "  change {here}/train.yaml (config.name, steps, prompts) and run it:  aitk run {}",
            word("train.yaml")
        ));
        ui.notice("  train a LoRA of StarCoder2 on your own code:            aitk help code-models");
        Ok(())
    }

    /// The steps with completions, each with the prompt and the first completion.
    fn completions(&self) -> Result<Vec<(u64, String)>, Failure> {
        let folder = self.run_folder().join("samples");
        let failed = |error: &std::io::Error| Failure::file("read", &folder, error);
        let entries = std::fs::read_dir(&folder).map_err(|error| failed(&error))?;
        let mut found = Vec::new();
        for entry in entries.flatten() {
            let text = regular::read_text(&entry.path(), MAX_TEXT_FILE_BYTES).map_err(|error| failed(&error))?;
            let line = text
                .lines()
                .next()
                .and_then(|line| serde_json::from_str::<Value>(line).ok());
            let Some(line) = line else { continue };
            let text = |key: &str| line.get(key).and_then(Value::as_str).unwrap_or_default();
            let step = line.get("step").and_then(Value::as_u64).unwrap_or_default();
            found.push((step, format!("{}{}", text("prompt"), text("completion"))));
        }
        found.sort();
        Ok(found)
    }
}

/// A text with spaces before its lines, without characters that a terminal would obey.
fn indented(text: &str) -> String {
    let lines: Vec<String> = text.lines().map(|line| format!("    {}", printable(line))).collect();
    lines.join("\n")
}

/// The beginning and the end of the curve of the loss, and of the held-out perplexity.
fn loss_lines(steps: &[StepMetrics]) -> Vec<String> {
    let of = |name: &str| -> Vec<(u64, f64)> {
        let values = steps
            .iter()
            .filter_map(|step| Some((step.step, *step.values.get(name)?)));
        values.collect()
    };
    let mut lines = Vec::new();
    let losses = of("loss");
    if let (Some((first, loss)), Some((last, _))) = (losses.first(), losses.last()) {
        let end = &losses[losses.len().saturating_sub(LAST_STEPS)..];
        let mean = end.iter().map(|(_, loss)| loss).sum::<f64>() / end.len() as f64;
        lines.push(format!(
            "the loss           {loss:.2} at step {first}, {mean:.2} at step {last}"
        ));
    }
    let perplexities = of("val/perplexity");
    if let (Some((first, before)), Some((last, after))) = (perplexities.first(), perplexities.last()) {
        lines.push(format!(
            "held-out files     perplexity {before:.0} at step {first}, {after:.1} at step {last} (1 would be certain of each token)"
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_are_written_and_a_training_of_other_files_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::new(dir.path().join("demo")).unwrap();
        let bytes = folder.prepare(None).unwrap();
        assert!((100_000..1_000_000).contains(&bytes), "{bytes}");
        let job = crate::config::read(
            &Ui::silent(),
            &folder.path.join("train.yaml"),
            dir.path(),
            Default::default(),
        );
        assert!(job.unwrap().warnings.is_empty());
        let foreign = Folder::new(dir.path().to_path_buf())
            .unwrap()
            .prepare(None)
            .unwrap_err();
        assert_eq!(foreign.exit, Exit::Conflict);
        // An interrupted training of the same files stays.
        let checkpoint = folder.run_folder().join(".aitk/checkpoint");
        fsutil::create_dir_all(&checkpoint).unwrap();
        folder.prepare(None).unwrap();
        assert!(checkpoint.exists());
        let other = dir.path().join("other");
        std::fs::create_dir(&other).unwrap();
        let refused = folder.prepare(Some(&other)).unwrap_err();
        assert!(refused.message.contains("no Rust file"), "{}", refused.message);
        std::fs::write(other.join("a.rs"), "fn a() {}\nfn b() {}\n").unwrap();
        folder.prepare(Some(&other)).unwrap();
        assert!(!checkpoint.exists());
        // One that is complete starts from the beginning. A training under another name, whose config the user made of the demo's, stays.
        let renamed = folder.path.join("output/my_own/my_own");
        fsutil::create_dir_all(&renamed).unwrap();
        fsutil::create_dir_all(&folder.run_folder().join(NAME)).unwrap();
        folder.prepare(Some(&other)).unwrap();
        assert!(!folder.run_folder().exists() && renamed.exists());
        // A changed config is kept as train.yaml.old2, beside the config for the first files (train.yaml.old).
        let config = folder.path.join("train.yaml");
        let edited = std::fs::read_to_string(&config).unwrap() + "# mine\n";
        std::fs::write(&config, &edited).unwrap();
        folder.prepare(Some(&other)).unwrap();
        assert_eq!(
            std::fs::read_to_string(folder.path.join("train.yaml.old2")).unwrap(),
            edited
        );
    }

    #[test]
    fn the_size_of_the_texts_is_that_of_the_tokenizer() {
        let text = announcement(4 << 20, Path::new("aitk-code-demo"));
        assert!(
            text.contains("tokenizer on 4.0 MiB of them") && text.contains("in aitk-code-demo."),
            "{text}"
        );
    }

    #[test]
    fn the_ends_of_the_curve_are_shown() {
        let step = |step: u64, values: &[(&str, f64)]| StepMetrics {
            step,
            values: values
                .iter()
                .map(|(name, value)| ((*name).to_owned(), *value))
                .collect(),
            ..StepMetrics::default()
        };
        let steps = [
            step(1, &[("loss", 7.5), ("val/perplexity", 1800.0)]),
            step(2, &[("loss", 5.5), ("val/perplexity", 20.25)]),
        ];
        let lines = loss_lines(&steps).join("\n");
        assert!(lines.contains("7.50 at step 1, 6.50 at step 2"), "{lines}");
        assert!(lines.contains("1800 at step 1, 20.2 at step 2"), "{lines}");
        assert!(loss_lines(&[]).is_empty());
    }
}
