//! The sizes of the images that a job makes or trains on: finds those that are too large for its model.

use super::location::at_key;
use super::models::GivenParts;
use crate::context::env;
use crate::paths::expand;
use aitk_common::fsutil::regular;
use aitk_common::job::generate::{GenerateConfig, numbered_prompt_lines};
use aitk_common::job::limits::MAX_TEXT_FILE_BYTES;
use aitk_common::job::prompt::PromptFlags;
use aitk_common::job::values::TextSource;
use aitk_common::job::{InputKind, JobSpec, ProcessKind};
use aitk_common::plan::image_batches::{ImageBatch, largest_batches};
use aitk_processes::{TrainingPreview, changed_image_sizes};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The most messages about the sizes of one process.
const MAX_MESSAGES: usize = 20;

/// Width and height of the images of each process that changes images, as they are changed.
pub(super) type ChangedSizes = BTreeMap<usize, BTreeSet<(u32, u32)>>;

/// Images of one size, and where the config says so.
struct SizedImages {
    /// The key that the size comes from. Empty: that of the path in `prefix`.
    key: String,
    /// What stands before the problem in a message.
    prefix: String,
    size: (u32, u32),
}

/// Reads the data sets of the processes that change images, as far as they are on this machine.
pub(super) async fn changed_sizes(spec: &JobSpec, directory: &Path) -> ChangedSizes {
    let (spec, directory) = (spec.clone(), directory.to_owned());
    let all = move || {
        let inputs = spec.inputs().into_iter();
        let inputs: BTreeMap<String, PathBuf> = inputs
            .filter(|input| input.kind == InputKind::Dataset)
            .map(|input| {
                let local = expand(&input.config_path, &directory, &env);
                (input.config_path, local)
            })
            .collect();
        let processes = spec.process.iter().enumerate();
        let changing = processes.filter_map(|(index, process)| match &process.kind {
            ProcessKind::Img2Img(process) => Some((index, changed_image_sizes(&spec, process, &inputs))),
            _ => None,
        });
        changing.collect::<ChangedSizes>()
    };
    // It may read the headers of many thousand images.
    tokio::task::spawn_blocking(all).await.unwrap_or_default()
}

/// The largest images of each process that changes images, for the prediction of its memory.
pub(super) fn changed_batches(sizes: &ChangedSizes) -> impl Iterator<Item = ImageBatch> + '_ {
    sizes.iter().flat_map(|(index, sizes)| {
        let batch = |(width, height): &(u32, u32)| ImageBatch {
            process: u32::try_from(*index).unwrap_or(u32::MAX),
            width: *width,
            height: *height,
            images: 1,
        };
        largest_batches(sizes.iter().map(batch))
    })
}

/// Returns an error for each size of images that is larger than the model of its process can make or be trained on. Samples of trainings
/// are checked with the other settings of a training. Models that are not here, or that cannot be read, are reported elsewhere.
/// `previews`: the data of each training, with the index of its process.
pub(super) async fn size_problems(
    spec: &JobSpec,
    directory: &Path,
    previews: &[(usize, &TrainingPreview)],
    changed: &ChangedSizes,
) -> Vec<String> {
    let mut images: BTreeMap<usize, Vec<SizedImages>> = BTreeMap::new();
    for (index, preview) in previews {
        images.entry(*index).or_default().extend(trained_images(preview));
    }
    for (index, process) in spec.process.iter().enumerate() {
        if let ProcessKind::Generate(process) = &process.kind {
            let made = generated_images(&process.generate, index, directory);
            images.entry(index).or_default().extend(made);
        }
    }
    for (index, sizes) in changed {
        let changed = sizes.iter().map(|size| SizedImages {
            key: format!("config.process[{index}].datasets"),
            prefix: String::new(),
            size: *size,
        });
        images.entry(*index).or_default().extend(changed);
    }
    let (spec, directory) = (spec.clone(), directory.to_owned());
    let all = move || {
        let of_process = |(index, images): (usize, Vec<SizedImages>)| problems_of(&spec, index, &images, &directory);
        images.into_iter().flat_map(of_process).collect()
    };
    tokio::task::spawn_blocking(all).await.unwrap_or_default()
}

fn problems_of(spec: &JobSpec, index: usize, images: &[SizedImages], directory: &Path) -> Vec<String> {
    let limit = || {
        let model = spec.process.get(index)?.model().filter(|_| !images.is_empty())?;
        let local = expand(&model.name_or_path, directory, &env);
        let parts = GivenParts::of(model).local(directory).filter(|_| local.exists())?;
        aitk_engine::families::size_limit(&local, model.arch.name, &parts).ok()?
    };
    let Some(limit) = limit() else {
        return Vec::new();
    };
    let problems = images.iter().filter_map(|images| {
        let (width, height) = images.size;
        let problem = format!("{}{}", images.prefix, limit.check(width, height).err()?);
        Some(match images.key.is_empty() {
            true => at_key(spec, index, directory, &problem),
            false => spec.finding(images.key.clone(), problem).to_string(),
        })
    });
    let mut seen = BTreeSet::new();
    let problems = problems.filter(|problem| seen.insert(problem.clone()));
    problems.take(MAX_MESSAGES).collect()
}

/// The images that a training reads: one for each bucket. The data set is named by its path, from which the key follows.
fn trained_images(preview: &TrainingPreview) -> Vec<SizedImages> {
    let sets = preview.datasets.iter();
    let buckets = sets.flat_map(|set| {
        set.buckets.iter().map(move |bucket| SizedImages {
            key: String::new(),
            prefix: format!("{}: a bucket at `resolution: {}`: ", set.path, set.resolution),
            size: (bucket.width, bucket.height),
        })
    });
    buckets.collect()
}

/// The images that are generated from prompts.
fn generated_images(generate: &GenerateConfig, index: usize, directory: &Path) -> Vec<SizedImages> {
    let section = format!("config.process[{index}].generate");
    let mut images: Vec<SizedImages> = Vec::new();
    let mut uses_section = generate.random_prompts;
    let mut add = |key: String, prefix: String, prompt: &str| {
        let flags = PromptFlags::parse(prompt);
        if flags.width.is_none() && flags.height.is_none() {
            uses_section = true;
            return;
        }
        let of_size = |size| SizedImages {
            key: key.clone(),
            prefix: prefix.clone(),
            size,
        };
        images.extend(generate.sizes(prompt).into_iter().map(of_size));
    };
    match &generate.prompts {
        // Random prompts are several lines, whose flags are read together.
        _ if generate.random_prompts => {}
        TextSource::List(prompts) => {
            for (number, prompt) in prompts.iter().enumerate() {
                add(format!("{section}.prompts[{number}]"), String::new(), prompt);
            }
        }
        TextSource::File(file) => {
            let text = regular::read_text(&expand(file, directory, &env), MAX_TEXT_FILE_BYTES).unwrap_or_default();
            for (line, prompt) in numbered_prompt_lines(&text) {
                add(format!("{section}.prompts"), format!("{file}:{line}: "), prompt);
            }
        }
    }
    if uses_section {
        let key = match generate.size_list {
            Some(_) => format!("{section}.size_list"),
            None => format!("{section}.width"),
        };
        images.extend(generate.sizes("").into_iter().map(|size| SizedImages {
            key: key.clone(),
            prefix: String::new(),
            size,
        }));
    }
    images
}
