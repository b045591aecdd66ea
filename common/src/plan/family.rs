//! What is known of a family of models before any of its files is seen.

/// Typical figures of a family. Parameters in millions.
///
/// Parameter counts are those of the published configurations (`config.json` of each component). Activations are per
/// megapixel of image (1024 x 1024) and per image, fitted to what the trainers publish: Stable Diffusion 1.5 LoRA
/// at 512 in about 4 GB (diffusers issue 2474), SDXL LoRA in 8 GB at the least and 10 GB advised (sd-scripts
/// `docs/sdxl_train_network.md`), FLUX.1 LoRA above 30 GB in bf16, about 17 GB with an 8-bit base and 8 GB with 28 of 35
/// blocks swapped (kohya_ss issue 2701, sd-scripts `docs/flux_train_network.md`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Family {
    /// As `model.arch` names it.
    pub name: &'static str,
    /// U-Net or transformer.
    pub denoiser: f64,
    /// The share of these that are convolutions of 3 x 3.
    pub convolutions: f64,
    /// All text encoders.
    pub text: f64,
    /// Those of the text encoders' parameters that are never quantised: vectors of tokens and positions.
    pub text_tables: f64,
    /// The VAE.
    pub vae: f64,
    /// Parameters of a LoRA over every linear layer of the denoiser, per unit of rank.
    pub lora_per_rank: f64,
    /// Parameters of its adapter per `network.conv`, in millions: of a convolution with a kernel above 1x1, from `in` to `out`
    /// channels, 9 in + out.
    pub conv_lora_per_rank: f64,
    /// The same of the text encoders that can be trained.
    pub text_lora_per_rank: f64,
    /// GiB of activations per megapixel in training, with gradient checkpointing.
    pub train_checkpointed: f64,
    /// The same without.
    pub train_plain: f64,
    /// GiB of activations per megapixel when denoising.
    pub denoise: f64,
    /// Seconds per unit of work on a middling CUDA card, where nothing was measured yet. A unit is one pass of one
    /// 512 x 512 image through the denoiser.
    pub seconds_per_unit: f64,
}

/// GiB of activations per megapixel while the VAE decodes or encodes in half precision, the same KL-VAE everywhere.
const VAE_ACTIVATIONS: f64 = 3.0;

/// GiB of activations per megapixel of image, on one kind of device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Activity {
    /// Training with gradient checkpointing.
    pub train_checkpointed: f64,
    /// The same where free memory is given back at once.
    pub train_lean: f64,
    /// Training without.
    pub train_plain: f64,
    /// One prediction of the denoiser.
    pub denoise: f64,
    /// The VAE from latents to pixels.
    pub decode: f64,
    /// The VAE from pixels to latents.
    pub encode: f64,
    /// What an optimizer step takes on top of the numbers of an adapter, as a share of the optimizer's state.
    pub step: f64,
    /// What is held while a checkpoint is saved.
    pub saving: Saving,
}

/// How often what is trained and what its optimizer keeps are held while they are saved, themselves counted; 0 where that
/// is not on this device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Saving {
    /// What is trained.
    pub own: f64,
    /// The state of its optimizer.
    pub state: f64,
}

/// Stable Diffusion 1.5 on a CPU in float32, measured (docs/memory.md).
const SD_ON_CPU_LAYOUT: Activity = Activity {
    train_checkpointed: 2.2,
    train_lean: 0.75,
    train_plain: 5.53,
    denoise: 0.76,
    decode: 3.1,
    encode: 2.04,
    step: 0.45,
    saving: Saving { own: 2.46, state: 1.0 },
};

/// The families whose figures are known. Speeds are of the order of the published ones on an RTX 3090.
const FAMILIES: [Family; 6] = [
    Family {
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
    Family {
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
    Family {
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
    Family {
        name: "sd3",
        denoiser: 8057.0,
        convolutions: 0.0,
        text: 5580.0,
        text_tables: 233.0,
        vae: 84.0,
        lora_per_rank: 3.5,
        conv_lora_per_rank: 0.0,
        text_lora_per_rank: 0.0,
        train_checkpointed: 3.0,
        train_plain: 16.0,
        denoise: 2.0,
        seconds_per_unit: 0.2,
    },
    Family {
        name: "flux",
        denoiser: 11_901.0,
        convolutions: 0.0,
        text: 4885.0,
        text_tables: 169.6,
        vae: 84.0,
        lora_per_rank: 4.79,
        conv_lora_per_rank: 0.0,
        text_lora_per_rank: 0.0,
        train_checkpointed: 3.0,
        train_plain: 20.0,
        denoise: 2.0,
        seconds_per_unit: 0.3,
    },
    Family {
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

/// Seconds per unit for a family without figures.
pub const UNKNOWN_SECONDS_PER_UNIT: f64 = 0.2;

impl Family {
    /// On a GPU, where a number has this many bytes.
    #[must_use]
    pub fn on_gpu(&self, width: f64) -> Activity {
        let wide = width / 2.0;
        Activity {
            train_checkpointed: self.train_checkpointed * wide,
            train_lean: self.train_checkpointed * wide,
            train_plain: self.train_plain * wide,
            // Published for both predictions in one batch.
            denoise: self.denoise * wide / 2.0,
            decode: VAE_ACTIVATIONS * wide,
            encode: VAE_ACTIVATIONS * wide,
            step: 0.0,
            saving: Saving::default(),
        }
    }

    /// On a CPU, in float32. What was measured is Stable Diffusion; others are in the same relation to it as on a
    /// GPU.
    #[must_use]
    pub fn on_cpu(&self) -> Activity {
        let sd = &FAMILIES[0];
        let Activity {
            train_checkpointed,
            train_lean,
            train_plain,
            denoise,
            ..
        } = SD_ON_CPU_LAYOUT;
        let more = self.train_checkpointed / sd.train_checkpointed;
        Activity {
            train_checkpointed: train_checkpointed * more,
            train_lean: train_lean * more,
            train_plain: train_plain * self.train_plain / sd.train_plain,
            denoise: denoise * self.denoise / sd.denoise,
            ..SD_ON_CPU_LAYOUT
        }
    }

    /// The figures of an architecture, as `model.arch` names it; text after `:` does not matter.
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

    #[test]
    fn names_of_configs_lead_to_figures() {
        assert_eq!(Family::of("flex1").unwrap().name, "flux");
        assert_eq!(Family::of("sdxl:v-pred").unwrap().name, "sdxl");
        assert_eq!(Family::of("wan21"), None);
    }
}
