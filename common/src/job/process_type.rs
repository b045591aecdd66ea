//! Names of process types, `config.process[].type`, and of job kinds, `job`.

use super::declare::choices;

const LATER: &str = "this release trains (`sd_trainer`, `diffusion_trainer`, `concept_slider`, `slider`, `ultimate_slider_trainer`, \
                     `image_reference_slider_trainer`, `lm_trainer`), makes images (`to_folder`, `batch_img2img`), generates texts \
                     (`lm_generate`), exports code models (`lm_export`), extracts LoRAs (`lora`, `locon`) and rescales them (`rescale_lora`); \
                     a program of your own runs as `extension:NAME` (docs/extensions.md)";

choices! {
    /// The type of a process.
    pub enum ProcessType("process type") {
        /// The general trainer.
        SdTrainer = "sd_trainer", Works;
        /// The same trainer, under the name that ai-toolkit's web UI writes.
        DiffusionTrainer = "diffusion_trainer", Works;
        /// Older name of `diffusion_trainer`.
        UiTrainer = "ui_trainer", Works;
        /// Older name of `sd_trainer`.
        TextualInversionTrainer = "textual_inversion_trainer", Works;
        /// Slider between two prompts, on images.
        ConceptSlider = "concept_slider", Works;
        /// Slider between prompts and paired images.
        UltimateSlider = "ultimate_slider_trainer", Works;
        /// Slider between paired images.
        ImageReferenceSlider = "image_reference_slider_trainer", Works;
        /// Make prompt A look like prompt B.
        ConceptReplacer = "concept_replacer", Refused(LATER);
        /// Training of a code model.
        LmTrainer = "lm_trainer", Works;
        /// Captions by Qwen3-VL.
        Qwen3VlCaptioner = "Qwen3VLCaptioner", Refused(LATER);
        /// Captions by Qwen3-Omni.
        Qwen3OmniCaptioner = "Qwen3OmniCaptioner", Refused(LATER);
        /// Captions by Ideogram 4.
        Ideogram4Captioner = "Ideogram4Captioner", Refused(LATER);
        /// Captions for sound.
        AceStepCaptioner = "AceStepCaptioner", Refused(LATER);
        /// Images from images.
        BatchImg2Img = "batch_img2img", Works;
        /// Images from reference images.
        ReferenceGenerator = "reference_generator", Refused(LATER);
        /// Images from a LoRM.
        PureLoraGenerator = "pure_lora_generator", Refused(LATER);
        /// Captions for folders.
        SuperTagger = "super_tagger", Refused(LATER);
        /// Data sets from web collections.
        SyncFromCollection = "sync_from_collection", Refused(LATER);
        /// A placeholder in ai-toolkit too.
        DatasetTools = "dataset_tools", Refused(LATER);
        /// Merging of models.
        ExampleMergeExtension = "example_merge_extension", Refused(LATER);
        /// Images from prompts.
        ToFolder = "to_folder", Works;
        /// Texts from a language model.
        LmGenerate = "lm_generate", Works;
        /// A language model for other programs.
        LmExport = "lm_export", Works;
        /// Slider between prompts, without images.
        Slider = "slider", Works;
        /// The predecessor of `slider`.
        SliderOld = "slider_old", Refused(LATER);
        /// Rescaling of Stable Diffusion.
        RescaleSd = "rescale_sd", Refused(LATER);
        /// Training of a VAE.
        Vae = "vae", Refused(LATER);
        /// Training of an upscaler.
        Esrgan = "esrgan", Refused(LATER);
        /// A LoCon from the difference of two models.
        ExtractLocon = "locon", Works;
        /// A LoRA from the difference of two models.
        ExtractLora = "lora", Works;
        /// A LoRA with another strength.
        RescaleLora = "rescale_lora", Works;
        /// A program that the worker's owner allows by name (docs/extensions.md).
        Extension = "extension:NAME", Works;
    }
}

choices! {
    /// `job`: the kind of a job.
    pub enum JobKind("job kind") {
        /// The normal kind: trainers, captioners, tools.
        Extension = "extension", Works;
        /// Legacy trainers.
        Train = "train", Works;
        /// A LoRA from the difference of two models.
        Extract = "extract", Works;
        /// Images from prompts.
        Generate = "generate", Works;
        /// Changes of model files.
        Mod = "mod", Works;
    }
}

impl ProcessType {
    /// Whether it trains a slider: an adapter with two directions.
    #[must_use]
    pub fn is_slider(self) -> bool {
        matches!(self, Self::ConceptSlider | Self::Slider) || self.uses_image_pairs()
    }

    /// Whether it trains on pairs of images (`slider.datasets`).
    #[must_use]
    pub fn uses_image_pairs(self) -> bool {
        matches!(self, Self::ImageReferenceSlider | Self::UltimateSlider)
    }

    /// Whether its slider has pairs of prompts (`slider.targets`).
    #[must_use]
    pub fn uses_slider_targets(self) -> bool {
        matches!(self, Self::Slider | Self::UltimateSlider)
    }

    /// The kind of job it belongs to.
    #[must_use]
    pub fn job(self) -> JobKind {
        match self {
            Self::ToFolder | Self::LmGenerate => JobKind::Generate,
            Self::Slider | Self::SliderOld | Self::RescaleSd | Self::Vae | Self::Esrgan => JobKind::Train,
            Self::ExtractLocon | Self::ExtractLora => JobKind::Extract,
            Self::RescaleLora | Self::LmExport => JobKind::Mod,
            _ => JobKind::Extension,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::schema::{FieldValue, SupportLevel};

    #[test]
    fn a_refused_type_lists_all_that_run() {
        for (name, level) in ProcessType::values() {
            let is_older_name = matches!(name, "ui_trainer" | "textual_inversion_trainer");
            if level == SupportLevel::Works && !is_older_name {
                assert!(LATER.contains(&format!("`{name}`")), "{name}");
            }
        }
    }
}
