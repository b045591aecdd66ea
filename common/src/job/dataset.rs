//! `datasets`: images, captions and their preprocessing.

use super::augmentation;
use super::declare::{choices, section};
use super::limits::{
    MAX_BATCH, MAX_CONTROL_FOLDERS, MAX_EXCLUDED_IMAGES, MAX_FACTOR, MAX_REPEATS, MAX_RESOLUTIONS, MAX_SIDE,
};
use super::node::Node;
use super::schema::{FieldValue, PresentKeys, ReadContext, SupportReport, join};
use super::values::{Float, ImageSize, OneOrMany, TextSource};
use serde::{Deserialize, Serialize};

choices! {
    /// The kind of data in a data set.
    pub enum DatasetType("dataset type") {
        /// Images (or videos) with captions.
        Image = "image", Works;
    }
}

choices! {
    /// How paired images guide a training: the loss of an image and its pair (docs/losses.md).
    pub enum GuidanceType("guidance type") {
        /// The image is learned most where it differs from its pair.
        Targeted = "targeted", Works;
        /// The image is learned with the adapter, its pair with the adapter at the opposite strength.
        Polarity = "polarity", Works;
        /// Both are learned, with noise that leads away from the other.
        TargetedPolarity = "targeted_polarity", Works;
        /// Their predictions are combined as classifier-free guidance combines its two.
        Direct = "direct", Works;
        /// The image is learned, and its pair unlearned a little ("this, not that").
        Tnt = "tnt", Works;
        /// Of flow models: the image is learned where it differs from its pair, and elsewhere what the model predicts is kept.
        TargetedFlow = "targeted_flow", Works;
    }
}

/// Three colour values from 0 to 255.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rgb(pub [u8; 3]);

impl FieldValue for Rgb {
    fn kind() -> String {
        "[red, green, blue]".into()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        let values = Vec::<u32>::read(node, cx)?;
        let bytes: Option<Vec<u8>> = values.iter().map(|&value| u8::try_from(value).ok()).collect();
        let rgb = bytes.and_then(|bytes| <[u8; 3]>::try_from(bytes).ok());
        if rgb.is_none() {
            cx.error("expected three whole numbers from 0 to 255: [red, green, blue]");
        }
        rgb.map(Self)
    }
    fn show(&self) -> String {
        format!("{:?}", self.0)
    }
    fn is_falsy(&self) -> bool {
        self.0 == [0, 0, 0]
    }
}

section! {
    /// Images, captions and their preprocessing.
    pub struct DatasetConfig("datasets") {
        /// Kind of data.
        kind as "type": DatasetType = DatasetType::Image, Works;
        /// Folder, searched recursively.
        folder_path: Option<String> = None, Works, input Dataset;
        /// Folder, or a JSON file that maps image paths to objects such as `{"caption": "a red circle"}`.
        dataset_path: Option<String> = None, Works, shown "`folder_path`", input Dataset;
        /// Images that are not trained: their paths in the folder, such as `a.png`.
        excluded_images: Vec<String> = Vec::new(), Works;
        /// Pixel budget: resolution squared. A list makes one data set per resolution over the same files.
        resolution: OneOrMany<u32> = OneOrMany(vec![512]), Works;
        /// Items per batch.
        batch_size: Option<u32> = None, Works, shown "`train.batch_size`";
        /// How often the list of files is repeated.
        num_repeats: u32 = 1, Works;
        /// Suffix of caption files, with or without the dot. In a `.json` file the caption is at the key `caption`.
        caption_ext: String = ".txt".into(), Works;
        /// Older name of `caption_ext`.
        caption_type: Option<String> = None, Works;
        /// A metadata file of sd-scripts with the captions and tags of the images in the folder, `.json` or `.jsonl`. Images that it does
        /// not have are not trained, and caption files are not read.
        captions_file: Option<String> = None, Works, input PromptFile;
        /// Caption when a file is missing or blank.
        default_caption: Option<String> = None, Works;
        /// Trigger word of this data set.
        trigger_word: Option<String> = None, Works, shown "the process's";
        /// Words that are appended at random, or a text file with one per line.
        random_triggers: TextSource = TextSource::default(), Works, input PromptFile;
        /// How many are appended: 0 none, 1 one, above 1 a random number from 0 to this value.
        random_triggers_max: u32 = 1, Works;
        /// Chance of an empty caption.
        caption_dropout_rate: Float = Float(0.0), Works;
        /// Chance to drop each comma-separated token.
        token_dropout_rate: Float = Float(0.0), Works;
        /// Leading tokens that are never dropped.
        keep_tokens: u32 = 0, Works;
        /// Shuffle the comma-separated tokens.
        shuffle_tokens: bool = false, Works;
        /// Captions as sd-scripts reads them: the first line, without spaces at its ends (with `enable_wildcard` every line that is
        /// not blank). Commas and spaces stay as they are, unless tokens are shuffled or dropped.
        sd_scripts_captions: bool = false, Works;
        /// sd-scripts: the tokens of `keep_tokens` keep their places when tokens are shuffled, too.
        shuffle_keeps_tokens: bool = false, Works;
        /// sd-scripts: tokens before this text, and after it where it stands a second time, are neither dropped nor shuffled; it
        /// has precedence over `keep_tokens`. Only with `shuffle_tokens` or `token_dropout_rate`.
        keep_tokens_separator: Option<String> = None, Works;
        /// sd-scripts: the text between tokens.
        caption_separator: Option<String> = None, Works, shown "a comma";
        /// sd-scripts: at the end, this text becomes `caption_separator` (a comma by default); it joins several tokens to one, which is
        /// dropped and shuffled as one.
        secondary_separator: Option<String> = None, Works;
        /// sd-scripts: text before each caption, followed by a space.
        caption_prefix: Option<String> = None, Works;
        /// sd-scripts: text after each caption, preceded by a space.
        caption_suffix: Option<String> = None, Works;
        /// sd-scripts: each time, one line of the caption is chosen, and one alternative of each `{a|b|c}`. `{{` and `}}` are braces.
        enable_wildcard: bool = false, Works;
        /// Take `caption_short` from the JSON file.
        use_short_captions: bool = false, Works;
        /// No effect for trainers.
        replacements: Vec<String> = Vec::new(), Accepted("never had an effect");
        /// A regularisation set: trained at every even step, except where a save or samples are due, with the weight
        /// `train.reg_weight`; its captions get no trigger word.
        is_reg: bool = false, Works;
        /// What the model without the adapter predicts is the target of these items. A step takes 1.3 times as long.
        prior_reg: bool = false, Works;
        /// LoRA multiplier for these items.
        network_weight: Float = Float(1.0), Works;
        /// Loss weight of these items.
        loss_multiplier: f64 = 1.0, Works;
        /// Aspect buckets; all data sets or none. Without buckets: squares of the resolution, cropped from the centre.
        buckets: bool = true, Works;
        /// As `resolution` of sd-scripts without buckets: the width and height of every image, which is scaled to cover them and
        /// cropped from the centre. Only with `buckets: false`. `resolution` then has no effect.
        size: Option<ImageSize> = None, Works;
        /// No effect: the model's divisibility is used.
        bucket_tolerance: u32 = 64, Accepted("the model's divisibility is used, as ai-toolkit did");
        /// Scale and crop every image to a square of the resolution, from its centre; smaller images are enlarged.
        square_crop: bool = false, Works;
        /// Scale before everything else.
        scale: f64 = 1.0, Works;
        /// Crop at a random position instead of at the centre. With buckets it is drawn once; without, each time, from the image at its
        /// own size.
        random_crop: bool = false, Works;
        /// Scale each image, each time, to a random size between the resolution and its own before it is cropped. Only with
        /// `random_crop` and `buckets: false`.
        random_scale: bool = false, Works;
        /// Add copies flipped left to right.
        flip_x: bool = false, Works;
        /// Add copies flipped upside down.
        flip_y: bool = false, Works;
        /// Built-in augmentations, drawn again each time an image is used: `ColorJitter` (brightness, contrast and saturation by up to 20 %,
        /// hue by up to 3 %), `RandomEqualize` (every fifth image). Latents are not cached then.
        augments: Vec<String> = Vec::new(), Works;
        /// Random changes of the images, drawn again each time an image is used: a list of `method` (a name of albumentations) and `params`; see
        /// docs/datasets.md. Latents are not cached then.
        augmentations: Option<Vec<serde_json::Value>> = None, Works;
        /// A new order of `augmentations` for each image, each time.
        shuffle_augmentations: bool = false, Works;
        /// `Rotate` and the flips of `augmentations` are applied to control images and masks too.
        replay_transforms: bool = true, Works;
        /// Subtract fixed means of red, green and blue and divide by fixed deviations: those of SDXL, or of Stable Diffusion for all
        /// other models. Control images stay as they are.
        standardize_images: bool = false, Works;
        /// Keep latents in RAM.
        cache_latents: bool = false, Works;
        /// Keep latents on disk.
        cache_latents_to_disk: bool = false, Works;
        /// Threads that decode while caching.
        cache_latents_num_workers: Option<u32> = None, Accepted("speed only"), shown "at most 6";
        /// Also keep pixels and sound on disk.
        cache_tensors_to_disk: bool = false, Accepted("speed only");
        /// Load pixels although latents are cached.
        load_image_when_caching_latents: bool = false, Accepted("nothing needs the pixels");
        /// Encode captions before training; all data sets or none.
        cache_text_embeddings: bool = false, Works;
        /// Cache CLIP image embeddings.
        cache_clip_vision_to_disk: bool = false, DependsOn("adapter");
        /// Folder of control images (FLUX.1 Kontext, `adapter`): for each image a file of the same stem, scaled and cropped like the image. Of
        /// several folders, exactly one has the file.
        control_path: OneOrMany<String> = OneOrMany(Vec::new()), Works, input ControlImages;
        /// The first control folder, as the web UI writes it; `control_path_1` to `control_path_3` replace `control_path`.
        control_path_1: Option<String> = None, Works, input ControlImages;
        /// The second control folder.
        control_path_2: Option<String> = None, Works, input ControlImages;
        /// The third control folder.
        control_path_3: Option<String> = None, Works, input ControlImages;
        /// The control image of each image is another image of its folder, drawn anew each time (FLUX.1 Kontext). Latents are not cached
        /// then.
        control_from_same_folder: bool = false, Works;
        /// How many control images each image gets: FLUX.1 Kontext changes one.
        num_controls_from_same_folder: u32 = 1, Works;
        /// Background of transparent control images.
        control_transparent_color: Rgb = Rgb([0, 0, 0]), Works;
        /// False: control images are resized to 512x512, then to the size of their images, and neither flipped nor cropped.
        full_size_control_images: bool = true, Works;
        /// What is in the folder `_controls` beside each image `NAME`, as `_controls/NAME.TYPE.jpg` (or `.jpeg`, `.png`, `.webp`): its control image
        /// (`depth`, `line` or `pose`; FLUX.1 Kontext, `adapter`), and its loss mask (`mask` or `sapiens2_mask`). Files that are missing are
        /// made, except those of `pose`. See docs/datasets.md.
        controls: OneOrMany<String> = OneOrMany(Vec::new()), Works;
        /// Ours: the network that makes files of `depth`: a folder with `config.json`, or a repository of transformers' Depth Anything V2.
        /// Empty: files that are missing are an error.
        depth_estimator: Option<String> = None, Works, shown "with `controls: depth` `depth-anything/Depth-Anything-V2-Large-hf`", input Vae;
        /// Ours: the network that makes files of `line`: TEED as a safetensors file. Without it files that are missing are an error.
        line_detector: Option<String> = None, Works, input Vae;
        /// Ours: the network that makes files of `mask`: BiRefNet as a safetensors file, or a folder or repository with one. Empty: files that
        /// are missing are an error.
        background_remover: Option<String> = None, Works, shown "with `controls: mask` `ZhengPeng7/BiRefNet_HR`", input Vae;
        /// Ours: the network that makes files of `sapiens2_mask`: Sapiens 2 with its matting head as a safetensors file, or a folder or
        /// repository with one. Empty: files that are missing are an error.
        matting_model: Option<String> = None, Works, shown "with `controls: sapiens2_mask` `facebook/sapiens2-matting-1b`", input Vae;
        /// Images whose transparency marks the region to inpaint.
        inpaint_path: Option<String> = None, Refused("only models that aitk does not run (Flex.2) are trained to inpaint"), input ControlImages;
        /// Folder of loss masks, matched to images by stem: white is full weight; the weights are scaled to 1 on average over a
        /// batch. An image without a mask has full weight.
        mask_path: Option<String> = None, Works, input ControlImages;
        /// The image's own transparency is the mask.
        alpha_mask: bool = false, Works;
        /// Invert the mask.
        invert_mask: bool = false, Works;
        /// Weight of black in the mask.
        mask_min_value: f64 = 0.0, Works;
        /// Folder of paired images, such as the same scenes without what is learned: for each image a file of the same stem, flipped,
        /// scaled and cropped like the image. The loss compares both.
        unconditional_path: Option<String> = None, Works, input ControlImages;
        /// The loss of an image and its pair; see docs/losses.md.
        guidance_type: GuidanceType = GuidanceType::Targeted, Works;
        /// Above 1: a video data set.
        num_frames: u32 = 1, Refused("no video models yet");
        /// Spread the frames over the clip.
        shrink_video_to_frames: bool = true, DependsOn("num_frames");
        /// Frames per second.
        fps: u32 = 24, DependsOn("num_frames");
        /// As many frames as the clip has.
        auto_frame_count: bool = false, Refused("no video models yet");
        /// Drop the tail instead of compressing time.
        trim_auto_frame_count_tail: bool = true, DependsOn("auto_frame_count");
        /// Also encode the first frame.
        do_i2v: bool = false, DependsOn("num_frames");
        /// Use the sound.
        do_audio: bool = false, DependsOn("num_frames");
        /// Normalise the volume of the sound.
        audio_normalize: bool = false, DependsOn("do_audio");
        /// Keep the pitch of the sound when time is compressed.
        audio_preserve_pitch: bool = false, DependsOn("do_audio");
        /// Loader threads.
        num_workers: u32 = 2, Accepted("speed only");
        /// Batches that are loaded ahead.
        prefetch_factor: u32 = 2, Accepted("speed only");
        /// Read sizes from file headers only.
        fast_image_size: bool = false, Accepted("speed only");
        /// Set from `train`.
        diff_output_preservation: bool = false, Accepted("the value of `train` counts");
        /// Set from `train`.
        diff_output_preservation_class: Option<String> = None, Accepted("the value of `train` counts");
        /// Print more about videos.
        debug: bool = false, Accepted("only prints more");
        /// Removed in ai-toolkit: any value is an error.
        poi: Option<serde_json::Value> = None, Works;
    }
    rare {
        "clip_image_path" => DependsOn("adapter");
        "clip_image_from_same_folder" => DependsOn("adapter");
        "clip_image_augmentations" => DependsOn("adapter");
        "clip_image_shuffle_augmentations" => DependsOn("adapter");
        "extra_values" => DependsOn("adapter");
    }
    finish = finish;
    check = check;
}

fn check(dataset: &DatasetConfig, path: &str, report: &mut SupportReport) {
    check_augmentations(dataset, path, report);
    check_drawn_controls(dataset, path, report);
    dataset.check_controls(path, report);
    if let Some((key, why)) = dataset.excluded_by_random_crop() {
        report.error(join(path, key), why);
    }
    if dataset.random_scale && (dataset.buckets || !dataset.random_crop) {
        report.warn(
            join(path, "random_scale"),
            "has no effect without `random_crop: true` and `buckets: false`, as in ai-toolkit",
        );
    }
    if dataset.random_crop && dataset.square_crop && dataset.buckets {
        report.warn(
            join(path, "random_crop"),
            "has no effect with `square_crop`, which crops from the centre, as in ai-toolkit",
        );
    }
    if dataset.use_short_captions && dataset.dataset_path.is_none() {
        report.warn(
            join(path, "use_short_captions"),
            "has no effect on the images of a folder, as in ai-toolkit: short captions are those of a JSON file, `dataset_path`",
        );
    }
    let has_augmentations = dataset
        .augmentations
        .as_ref()
        .is_some_and(|entries| !entries.is_empty());
    for (key, is_set) in [
        ("shuffle_augmentations", dataset.shuffle_augmentations),
        ("replay_transforms", !dataset.replay_transforms),
    ] {
        if is_set && !has_augmentations {
            report.warn(join(path, key), "has no effect without `augmentations`");
        }
    }
}

/// Checks the augmentations, and what they exclude.
fn check_augmentations(dataset: &DatasetConfig, path: &str, report: &mut SupportReport) {
    let entries = dataset.augmentations.as_deref().unwrap_or_default();
    augmentation::check_names(&dataset.augments, entries, path, report);
    if !dataset.is_augmented() {
        return;
    }
    warn_of_caches(
        dataset,
        "is ignored, as in ai-toolkit: with `augments` or `augmentations` the images differ each time",
        path,
        report,
    );
    let follows =
        dataset.control_key().is_some() || dataset.unconditional_path.is_some() || dataset.mask_key().is_some();
    let shifts = |entry: &serde_json::Value| entry.get("method").is_some_and(|name| name == "ShiftScaleRotate");
    if follows && dataset.replay_transforms && entries.iter().any(shifts) {
        report.error(
            join(path, "augmentations"),
            "ai-toolkit does not apply `ShiftScaleRotate` to masks, control images and pairs, so they would not fit their images: use \
             `Rotate`, or set `replay_transforms: false` if they should stay as they are",
        );
    }
}

/// Warns of caches of latents, which are not used.
fn warn_of_caches(dataset: &DatasetConfig, why: &str, path: &str, report: &mut SupportReport) {
    for (on, key) in [
        (dataset.cache_latents, "cache_latents"),
        (dataset.cache_latents_to_disk, "cache_latents_to_disk"),
    ] {
        if on {
            report.warn(join(path, key), why);
        }
    }
}

/// Checks control images that are drawn from the images of the data set.
fn check_drawn_controls(dataset: &DatasetConfig, path: &str, report: &mut SupportReport) {
    if !dataset.control_from_same_folder {
        if dataset.num_controls_from_same_folder != 1 {
            report.warn(
                join(path, "num_controls_from_same_folder"),
                "has no effect without `control_from_same_folder`",
            );
        }
        return;
    }
    if dataset.num_controls_from_same_folder != 1 {
        report.error(
            join(path, "num_controls_from_same_folder"),
            format!(
                "{} is not possible: FLUX.1 Kontext changes one image; expected 1",
                dataset.num_controls_from_same_folder
            ),
        );
    }
    if dataset.control_path.iter().next().is_some() {
        report.error(
            join(path, "control_from_same_folder"),
            "cannot be used with `control_path`: remove one of them. ai-toolkit ignores `control_path` then",
        );
    }
    if !dataset.is_augmented() {
        let why = "is ignored: with `control_from_same_folder` the control images differ each time, so that the VAE is needed all the time";
        warn_of_caches(dataset, why, path, report);
    }
}

fn finish(dataset: &mut DatasetConfig, present: &PresentKeys, cx: &mut ReadContext) {
    if dataset.poi.is_some() {
        cx.error_at(
            "poi",
            "was removed from ai-toolkit; remove the key and crop the images beforehand",
        );
    }
    if let Some(legacy) = &dataset.caption_type
        // A job from JSON has both keys.
        && (!present.has("caption_ext") || dataset.caption_ext == *legacy)
    {
        dataset.caption_ext.clone_from(legacy);
    } else if !dataset.caption_ext.is_empty() && !dataset.caption_ext.starts_with('.') {
        dataset.caption_ext.insert(0, '.');
    }
    if let Err(why) = super::naming::check_suffix(&dataset.caption_ext) {
        cx.error_at("caption_ext", why);
    }
    let ui = dataset.numbered_controls();
    if !ui.is_empty() {
        dataset.control_path = OneOrMany(ui);
    }
    dataset.control_path.0.retain(|path| !path.is_empty());
    dataset.finish_controls(cx);
    cx.check_item_count("controls", dataset.controls.len(), MAX_CONTROL_FOLDERS);
    cx.check_item_count("excluded_images", dataset.excluded_images.len(), MAX_EXCLUDED_IMAGES);
    cx.check_item_count("control_path", dataset.control_path.len(), MAX_CONTROL_FOLDERS);
    for path in [
        &mut dataset.folder_path,
        &mut dataset.dataset_path,
        &mut dataset.mask_path,
        &mut dataset.unconditional_path,
        &mut dataset.inpaint_path,
    ] {
        if path.as_deref() == Some("") {
            *path = None;
        }
    }
    if dataset.resolution.is_empty() {
        cx.error_at(
            "resolution",
            "expected at least one resolution, such as 512 or [512, 768]",
        );
    } else if dataset.resolution.contains(&0) {
        cx.error_at("resolution", "expected resolutions of at least 1, found 0");
    }
    cx.check_item_count("resolution", dataset.resolution.len(), MAX_RESOLUTIONS);
    if let Some(ImageSize(width, height)) = dataset.size {
        if dataset.buckets {
            cx.error_at(
                "size",
                "needs `buckets: false`: with buckets, images keep their aspect ratio",
            );
        } else if dataset.resolution.len() > 1 {
            cx.error_at("size", "takes the place of `resolution`, which must not be a list then");
        } else if width.min(height) == 0 || width.max(height) > MAX_SIDE {
            cx.error_at("size", format!("expected a width and a height from 1 to {MAX_SIDE}"));
        } else {
            // Of the same area.
            dataset.resolution.0 = vec![(f64::from(width) * f64::from(height)).sqrt() as u32];
        }
    }
    if dataset.batch_size == Some(0) {
        cx.error_at("batch_size", "expected at least 1");
    }
    cx.check_at_most(
        "resolution",
        dataset.resolution.iter().max().copied().unwrap_or(0),
        MAX_SIDE,
    );
    cx.check_at_most("batch_size", dataset.batch_size.unwrap_or(0), MAX_BATCH);
    cx.check_not_zero("num_repeats", dataset.num_repeats);
    cx.check_at_most("num_repeats", dataset.num_repeats, MAX_REPEATS);
    cx.check_in_range("loss_multiplier", dataset.loss_multiplier, -MAX_FACTOR..=MAX_FACTOR);
    cx.check_in_range("mask_min_value", dataset.mask_min_value, 0.0..=1.0);
    for (rate, key) in [
        (*dataset.caption_dropout_rate, "caption_dropout_rate"),
        (*dataset.token_dropout_rate, "token_dropout_rate"),
    ] {
        if !(0.0..=1.0).contains(&rate) {
            cx.error_at(key, "expected a chance from 0 to 1");
        }
    }
    finish_captions(dataset, cx);
    if dataset.scale <= 0.0 {
        cx.error_at("scale", "expected a factor above 0");
    } else {
        cx.check_in_range("scale", dataset.scale, 0.0..=MAX_FACTOR);
    }
}

/// The longest text between tags. A caption has at most a million of them, and each can become this text.
const MAX_SEPARATOR_BYTES: usize = 32;
/// The longest text before or after each caption.
const MAX_AFFIX_BYTES: usize = 10_000;

/// Makes empty texts absent, as in sd-scripts, and checks the others.
fn finish_captions(dataset: &mut DatasetConfig, cx: &mut ReadContext) {
    let texts = [
        ("caption_separator", &mut dataset.caption_separator, MAX_SEPARATOR_BYTES),
        (
            "keep_tokens_separator",
            &mut dataset.keep_tokens_separator,
            MAX_SEPARATOR_BYTES,
        ),
        (
            "secondary_separator",
            &mut dataset.secondary_separator,
            MAX_SEPARATOR_BYTES,
        ),
        ("caption_prefix", &mut dataset.caption_prefix, MAX_AFFIX_BYTES),
        ("caption_suffix", &mut dataset.caption_suffix, MAX_AFFIX_BYTES),
    ];
    for (key, text, limit) in texts {
        if text.as_deref() == Some("") {
            *text = None;
        }
        if let Some(length) = text.as_ref().map(String::len).filter(|length| *length > limit) {
            cx.error_at(key, format!("expected at most {limit} bytes, found {length}"));
        }
    }
    let changes = dataset.shuffle_tokens || *dataset.token_dropout_rate > 0.0;
    if dataset.keep_tokens_separator.is_some() && !changes {
        let why = "has no effect without `shuffle_tokens` or `token_dropout_rate`, and stays in the captions, as in sd-scripts";
        cx.warn_at("keep_tokens_separator", why);
    }
    if dataset.shuffle_keeps_tokens && !(dataset.shuffle_tokens && dataset.keep_tokens > 0) {
        cx.warn_at(
            "shuffle_keeps_tokens",
            "has no effect without `shuffle_tokens` and `keep_tokens`",
        );
    }
}

impl DatasetConfig {
    /// The control folders as the web UI writes them: `control_path_1` to `control_path_3`.
    pub(super) fn numbered_controls(&self) -> Vec<String> {
        let paths = [&self.control_path_1, &self.control_path_2, &self.control_path_3];
        let non_empty = paths.into_iter().flatten().filter(|path| !path.is_empty());
        non_empty.cloned().collect()
    }

    /// The key that gives the images control images, if there is one.
    pub(super) fn control_key(&self) -> Option<&'static str> {
        self.folder_control_key()
            .or(self.condition_type().is_some().then_some("controls"))
    }

    /// As [`Self::control_key`], without `controls`.
    pub(super) fn folder_control_key(&self) -> Option<&'static str> {
        let numbered = [
            (&self.control_path_1, "control_path_1"),
            (&self.control_path_2, "control_path_2"),
            (&self.control_path_3, "control_path_3"),
        ];
        let is_set = |path: &Option<String>| path.as_ref().is_some_and(|path| !path.is_empty());
        let first = numbered.into_iter().find(|(path, _)| is_set(path));
        first
            .map(|(_, key)| key)
            .or((!self.control_path.is_empty()).then_some("control_path"))
            .or(self.control_from_same_folder.then_some("control_from_same_folder"))
    }

    /// Whether images are changed at random each time.
    #[must_use]
    pub fn is_augmented(&self) -> bool {
        !self.augments.is_empty() || self.augmentations.as_ref().is_some_and(|list| !list.is_empty())
    }

    /// The key that cannot be used with a part that is cropped at random each time, and why, if there is one.
    #[must_use]
    pub fn excluded_by_random_crop(&self) -> Option<(&'static str, &'static str)> {
        if !self.random_crop || self.buckets {
            return None;
        }
        let cached =
            "cannot be used with `random_crop` without buckets, which crops another part each time; remove one of them";
        let fixed = "cannot be used with `buckets: false` and `random_crop`, as in ai-toolkit; remove one of them";
        let squares = "cannot be used with `random_crop` without buckets, which crops squares; remove one of them";
        [
            (self.cache_latents, "cache_latents", cached),
            (self.cache_latents_to_disk, "cache_latents_to_disk", cached),
            (self.mask_path.is_some(), "mask_path", fixed),
            (self.alpha_mask, "alpha_mask", fixed),
            (!self.control_path.is_empty(), "control_path", fixed),
            (self.control_types().next().is_some(), "controls", fixed),
            (self.unconditional_path.is_some(), "unconditional_path", fixed),
            (self.control_from_same_folder, "control_from_same_folder", fixed),
            (self.size.is_some(), "size", squares),
        ]
        .into_iter()
        .find_map(|(on, key, why)| on.then_some((key, why)))
    }

    /// Whether latents are encoded once. Not where images are changed, or control images drawn, each time.
    #[must_use]
    pub fn caches_latents(&self) -> bool {
        (self.cache_latents || self.cache_latents_to_disk) && !self.is_augmented() && !self.control_from_same_folder
    }

    /// Where the images are: `dataset_path`, else `folder_path`.
    #[must_use]
    pub fn path(&self) -> Option<&str> {
        self.dataset_path.as_deref().or(self.folder_path.as_deref())
    }
}
