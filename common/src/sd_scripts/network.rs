//! `network_module`, `network_dim`, `network_args` and the other options of adapters.

use super::block_ranks::{NetworkRanks, block_ranks, has_convolutions};
use super::block_rates::block_rates;
use super::lycoris::{lycoris, lycoris_kwargs, lycoris_rank_dropout};
use super::network_arguments::{Arguments, is_translated};
use super::optimizer::Rates;
use super::report::{Import, Section, number};
use super::script::ScriptFamily;
use super::transformer_blocks::{flux_blocks, joint_blocks};
use super::weights_ranks::largest_ranks;
use serde_json::{Value, json};

/// The blocks of a U-Net whose layers sd-scripts and LyCORIS adapt, as parts of diffusers' names: `Transformer2DModel` alone, or
/// with `ResnetBlock2D`, `Downsample2D` and `Upsample2D` too.
const ATTENTION: &[&str] = &["attentions"];
const ALL_BLOCKS: &[&str] = &["attentions", "resnets", "downsamplers", "upsamplers"];
/// In the names of all layers of text encoders.
const TEXT_ENCODER: &str = "text_model";

/// The `network` section.
pub(super) fn network(import: &mut Import<'_>, rates: &Rates) -> Section {
    let settings = import.settings;
    let Some(module) = settings.text("network_module") else {
        let script = import.script.name();
        import.error(
            "network_module",
            format!("{script} needs it, for example networks.lora"),
        );
        return Section::new();
    };
    let arguments = Arguments::read(import);
    let mut network = Section::new();
    let rank = import.whole_from("network_dim", 1, 4);
    let alpha = settings.number("network_alpha").unwrap_or(1.0);
    // sd-scripts takes an alpha of 0 for the rank, as aitk does: of each layer, which may have another rank than the network.
    let alpha = match alpha == 0.0 && import.script.is_flow() {
        true => rank as f64,
        false => alpha,
    };
    network.insert("type".into(), json!("lora"));
    network.insert("linear".into(), json!(rank));
    network.insert("linear_alpha".into(), number(alpha));
    let is_lycoris = module == "lycoris.kohya";
    let family = import.script.family();
    match (module, family) {
        ("networks.lora" | "lycoris.kohya", ScriptFamily::Sd | ScriptFamily::Sdxl)
        | ("networks.lora_flux", ScriptFamily::Flux)
        | ("networks.lora_sd3", ScriptFamily::Sd3) => {}
        ("lycoris.kohya", _) => {
            import.error("network_module", "aitk imports LyCORIS networks of U-Nets only: train this model with networks.lora_flux or networks.lora_sd3");
        }
        ("networks.lora" | "networks.lora_flux" | "networks.lora_sd3", _) => {
            let script = import.script.name();
            import.error("network_module", format!("`{module}` does not fit {script}"));
        }
        _ => {
            let shown: String = module.chars().take(60).collect();
            let message = format!(
                "aitk has no `{}`: use networks.lora, networks.lora_flux, networks.lora_sd3, or lycoris.kohya with algo locon, loha or lokr",
                shown.escape_debug()
            );
            import.error("network_module", message);
        }
    }
    let mut kwargs = Section::new();
    if is_lycoris {
        lycoris_rank_dropout(import, &arguments, &mut kwargs);
        lycoris(import, &arguments, rank, alpha, &mut network);
        lycoris_kwargs(import, &arguments, &network, &mut kwargs);
    } else {
        if let Some(chance) = arguments.chance(import, "rank_dropout") {
            kwargs.insert("rank_dropout".into(), number(chance));
        }
        if let Some(chance) = settings.number("network_dropout").filter(|chance| *chance != 0.0) {
            network.insert("dropout".into(), number(chance));
        }
        let conv = arguments.number(import, "conv_dim").filter(|conv| *conv > 0.0);
        if import.script.is_flow() && conv.is_some() {
            let message = "conv_dim is ignored, as in sd-scripts: a transformer has no larger convolutions";
            import.note("network_args", message);
        } else if let Some(conv) = conv {
            let conv_alpha = arguments.number(import, "conv_alpha").unwrap_or(1.0);
            network.insert("conv".into(), number(conv));
            network.insert(
                "conv_alpha".into(),
                number(if conv_alpha == 0.0 { conv } else { conv_alpha }),
            );
        }
    }
    let from_file = settings.flag("dim_from_weights");
    if from_file {
        ranks_of_file(import, is_lycoris, &arguments, &mut network);
        kwargs.clear();
    }
    if let Some(max) = settings.number("scale_weight_norms").filter(|max| *max != 0.0) {
        network.insert("scale_weight_norms".into(), number(max));
    }
    if let Some(chance) = arguments.chance(import, "module_dropout").filter(|_| !from_file) {
        kwargs.insert("module_dropout".into(), number(chance));
    }
    if import.script.is_flow() {
        if !from_file {
            check_alpha_of_transformer(import, rank, alpha);
        }
        if !arguments.is_on("split_qkv") {
            import.note(
                "network_module",
                "aitk trains q, k and v (and the MLP of single blocks) with a LoRA each, as split_qkv=True does",
            );
        }
    }
    let convolutions = network.contains_key("conv") || (!is_lycoris && has_convolutions(&arguments.0));
    let layers = match family {
        _ if from_file && import.script.is_flow() => Vec::new(),
        ScriptFamily::Sd if is_lycoris => Vec::new(),
        ScriptFamily::Sdxl if is_lycoris => to_strings(ALL_BLOCKS),
        ScriptFamily::Sd | ScriptFamily::Sdxl if convolutions || from_file => to_strings(ALL_BLOCKS),
        ScriptFamily::Sd | ScriptFamily::Sdxl => to_strings(ATTENTION),
        ScriptFamily::Flux => flux_blocks(import, &arguments),
        ScriptFamily::Sd3 => joint_blocks(import, &arguments),
    };
    if !layers.is_empty() {
        let text = (rates.trains_text_encoder).then(|| TEXT_ENCODER.to_owned());
        let all: Vec<String> = layers.into_iter().chain(text).collect();
        kwargs.insert("only_if_contains".into(), json!(all));
    }
    if !from_file {
        let of = |rank: &str, alpha: &str| Some((network.get(rank)?.as_f64()?, network.get(alpha)?.as_f64()?));
        let ranks = NetworkRanks {
            linear: (rank as f64, alpha),
            conv: of("conv", "conv_alpha"),
        };
        let entries = block_ranks(import, &arguments.0, &ranks);
        if !entries.is_empty() {
            network.insert("layer_ranks".into(), entries.into());
        }
    }
    let without = block_rates(import, &arguments.0, convolutions);
    let without: Vec<String> = without
        .into_iter()
        .filter(|block| block.weight == 0.0)
        .map(|block| block.name)
        .collect();
    if from_file && !without.is_empty() {
        let message = "dim_from_weights keeps the LoRA of a block whose weight is 0, untrained, which aitk does not: remove one of them";
        import.error("network_args", message);
    }
    if !without.is_empty() {
        kwargs.insert("ignore_if_contains".into(), json!(without));
    }
    if !kwargs.is_empty() {
        network.insert("network_kwargs".into(), Value::Object(kwargs));
    }
    if let Some(path) = settings.text("network_weights") {
        network.insert("pretrained_lora_path".into(), json!(path));
    }
    network
}

/// `dim_from_weights`: the network is that of the file, as `create_network_from_weights` of sd-scripts makes it.
fn ranks_of_file(import: &mut Import<'_>, is_lycoris: bool, arguments: &Arguments, network: &mut Section) {
    if is_lycoris {
        let message = "is for networks.lora, networks.lora_flux and networks.lora_sd3: give the algo and the ranks of the file instead";
        import.error("dim_from_weights", message);
        return;
    }
    let Some(ranks) = largest_ranks(import) else { return };
    for option in ["network_dim", "network_alpha", "network_dropout"] {
        if import.settings.is_set(option) {
            import.note(option, "ignored with dim_from_weights, as in sd-scripts");
        }
    }
    let rates = [
        "down_lr_weight",
        "mid_lr_weight",
        "up_lr_weight",
        "block_lr_zero_threshold",
        "split_qkv",
    ];
    for argument in arguments
        .0
        .iter()
        .filter(|argument| !rates.contains(&argument.name.as_str()))
    {
        if is_translated(&argument.name) && !argument.is_off() {
            let message = format!("{} is ignored with dim_from_weights, as in sd-scripts", argument.name);
            import.note("network_args", message);
        }
    }
    for key in ["dropout", "conv", "conv_alpha"] {
        network.remove(key);
    }
    network.insert("linear".into(), json!(ranks.linear));
    network.insert("linear_alpha".into(), json!(ranks.linear));
    if let Some(conv) = ranks.conv {
        network.insert("conv".into(), json!(conv));
        network.insert("conv_alpha".into(), json!(conv));
    }
    network.insert("ranks_of_pretrained_lora".into(), json!(true));
}

fn to_strings(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// In files of a LoRA of a transformer there is no alpha: its scale is 1.
fn check_alpha_of_transformer(import: &mut Import<'_>, rank: u64, alpha: f64) {
    if alpha == rank as f64 {
        return;
    }
    let option = if import.settings.is_set("network_alpha") {
        "network_alpha"
    } else {
        "network_dim"
    };
    let message = format!(
        "aitk's LoRAs of transformers have the scale 1, as ai-toolkit's, so network_alpha ({alpha:?}) must be network_dim ({rank}): set it, \
         and adapt the learning rate; sd-scripts multiplies the LoRA by alpha / dim"
    );
    import.error(option, message);
}
