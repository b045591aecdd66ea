//! Finds the parts of a model in its own file or folder and in the paths that a config gives.

use super::family::{self, FamilyPart, FamilyParts};
use super::kind::{ModelPart, has};
use super::{ModelParts, PartFiles, PartPaths, PresentParts};
use crate::job::arch::ArchName;
use crate::model_files::inventory::{TensorShapes, Unreadable, header_of, is_weights, read_json_file};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The most weights files of a folder whose headers are read to find parts in them.
const MAX_FILES: usize = 64;

/// Finds the parts of the model of this family at `model`, a file or a folder. Reads names of files and headers of weights.
///
/// # Errors
/// A sentence that names every missing part and how to give it, or two files of which only one can be a part, or a family whose models
/// have no parts from elsewhere.
pub fn model_parts(arch: ArchName, model: &Path, paths: &PartPaths) -> Result<ModelParts, String> {
    let search = Search::new(arch, model, paths)?;
    let found = search.find(&|_| true)?;
    if !found.missing.is_empty() {
        return Err(format!(
            "{}: {}",
            search.lack(&found.missing),
            search.advice(&found.missing)
        ));
    }
    Ok(search.assemble(found))
}

/// Those of the `wanted` parts of the model of this family at `model` that are there, for commands that need no others. Reads names of
/// files and headers of weights. A tokenizer may be missing.
///
/// # Errors
/// As [`model_parts`], but a part may be missing.
pub fn present_parts(
    arch: ArchName,
    model: &Path,
    paths: &PartPaths,
    wanted: &[ModelPart],
) -> Result<PresentParts, String> {
    let search = Search::new(arch, model, paths)?;
    let found = search.find(&|part| wanted.contains(&part))?;
    let missing = found.missing.iter().filter(|missing| missing.part().is_some());
    Ok(PresentParts {
        missing: missing.map(Missing::title).collect(),
        parts: search.assemble(found),
    })
}

/// The weights of one part at this path: a file, the folder of the part, or a model's folder that has one. Its config may come from
/// the extras in `paths`.
///
/// # Errors
/// When the path has another part or none, or the family has no such part.
pub fn model_part(arch: ArchName, part: ModelPart, path: &Path, paths: &PartPaths) -> Result<PartFiles, String> {
    let elsewhere = PartPaths {
        extras: paths.extras.clone(),
        ..PartPaths::default()
    };
    let search = Search::new(arch, path, &elsewhere)?;
    let place = search.family.parts.iter().find(|place| place.part == part);
    let place = place.ok_or_else(|| format!("{} has no {}", search.family.name, part.name().0))?;
    search.given_part(place, path)
}

fn existing(file: PathBuf) -> Option<PathBuf> {
    file.is_file().then_some(file)
}

/// Whether a weights file is in the folder.
fn has_weights(folder: &Path) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.any(|name| is_weights(&name))
}

/// Whether `model_index.json` of a folder says that it has no such part, although there may be files of it.
fn leaves_out(folder: &Path, part: &str) -> bool {
    let index = read_json_file(&folder.join("model_index.json"));
    let class = index.as_ref().and_then(|index| index.get(part)?.as_array());
    class.is_some_and(|class| class.iter().all(Value::is_null))
}

/// The weights files directly in a folder, with their headers. A damaged file among them is left out: it is reported only if its part
/// is missing.
fn weights_files_in(folder: &Path) -> Result<Vec<(PathBuf, TensorShapes)>, String> {
    let entries = std::fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let names = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.filter(|name| is_weights(name)).collect();
    names.sort();
    let files = names.into_iter().take(MAX_FILES).map(|name| folder.join(name));
    Ok(files
        .filter_map(|path| header_of(&path).ok().map(|weights| (path, weights)))
        .collect())
}

/// The header of a file that a config gives.
fn given_header(path: &Path) -> Result<TensorShapes, String> {
    header_of(path).map_err(|error| match error {
        Unreadable::Pickle(why) => format!("{}: it is a pickle file, which is not opened: {why}", path.display()),
        Unreadable::Other(why) => format!("{}: {why}", path.display()),
    })
}

/// What a file has instead of what was expected.
fn contents(weights: &TensorShapes) -> String {
    let first = weights.shapes.keys().next();
    let architecture = weights.architecture.as_ref();
    let architecture = architecture.map(|name| format!("`general.architecture: {name}` and "));
    format!(
        "it has {}{}",
        architecture.unwrap_or_default(),
        first.map_or("no tensors".to_owned(), |name| format!("tensors such as `{name}`"))
    )
}

/// What a model lacks.
enum Missing<'a> {
    Part(&'a FamilyPart),
    Tokenizer(&'a FamilyPart),
}

impl Missing<'_> {
    fn title(&self) -> String {
        match self {
            Self::Part(place) => place.title(),
            Self::Tokenizer(place) => {
                let (name, files) = place.part.needed_tokenizer().unwrap_or_default();
                let folder = place.tokenizer.unwrap_or_default();
                format!("tokenizer of {name} (folder `{folder}` with {files})")
            }
        }
    }

    /// The part that is missing, if it is not a tokenizer.
    fn part(&self) -> Option<ModelPart> {
        match self {
            Self::Part(place) => Some(place.part),
            Self::Tokenizer(_) => None,
        }
    }
}

/// What a search found.
#[derive(Default)]
struct FoundParts {
    found: Vec<(ModelPart, PartFiles)>,
    /// The folders of tokenizers.
    tokenizers: Vec<(ModelPart, PathBuf)>,
    /// Weights before tokenizers.
    missing: Vec<Missing<'static>>,
}

/// Where parts may be.
struct Search<'a> {
    family: &'static FamilyParts,
    model: &'a Path,
    paths: &'a PartPaths,
    /// The header of a model that is one file.
    checkpoint: Option<TensorShapes>,
    /// Weights files directly in the folder of the extras, with their headers.
    extra_files: Vec<(PathBuf, TensorShapes)>,
    /// For a family with several text encoders: the file of `te_name_or_path`, or the files directly in its folder.
    text_files: Vec<(PathBuf, TensorShapes)>,
}

impl<'a> Search<'a> {
    fn new(arch: ArchName, model: &'a Path, paths: &'a PartPaths) -> Result<Self, String> {
        let family = family::of(arch).ok_or_else(|| {
            format!(
                "{}: a model of `arch: {arch}` has no parts from elsewhere",
                model.display()
            )
        })?;
        for path in [&paths.extras, &paths.text_encoder, &paths.vae].into_iter().flatten() {
            if !path.exists() {
                return Err(format!("{}: no such file or folder", path.display()));
            }
        }
        let mut extra_files = Vec::new();
        if let Some(extras) = &paths.extras {
            if !extras.is_dir() {
                return Err(format!(
                    "{}: `extras_name_or_path` is a folder: that of a {} model in diffusers' layout, or one with the files of text \
                     encoders and VAE",
                    extras.display(),
                    family.name
                ));
            }
            extra_files = weights_files_in(extras)?;
        }
        let several = family.given_text.len() > 1;
        let text_files = match paths.text_encoder.as_deref().filter(|_| several) {
            Some(folder) if folder.is_dir() => weights_files_in(folder)?,
            Some(file) => vec![(file.to_path_buf(), given_header(file)?)],
            None => Vec::new(),
        };
        let search = Self {
            family,
            model,
            paths,
            checkpoint: if model.is_dir() { None } else { header_of(model).ok() },
            extra_files,
            text_files,
        };
        search.check_given_text()?;
        Ok(search)
    }

    /// Searches the wanted parts of the family.
    fn find(&self, is_wanted: &dyn Fn(ModelPart) -> bool) -> Result<FoundParts, String> {
        let mut all = FoundParts::default();
        for place in self.family.parts.iter().filter(|place| is_wanted(place.part)) {
            match self.part(place)? {
                Some(files) => all.found.push((place.part, files)),
                None if place.is_optional => continue,
                None => all.missing.push(Missing::Part(place)),
            }
            match self.tokenizer(place) {
                Some(folder) => all.tokenizers.push((place.part, folder)),
                None if place.part.needed_tokenizer().is_some() => all.missing.push(Missing::Tokenizer(place)),
                None => {}
            }
        }
        all.missing
            .sort_by_key(|missing| matches!(missing, Missing::Tokenizer(_)));
        Ok(all)
    }

    /// The model with these parts.
    fn assemble(&self, found: FoundParts) -> ModelParts {
        let model = self.model;
        let transformer = model.join("transformer");
        let transformer = match model.is_dir() {
            true => PartFiles {
                config: existing(transformer.join("config.json")),
                path: transformer,
                prefix: "",
            },
            false => PartFiles {
                path: model.to_path_buf(),
                prefix: "",
                config: None,
            },
        };
        let scheduler = self
            .folders()
            .find(|folder| folder.join("scheduler/scheduler_config.json").is_file());
        ModelParts {
            transformer,
            found: found.found,
            tokenizers: found.tokenizers,
            scheduler: scheduler.map(Path::to_path_buf),
            scheduler_transformer: scheduler
                .filter(|folder| *folder != model)
                .and_then(|folder| existing(folder.join("transformer/config.json"))),
        }
    }

    /// What the model lacks.
    fn lack(&self, missing: &[Missing<'_>]) -> String {
        let names: Vec<String> = missing.iter().map(Missing::title).collect();
        format!(
            "{}: {} without {}",
            self.model.display(),
            self.family.name,
            names.join(", without ")
        )
    }

    /// Folders in diffusers' layout.
    fn folders(&self) -> impl Iterator<Item = &Path> {
        let model = Some(self.model).filter(|model| model.is_dir());
        model.into_iter().chain(self.paths.extras.as_deref())
    }

    /// The config of the part in a folder in diffusers' layout.
    fn config(&self, place: &FamilyPart) -> Option<PathBuf> {
        self.folders()
            .find_map(|folder| existing(folder.join(place.folder).join("config.json")))
    }

    fn part(&self, place: &FamilyPart) -> Result<Option<PartFiles>, String> {
        if let Some(vae) = self.paths.vae.as_deref().filter(|_| place.part == ModelPart::Vae) {
            return self.given_part(place, vae).map(Some);
        }
        if let Some(given) = self.given_text(place)? {
            return Ok(Some(given));
        }
        let checkpoint = self.checkpoint.as_ref();
        let prefix = checkpoint.and_then(|weights| place.part.prefixes().iter().find(|prefix| has(weights, prefix)));
        if let Some(prefix) = prefix {
            return Ok(Some(PartFiles {
                path: self.model.to_path_buf(),
                prefix,
                config: self.config(place),
            }));
        }
        for model in self.folders() {
            if let Some(found) = self.in_folder(place, model)? {
                return Ok(Some(found));
            }
        }
        self.among(place, &self.extra_files)
    }

    /// The part in a folder in diffusers' layout: the model, or the extras.
    fn in_folder(&self, place: &FamilyPart, model: &Path) -> Result<Option<PartFiles>, String> {
        let folder = model.join(place.folder);
        let config = existing(folder.join("config.json"));
        // A part that may be left out is there if its folder is: what it lacks is an error then.
        let is_there = match place.is_optional {
            true => folder.is_dir() && !leaves_out(model, place.folder),
            false => config.is_some() && has_weights(&folder),
        };
        if !is_there {
            return Ok(None);
        }
        if self.paths.extras.as_deref() == Some(model)
            && let Some(found) = config
                .as_deref()
                .and_then(|config| place.part.other_part(config, self.family.vae_scaling_factor))
        {
            return Err(self.wrong_extras(place, model, &folder, &found));
        }
        Ok(Some(PartFiles {
            config: Some(folder.join("config.json")),
            path: folder,
            prefix: "",
        }))
    }

    /// The part among files side by side.
    fn among(&self, place: &FamilyPart, files: &[(PathBuf, TensorShapes)]) -> Result<Option<PartFiles>, String> {
        let mut found = files.iter().filter(|(_, weights)| place.part.is_in(weights));
        match (found.next(), found.next()) {
            (Some((one, _)), Some((other, _))) => Err(format!(
                "{} and {} are both the {}: leave one of them in the folder{}",
                one.display(),
                other.display(),
                place.title(),
                match place.part {
                    ModelPart::Vae => ", or give one as `model.vae_path`",
                    part if self.family.given_text.contains(&part) => ", or give one as `model.te_name_or_path`",
                    _ => "",
                }
            )),
            (Some((path, _)), None) => Ok(Some(PartFiles {
                path: path.clone(),
                prefix: "",
                config: self.config(place),
            })),
            (None, _) => Ok(None),
        }
    }

    /// The text encoder at `te_name_or_path`. `None` if the path is not given, or if it has only other text encoders of the family.
    fn given_text(&self, place: &FamilyPart) -> Result<Option<PartFiles>, String> {
        let path = self.paths.text_encoder.as_deref();
        let Some(path) = path.filter(|_| self.family.given_text.contains(&place.part)) else {
            return Ok(None);
        };
        if self.family.given_text.len() == 1 {
            return self.given_part(place, path).map(Some);
        }
        if !path.is_dir() {
            let prefix = self
                .text_files
                .first()
                .and_then(|(_, weights)| place.part.prefix_in(weights));
            return Ok(prefix.map(|prefix| PartFiles {
                path: path.to_path_buf(),
                prefix,
                config: self.config(place),
            }));
        }
        let config = path.join("config.json");
        let folder = match ModelPart::of_config(&config) {
            Some(part) if part == place.part => path.to_path_buf(),
            _ => path.join(place.folder),
        };
        match existing(folder.join("config.json")) {
            Some(config) => match place.part.other_part(&config, self.family.vae_scaling_factor) {
                Some(found) => Err(format!(
                    "{}: this is not {}'s {}: its config.json has {found}",
                    folder.display(),
                    self.family.name,
                    place.title()
                )),
                None => Ok(Some(PartFiles {
                    path: folder,
                    prefix: "",
                    config: Some(config),
                })),
            },
            None if config.is_file() => Ok(None),
            None => self.among(place, &self.text_files),
        }
    }

    /// Checks that `te_name_or_path` has a text encoder of the family. Of a family with one, [`Self::given_part`] does.
    fn check_given_text(&self) -> Result<(), String> {
        let several = self.family.given_text.len() > 1;
        let Some(path) = self.paths.text_encoder.as_deref().filter(|_| several) else {
            return Ok(());
        };
        let places = || self.family.parts.iter();
        for place in places() {
            if self.given_text(place)?.is_some() {
                return Ok(());
            }
        }
        let text = places().filter(|place| self.family.given_text.contains(&place.part));
        let titles: Vec<String> = text.map(FamilyPart::title).collect();
        let found = match self.text_files.as_slice() {
            [(_, weights)] => contents(weights),
            _ => "it has none of their folders and files".to_owned(),
        };
        Err(format!(
            "{} is not a text encoder of {}: {found}. Expected one of: {}",
            path.display(),
            self.family.name,
            titles.join(", ")
        ))
    }

    /// The part at a path that the config gives for it: a file, the folder of the part, or a model's folder that has one.
    fn given_part(&self, place: &FamilyPart, path: &Path) -> Result<PartFiles, String> {
        if path.is_dir() {
            let inner = path.join(place.folder);
            let folder = if inner.is_dir() { inner } else { path.to_path_buf() };
            let config = existing(folder.join("config.json"));
            return Ok(PartFiles {
                path: folder,
                prefix: "",
                config: config.or_else(|| self.config(place)),
            });
        }
        let weights = given_header(path)?;
        match place.part.prefix_in(&weights) {
            Some(prefix) => Ok(PartFiles {
                path: path.to_path_buf(),
                prefix,
                config: self.config(place),
            }),
            None => Err(format!(
                "{} is not a {}: {}",
                path.display(),
                place.title(),
                contents(&weights)
            )),
        }
    }

    /// The folder of a text encoder's tokenizer. Not one beside a given file: an attempt may read the paths of its config alone.
    fn tokenizer(&self, place: &FamilyPart) -> Option<PathBuf> {
        let all = [
            Some(self.model),
            self.paths.text_encoder.as_deref(),
            self.paths.extras.as_deref(),
        ];
        let folders = || all.into_iter().flatten().filter(|path| path.is_dir());
        let name = place.tokenizer?;
        let inner = folders().map(|folder| folder.join(name));
        // Of CLIP only a folder of its own: the model may have several tokenizers.
        let is_alone = place.part.needed_tokenizer().is_some();
        let outer = folders().filter(|_| is_alone).map(Path::to_path_buf);
        let mut candidates = inner.chain(outer);
        candidates.find(|folder| place.part.has_tokenizer(folder))
    }

    /// The error for a folder of another family as `model.extras_name_or_path`. `found`: what the config in `folder` has.
    fn wrong_extras(&self, place: &FamilyPart, extras: &Path, folder: &Path, found: &str) -> String {
        let index = read_json_file(&extras.join("model_index.json"));
        let class = index.as_ref().and_then(|index| index.get("_class_name")?.as_str());
        let family = self.family.name;
        format!(
            "{}: this is not {family}'s {}: its config.json has {found}{}. Set `model.extras_name_or_path` to a folder or repository of {family}",
            folder.display(),
            place.title(),
            class.map_or(String::new(), |class| format!(
                ", and {} is a model for {class}",
                extras.display()
            ))
        )
    }

    /// How to give what is missing.
    fn advice(&self, missing: &[Missing<'_>]) -> String {
        let given_text = self.family.given_text;
        let is_text = |missing: &Missing<'_>| missing.part().is_some_and(|part| given_text.contains(&part));
        let only_text = missing.iter().all(is_text);
        let only_vae = missing.iter().all(|missing| missing.part() == Some(ModelPart::Vae));
        let single = match () {
            () if only_text && missing.len() > 1 => ", or `model.te_name_or_path` to a folder with them",
            () if only_text => ", or `model.te_name_or_path` to its file or folder",
            () if only_vae => ", or `model.vae_path` to its file or folder",
            () => ", in diffusers' layout or as files side by side",
        };
        format!(
            "set `model.extras_name_or_path` to a folder or repository of {} that has it{single}",
            self.family.name
        )
    }
}
