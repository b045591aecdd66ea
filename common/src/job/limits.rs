//! Size limits of configs. They are far above real configs and bound the cost of hostile files.

use super::error::Finding;
use super::node::Mark;

/// Bytes of a config file.
pub const MAX_BYTES: u64 = 10 * 1024 * 1024;
/// Nesting depth of lists and maps.
pub const MAX_DEPTH: usize = 64;
/// Bytes of the tree after aliases, variables and names are expanded; a value counts for 64 plus its text.
pub const MAX_EXPANDED: usize = 64 * 1024 * 1024;
/// Width or height of an image in pixels; an image of this width and height has 268 megapixels.
pub const MAX_SIDE: u32 = 16_384;
/// Rank of a network. More than the narrower side of a layer adds nothing, and FLUX.1's widest layers have 15360.
pub const MAX_RANK: u32 = 16_384;
/// Items of a batch.
pub const MAX_BATCH: u32 = 65_536;
/// Sampling steps. Models are trained on 1000 timesteps, so that more steps repeat them.
pub const MAX_SAMPLE_STEPS: u32 = 1000;
/// Length of the timestep table; models are trained with 1000.
pub const MAX_TIMESTEPS: u32 = 1_000_000;
/// How often a list of files or prompts is repeated.
pub const MAX_REPEATS: u32 = 1_000_000;
/// Processes of a job.
pub const MAX_PROCESSES: usize = 100;
/// Maximum inputs of an extension.
pub const MAX_EXTENSION_INPUTS: usize = 64;
/// Data sets of a process.
pub const MAX_DATASETS: usize = 1_000;
/// Resolutions of a data set: each makes one more data set of the same files.
pub const MAX_RESOLUTIONS: usize = 64;
/// Folders of control images of a data set.
pub const MAX_CONTROL_FOLDERS: usize = 16;
/// Images of a `sample` section.
pub const MAX_SAMPLES: usize = 10_000;
/// Labels that a job requires.
pub const MAX_LABELS: usize = 64;
/// Random prompts of a process.
pub const MAX_RANDOM_PROMPTS: u32 = 1_000_000;
/// Lines that a random prompt is built from.
pub const MAX_LINES_PER_PROMPT: u32 = 1_000;
/// Bytes of a text file that a config names: prompts, words, the captions of a whole data set.
pub const MAX_TEXT_FILE_BYTES: u64 = 64 * 1024 * 1024;
/// Bytes of the caption of one image.
pub const MAX_CAPTION_BYTES: u64 = 1024 * 1024;
/// The largest factor, weight, guidance scale or learning rate of a config, without its sign. No use of these keys comes
/// near, and the square of a larger one could leave the range of 32-bit floats within a training step.
pub const MAX_FACTOR: f64 = 1e6;
/// The largest `noise_multiplier` and `noise_offset`, without its sign. Larger noise leaves the range of 16-bit floats.
pub const MAX_NOISE_FACTOR: f64 = 100.0;
/// Pairs of prompts of a slider, its anchors and its sizes.
pub const MAX_SLIDER_PROMPTS: usize = 256;
/// Coarser noise tensors of `multires_noise_iterations`.
pub const MAX_MULTIRES: u32 = 64;
/// Entries of `datasets[].excluded_images`.
pub const MAX_EXCLUDED_IMAGES: usize = 100_000;

/// Blocks of an adapter, and residual blocks of each.
pub const MAX_ADAPTER_BLOCKS: usize = 64;
/// Channels of a block of an adapter: those of published U-Nets have 1280.
pub const MAX_ADAPTER_CHANNELS: u32 = 16_384;
/// Entries of `network.layer_ranks`.
pub const MAX_LAYER_RANKS: usize = 1_024;

/// Entries of `train.lr_factors`.
pub const MAX_LR_FACTORS: usize = 256;
/// Vectors of a textual inversion: the tokens of a prompt without the two that begin and end it.
pub const MAX_EMBEDDING_VECTORS: u32 = 75;
/// Tokens of a decorator: as many as those that T5 reads of a prompt.
pub const MAX_DECORATOR_TOKENS: u32 = 512;
/// Images of `train.validation_config`, which stay in memory.
pub const MAX_VALIDATION_ITEMS: usize = 256;
/// Noise levels of `train.validation_config`.
pub const MAX_VALIDATION_SIGMAS: usize = 100;
/// Files of `model.embedding_paths`.
pub const MAX_EMBEDDINGS: usize = 64;
/// Tokens of a generated text.
pub const MAX_NEW_TOKENS: u32 = 1_048_576;
/// Completions of a prompt.
pub const MAX_COMPLETIONS: u32 = 10_000;
/// Texts that are generated at a time.
pub const MAX_TEXT_BATCH: u32 = 1_024;
/// Gaps of `generate.fill`.
pub const MAX_FILL_ITEMS: usize = 100_000;
/// LoRAs of `model.loras` of a language model.
pub const MAX_LORAS: usize = 16;
/// Texts that end a completion.
pub const MAX_STOPS: usize = 64;
/// Bytes of a text that ends a completion.
pub const MAX_STOP_BYTES: usize = 1_024;
/// Noise tensors from which the nearest is taken.
pub const MAX_NOISE_PAIRS: u32 = 1_000;
/// The most negative prompts that are joined (`max_negative_prompts`): a text encoder reads some 75 to 512 tokens.
pub const MAX_NEGATIVE_PROMPTS: u32 = 100;
/// Tokens of a row of a training of a code model: longer than the context of every published model.
pub const MAX_CONTEXT: u32 = 1 << 20;
/// Tokens of a batch of such a training.
pub const MAX_BATCH_TOKENS: u64 = 1 << 26;
/// Batches of a step of such a training.
pub const MAX_ACCUMULATION: u32 = 65_536;
/// How often the data of such a training is repeated.
pub const MAX_EPOCHS: u32 = 1_000_000;
/// Patterns of file names of a data set.
pub const MAX_PATTERNS: usize = 256;
/// Prompts that such a training completes.
pub const MAX_LM_SAMPLES: usize = 64;
/// Rows on which the loss of such a training is measured.
pub const MAX_VALIDATION_ROWS: u32 = 65_536;
/// Bytes that one value counts for besides its text.
pub(crate) const NODE_BYTES: usize = 64;

pub(crate) fn finding(file: Option<&str>, mark: Mark, key: &str, message: impl Into<String>) -> Finding {
    Finding {
        file: file.map(str::to_owned),
        line: Some(mark.line),
        column: Some(mark.column),
        key: key.to_owned(),
        message: message.into(),
    }
}

pub(crate) fn too_deep() -> String {
    format!("more than {MAX_DEPTH} lists and maps inside each other; a config needs fewer than ten")
}

pub(crate) fn too_large() -> String {
    format!(
        "the config grows beyond {} MiB when aliases and variables are filled in",
        MAX_EXPANDED >> 20
    )
}
