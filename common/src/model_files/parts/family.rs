//! Which parts the models of a family have, and their folders in diffusers' layout.

use super::kind::ModelPart;
use crate::job::arch::ArchName;

/// A part of a family's models.
pub(super) struct FamilyPart {
    pub(super) part: ModelPart,
    /// Its folder in a diffusers model.
    pub(super) folder: &'static str,
    /// The folder of its tokenizer.
    pub(super) tokenizer: Option<&'static str>,
    /// Whether the model works without it.
    pub(super) is_optional: bool,
}

impl FamilyPart {
    const fn text(part: ModelPart, folder: &'static str, tokenizer: &'static str) -> Self {
        Self {
            part,
            folder,
            tokenizer: Some(tokenizer),
            is_optional: false,
        }
    }

    const fn vae() -> Self {
        Self {
            part: ModelPart::Vae,
            folder: "vae",
            tokenizer: None,
            is_optional: false,
        }
    }

    /// What it is, for messages.
    pub(super) fn title(&self) -> String {
        let (name, file) = self.part.name();
        format!("{name} (folder `{}`, or a file such as {file})", self.folder)
    }
}

/// The parts of a family's models.
pub(super) struct FamilyParts {
    /// The family's name, for messages.
    pub(super) name: &'static str,
    pub(super) parts: &'static [FamilyPart],
    /// The text encoders that `model.te_name_or_path` may give.
    pub(super) given_text: &'static [ModelPart],
    /// `scaling_factor` of the published VAE.
    pub(super) vae_scaling_factor: f64,
}

static FLUX: FamilyParts = FamilyParts {
    name: "FLUX.1",
    parts: &[
        FamilyPart::text(ModelPart::ClipL, "text_encoder", "tokenizer"),
        FamilyPart::text(ModelPart::T5, "text_encoder_2", "tokenizer_2"),
        FamilyPart::vae(),
    ],
    given_text: &[ModelPart::T5],
    vae_scaling_factor: 0.3611,
};

static SD3: FamilyParts = FamilyParts {
    name: "Stable Diffusion 3.5",
    parts: &[
        FamilyPart::text(ModelPart::ClipL, "text_encoder", "tokenizer"),
        FamilyPart::text(ModelPart::ClipG, "text_encoder_2", "tokenizer_2"),
        FamilyPart {
            is_optional: true,
            ..FamilyPart::text(ModelPart::T5, "text_encoder_3", "tokenizer_3")
        },
        FamilyPart::vae(),
    ],
    given_text: &[ModelPart::ClipL, ModelPart::ClipG, ModelPart::T5],
    vae_scaling_factor: 1.5305,
};

static CHROMA: FamilyParts = FamilyParts {
    name: "Chroma",
    parts: &[
        FamilyPart::text(ModelPart::T5, "text_encoder", "tokenizer"),
        FamilyPart::vae(),
    ],
    given_text: &[ModelPart::T5],
    vae_scaling_factor: 0.3611,
};

static ZIMAGE: FamilyParts = FamilyParts {
    name: "Z-Image",
    parts: &[
        FamilyPart::text(ModelPart::Qwen3, "text_encoder", "tokenizer"),
        FamilyPart::vae(),
    ],
    given_text: &[ModelPart::Qwen3],
    vae_scaling_factor: 0.3611,
};

/// The parts of a family's models. `None` if all of its parts are in the model's own file or folder.
pub(super) fn of(arch: ArchName) -> Option<&'static FamilyParts> {
    match arch {
        ArchName::Flux | ArchName::FluxKontext => Some(&FLUX),
        ArchName::Sd3 => Some(&SD3),
        ArchName::Chroma => Some(&CHROMA),
        ArchName::Zimage => Some(&ZIMAGE),
        _ => None,
    }
}
