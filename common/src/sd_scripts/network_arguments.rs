//! `network_args`: which arguments of networks there are, and what becomes of each.

use super::arguments::{Argument, arguments};
use super::report::Import;

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
    "block_size",
    "train_on_input",
];

/// Arguments that are translated, with what they become.
const TRANSLATED: &[(&str, &str)] = &[
    (
        "conv_dim",
        "`network.conv`; 0: none, and of larger convolutions no LoRA, but of all other layers of the U-Net's blocks; 0 is refused for a LoKr of whole matrices",
    ),
    ("conv_alpha", "`network.conv_alpha`"),
    (
        "rank_dropout",
        "`network.network_kwargs.rank_dropout`; for LyCORIS with algo lora or locon `output_dropout` there",
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
    ("use_scalar", "of LyCORIS: `network.network_kwargs.use_scalar`"),
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
    ("loraplus_lr_ratio", "LoRA+: `train.lr_factors`; refused for LyCORIS"),
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
        "U-Nets: `network.layer_ranks`: 25 numbers (12 down, 1 middle, 12 up), for SDXL 23 (1, 9, 3, 9, 1); 0: no LoRA",
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
        "disable_conv_cp",
        "the same: LyCORIS 3 and 4 take its text for that of use_tucker",
    ),
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

/// Translated arguments that only some networks have, with the names of these.
const OF_SOME_NETWORKS: &[(&[&str], &[&str])] = &[
    (
        &["lycoris.kohya"],
        &[
            "algo",
            "decompose_both",
            "dora_wd",
            "dropout",
            "factor",
            "full_matrix",
            "preset",
            "rs_lora",
            "train_norm",
            "unbalanced_factorization",
            "use_conv_cp",
            "use_cp",
            "use_scalar",
            "use_tucker",
            "wd_on_output",
        ],
    ),
    (
        &["networks.lora_flux"],
        &[
            "train_blocks",
            "train_double_block_indices",
            "train_single_block_indices",
        ],
    ),
    (&["networks.lora_sd3"], &["train_block_indices"]),
    (&["networks.lora_flux", "networks.lora_sd3"], &["split_qkv"]),
];

/// Whether a network of sd-scripts or LyCORIS reads a translated argument; others ignore it.
fn reads(module: &str, argument: &str) -> bool {
    OF_SOME_NETWORKS
        .iter()
        .all(|(modules, arguments)| modules.contains(&module) || !arguments.contains(&argument))
}

/// All arguments with what becomes of them, for the documentation.
pub(super) fn documented_arguments() -> impl Iterator<Item = (&'static str, String)> {
    let translated = TRANSLATED.iter().map(|(name, what)| (*name, (*what).to_owned()));
    let refused = REFUSED_ARGUMENTS
        .iter()
        .map(|(name, why)| (*name, format!("refused: {why}")));
    let others = WITHOUT_INFLUENCE.iter().map(|name| (*name, "no influence".to_owned()));
    translated.chain(refused).chain(others)
}

/// The arguments of one network, by name.
pub(super) struct Arguments(pub(super) Vec<Argument>);

impl Arguments {
    /// Those of the settings. Reports unknown ones, and those that are refused.
    pub(super) fn read(import: &mut Import<'_>) -> Self {
        let arguments = Self(arguments(import, "network_args"));
        check_arguments(import, &arguments);
        arguments
    }

    pub(super) fn get(&self, name: &str) -> Option<&Argument> {
        self.0.iter().find(|argument| argument.name == name)
    }

    /// Whether an argument is there and not off.
    pub(super) fn is_on(&self, name: &str) -> bool {
        self.get(name).is_some_and(|argument| !argument.is_off())
    }

    /// Whether an argument is there with a text that LyCORIS takes for true.
    pub(super) fn is_not_false(&self, name: &str) -> bool {
        self.get(name).is_some_and(Argument::is_not_false)
    }

    /// The number of an argument; another text is an error.
    pub(super) fn number(&self, import: &mut Import<'_>, name: &str) -> Option<f64> {
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
    pub(super) fn chance(&self, import: &mut Import<'_>, name: &str) -> Option<f64> {
        self.number(import, name).filter(|chance| *chance != 0.0)
    }

    /// Whether an argument is a number other than 0.
    pub(super) fn is_chance(&self, name: &str) -> bool {
        self.get(name)
            .and_then(Argument::number)
            .is_some_and(|chance| chance != 0.0)
    }
}

/// Whether an argument of this name is translated.
pub(super) fn is_translated(name: &str) -> bool {
    TRANSLATED.iter().any(|(translated, _)| *translated == name)
}

/// Reports unknown arguments, and those that are refused.
fn check_arguments(import: &mut Import<'_>, arguments: &Arguments) {
    let module = import.settings.text("network_module");
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
        } else if is_translated(name) && !argument.is_off() {
            if let Some(module) = module.filter(|module| !reads(module, name)) {
                let message = format!(
                    "{name} is ignored, as in sd-scripts: {} does not have it",
                    super::settings::shortened(module)
                );
                import.note("network_args", message);
            }
        } else if !is_translated(name) && !WITHOUT_INFLUENCE.contains(&name) {
            let refused = REFUSED_ARGUMENTS.iter().map(|(name, _)| *name);
            let known = TRANSLATED
                .iter()
                .map(|(name, _)| *name)
                .chain(WITHOUT_INFLUENCE.iter().copied())
                .chain(refused);
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
