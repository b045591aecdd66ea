//! The options of data set configs. What becomes of most is decided by the line of the same name in `options.rs`.

use super::option::Fate::{NoInfluence, Noted, Refused, Translated};
use super::option::Kind::{Flag, Number, Numbers, Size, Table, Text, Whole};
use super::option::{Fate, OptionRow, UsedBy, row};
use super::options;

const ALL: UsedBy = UsedBy::ALL;

const fn refused(why: &'static str) -> Fate {
    Refused { unless: "", why }
}

/// Of `[[datasets]]` and `[general]`.
#[rustfmt::skip]
pub(super) const DATASET: &[OptionRow] = &[
    row("resolution", Size, "resolution", ALL, Translated("`resolution`, `size`")),
    row("batch_size", Whole, "train_batch_size", ALL, Translated("`batch_size`")),
    row("enable_bucket", Flag, "enable_bucket", ALL, Translated("`buckets`")),
    row("bucket_no_upscale", Flag, "bucket_no_upscale", ALL, Translated("always on: with buckets, aitk does not enlarge images")),
    row("min_bucket_reso", Whole, "min_bucket_reso", ALL, NoInfluence("aitk's buckets have the area of the resolution")),
    row("max_bucket_reso", Whole, "max_bucket_reso", ALL, NoInfluence("aitk's buckets have the area of the resolution")),
    row("bucket_reso_steps", Whole, "bucket_reso_steps", ALL, NoInfluence("aitk's buckets are multiples of what the model needs")),
    row("network_multiplier", Number, "1.0", ALL, Translated("`network_weight`")),
    row("validation_split", Number, "0", ALL, Translated("`excluded_images`: the images that sd-scripts holds out; with LoRAs also `train.validation_config`")),
    row("validation_seed", Whole, "", ALL, Translated(options::VALIDATION_SEED)),
];

/// Of `[[datasets.subsets]]`, `[[datasets]]` and `[general]`.
#[rustfmt::skip]
pub(super) const SHARED: &[OptionRow] = &[
    row("num_repeats", Whole, "1", ALL, Translated("`num_repeats`")),
    row("caption_extension", Text, "caption_extension", ALL, Translated("`caption_ext`")),
    row("class_tokens", Text, "", ALL, Translated("`default_caption`")),
    row("shuffle_caption", Flag, "shuffle_caption", ALL, Translated("`shuffle_tokens`")),
    row("keep_tokens", Whole, "keep_tokens", ALL, Translated("`keep_tokens`, `shuffle_keeps_tokens`")),
    row("keep_tokens_separator", Text, "keep_tokens_separator", ALL, Translated("`keep_tokens_separator`, if captions are shuffled or tags are dropped")),
    row("caption_separator", Text, "caption_separator", ALL, Translated("`caption_separator`")),
    row("secondary_separator", Text, "secondary_separator", ALL, Translated("`secondary_separator`")),
    row("enable_wildcard", Flag, "enable_wildcard", ALL, Translated("`enable_wildcard`")),
    row("caption_prefix", Text, "caption_prefix", ALL, Translated("`caption_prefix`")),
    row("caption_suffix", Text, "caption_suffix", ALL, Translated("`caption_suffix`")),
    row("caption_dropout_rate", Number, "caption_dropout_rate", ALL, Translated("`caption_dropout_rate`")),
    row("caption_dropout_every_n_epochs", Whole, "0", ALL, refused(options::EVERY_N_EPOCHS)),
    row("caption_tag_dropout_rate", Number, "caption_tag_dropout_rate", ALL, Translated("`token_dropout_rate`")),
    row("token_warmup_min", Whole, "1", ALL, NoInfluence("only token_warmup_step uses it, which is refused")),
    row("token_warmup_step", Number, "0", ALL, refused(options::TOKEN_WARMUP)),
    row("flip_aug", Flag, "flip_aug", ALL, Translated("`flip_x`: both images, where sd-scripts flips every second time")),
    row("color_aug", Flag, "false", ALL, refused(options::COLOR_AUG)),
    row("random_crop", Flag, "random_crop", ALL, Translated("`random_crop`: with buckets drawn once for each image")),
    row("face_crop_aug_range", Numbers, "", ALL, refused(options::FACE_CROP)),
    row("resize_interpolation", Text, "", ALL, Noted("aitk has one way to scale images")),
    row("cache_info", Flag, "false", ALL, NoInfluence("speed only")),
    row("custom_attributes", Table, "", ALL, refused("aitk sets such options for the whole job: use a YAML config")),
];

/// Of `[[datasets.subsets]]` alone.
#[rustfmt::skip]
pub(super) const SUBSET: &[OptionRow] = &[
    row("image_dir", Text, "", ALL, Translated("`folder_path`")),
    row("is_reg", Flag, "false", ALL, Translated("`is_reg`")),
    row("alpha_mask", Flag, "alpha_mask", ALL, Translated("`alpha_mask`")),
    row("conditioning_data_dir", Text, "", ALL, Translated("`mask_path`, with masked_loss")),
    row("metadata_file", Text, "", ALL, Translated("`captions_file`, of the images in image_dir")),
];
