//! Typical figures of each model family, used when the model's files are not known.

/// Typical figures of a model family. Parameters in millions.
///
/// Parameter counts are those of the published configurations (`config.json` of each component). Activations are per
/// megapixel of image (1024 x 1024) and per image, fitted to what the trainers publish: Stable Diffusion 1.5 LoRA
/// at 512 in about 4 GB (diffusers issue 2474), SDXL LoRA in 8 GB at the least and 10 GB advised (sd-scripts
/// `docs/sdxl_train_network.md`), FLUX.1 LoRA above 30 GB in bf16, about 17 GB with an 8-bit base and 8 GB with 28 of 35
/// blocks swapped (kohya_ss issue 2701, sd-scripts `docs/flux_train_network.md`). Those of `sd3` are Stable
/// Diffusion 3.5 large's. Z-Image LoRA at 1024 in bf16 with the captions
/// encoded before: 21.3 GiB, 12.9 with gradient checkpointing, and 7.25 with an 8-bit base too (OneTrainer's sweep of 2026).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FamilyCosts {
    /// The name as in `model.arch`.
    pub name: &'static str,
    /// Parameters of the U-Net or transformer.
    pub denoiser: f64,
    /// Fraction of the denoiser's parameters in 3 x 3 convolutions.
    pub convolutions: f64,
    /// Parameters of all text encoders.
    pub text: f64,
    /// Parameters of the text encoders that are never quantised: token and position embeddings.
    pub text_tables: f64,
    /// Parameters of the VAE.
    pub vae: f64,
    /// Parameters of a LoRA over every linear layer of the denoiser, per unit of rank. Of transformers, over those of the
    /// repeated blocks, modulations included: the default, `network.transformer_only`.
    pub lora_per_rank: f64,
    /// Parameters of a LoRA over every convolution with a kernel above 1x1, per unit of `network.conv`: 9 in + out for a
    /// convolution from `in` to `out` channels.
    pub conv_lora_per_rank: f64,
    /// Parameters of a LoRA over the trainable text encoders, per unit of rank.
    pub text_lora_per_rank: f64,
    /// GiB of activations per megapixel in training, with gradient checkpointing.
    pub train_checkpointed: f64,
    /// GiB of activations per megapixel in training, without gradient checkpointing.
    pub train_plain: f64,
    /// GiB of activations per megapixel when denoising.
    pub denoise: f64,
    /// Seconds per unit of work on an average CUDA GPU, used before anything is measured. A unit is one denoiser pass of one
    /// 512 x 512 image.
    pub seconds_per_unit: f64,
}

/// GiB of activations per megapixel while the VAE runs in half precision. All families use the same KL-VAE.
const VAE_ACTIVATIONS: f64 = 3.0;

/// Activation memory on one kind of device, in GiB per megapixel of image.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActivationCosts {
    /// Training with gradient checkpointing.
    pub train_checkpointed: f64,
    /// Training with gradient checkpointing, if freed memory is returned immediately.
    pub train_memory_saving: f64,
    /// Training without gradient checkpointing.
    pub train_plain: f64,
    /// One denoiser pass.
    pub denoise: f64,
    /// VAE decoding.
    pub decode: f64,
    /// VAE encoding.
    pub encode: f64,
    /// Extra memory of an optimizer step of an adapter, as a fraction of the optimizer state.
    pub step: f64,
    /// Memory while a checkpoint is saved.
    pub saving: SaveCopies,
}

/// Number of copies in memory while a checkpoint is saved, the originals included; 0 if they are not on this device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SaveCopies {
    /// Copies of the trained weights.
    pub weights: f64,
    /// Copies of the optimizer state.
    pub state: f64,
}

/// Stable Diffusion 1.5 on a CPU in float32, measured (docs/memory.md).
const SD1_ON_CPU: ActivationCosts = ActivationCosts {
    train_checkpointed: 2.2,
    train_memory_saving: 0.75,
    train_plain: 5.53,
    denoise: 0.76,
    decode: 3.1,
    encode: 2.04,
    step: 0.45,
    saving: SaveCopies {
        weights: 2.46,
        state: 1.0,
    },
};

/// The known families. Speeds are roughly those published for an RTX 3090.
const FAMILIES: [FamilyCosts; 7] = [
    FamilyCosts {
        name: "sd1",
        denoiser: 860.0,
        convolutions: 0.63,
        text: 123.0,
        text_tables: 38.0,
        vae: 84.0,
        lora_per_rank: 0.43,
        conv_lora_per_rank: 0.547,
        text_lora_per_rank: 0.166,
        train_checkpointed: 2.5,
        train_plain: 7.0,
        denoise: 4.0,
        seconds_per_unit: 0.05,
    },
    FamilyCosts {
        name: "sd2",
        denoiser: 866.0,
        convolutions: 0.62,
        text: 340.0,
        text_tables: 50.7,
        vae: 84.0,
        lora_per_rank: 0.43,
        conv_lora_per_rank: 0.547,
        text_lora_per_rank: 0.417,
        train_checkpointed: 2.5,
        train_plain: 7.0,
        denoise: 4.0,
        seconds_per_unit: 0.05,
    },
    FamilyCosts {
        name: "sdxl",
        denoiser: 2567.0,
        convolutions: 0.12,
        text: 818.0,
        text_tables: 101.4,
        vae: 84.0,
        lora_per_rank: 2.0,
        conv_lora_per_rank: 0.359,
        text_lora_per_rank: 0.72,
        train_checkpointed: 3.0,
        train_plain: 10.0,
        denoise: 2.0,
        seconds_per_unit: 0.1,
    },
    FamilyCosts {
        name: "sd3",
        denoiser: 8057.0,
        convolutions: 0.0,
        text: 5580.0,
        text_tables: 233.0,
        vae: 84.0,
        lora_per_rank: 4.58,
        conv_lora_per_rank: 0.0,
        text_lora_per_rank: 0.72,
        train_checkpointed: 3.0,
        train_plain: 16.0,
        denoise: 2.0,
        seconds_per_unit: 0.2,
    },
    FamilyCosts {
        name: "flux",
        denoiser: 11_901.0,
        convolutions: 0.0,
        text: 4885.0,
        text_tables: 169.6,
        vae: 84.0,
        lora_per_rank: 5.37,
        conv_lora_per_rank: 0.0,
        text_lora_per_rank: 0.166,
        train_checkpointed: 3.0,
        train_plain: 20.0,
        denoise: 2.0,
        seconds_per_unit: 0.3,
    },
    FamilyCosts {
        name: "zimage",
        denoiser: 6155.0,
        convolutions: 0.0,
        text: 3921.0,
        text_tables: 389.0,
        vae: 84.0,
        lora_per_rank: 2.66,
        conv_lora_per_rank: 0.0,
        text_lora_per_rank: 0.0,
        train_checkpointed: 1.5,
        train_plain: 9.8,
        denoise: 1.5,
        seconds_per_unit: 0.2,
    },
    FamilyCosts {
        name: "qwen_image",
        denoiser: 20_430.0,
        convolutions: 0.0,
        text: 8292.0,
        text_tables: 545.0,
        vae: 127.0,
        lora_per_rank: 5.9,
        conv_lora_per_rank: 0.0,
        text_lora_per_rank: 0.0,
        train_checkpointed: 4.0,
        train_plain: 30.0,
        denoise: 2.0,
        seconds_per_unit: 0.5,
    },
];

/// Seconds per unit of work for unknown families.
pub const UNKNOWN_SECONDS_PER_UNIT: f64 = 0.2;

impl FamilyCosts {
    /// Activation memory on a GPU whose numbers have `width` bytes.
    #[must_use]
    pub fn on_gpu(&self, width: f64) -> ActivationCosts {
        let factor = width / 2.0;
        ActivationCosts {
            train_checkpointed: self.train_checkpointed * factor,
            train_memory_saving: self.train_checkpointed * factor,
            train_plain: self.train_plain * factor,
            // The published figures are for both guidance passes in one batch.
            denoise: self.denoise * factor / 2.0,
            decode: VAE_ACTIVATIONS * factor,
            encode: VAE_ACTIVATIONS * factor,
            step: 0.0,
            saving: SaveCopies::default(),
        }
    }

    /// Activation memory on a CPU in float32. Measured for Stable Diffusion; scaled for other families by the ratio on a GPU.
    #[must_use]
    pub fn on_cpu(&self) -> ActivationCosts {
        let sd = &FAMILIES[0];
        let ActivationCosts {
            train_checkpointed,
            train_memory_saving,
            train_plain,
            denoise,
            ..
        } = SD1_ON_CPU;
        let ratio = self.train_checkpointed / sd.train_checkpointed;
        ActivationCosts {
            train_checkpointed: train_checkpointed * ratio,
            train_memory_saving: train_memory_saving * ratio,
            train_plain: train_plain * self.train_plain / sd.train_plain,
            denoise: denoise * self.denoise / sd.denoise,
            ..SD1_ON_CPU
        }
    }

    /// The family of a `model.arch`. Text after `:` is ignored.
    #[must_use]
    pub fn of(arch: &str) -> Option<&'static Self> {
        let name = match arch.split(':').next().unwrap_or(arch) {
            "sd15" => "sd1",
            "flex1" | "flux_kontext" => "flux",
            "qwen_image_edit" => "qwen_image",
            other => other,
        };
        FAMILIES.iter().find(|family| family.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Inputs and outputs of every linear layer that gets a LoRA, added up from the published widths and numbers of blocks.
    #[test]
    fn loras_of_transformers_have_the_parameters_of_their_layers() {
        // A feed-forward network of four times the width.
        let mlp = |w: u64| 2 * (w + 4 * w);
        // A stream of a joint block: four projections, the modulation and the network.
        let stream = |w: u64| 4 * 2 * w + (w + 6 * w) + mlp(w);
        // FLUX.1: 19 double blocks and 38 single ones, whose MLP runs beside their attention.
        let w = 3072;
        let single = (w + 3 * w) + 3 * 2 * w + (w + 4 * w) + (5 * w + w);
        let flux = 19 * 2 * stream(w) + 38 * single;
        // Stable Diffusion 3.5 large: 38 blocks; the last gives no text, which leaves its text's projections and two vectors.
        let w = 2432;
        let sd3 = 37 * 2 * stream(w) + stream(w) + 3 * 2 * w + (w + 2 * w);
        // Z-Image: 30 blocks with a gated network of 10240 features.
        let w = 3840;
        let zimage = 30 * (4 * 2 * w + 3 * (w + 10_240) + (256 + 4 * w));
        for (name, counted) in [("flux", flux), ("sd3", sd3), ("zimage", zimage)] {
            let millions = counted as f64 / 1e6;
            let figure = FamilyCosts::of(name).unwrap().lora_per_rank;
            assert!(
                (figure / millions - 1.0).abs() < 0.005,
                "{name}: {figure}, {millions} counted"
            );
        }
        // FLUX.1 trains CLIP-L: 12 layers of four projections and a network.
        let clip = 12 * (4 * 2 * 768 + mlp(768));
        let figure = FamilyCosts::of("flux").unwrap().text_lora_per_rank;
        assert!((figure - clip as f64 / 1e6).abs() < 0.001, "{figure}");
    }

    #[test]
    fn arch_names_map_to_families() {
        assert_eq!(FamilyCosts::of("flex1").unwrap().name, "flux");
        assert_eq!(FamilyCosts::of("sdxl:v-pred").unwrap().name, "sdxl");
        assert_eq!(FamilyCosts::of("wan21"), None);
    }
}
