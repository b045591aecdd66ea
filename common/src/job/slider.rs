//! `slider`, `embedding`, `decorator` and `replacements`: trainings guided by text or by image pairs.

use super::declare::{choices, section};
use super::values::ImageSize;

section! {
    /// One pair of opposites for a slider.
    pub struct SliderTarget("targets") {
        /// Concept that is changed.
        target_class: String = String::new(), Works;
        /// The positive end.
        positive: String = String::new(), Works;
        /// The negative end.
        negative: String = String::new(), Works;
        /// LoRA strength.
        multiplier: f64 = 1.0, Works;
        /// Loss weight.
        weight: f64 = 1.0, Works;
        /// Also train permutations of the comma-separated parts, up to 8.
        shuffle: bool = false, Works;
    }
}

section! {
    /// A prompt that a slider must not change.
    pub struct SliderAnchor("anchors") {
        /// The prompt.
        prompt: String = String::new(), Works;
        /// Negative prompt.
        neg_prompt: String = String::new(), Works;
        /// LoRA strength.
        multiplier: f64 = 1.0, Works;
    }
}

section! {
    /// Paired images for a slider.
    pub struct ReferenceDataset("slider.datasets") {
        /// Side-by-side images: negative half left, positive half right.
        pair_folder: Option<String> = None, Works, input Dataset;
        /// Positive images, matched by stem.
        pos_folder: Option<String> = None, Works, input Dataset;
        /// Negative images, matched by stem.
        neg_folder: Option<String> = None, Works, input Dataset;
        /// Prompt when there is no caption.
        target_class: String = String::new(), Works;
        /// Height, or bucket resolution for pairs of folders.
        size: u32 = 512, Works;
        /// Default of the next two.
        network_weight: f64 = 1.0, Works;
        /// LoRA strength of the positive end.
        pos_weight: Option<f64> = None, Works, shown "`network_weight`";
        /// LoRA strength of the negative end.
        neg_weight: Option<f64> = None, Works, shown "`network_weight`";
    }
}

section! {
    /// Sliders of every kind; which keys matter depends on the process type.
    pub struct SliderConfig("slider") {
        /// Pairs of opposites (`slider`, `ultimate_slider_trainer`).
        targets: Vec<SliderTarget> = Vec::new(), Works;
        /// Prompts whose result must not change (`slider`, `ultimate_slider_trainer`).
        anchors: Vec<SliderAnchor> = Vec::new(), Works;
        /// Sizes; one is picked at random.
        resolutions: Vec<ImageSize> = vec![ImageSize(512, 512)], Works;
        /// Neutral prompts, one per line.
        prompt_file: Option<String> = None, Works, input PromptFile;
        /// Cache of encoded prompts.
        prompt_tensors: Option<String> = None, Works;
        /// Do the four parts in one step.
        batch_full_slide: bool = true, Works;
        /// `depth`.
        use_adapter: Option<String> = None, Works;
        /// Depth images by stem.
        adapter_img_dir: Option<String> = None, Works, input ControlImages;
        /// `concept_slider`: strength of the push.
        guidance_strength: f64 = 3.0, Works;
        /// `concept_slider`: strength of the anchor.
        anchor_strength: f64 = 1.0, Works;
        /// `concept_slider`: the positive end.
        positive_prompt: String = String::new(), Works;
        /// `concept_slider`: the negative end.
        negative_prompt: String = String::new(), Works;
        /// `concept_slider`: what is changed.
        target_class: String = String::new(), Works;
        /// `concept_slider`: what must not change.
        anchor_class: Option<String> = None, Works;
        /// Paired images (`ultimate_slider_trainer`, `image_reference_slider_trainer`).
        datasets: Vec<ReferenceDataset> = Vec::new(), Works;
        /// More losses (`ultimate_slider_trainer`, `image_reference_slider_trainer`).
        additional_losses: Vec<String> = Vec::new(), Works;
        /// Random change of the weights.
        weight_jitter: f64 = 0.0, Works;
        /// Weight of the image loss.
        img_loss_weight: f64 = 1.0, Works;
        /// Weight of the text loss.
        cfg_loss_weight: f64 = 1.0, Works;
    }
    rare {
        "low_ram" => Accepted("saves memory only");
    }
}

section! {
    /// A concept and what replaces it.
    pub struct Replacement("replacements") {
        /// Concept that is replaced.
        concept: String = String::new(), Works;
        /// The replacement.
        replacement: String = String::new(), Works;
    }
}

choices! {
    /// File format of a textual inversion.
    pub enum EmbeddingFormat("embedding format") {
        /// safetensors.
        Safetensors = "safetensors", Works;
        /// A pickle.
        Pt = "pt", Refused("pickles are not written");
    }
}

section! {
    /// Textual inversion: new words for the text encoder.
    pub struct EmbeddingConfig("embedding") {
        /// Name of the word and of the file.
        trigger: String = "custom_embedding".into(), Works;
        /// Number of vectors.
        tokens: u32 = 4, Works;
        /// Text whose embedding initialises the vectors.
        init_words: String = "*".into(), Works;
        /// `safetensors` or `pt`.
        save_format: EmbeddingFormat = EmbeddingFormat::Safetensors, Works;
        /// Class for prior predictions.
        trigger_class_name: Option<String> = None, Works;
    }
}
