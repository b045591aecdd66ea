//! `network_module`, `network_dim`, `network_args` and the other options of adapters.

use super::arguments::{Argument, arguments};
use super::block_ranks::{NetworkRanks, block_ranks, has_convolutions};
use super::block_rates::block_rates;
use super::optimizer::Rates;
use super::report::{Import, Section, number};
use super::script::ScriptFamily;
use super::weights_ranks::largest_ranks;
use crate::job::limits::MAX_RANK;
use serde_json::{Value, json};

/// The blocks of a U-Net whose layers sd-scripts and LyCORIS adapt, as parts of diffusers' names: `Transformer2DModel` alone, or
/// with `ResnetBlock2D`, `Downsample2D` and `Upsample2D` too.
const ATTENTION: &[&str] = &["attentions"];
const ALL_BLOCKS: &[&str] = &["attentions", "resnets", "downsamplers", "upsamplers"];
/// In the names of all layers of text encoders.
const TEXT_ENCODER: &str = "text_model";
/// Blocks of FLUX.1.
const DOUBLE_BLOCKS: usize = 19;
const SINGLE_BLOCKS: usize = 38;
/// The most blocks of a Stable Diffusion 3.5.
const JOINT_BLOCKS: usize = 38;

/// Why an argument of `network_args` is refused, unless it is off.
const REFUSED_ARGUMENTS: &[(&str, &str)] = &[
    ("network_reg_lrs", "aitk has one learning rate for all layers"),
    ("network_reg_dims", "aitk has one rank for all layers"),
    ("ggpo_beta", "aitk has no GGPO"),
    ("ggpo_sigma", "aitk has no GGPO"),
    ("train_t5xxl", "aitk does not train T5"),
    (
        "in_dims",
        "aitk has one rank, and adapts layers outside of the blocks only with `transformer_only: false` of a YAML config",
    ),
    (
        "emb_dims",
        "aitk has one rank, and adapts layers outside of the blocks only with `transformer_only: false` of a YAML config",
    ),
    ("img_attn_dim", "aitk has one rank for all layers"),
    ("txt_attn_dim", "aitk has one rank for all layers"),
    ("img_mlp_dim", "aitk has one rank for all layers"),
    ("txt_mlp_dim", "aitk has one rank for all layers"),
    ("img_mod_dim", "aitk has one rank for all layers"),
    ("txt_mod_dim", "aitk has one rank for all layers"),
    ("single_dim", "aitk has one rank for all layers"),
    ("single_mod_dim", "aitk has one rank for all layers"),
    ("context_attn_dim", "aitk has one rank for all layers"),
    ("context_mlp_dim", "aitk has one rank for all layers"),
    ("context_mod_dim", "aitk has one rank for all layers"),
    ("x_attn_dim", "aitk has one rank for all layers"),
    ("x_mlp_dim", "aitk has one rank for all layers"),
    ("x_mod_dim", "aitk has one rank for all layers"),
    ("rescaled", "aitk trains no OFT"),
    ("constraint", "aitk trains no OFT"),
];

/// Arguments without influence on what is trained here.
const WITHOUT_INFLUENCE: &[&str] = &[
    "verbose",
    "varbose",
    // LyCORIS' create_network does not pass it on to its layers.
    "rank_dropout_scale",
    "disable_conv_cp",
    "block_size",
    "train_on_input",
];

/// Arguments that are translated.
const TRANSLATED: &[&str] = &[
    "conv_dim",
    "conv_alpha",
    "rank_dropout",
    "module_dropout",
    "dropout",
    "algo",
    "preset",
    "factor",
    "full_matrix",
    "use_scalar",
    "train_blocks",
    "train_double_block_indices",
    "train_single_block_indices",
    "train_block_indices",
    "split_qkv",
    "loraplus_lr_ratio",
    "loraplus_unet_lr_ratio",
    "loraplus_text_encoder_lr_ratio",
    "down_lr_weight",
    "mid_lr_weight",
    "up_lr_weight",
    "block_lr_zero_threshold",
    "block_dims",
    "block_alphas",
    "conv_block_dims",
    "conv_block_alphas",
    "use_tucker",
    "use_cp",
    "use_conv_cp",
    "rs_lora",
    "bypass_mode",
    "dora_wd",
    "wd_on_output",
    "train_norm",
    "decompose_both",
    "unbalanced_factorization",
];

/// All arguments with what becomes of them, for the documentation.
pub(super) fn documented_arguments() -> impl Iterator<Item = (&'static str, String)> {
    let translated = [
        (
            "conv_dim",
            "`network.conv`; 0: none, and of larger convolutions no LoRA, but of all other layers of the U-Net's blocks; 0 is refused for a LoKr of whole matrices",
        ),
        ("conv_alpha", "`network.conv_alpha`"),
        (
            "rank_dropout",
            "`network.network_kwargs.rank_dropout`; of LyCORIS with algo lora or locon `output_dropout` there",
        ),
        ("module_dropout", "`network.network_kwargs.module_dropout`"),
        (
            "dropout",
            "of LyCORIS: ignored with a note, as network_dropout: LyCORIS drops nothing with them",
        ),
        (
            "algo",
            "of LyCORIS: `network.type`: lora and locon are `lora`, loha, lokr; others are refused",
        ),
        ("preset", "of LyCORIS: only full"),
        (
            "factor",
            "`network.lokr_factor`, and `network.network_kwargs.smaller_factor_first`, as LyCORIS",
        ),
        ("full_matrix", "`network.lokr_full_rank`"),
        ("use_scalar", "with algo lora or locon: `network.type: locon`"),
        ("train_blocks", "FLUX.1: `network.network_kwargs.only_if_contains`"),
        (
            "train_double_block_indices",
            "FLUX.1: `network.network_kwargs.only_if_contains`",
        ),
        (
            "train_single_block_indices",
            "FLUX.1: `network.network_kwargs.only_if_contains`",
        ),
        ("train_block_indices", "SD3: `network.network_kwargs.only_if_contains`"),
        (
            "split_qkv",
            "FLUX.1 and SD3: aitk always trains q, k and v on their own",
        ),
        ("loraplus_lr_ratio", "LoRA+: `train.lr_factors`; of LyCORIS refused"),
        ("loraplus_unet_lr_ratio", "the same for the U-Net or transformer alone"),
        ("loraplus_text_encoder_lr_ratio", "the same for text encoders alone"),
        (
            "down_lr_weight",
            "U-Nets: `train.lr_factors`; blocks of weight 0: `network.network_kwargs.ignore_if_contains`",
        ),
        ("mid_lr_weight", "the same"),
        ("up_lr_weight", "the same"),
        ("block_lr_zero_threshold", "weights up to it count as 0"),
        (
            "block_dims",
            "U-Nets: `network.layer_ranks`: 25 numbers (12 down, 1 middle, 12 up), of SDXL 23 (1, 9, 3, 9, 1); 0: no LoRA",
        ),
        ("block_alphas", "the same, with block_dims or a weight of blocks"),
        ("conv_block_dims", "the same for larger convolutions"),
        ("conv_block_alphas", "the same, with conv_block_dims"),
        (
            "use_tucker",
            "of LyCORIS: `network.network_kwargs.use_cp`; without influence on a LoKr that splits no matrix, and on networks of sd-scripts",
        ),
        ("use_cp", "the same"),
        ("use_conv_cp", "the same"),
        (
            "rs_lora",
            "of LyCORIS: `network.network_kwargs.rs_lora`; refused with a LoKr of whole matrices; without influence on networks of sd-scripts",
        ),
        (
            "bypass_mode",
            "without influence: the product of the change is computed apart, which gives the same numbers. Refused with a dropout (dropout, network_dropout) and, with algo lora or locon, with rank_dropout: LyCORIS drops other numbers then",
        ),
        (
            "dora_wd",
            "of LyCORIS: `network.network_kwargs.dora_wd`; refused with bypass_mode; without influence on networks of sd-scripts",
        ),
        (
            "wd_on_output",
            "with dora_wd: `network.network_kwargs.wd_on_out`; on without it, as in LyCORIS 3 and later",
        ),
        (
            "train_norm",
            "of LyCORIS: `network.network_kwargs.train_norm`; refused with rank_dropout and module_dropout; without influence on networks of sd-scripts",
        ),
        (
            "decompose_both",
            "with algo lokr: `network.network_kwargs.decompose_both`, for any text, also False, as LyCORIS; without influence on one that splits no matrix",
        ),
        (
            "unbalanced_factorization",
            "with algo lokr: `network.network_kwargs.unbalanced_factorization`",
        ),
    ];
    let translated = translated.into_iter().map(|(name, what)| (name, what.to_owned()));
    let refused = REFUSED_ARGUMENTS
        .iter()
        .map(|(name, why)| (*name, format!("refused: {why}")));
    let others = WITHOUT_INFLUENCE.iter().map(|name| (*name, "no influence".to_owned()));
    translated.chain(refused).chain(others)
}

/// The arguments of one network, by name.
struct Arguments(Vec<Argument>);

impl Arguments {
    fn get(&self, name: &str) -> Option<&Argument> {
        self.0.iter().find(|argument| argument.name == name)
    }

    fn is_on(&self, name: &str) -> bool {
        self.get(name).is_some_and(|argument| !argument.is_off())
    }

    fn number(&self, import: &mut Import<'_>, name: &str) -> Option<f64> {
        let argument = self.get(name)?;
        if argument.text.is_empty() || argument.text == "None" {
            return None;
        }
        let found = argument.number();
        if found.is_none() {
            import.error(
                "network_args",
                format!("{name}: expected a number, found \"{}\"", argument.text.escape_debug()),
            );
        }
        found
    }

    /// A number that is not 0.
    fn chance(&self, import: &mut Import<'_>, name: &str) -> Option<f64> {
        self.number(import, name).filter(|chance| *chance != 0.0)
    }
}

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
    let arguments = Arguments(arguments(import, "network_args"));
    check_arguments(import, &arguments);
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
    let is_lora = matches!(algorithm(&arguments).as_str(), "lora" | "locon" | "");
    let bypasses = is_lycoris && arguments.is_on("bypass_mode");
    let rank_dropout = arguments.chance(import, "rank_dropout");
    if bypasses && is_lora && rank_dropout.is_some() {
        let message = "bypass_mode: LyCORIS drops rows of the first matrix with it, and rank_dropout is one chance for all images of a batch: \
                       remove one of them";
        import.error("network_args", message);
    } else if bypasses && rank_dropout.is_some() && algorithm(&arguments) == "lokr" {
        import.note(
            "network_args",
            "rank_dropout: ignored, as by LyCORIS of a LoKr with bypass_mode",
        );
    } else if let Some(chance) = rank_dropout {
        // LyCORIS drops rows of the weight's change.
        let key = if is_lycoris && is_lora {
            "output_dropout"
        } else {
            "rank_dropout"
        };
        kwargs.insert(key.into(), number(chance));
    }
    if is_lycoris {
        lycoris(import, &arguments, rank, alpha, &mut network);
        // LyCORIS joins the texts of its arguments with `or`: the first one that is there counts.
        let decomposes = ["use_conv_cp", "use_cp", "use_tucker"]
            .iter()
            .find_map(|name| arguments.get(name).filter(|argument| !argument.text.is_empty()));
        let has_convolutions = network.contains_key("conv");
        if decomposes.is_some_and(|argument| !argument.is_off())
            && has_convolutions
            && !splits_nothing(import, &arguments)
        {
            kwargs.insert("use_cp".into(), json!(true));
        }
        if arguments.is_on("rs_lora") && splits_nothing(import, &arguments) {
            let message = "rs_lora: LyCORIS multiplies the whole matrices of this LoKr with sqrt(network_dim) while it trains, and programs \
                           read its files without that factor: remove it";
            import.error("network_args", message);
        } else if arguments.is_on("rs_lora") {
            kwargs.insert("rs_lora".into(), json!(true));
        }
        if arguments.is_on("dora_wd") && bypasses {
            let message = "dora_wd: with bypass_mode LyCORIS does not decompose the weights: remove one of them";
            import.error("network_args", message);
        } else if arguments.is_on("dora_wd") {
            kwargs.insert("dora_wd".into(), json!(true));
            if arguments.get("wd_on_output").is_some_and(is_false) {
                kwargs.insert("wd_on_out".into(), json!(false));
            }
        }
        if network.get("type") == Some(&json!("lokr")) {
            // LyCORIS passes the text on, and any text is true.
            let splits_both = arguments
                .get("decompose_both")
                .is_some_and(|argument| !argument.text.is_empty());
            if splits_both && !splits_nothing(import, &arguments) {
                kwargs.insert("decompose_both".into(), json!(true));
            }
            if arguments.is_on("unbalanced_factorization") {
                kwargs.insert("unbalanced_factorization".into(), json!(true));
            }
            // Its factorization puts the smaller factor first; without a given one that is so anyway.
            if arguments
                .get("factor")
                .and_then(Argument::number)
                .is_some_and(|factor| factor > 1.0)
            {
                kwargs.insert("smaller_factor_first".into(), json!(true));
            }
        }
        if arguments.is_on("train_norm") {
            kwargs.insert("train_norm".into(), json!(true));
            if family == ScriptFamily::Sd {
                // The only norm of the U-Net outside of the blocks.
                kwargs.insert("ignore_if_contains".into(), json!(["conv_norm_out"]));
            }
            let drops = |name: &&str| {
                arguments
                    .get(name)
                    .and_then(Argument::number)
                    .is_some_and(|chance| chance != 0.0)
            };
            if let Some(name) = ["rank_dropout", "module_dropout"].into_iter().find(drops) {
                let message = format!(
                    "train_norm: LyCORIS drops changes of norms too with {name}, which aitk does not: remove one of them"
                );
                import.error("network_args", message);
            }
        }
    } else {
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
        if network.get("type") == Some(&json!("locon")) {
            let message =
                "aitk limits the norms of a LoRA, LoKr or LoHa, and not of a LoCon with use_scalar: remove one of them";
            import.error("scale_weight_norms", message);
        }
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
        let text = (rates.text_encoder).then(|| TEXT_ENCODER.to_owned());
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
        if TRANSLATED.contains(&argument.name.as_str()) && !argument.is_off() {
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

/// Whether a LoKr has whole matrices alone: LyCORIS splits none whose sides are smaller than twice the rank, and none with full_matrix.
fn splits_nothing(import: &Import<'_>, arguments: &Arguments) -> bool {
    let is_lokr = arguments
        .get("algo")
        .is_some_and(|algo| algo.text.eq_ignore_ascii_case("lokr"));
    let rank = import.settings.number("network_dim").unwrap_or(4.0);
    let conv = arguments
        .get("conv_dim")
        .and_then(Argument::number)
        .filter(|rank| *rank != 0.0);
    let is_whole = |rank: f64| rank > f64::from(MAX_RANK);
    is_lokr && (arguments.is_on("full_matrix") || (is_whole(rank) && is_whole(conv.unwrap_or(rank))))
}

/// Reports unknown arguments, and those that are refused.
fn check_arguments(import: &mut Import<'_>, arguments: &Arguments) {
    for argument in &arguments.0 {
        let name = argument.name.as_str();
        if let Some((_, why)) = REFUSED_ARGUMENTS.iter().find(|(refused, _)| *refused == name) {
            // A rank of 0 leaves out the layers.
            if name.ends_with("_dim") && argument.number() == Some(0.0) {
                let message = format!(
                    "{name}: 0 gives these layers no LoRA: remove it, and name the layers in `network.network_kwargs.ignore_if_contains` of the \
                     YAML config that `aitk import` writes"
                );
                import.error("network_args", message);
            } else if !argument.is_off() {
                import.error("network_args", format!("{name}: {why}"));
            }
        } else if !TRANSLATED.contains(&name) && !WITHOUT_INFLUENCE.contains(&name) {
            let refused = REFUSED_ARGUMENTS.iter().map(|(name, _)| *name);
            let known = TRANSLATED.iter().chain(WITHOUT_INFLUENCE).copied().chain(refused);
            let hint = match super::option::nearest(name, known) {
                Some(near) => format!("; did you mean `{near}`?"),
                None => String::new(),
            };
            let shown = super::settings::shortened(name);
            import.error(
                "network_args",
                format!("`{shown}` is not an argument of a network{hint}"),
            );
        }
    }
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

/// `LoConModule`, `LohaModule` and `LokrModule` of LyCORIS drop numbers of a layer's input and output in their bypass mode alone.
const DROPS_NOTHING: &str = "ignored, as by LyCORIS, which drops nothing with it without bypass_mode";

/// And with it numbers of the change's output.
const DROPS_OUTPUTS: &str =
    "with bypass_mode LyCORIS drops numbers of the change's output, which aitk does not: remove one of them";

/// Whether an argument is there with a value that is off.
fn is_false(argument: &Argument) -> bool {
    argument.is_off() && !argument.text.is_empty()
}

/// The algorithm of a LyCORIS network.
fn algorithm(arguments: &Arguments) -> String {
    arguments
        .get("algo")
        .map_or("lora", |argument| argument.text.as_str())
        .to_lowercase()
}

/// LyCORIS: `algo` and what belongs to it.
fn lycoris(import: &mut Import<'_>, arguments: &Arguments, rank: u64, alpha: f64, network: &mut Section) {
    let algo = algorithm(arguments);
    let scalar = arguments.is_on("use_scalar");
    let kind = match algo.as_str() {
        "lora" | "locon" if scalar => "locon",
        "lora" | "locon" | "" => "lora",
        "loha" => "loha",
        "lokr" => "lokr",
        other => {
            let message = format!(
                "algo={}: aitk has locon, loha and lokr of LyCORIS",
                other.escape_debug()
            );
            import.error("network_args", message);
            return;
        }
    };
    if scalar && kind != "locon" {
        import.error(
            "network_args",
            format!("use_scalar: aitk's {kind} has no trained scalar"),
        );
    }
    let preset = arguments
        .get("preset")
        .map_or("full", |argument| argument.text.as_str());
    if !matches!(preset, "full" | "") {
        import.error(
            "network_args",
            format!("preset={}: aitk imports the preset full only", preset.escape_debug()),
        );
    }
    let bypasses = arguments.is_on("bypass_mode");
    let of_settings = import.settings.number("network_dropout").unwrap_or(0.0);
    let of_arguments = arguments.chance(import, "dropout").is_some();
    for (option, name, is_on) in [
        ("network_args", "dropout: ", of_arguments),
        ("network_dropout", "", of_settings != 0.0),
    ] {
        if is_on && bypasses {
            import.error(option, format!("{name}{DROPS_OUTPUTS}"));
        } else if is_on {
            import.note(option, format!("{name}{DROPS_NOTHING}"));
        }
    }
    // Convolutions are trained too, without conv_dim with the rank of the linear layers; with 0 only those of 1 x 1, as these layers.
    let conv = arguments.number(import, "conv_dim").unwrap_or(rank as f64);
    let conv_alpha = arguments.number(import, "conv_alpha").unwrap_or(alpha);
    network.insert("type".into(), json!(kind));
    if conv > 0.0 {
        network.insert("conv".into(), number(conv));
        // LyCORIS takes an alpha of 0 for the rank, too.
        network.insert(
            "conv_alpha".into(),
            number(if conv_alpha == 0.0 { conv } else { conv_alpha }),
        );
    }
    if kind == "lokr" {
        if arguments.get("decompose_both").is_some_and(is_false) && !splits_nothing(import, arguments) {
            let message = "decompose_both: LyCORIS takes any text for True, also this one: the first matrix of layers that are large enough is \
                           split; remove the argument to train it whole";
            import.note("network_args", message);
        }
        let is_stabilised = arguments.is_on("rs_lora");
        let has_scale_1 = |alpha: f64, rank: f64| !is_stabilised && (alpha == 0.0 || alpha == rank);
        if bypasses
            && !splits_nothing(import, arguments)
            && !(has_scale_1(alpha, rank as f64) && (conv <= 0.0 || has_scale_1(conv_alpha, conv)))
        {
            let message = "bypass_mode: aitk multiplies a LoKr with alpha / dim (with rs_lora alpha / sqrt(dim)), as LyCORIS 4; LyCORIS 3 leaves \
                           that out with bypass_mode while it trains";
            import.note("network_args", message);
        }
        let factor = arguments.number(import, "factor").unwrap_or(-1.0);
        network.insert("lokr_factor".into(), number(factor));
        // LyCORIS splits no matrix whose sides are smaller than twice the rank: people write 100000 for none at all.
        let is_whole = rank > u64::from(MAX_RANK) || arguments.is_on("full_matrix");
        if is_whole && conv <= 0.0 {
            let message = "conv_dim=0: aitk's LoKr of whole matrices adapts the larger convolutions too: remove it, or set a smaller \
                           network_dim without full_matrix";
            import.error("network_args", message);
        }
        let none_is_split = rank > u64::from(MAX_RANK) && conv > f64::from(MAX_RANK);
        if none_is_split {
            for key in ["linear", "linear_alpha", "conv", "conv_alpha"] {
                network.remove(key);
            }
        }
        network.insert(
            "lokr_full_rank".into(),
            json!(none_is_split || arguments.is_on("full_matrix")),
        );
    }
}

/// The names of the blocks of FLUX.1 that are trained; none: all.
fn flux_blocks(import: &mut Import<'_>, arguments: &Arguments) -> Vec<String> {
    let which = arguments
        .get("train_blocks")
        .map_or("all", |argument| argument.text.as_str());
    let (double, single) = match which {
        "all" | "" => (true, true),
        "double" => (true, false),
        "single" => (false, true),
        other => {
            import.error(
                "network_args",
                format!(
                    "train_blocks: expected all, single or double, found {}",
                    other.escape_debug()
                ),
            );
            return Vec::new();
        }
    };
    let doubles = indices(import, arguments, "train_double_block_indices", DOUBLE_BLOCKS);
    let singles = indices(import, arguments, "train_single_block_indices", SINGLE_BLOCKS);
    if double && single && doubles.is_none() && singles.is_none() {
        return Vec::new();
    }
    let mut names = Vec::new();
    for (is_trained, which, prefix) in [
        (double, doubles, "transformer.transformer_blocks."),
        (single, singles, "transformer.single_transformer_blocks."),
    ] {
        match which {
            _ if !is_trained => {}
            None => names.push(prefix.to_owned()),
            Some(indices) => names.extend(indices.iter().map(|index| format!("{prefix}{index}."))),
        }
    }
    if names.is_empty() {
        import.error("network_args", "no block is trained");
    }
    names
}

/// The names of the blocks of Stable Diffusion 3 that are trained; none: all.
fn joint_blocks(import: &mut Import<'_>, arguments: &Arguments) -> Vec<String> {
    match indices(import, arguments, "train_block_indices", JOINT_BLOCKS) {
        None => Vec::new(),
        Some(indices) if indices.is_empty() => {
            import.error("network_args", "no block is trained");
            Vec::new()
        }
        Some(indices) => indices
            .iter()
            .map(|index| format!("transformer.transformer_blocks.{index}."))
            .collect(),
    }
}

/// The blocks of `all`, `none`, or `0-3,7`; `None`: all.
fn indices(import: &mut Import<'_>, arguments: &Arguments, name: &str, blocks: usize) -> Option<Vec<usize>> {
    let text = arguments.get(name)?.text.trim();
    match text {
        "all" => return None,
        "none" | "" => return Some(Vec::new()),
        _ => {}
    }
    let part = |part: &str| -> Option<std::ops::RangeInclusive<usize>> {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (first <= last && last < blocks).then_some(first..=last)
    };
    let parts: Option<Vec<_>> = text.split(',').map(part).collect();
    match parts {
        Some(parts) => {
            let mut all: Vec<usize> = parts.into_iter().flatten().collect();
            all.sort_unstable();
            all.dedup();
            Some(all)
        }
        None => {
            let shown = super::settings::shortened(text);
            import.error(
                "network_args",
                format!(
                    "{name}: expected blocks from 0 to {}, such as 0-3,7, found \"{shown}\"",
                    blocks - 1
                ),
            );
            None
        }
    }
}
