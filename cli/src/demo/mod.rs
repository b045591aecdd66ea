//! The demos. `aitk demo` trains a LoRA of a new shape for a tiny Stable Diffusion model, on this machine, in two minutes; `aitk demo code` a
//! code model from scratch (`code.rs`).
//!
//! Model, data set and config are those of `config/demo/`, embedded in the program. They are written to the output
//! folder and run by the same code as `aitk run`.

mod code;
mod existing_files;
mod grid;
#[cfg(test)]
mod shipped;

use crate::args::{DemoArgs, DemoKind};
use crate::commands::run::{RunOptions, run_embedded};
use crate::context::Context;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::output::Ui;
use crate::output::format::{printable, shell_word};
use aitk_common::control_plane::Artifact;
use aitk_common::fsutil;
use aitk_common::job::process::ProcessKind;
use aitk_common::job::prompt::PromptFlags;
use aitk_common::job::{LoadOptions, LoadedJob, load};
use existing_files::{CONFIG, keep_edited, refuse_other_folder};
use grid::{Row, render, wrap};
use image::RgbImage;
use include_dir::{Dir, DirEntry, include_dir};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// The files of `config/demo` that `build.rs` copied (`shipped.rs`).
static FILES: Dir<'_> = include_dir!("$OUT_DIR/demo");

/// The path of the demo's folder in its config, relative to the root of the repository.
const SHIPPED_AT: &str = "config/demo/";
/// The name of the training in its config.
const NAME: &str = "zorb";
/// What the config of the demo contains.
const MARK: &str = "teaches the demo's tiny base model a new word";

/// Runs the demo.
///
/// # Errors
/// When the folder cannot be written, or as [`run_embedded`].
pub async fn run(context: &Context, args: DemoArgs) -> CommandResult {
    match args.what {
        DemoKind::Code => code::run(context, args).await,
        DemoKind::Image if args.data.is_some() => {
            Err(Failure::usage("--data is for the demo of code models")
                .hint("to train on it: aitk demo code --data DIR"))
        }
        DemoKind::Image => run_image(context, args).await,
    }
}

async fn run_image(context: &Context, args: DemoArgs) -> CommandResult {
    let ui = context.ui(args.no_progress);
    let output = args.output.unwrap_or_else(|| PathBuf::from("aitk-demo"));
    let folder = context.directory.join(&output);
    let config = unpack(&folder)?;
    ui.notice(&format!(
        "Training a tiny Stable Diffusion model on a shape that it has never seen: a zorb.\n\
         Model, data set and config are in {}.",
        output.display()
    ));
    let options = RunOptions {
        device: args.device.clone(),
        ..RunOptions::default()
    };
    let report = run_embedded(
        &ui,
        &context.paths,
        &context.directory,
        std::slice::from_ref(&config),
        &options,
    )
    .await?;
    if report.exit != Exit::Ok {
        return Ok(report.exit);
    }
    let artifacts = report
        .results
        .first()
        .map(|result| result.artifacts.as_slice())
        .unwrap_or_default();
    let image = folder.join("before-after.png");
    save_grid(&image, &config, &folder.join("dataset"), artifacts)?;
    print_next_steps(&ui, &output, artifacts)?;
    Ok(Exit::Ok)
}

/// Writes model, data set and config into `folder`.
///
/// # Errors
/// When the folder cannot be written.
pub(crate) fn extract(folder: &Path) -> Result<(), Failure> {
    let written = std::fs::create_dir_all(folder).and_then(|()| FILES.extract(folder));
    written.map_err(|error| Failure::file("write the demo to", folder, &error))
}

/// Writes model, data set and config into `folder`, and returns the path of the config. The results of an earlier demo
/// are removed, and its model and data set written again; a config that differs from the new one, and trainings under other names, stay.
fn unpack(folder: &Path) -> Result<PathBuf, Failure> {
    refuse_other_folder(folder, MARK, "aitk demo")?;
    let config = folder.join(CONFIG);
    let text = config_text(folder)?;
    keep_edited(&config, &text)?;
    // First, because it marks the folder as the demo's.
    fsutil::create_dir_all(folder)
        .and_then(|()| fsutil::write_atomic(&config, |out| out.write_all(text.as_bytes())))
        .and_then(|()| fsutil::remove(&folder.join("output").join(NAME)))
        .map_err(|error| Failure::failed(error.to_string()))?;
    for entry in FILES.entries() {
        let path = folder.join(entry.path());
        let written = match entry {
            DirEntry::Dir(dir) => std::fs::create_dir_all(&path).and_then(|()| dir.extract(folder)),
            DirEntry::File(_) if path == config => Ok(()),
            DirEntry::File(file) => std::fs::write(&path, file.contents()),
        };
        written.map_err(|error| Failure::file("write", &path, &error))?;
    }
    Ok(config)
}

/// The demo's config with the paths of `folder`.
fn config_text(folder: &Path) -> Result<String, Failure> {
    let here = folder
        .to_str()
        .ok_or_else(|| Failure::usage("the output folder's path is not UTF-8 text"))?;
    let shipped = FILES.get_file(CONFIG).and_then(|file| file.contents_utf8());
    let mut text = shipped.unwrap_or_default().to_owned();
    for (key, shipped, below) in [
        ("training_folder", "output".to_owned(), "output"),
        ("folder_path", format!("{SHIPPED_AT}dataset"), "dataset"),
        ("name_or_path", format!("{SHIPPED_AT}base"), "base"),
    ] {
        let quoted = Value::from(format!("{here}/{below}")).to_string();
        text = text.replace(&format!("{key}: {shipped}\n"), &format!("{key}: {quoted}\n"));
    }
    let command_path = shell_word(&printable(&format!("{here}/{CONFIG}")));
    Ok(text.replace(
        &format!("aitk run {SHIPPED_AT}{CONFIG}"),
        &format!("aitk run {command_path}"),
    ))
}

fn save_grid(target: &Path, config: &Path, dataset: &Path, artifacts: &[Artifact]) -> Result<(), Failure> {
    let mut steps: BTreeMap<u64, BTreeMap<u64, PathBuf>> = BTreeMap::new();
    for artifact in artifacts.iter().filter(|artifact| artifact.kind == "sample") {
        if let (Some(step), Some(index), Some(path)) = (artifact.step, artifact.index, &artifact.local_path) {
            steps.entry(step).or_default().insert(index, PathBuf::from(path));
        }
    }
    let last = steps.keys().next_back().copied();
    let mut rows = Vec::new();
    for (step, images) in &steps {
        let label = match step {
            0 => vec!["before".to_owned()],
            step if Some(*step) == last => vec!["after".to_owned(), format!("{step}"), "steps".to_owned()],
            step => vec![format!("{step}"), "steps".to_owned()],
        };
        let images = images.values().map(|path| open(path)).collect::<Result<_, _>>()?;
        rows.push(Row { label, images });
    }
    let columns = rows.first().map_or(0, |row| row.images.len());
    rows.insert(
        0,
        Row {
            label: vec!["training".to_owned(), "data".to_owned()],
            images: examples(dataset, columns)?,
        },
    );
    let captions: Vec<Vec<String>> = prompts(config)?.iter().map(|prompt| wrap(prompt, 10)).collect();
    let image = render(&captions, &rows);
    fsutil::write_atomic(target, |file| {
        let mut png = std::io::Cursor::new(Vec::new());
        image
            .write_to(&mut png, image::ImageFormat::Png)
            .map_err(std::io::Error::other)?;
        std::io::Write::write_all(file, png.get_ref())
    })
    .map_err(|error| Failure::failed(error.to_string()))
}

fn open(path: &Path) -> Result<RgbImage, Failure> {
    let image = image::open(path);
    let image = image.map_err(|error| Failure::failed(format!("cannot read {}: {error}", path.display())))?;
    Ok(image.to_rgb8())
}

fn examples(dataset: &Path, count: usize) -> Result<Vec<RgbImage>, Failure> {
    let entries = std::fs::read_dir(dataset).map_err(|error| Failure::file("read", dataset, &error))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "png"));
    paths.sort();
    paths.iter().take(count).map(|path| open(path)).collect()
}

/// Returns the prompts of the config's samples, without their flags.
fn prompts(config: &Path) -> Result<Vec<String>, Failure> {
    let options = LoadOptions {
        env: &crate::context::env,
        ..LoadOptions::default()
    };
    let name = config.to_str().unwrap_or_default();
    let loaded: LoadedJob = load(name, &options).map_err(|error| Failure::failed(error.to_string()))?;
    let mut prompts = Vec::new();
    for process in &loaded.spec.process {
        if let ProcessKind::Train(trainer) = &process.kind {
            let trigger = trainer.trigger_word.as_deref().unwrap_or("[trigger]");
            for item in &trainer.sample.samples {
                prompts.push(PromptFlags::parse(&item.prompt).prompt.replace("[trigger]", trigger));
            }
        }
    }
    Ok(prompts)
}

fn print_next_steps(ui: &Ui, output: &Path, artifacts: &[Artifact]) -> Result<(), Failure> {
    let lora = artifacts
        .iter()
        .filter(|artifact| artifact.kind == "lora")
        .filter_map(|artifact| artifact.local_path.as_deref())
        // The final file has the shortest name, because the names of the others contain their step.
        .min_by_key(|path| path.len());
    let here = output.display();
    ui.data(&format!("before and after   {here}/before-after.png"))?;
    if let Some(lora) = lora {
        ui.data(&format!("the LoRA           {lora}"))?;
    }
    ui.data(&format!("the config         {here}/train.yaml"))?;
    ui.notice("");
    ui.notice("Next:");
    let config = shell_word(&format!("{here}/{CONFIG}"));
    ui.notice(&format!(
        "  change {here}/train.yaml (config.name, rank, steps, prompts) and run it:  aitk run {config}"
    ));
    ui.notice("  start from a commented config for Stable Diffusion 1.5:      aitk init my_lora.yaml");
    ui.notice("  see what this machine can do:                                aitk doctor");
    ui.notice("  a queue over several machines:                               aitk up");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &Path) -> String {
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn only_the_results_of_an_earlier_demo_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let results = dir.path().join("output/my_lora/my_lora.safetensors");
        fsutil::create_dir_all(results.parent().unwrap()).unwrap();
        std::fs::write(&results, "mine").unwrap();
        std::fs::write(dir.path().join("train.yaml"), "job: extension\n").unwrap();
        assert_eq!(unpack(dir.path()).unwrap_err().exit, Exit::Conflict);
        assert_eq!(read(&results), "mine");
        assert_eq!(read(&dir.path().join("train.yaml")), "job: extension\n");
        assert!(!dir.path().join("base").exists());

        let folder = dir.path().join("demo");
        let config = unpack(&folder).unwrap();
        let (own, other) = (folder.join("output/zorb"), folder.join("output/my_own"));
        for run in [&own, &other] {
            fsutil::create_dir_all(run).unwrap();
        }
        let edited = read(&config) + "# mine\n";
        std::fs::write(&config, &edited).unwrap();
        assert_eq!(unpack(&folder).unwrap(), config);
        assert!(!own.exists() && other.exists());
        assert_eq!(read(&folder.join("train.yaml.old")), edited);
        assert!(!read(&config).contains("# mine"));
        // An unchanged config is not kept.
        unpack(&folder).unwrap();
        assert!(!folder.join("train.yaml.old2").exists());
    }

    #[test]
    fn the_config_has_the_paths_of_any_folder() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["demo", "C #1", "a: b", "say \"hi\"", "back\\slash", "it's"] {
            let folder = dir.path().join(name);
            let config = unpack(&folder).unwrap();
            let loaded = load(config.to_str().unwrap(), &LoadOptions::default()).unwrap();
            assert_eq!(loaded.spec.name, NAME);
            let inputs: Vec<String> = (loaded.spec.inputs().into_iter())
                .map(|input| input.config_path)
                .collect();
            for below in ["dataset", "base"] {
                let expected = folder.join(below).to_str().unwrap().to_owned();
                assert!(inputs.contains(&expected), "{expected}: {inputs:?}");
            }
            let written = read(&config);
            let output = Value::from(folder.join("output").to_str().unwrap()).to_string();
            assert!(written.contains(&format!("training_folder: {output}\n")), "{written}");
            assert!(!written.contains(SHIPPED_AT), "{written}");
        }
        let quoted = read(&dir.path().join("C #1/train.yaml"));
        assert!(quoted.contains("C #1/train.yaml'\n"), "{quoted}");
    }
}
