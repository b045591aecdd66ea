//! `adapter`: a network beside the denoiser that conditions it on images (ai-toolkit's `AdapterConfig`).

use super::arch::ArchName;
use super::declare::{choices, section};
use super::limits::{MAX_ADAPTER_BLOCKS, MAX_ADAPTER_CHANNELS, MAX_SAMPLES};
use super::read_context::join;
use super::schema::{PresentKeys, ReadContext, SupportLevel, SupportReport};
use super::values::OneOrMany;

const NEEDS_CLIP_VISION: &str = "it needs an image encoder (CLIP vision), and this release has none";
const FOR_TRANSFORMERS: &str = "it is for models that this release trains without it: of FLUX.1 and of video models";

choices! {
    /// Type of an adapter. One that is added gets its status here, and its file in the engine's `image_adapters`.
    pub enum AdapterType("adapter type") {
        /// T2I-Adapter: features of a control image are added in the down blocks of the U-Net.
        T2i = "t2i", Works;
        /// ControlNet: a copy of the U-Net's down and middle blocks sees the control image, and its features are added to the skip connections.
        ControlNet = "control_net", Works;
        /// IP-Adapter.
        Ip = "ip", Refused(NEEDS_CLIP_VISION);
        /// IP-Adapter plus.
        IpPlus = "ip+", Refused(NEEDS_CLIP_VISION);
        /// IP-Adapter with zero convolutions.
        Ipz = "ipz", Refused(NEEDS_CLIP_VISION);
        /// IP-Adapter of faces.
        IpClipFace = "ip_clip_face", Refused(NEEDS_CLIP_VISION);
        /// Words from images.
        Clip = "clip", Refused(NEEDS_CLIP_VISION);
        /// Images in the tokens of prompts.
        ClipFusion = "clip_fusion", Refused(NEEDS_CLIP_VISION);
        /// Attention to images.
        VisionDirect = "vision_direct", Refused(NEEDS_CLIP_VISION);
        /// LoRA weights from an image.
        Ilora = "ilora", Refused(NEEDS_CLIP_VISION);
        /// PhotoMaker.
        PhotoMaker = "photo_maker", Refused(NEEDS_CLIP_VISION);
        /// FLUX.1 Redux.
        Redux = "redux", Refused(NEEDS_CLIP_VISION);
        /// Images that change the text encoder.
        TeAugmenter = "te_augmenter", Refused(NEEDS_CLIP_VISION);
        /// First frames of videos.
        I2v = "i2v", Refused(FOR_TRANSFORMERS);
        /// A LoRA with control images in further latent channels.
        ControlLora = "control_lora", Refused(FOR_TRANSFORMERS);
        /// Smaller patches of the transformer.
        Subpixel = "subpixel", Refused(FOR_TRANSFORMERS);
        /// Mean flow.
        MeanFlow = "mean_flow", Refused(FOR_TRANSFORMERS);
        /// A language model in place of the text encoder.
        LlmAdapter = "llm_adapter", Refused("it replaces the text encoder by a language model, which this release does not train");
        /// Another text encoder.
        TextEncoder = "text_encoder", Refused("it replaces the text encoder by another one, which this release does not train");
        /// Reference images in self-attention.
        Reference = "reference", Refused("reference images in self-attention are not supported");
        /// Numbers as conditions.
        SingleValue = "single_value", Refused("numbers as conditions (`extra_values`) are not supported");
    }
}

impl AdapterType {
    /// Whether a save is a folder, as diffusers writes it, instead of a file.
    #[must_use]
    pub fn saves_folders(self) -> bool {
        self == Self::ControlNet
    }
}

choices! {
    /// Network of a T2I-Adapter.
    pub enum T2iNetwork("T2I-Adapter network") {
        /// That of Stable Diffusion 1.x and 2.x.
        FullAdapter = "full_adapter", Works;
        /// That of SDXL.
        FullAdapterXl = "full_adapter_xl", Works;
        /// A small one, for color palettes.
        LightAdapter = "light_adapter", Works;
    }
}

impl T2iNetwork {
    /// The network for a family: as in ai-toolkit, SDXL has `full_adapter_xl` in place of `full_adapter`. `None`: there is none.
    #[must_use]
    pub fn of_arch(self, arch: ArchName) -> Option<Self> {
        match (self, arch) {
            (Self::FullAdapter, ArchName::Sdxl) => Some(Self::FullAdapterXl),
            (Self::LightAdapter, ArchName::Sdxl) => None,
            (network, _) => Some(network),
        }
    }
}

section! {
    /// A network beside the denoiser that conditions it on images. It is trained alone: the model stays as it is.
    pub struct AdapterConfig("adapter") {
        /// Type of the adapter.
        kind as "type": AdapterType = AdapterType::T2i, Works;
        /// Train the adapter. Required here: ai-toolkit's default, false, uses it beside another training.
        train: bool = false, Works;
        /// Adapter to start from: a diffusers folder, a safetensors file, or the name of a repository. Absent: a T2I-Adapter gets random
        /// weights, a ControlNet those of the U-Net and zero convolutions.
        name_or_path: Option<String> = None, Works, input Vae;
        /// Control images of samples that name none, one after the other: a list, or paths with commas between them.
        test_img_path: OneOrMany<String> = OneOrMany(Vec::new()), Works, input ControlImages;
        /// T2I-Adapter: channels of control images.
        in_channels: u32 = 3, Works;
        /// T2I-Adapter: channels of its blocks, which are those of the U-Net's. `light_adapter` has one block more than channels.
        channels: Vec<u32> = vec![320, 640, 1280, 1280], Works;
        /// T2I-Adapter: residual blocks of each block.
        num_res_blocks: u32 = 2, Works;
        /// T2I-Adapter: pixels of the control image for each of the first feature map: 8, for SDXL 16.
        downscale_factor: u32 = 8, Works;
        /// T2I-Adapter: its network. For SDXL `full_adapter` means `full_adapter_xl`.
        adapter_type: T2iNetwork = T2iNetwork::FullAdapter, Works;
        /// No effect, as in ai-toolkit.
        image_dir: Option<String> = None, Accepted("never had an effect");
    }
    rare {
        "image_encoder_path" => DependsOn("type: ip");
        "num_tokens" => DependsOn("type: ip");
        "train_image_encoder" => DependsOn("type: ip");
        "train_only_image_encoder" => DependsOn("type: ip");
        "train_only_image_encoder_positional_embedding" => DependsOn("type: ip");
        "image_encoder_arch" => DependsOn("type: ip");
        "safe_reducer_channels" => DependsOn("type: ip");
        "safe_channels" => DependsOn("type: ip");
        "safe_tokens" => DependsOn("type: ip");
        "quad_image" => DependsOn("type: ip");
        "clip_layer" => DependsOn("type: ip");
        "train_scaler" => DependsOn("type: ip");
        "scaler_lr" => DependsOn("type: ip");
        "merge_scaler" => DependsOn("type: ip");
        "conv_pooling" => DependsOn("type: ip");
        "conv_pooling_stacks" => DependsOn("type: ip");
        "sparse_autoencoder_dim" => DependsOn("type: ip");
        "pixtral_max_image_size" => DependsOn("type: ip");
        "pixtral_random_image_size" => DependsOn("type: ip");
        "flux_only_double" => DependsOn("type: ip");
        "trigger" => DependsOn("type: clip");
        "trigger_class_name" => DependsOn("type: clip");
        "class_names" => DependsOn("type: clip");
        "text_encoder_path" => DependsOn("type: text_encoder");
        "text_encoder_arch" => DependsOn("type: text_encoder");
        "num_cloned_blocks" => DependsOn("type: llm_adapter");
        "quantize_llm" => DependsOn("type: llm_adapter");
        "head_dim" => DependsOn("type: ilora");
        "num_heads" => DependsOn("type: ilora");
        "ilora_down" => DependsOn("type: ilora");
        "ilora_mid" => DependsOn("type: ilora");
        "ilora_up" => DependsOn("type: ilora");
        "lora_config" => DependsOn("type: control_lora");
        "num_control_images" => DependsOn("type: control_lora");
        "control_image_dropout" => DependsOn("type: control_lora");
        "has_inpainting_input" => DependsOn("type: control_lora");
        "invert_inpaint_mask_chance" => DependsOn("type: control_lora");
        "subpixel_downscale_factor" => DependsOn("type: subpixel");
        "i2v_do_start_frame" => DependsOn("type: i2v");
    }
    finish = finish_adapter;
    check = check_adapter;
}

fn finish_adapter(adapter: &mut AdapterConfig, _present: &PresentKeys, cx: &mut ReadContext) {
    if adapter.name_or_path.as_deref() == Some("") {
        adapter.name_or_path = None;
    }
    // As in ai-toolkit.
    if let [paths] = adapter.test_img_path.0.as_slice() {
        let paths = paths.split(',').map(str::trim).filter(|path| !path.is_empty());
        adapter.test_img_path = OneOrMany(paths.map(str::to_owned).collect());
    }
    cx.check_item_count("test_img_path", adapter.test_img_path.len(), MAX_SAMPLES);
    cx.check_item_count("channels", adapter.channels.len(), MAX_ADAPTER_BLOCKS);
    if adapter.channels.is_empty() {
        cx.error_at("channels", "expected one number for each block of the U-Net");
    }
    let most = adapter.channels.iter().copied().max().unwrap_or(1);
    cx.check_not_zero("channels", adapter.channels.iter().copied().min().unwrap_or(1));
    cx.check_at_most("channels", most, MAX_ADAPTER_CHANNELS);
    cx.check_at_most("num_res_blocks", adapter.num_res_blocks, MAX_ADAPTER_BLOCKS as u32);
    cx.check_not_zero("downscale_factor", adapter.downscale_factor);
    cx.check_at_most("downscale_factor", adapter.downscale_factor, 64);
}

fn check_adapter(adapter: &AdapterConfig, path: &str, report: &mut SupportReport) {
    if matches!(adapter.kind.status(), SupportLevel::Refused(_)) {
        return;
    }
    if !adapter.train {
        report.error(
            join(path, "train"),
            "is false: an adapter that is used beside another training, and not trained itself, is not supported; set `train: true`",
        );
    }
    if adapter.kind == AdapterType::T2i && adapter.in_channels != 3 {
        report.error(
            join(path, "in_channels"),
            format!(
                "expected 3, found {}: control images are read with red, green and blue, in ai-toolkit too",
                adapter.in_channels
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::{AdapterType, T2iNetwork};
    use crate::job::{Format, JobSpec, LoadOptions, parse};

    fn read(adapter: &str) -> Result<JobSpec, String> {
        let text = format!(
            "job: extension\nconfig:\n  name: a\n  process:\n    - type: sd_trainer\n      training_folder: out\n      datasets: \
             [{{folder_path: cats, control_path: edges}}]\n      model: {{name_or_path: models/sd, arch: sd15}}\n      adapter: {adapter}\n"
        );
        let read = parse(&text, Format::Yaml, Some("a.yaml"), &LoadOptions::default());
        read.map(|job| job.spec).map_err(|error| error.to_string())
    }

    fn problems(adapter: &str) -> String {
        match read(adapter) {
            Ok(spec) => spec.unsupported().to_string(),
            Err(error) => error,
        }
    }

    #[test]
    fn the_defaults_are_those_of_ai_toolkit() {
        let spec = read("{train: true}").unwrap();
        let adapter = spec.process[0].trainer().unwrap().adapter.clone().unwrap();
        assert_eq!(adapter.kind, AdapterType::T2i);
        assert_eq!(adapter.channels, [320, 640, 1280, 1280]);
        let numbers = (adapter.in_channels, adapter.num_res_blocks, adapter.downscale_factor);
        assert_eq!(numbers, (3, 2, 8));
        assert_eq!(adapter.adapter_type, T2iNetwork::FullAdapter);
        assert!(adapter.name_or_path.is_none() && adapter.test_img_path.is_empty());
        assert!(spec.unsupported().is_ok(), "{}", spec.unsupported());
        // A coordinator reads the job again from its JSON.
        let json = serde_json::to_value(&spec).unwrap();
        assert_eq!(JobSpec::from_value(&json).unwrap(), spec);
    }

    #[test]
    fn paths_with_commas_between_them_are_control_images_of_samples() {
        let spec =
            read("{train: true, type: control_net, name_or_path: nets/canny, test_img_path: 'a.png, b.png,'}").unwrap();
        let trainer = spec.process[0].trainer().unwrap();
        assert_eq!(trainer.adapter.as_ref().unwrap().test_img_path.0, ["a.png", "b.png"]);
        let inputs: Vec<String> = spec.inputs().into_iter().map(|input| input.config_path).collect();
        for path in ["a.png", "b.png", "edges", "nets/canny"] {
            assert!(inputs.iter().any(|input| input == path), "{path} in {inputs:?}");
        }
        assert!(spec.unsupported().is_ok(), "{}", spec.unsupported());
        let json = serde_json::to_value(&spec).unwrap();
        assert_eq!(JobSpec::from_value(&json).unwrap(), spec);
    }

    #[test]
    fn what_cannot_be_trained_is_refused_at_its_key() {
        for (adapter, key, text) in [
            ("{}", "adapter.train", "set `train: true`"),
            ("{type: ip, train: true}", "adapter.type", "CLIP vision"),
            ("{type: control_lora, train: true}", "adapter.type", "FLUX.1"),
            ("{type: reference}", "adapter.type", "self-attention"),
            ("{type: t2l, train: true}", "adapter.type", "did you mean `t2i`"),
            ("{train: true, in_channels: 1}", "adapter.in_channels", "expected 3"),
            (
                "{train: true, channels: []}",
                "adapter.channels",
                "one number for each block",
            ),
            ("{train: true, channels: [16, 0]}", "adapter.channels", "at least 1"),
            (
                "{train: true, downscale_factor: 0}",
                "adapter.downscale_factor",
                "at least 1",
            ),
            (
                "{train: true, adapter_type: small}",
                "adapter.adapter_type",
                "Known: full_adapter",
            ),
        ] {
            let found = problems(adapter);
            assert!(found.contains(key), "{adapter}: {found}");
            let lower = |text: &str| text.to_lowercase();
            assert!(lower(&found).contains(&lower(text)), "{adapter}: {found}");
        }
    }

    #[test]
    fn sdxl_has_a_network_of_its_own() {
        use crate::job::arch::ArchName;
        let of = T2iNetwork::of_arch;
        assert_eq!(
            of(T2iNetwork::FullAdapter, ArchName::Sdxl),
            Some(T2iNetwork::FullAdapterXl)
        );
        assert_eq!(
            of(T2iNetwork::FullAdapter, ArchName::Sd1),
            Some(T2iNetwork::FullAdapter)
        );
        assert_eq!(of(T2iNetwork::LightAdapter, ArchName::Sdxl), None);
    }
}
