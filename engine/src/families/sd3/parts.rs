//! The tensors and the configs of the parts of Stable Diffusion 3.5, from a diffusers folder, single files, or both.

use crate::error::{EngineError, Result};
use crate::families::options::LoadOptions;
use crate::families::part_files::{Published, TransformerKind, clip, required, scheduler, t5, vae_part};
use crate::models::clip::ClipTextConfig;
use crate::models::sd3::{Sd3Config, single_file};
use crate::models::t5::T5Config;
use crate::models::vae::VaeConfig;
use crate::weights::Index;
use aitk_common::job::arch::ArchName;
use aitk_common::model_files::{ModelPart, model_parts};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The transformer.
pub(super) const TRANSFORMER: TransformerKind<Sd3Config> = TransformerKind {
    has_original_names: single_file::has_original_names,
    with_diffusers_names: single_file::with_diffusers_names,
    config_of: single_file::config_of,
    config_json: single_file::config_json,
};
/// The VAE of Stable Diffusion 3.5.
pub(super) const PUBLISHED: Published = Published {
    scaling_factor: 1.5305,
    shift_factor: 0.0609,
};
/// `shift` of the published `scheduler_config.json`.
const PUBLISHED_SHIFT: f64 = 3.0;

/// What every part is loaded from.
pub(super) struct Parts {
    /// CLIP-L and CLIP-G.
    pub(super) clip: [(Index, ClipTextConfig); 2],
    /// The folders of their tokenizers; `None`: OpenAI's.
    pub(super) clip_tokenizers: [Option<PathBuf>; 2],
    /// T5 and the folder of its tokenizer. Without T5 its tokens are zeros.
    pub(super) t5: Option<(Index, T5Config, PathBuf)>,
    pub(super) transformer: (Index, Sd3Config),
    /// The transformer's `config.json`.
    pub(super) transformer_json: String,
    pub(super) vae: (Index, VaeConfig),
    /// The file or folder of the VAE.
    pub(super) vae_path: PathBuf,
    pub(super) scheduler: Value,
}

impl Parts {
    /// Opens the parts of the model at `path`, a folder or a file. No weights are read.
    pub(super) fn open(path: &Path, options: &LoadOptions) -> Result<Self> {
        let parts = model_parts(ArchName::Sd3, path, &options.parts).map_err(EngineError::BadInput)?;
        let (transformer, config, transformer_json) = TRANSFORMER.open(&parts.transformer)?;
        let vae = required(&parts, ModelPart::Vae)?;
        let tokenizer = |part| parts.tokenizer(part).map(Path::to_path_buf);
        Ok(Self {
            clip: [
                clip(required(&parts, ModelPart::ClipL)?, published_clip_l())?,
                clip(required(&parts, ModelPart::ClipG)?, published_clip_g())?,
            ],
            clip_tokenizers: [ModelPart::ClipL, ModelPart::ClipG].map(tokenizer),
            t5: match (parts.get(ModelPart::T5), tokenizer(ModelPart::T5)) {
                (Some(files), Some(tokenizer)) => {
                    let (index, config) = t5(files)?;
                    Some((index, config, tokenizer))
                }
                _ => None,
            },
            transformer: (transformer, config),
            transformer_json,
            vae: vae_part(vae, PUBLISHED)?,
            vae_path: vae.path.clone(),
            scheduler: scheduler(&parts, PUBLISHED_SHIFT)?,
        })
    }

    /// The tensors of the text encoders.
    pub(super) fn text_indexes(&self) -> impl Iterator<Item = &Index> {
        let clip = self.clip.iter().map(|(index, _)| index);
        clip.chain(self.t5.as_ref().map(|(index, ..)| index))
    }

    /// Checks that the components belong to one model.
    pub(super) fn check_widths(&self) -> Result<()> {
        let [(first_index, first), (_, second)] = &self.clip;
        let (transformer, (vae_index, vae)) = (&self.transformer.1, &self.vae);
        let of_t5 = self.t5.as_ref().map(|(index, t5, _)| {
            (
                index,
                "third text encoder gives",
                t5.d_model,
                transformer.joint_attention_dim,
            )
        });
        for (index, what, found, expected) in [
            (
                first_index,
                "first two text encoders give a pooled text of",
                first.projection_dim.saturating_add(second.projection_dim),
                transformer.pooled_projection_dim,
            ),
            (
                vae_index,
                "autoencoder's latents have",
                vae.latent_channels,
                transformer.in_channels,
            ),
        ]
        .into_iter()
        .chain(of_t5)
        {
            if found != expected {
                return Err(EngineError::Unsupported(format!(
                    "{}: the {what} {found} features, the transformer expects {expected}: they belong to different models",
                    index.path().display()
                )));
            }
        }
        let tokens = first.hidden_size.saturating_add(second.hidden_size);
        if tokens > transformer.joint_attention_dim {
            return Err(EngineError::Unsupported(format!(
                "{}: the first two text encoders give tokens of {tokens} features, the transformer reads at most {}: they belong to \
                 different models",
                first_index.path().display(),
                transformer.joint_attention_dim
            )));
        }
        Ok(())
    }
}

/// `text_encoder/config.json` of Stable Diffusion 3.5: CLIP-L.
pub(super) fn published_clip_l() -> ClipTextConfig {
    ClipTextConfig {
        projection_dim: 768,
        ..ClipTextConfig::default()
    }
}

/// `text_encoder_2/config.json` of Stable Diffusion 3.5: CLIP-G.
pub(super) fn published_clip_g() -> ClipTextConfig {
    ClipTextConfig {
        hidden_size: 1280,
        intermediate_size: 5120,
        num_hidden_layers: 32,
        num_attention_heads: 20,
        hidden_act: "gelu".into(),
        projection_dim: 1280,
        ..ClipTextConfig::default()
    }
}
