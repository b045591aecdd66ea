//! Model families: the values of `model.arch`.

use super::declare::choices;
use super::node::Node;
use super::schema::{FieldValue, ReadContext, SupportLevel, SupportReport};
use super::values::read_choice;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

const LATER: &str = "this release runs Stable Diffusion 1.x, 2.x, XL and 3.5, FLUX.1, FLUX.1 Kontext, Chroma and Z-Image (`sd1`, `sd2`, `sdxl`, `sd3`, `flux`, `flux_kontext`, `chroma`, `zimage`)";

choices! {
    /// A family of models.
    pub enum ArchName("model architecture") {
        /// Stable Diffusion 1.x.
        Sd1 = "sd1" | "sd15", Works;
        /// Stable Diffusion 2.x.
        Sd2 = "sd2", Works;
        /// Stable Diffusion XL.
        Sdxl = "sdxl", Works;
        /// SSD-1B.
        Ssd = "ssd", Refused(LATER);
        /// Segmind Vega.
        Vega = "vega", Refused(LATER);
        /// Stable Diffusion 3 and 3.5.
        Sd3 = "sd3", Works;
        /// PixArt.
        Pixart = "pixart", Refused(LATER);
        /// PixArt-Sigma.
        PixartSigma = "pixart_sigma", Refused(LATER);
        /// AuraFlow.
        Auraflow = "auraflow", Refused(LATER);
        /// FLUX.1 dev and schnell, Flex.1.
        Flux = "flux" | "flex1", Works;
        /// Flex.2.
        Flex2 = "flex2", Refused(LATER);
        /// FLUX.1 Kontext.
        FluxKontext = "flux_kontext", Works;
        /// FLUX.2.
        Flux2 = "flux2", Refused(LATER);
        /// FLUX.2 Klein 4B.
        Flux2Klein4b = "flux2_klein_4b", Refused(LATER);
        /// FLUX.2 Klein 9B.
        Flux2Klein9b = "flux2_klein_9b", Refused(LATER);
        /// Lumina Image 2.
        Lumina2 = "lumina2", Refused(LATER);
        /// Chroma.
        Chroma = "chroma", Works;
        /// Chroma Radiance.
        ChromaRadiance = "chroma_radiance", Refused(LATER);
        /// Zeta Chroma.
        ZetaChroma = "zeta_chroma", Refused(LATER);
        /// Qwen-Image.
        QwenImage = "qwen_image", Refused(LATER);
        /// Qwen-Image Edit.
        QwenImageEdit = "qwen_image_edit", Refused(LATER);
        /// Qwen-Image Edit Plus.
        QwenImageEditPlus = "qwen_image_edit_plus", Refused(LATER);
        /// HiDream I1.
        Hidream = "hidream", Refused(LATER);
        /// HiDream E1.
        HidreamE1 = "hidream_e1", Refused(LATER);
        /// HiDream O1.
        HidreamO1 = "hidream_o1", Refused(LATER);
        /// OmniGen2.
        Omnigen2 = "omnigen2", Refused(LATER);
        /// Z-Image.
        Zimage = "zimage", Works;
        /// Z-Image, pixel space.
        ZimageL2p = "zimage_l2p", Refused(LATER);
        /// Wan 2.1.
        Wan21 = "wan21", Refused(LATER);
        /// Wan 2.1 image to video.
        Wan21I2v = "wan21_i2v", Refused(LATER);
        /// Wan 2.2 5B.
        Wan22_5b = "wan22_5b", Refused(LATER);
        /// Wan 2.2 14B, two experts.
        Wan22_14b = "wan22_14b", Refused(LATER);
        /// Wan 2.2 14B image to video.
        Wan22_14bI2v = "wan22_14b_i2v", Refused(LATER);
        /// LTX-2.
        Ltx2 = "ltx2", Refused(LATER);
        /// LTX-2.3.
        Ltx2_3 = "ltx2.3", Refused(LATER);
        /// LTX-2.5.
        Ltx2_5 = "ltx2.5", Refused(LATER);
        /// MiniMax-H3.
        MinimaxH3 = "minimax_h3", Refused(LATER);
        /// MiniMax-H3, references to video and sound.
        MinimaxH3Ref2va = "minimax_h3_ref2va", Refused(LATER);
        /// ERNIE-Image.
        ErnieImage = "ernie_image", Refused(LATER);
        /// Nucleus-Image.
        NucleusImage = "nucleus_image", Refused(LATER);
        /// Anima.
        Anima = "anima", Refused(LATER);
        /// Krea 2.
        Krea2 = "krea2", Refused(LATER);
        /// Ideogram 4.
        Ideogram4 = "ideogram4", Refused(LATER);
        /// Mage-Flow.
        Mageflow = "mageflow", Refused(LATER);
        /// Mage-Flow Edit.
        MageflowEdit = "mageflow_edit", Refused(LATER);
        /// Boogu.
        BooguImage = "boogu_image", Refused(LATER);
        /// Boogu Edit.
        BooguImageEdit = "boogu_image_edit", Refused(LATER);
        /// PRXPixel.
        PrxPixel = "prx_pixel", Refused(LATER);
        /// F-Lite.
        FLite = "f-lite", Refused(LATER);
        /// CogView4.
        Cogview4 = "cogview4", Refused(LATER);
        /// ACE-Step 1.5.
        AceStep15 = "ace_step_15", Refused(LATER);
        /// ACE-Step 1.5 XL.
        AceStep15Xl = "ace_step_15_xl", Refused(LATER);
    }
}

impl ArchName {
    /// Whether the family was trained by flow matching. Those that this release runs.
    #[must_use]
    pub fn is_flow(self) -> bool {
        matches!(
            self,
            Self::Sd3 | Self::Flux | Self::FluxKontext | Self::Chroma | Self::Zimage
        )
    }

    /// Whether the model is a FLUX.1, with or without a control image: the same files and parts.
    #[must_use]
    pub fn is_flux(self) -> bool {
        matches!(self, Self::Flux | Self::FluxKontext)
    }

    /// Whether a model's parts may come from elsewhere (`te_name_or_path`, `extras_name_or_path`, a file as `vae_path`): families whose
    /// single files may have the transformer alone.
    #[must_use]
    pub fn takes_parts(self) -> bool {
        self.is_flux() || matches!(self, Self::Sd3 | Self::Chroma | Self::Zimage)
    }

    /// Whether the model changes a control image (`ctrl_img`, and `control_path` of a data set). Those that this release runs.
    #[must_use]
    pub fn takes_control_image(self) -> bool {
        self == Self::FluxKontext
    }

    /// Bucket sizes are multiples of this many pixels.
    #[must_use]
    pub fn bucket_divisibility(self) -> u32 {
        match self {
            Self::Cogview4 => 8,
            Self::Sd3
            | Self::Flux
            | Self::Chroma
            | Self::ChromaRadiance
            | Self::ZetaChroma
            | Self::QwenImage
            | Self::QwenImageEdit
            | Self::QwenImageEditPlus
            | Self::HidreamO1
            | Self::Wan22_5b
            | Self::Ltx2
            | Self::Ltx2_3
            | Self::Ltx2_5
            | Self::MinimaxH3
            | Self::MinimaxH3Ref2va
            | Self::ErnieImage
            | Self::NucleusImage
            | Self::Anima => 32,
            _ => 16,
        }
    }

    /// `ss_base_model_version` of saved files.
    #[must_use]
    pub fn base_model_version(self) -> &'static str {
        match self {
            Self::Sd1 => "sd_1.5",
            Self::Sd2 => "sd_2.1",
            Self::Sdxl => "sdxl_1.0",
            Self::Sd3 => "sd_3",
            Self::PixartSigma => "pixart",
            Self::Flux => "flux.1",
            Self::FluxKontext => "flux.1_kontext",
            Self::QwenImageEdit | Self::QwenImageEditPlus => "qwen_image",
            Self::Hidream | Self::HidreamE1 => "hidream_i1",
            Self::ZimageL2p => "zimage",
            Self::Wan21 | Self::Wan21I2v => "wan_2.1",
            Self::Wan22_5b => "wan_2.2_5b",
            Self::Wan22_14b | Self::Wan22_14bI2v => "wan_2.2_14b",
            Self::Ltx2_3 | Self::Ltx2_5 => "ltx2",
            Self::BooguImage => "boogu_image.0.1",
            Self::BooguImageEdit => "boogu_image_edit.0.1",
            other => other.name(),
        }
    }

    /// First part of LoRA keys.
    #[must_use]
    pub fn lora_prefix(self) -> &'static str {
        match self {
            Self::Sd1 | Self::Sd2 | Self::Sdxl | Self::Ssd | Self::Vega => "lora_unet_",
            Self::Pixart | Self::PixartSigma | Self::Auraflow => "lora_transformer_",
            // ai-toolkit saves the original names of Chroma's layers; we save those of diffusers.
            Self::Sd3
            | Self::Flux
            | Self::Flex2
            | Self::FluxKontext
            | Self::Chroma
            | Self::Lumina2
            | Self::Cogview4 => "transformer.",
            _ => "diffusion_model.",
        }
    }

    /// `latent_space_version` of the latent cache, unless `model.latent_space_version` sets it.
    #[must_use]
    pub fn latent_space_version(self) -> &'static str {
        match self {
            Self::Sdxl | Self::Ssd | Self::Vega | Self::Auraflow | Self::PixartSigma => "sdxl",
            Self::Sd3 => "sd3",
            Self::Flux | Self::FluxKontext => "flux1",
            other => other.name(),
        }
    }
}

/// `model.arch`: a family, and the tag that the web UI may add after a colon (`wan22_14b:t2v`), which has no effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arch {
    /// The family.
    pub name: ArchName,
    /// The text after the colon.
    pub tag: Option<String>,
}

impl From<ArchName> for Arch {
    fn from(name: ArchName) -> Self {
        Self { name, tag: None }
    }
}

impl Arch {
    /// Reads `name` or `name:tag`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (name, tag) = match text.split_once(':') {
            Some((name, tag)) => (name, Some(tag.to_owned())),
            None => (text, None),
        };
        ArchName::from_name(name.trim()).map(|name| Self { name, tag })
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.tag {
            Some(tag) => write!(f, "{}:{tag}", self.name),
            None => write!(f, "{}", self.name),
        }
    }
}

impl Serialize for Arch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Arch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| serde::de::Error::custom(format!("unknown arch `{text}`")))
    }
}

impl FieldValue for Arch {
    const HAS_CHECKS: bool = true;

    fn kind() -> String {
        ArchName::kind()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        read_choice(node, cx, "model architecture", &ArchName::usable_names(), Self::parse)
    }
    fn show(&self) -> String {
        self.to_string()
    }
    fn is_falsy(&self) -> bool {
        false
    }
    fn check_support(&self, path: &str, report: &mut SupportReport) {
        self.name.check_support(path, report);
    }
    fn values() -> Vec<(&'static str, SupportLevel)> {
        ArchName::values()
    }
}
