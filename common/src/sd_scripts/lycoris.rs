//! Networks of LyCORIS (`network_module: lycoris.kohya`): `algo`, and the arguments that only they have.

use super::arguments::Argument;
use super::network_arguments::Arguments;
use super::report::{Import, Section, number};
use super::script::ScriptFamily;
use crate::job::limits::MAX_RANK;
use serde_json::json;

/// `LoConModule`, `LohaModule` and `LokrModule` of LyCORIS drop numbers of a layer's input and output in their bypass mode alone.
const DROPS_NOTHING: &str = "ignored, as by LyCORIS, which drops nothing with it without bypass_mode";

/// And with it numbers of the change's output.
const DROPS_OUTPUTS: &str =
    "with bypass_mode LyCORIS drops numbers of the change's output, which aitk does not: remove one of them";

/// Arguments that are true or false, which LyCORIS takes for true whatever their text is but `False`.
const FLAGS: &[&str] = &[
    "use_scalar",
    "train_norm",
    "dora_wd",
    "wd_on_output",
    "full_matrix",
    "bypass_mode",
    "rs_lora",
    "unbalanced_factorization",
    "use_tucker",
    "use_cp",
    "use_conv_cp",
];

/// Whether an argument is there with a value that is off.
fn is_false(argument: &Argument) -> bool {
    argument.is_off() && !argument.text.is_empty()
}

/// The argument that says whether larger convolutions have a Tucker decomposition. LyCORIS joins the texts of its names with `or`, and from
/// version 3 on takes the other names for `use_tucker`, also `disable_conv_cp`.
fn decomposing(arguments: &Arguments) -> Option<&Argument> {
    let first = ["use_conv_cp", "use_cp"].into_iter();
    let mut first = first.filter_map(|name| arguments.get(name).filter(|argument| !argument.text.is_empty()));
    let others = ["disable_conv_cp", "use_tucker", "use_conv_cp", "use_cp"];
    first
        .next()
        .or_else(|| others.into_iter().find_map(|name| arguments.get(name)))
}

/// The algorithm of a LyCORIS network.
fn algorithm(arguments: &Arguments) -> String {
    arguments
        .get("algo")
        .map_or("lora", |argument| argument.text.as_str())
        .to_lowercase()
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
    is_lokr && (arguments.is_not_false("full_matrix") || (is_whole(rank) && is_whole(conv.unwrap_or(rank))))
}

/// `rank_dropout`, of which LyCORIS drops rows of the weight's change.
pub(super) fn lycoris_rank_dropout(import: &mut Import<'_>, arguments: &Arguments, kwargs: &mut Section) {
    let is_lora = matches!(algorithm(arguments).as_str(), "lora" | "locon" | "");
    let bypasses = arguments.is_not_false("bypass_mode");
    let rank_dropout = arguments.chance(import, "rank_dropout");
    if bypasses && is_lora && rank_dropout.is_some() {
        let message = "bypass_mode: LyCORIS drops rows of the first matrix with it, and rank_dropout is one chance for all images of a batch: \
                       remove one of them";
        import.error("network_args", message);
    } else if bypasses && rank_dropout.is_some() && algorithm(arguments) == "lokr" {
        import.note(
            "network_args",
            "rank_dropout: ignored, as by LyCORIS of a LoKr with bypass_mode",
        );
    } else if let Some(chance) = rank_dropout {
        let key = if is_lora { "output_dropout" } else { "rank_dropout" };
        kwargs.insert(key.into(), number(chance));
    }
}

/// LyCORIS: `algo` and what belongs to it.
pub(super) fn lycoris(import: &mut Import<'_>, arguments: &Arguments, rank: u64, alpha: f64, network: &mut Section) {
    let algo = algorithm(arguments);
    let kind = match algo.as_str() {
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
    for argument in &arguments.0 {
        if FLAGS.contains(&argument.name.as_str()) && argument.is_off() && argument.is_not_false() {
            let message = format!(
                "{}: LyCORIS takes any text but False for True, also \"{}\": write False to turn it off",
                argument.name,
                argument.text.escape_debug()
            );
            import.note("network_args", message);
        }
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
    let bypasses = arguments.is_not_false("bypass_mode");
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
        let is_stabilised = arguments.is_not_false("rs_lora");
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
        let is_whole = rank > u64::from(MAX_RANK) || arguments.is_not_false("full_matrix");
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
            json!(none_is_split || arguments.is_not_false("full_matrix")),
        );
    }
}

/// The arguments of a network whose `network` section [`lycoris`] wrote that go to `network_kwargs`.
pub(super) fn lycoris_kwargs(import: &mut Import<'_>, arguments: &Arguments, network: &Section, kwargs: &mut Section) {
    let decomposing = decomposing(arguments).filter(|argument| argument.is_not_false());
    let has_convolutions = network.contains_key("conv");
    if let Some(argument) = decomposing
        && has_convolutions
        && !splits_nothing(import, arguments)
    {
        kwargs.insert("use_cp".into(), json!(true));
        if argument.name == "disable_conv_cp" {
            let message = "disable_conv_cp: LyCORIS 3 and 4 take it for use_tucker, so that convolutions have a Tucker decomposition; remove it \
                           to train them without";
            import.note("network_args", message);
        }
    }
    if arguments.is_not_false("rs_lora") && splits_nothing(import, arguments) {
        let message = "rs_lora: LyCORIS multiplies the whole matrices of this LoKr with sqrt(network_dim) while it trains, and programs \
                       read its files without that factor: remove it";
        import.error("network_args", message);
    } else if arguments.is_not_false("rs_lora") {
        kwargs.insert("rs_lora".into(), json!(true));
    }
    if arguments.is_not_false("dora_wd") && arguments.is_not_false("bypass_mode") {
        let message = "dora_wd: with bypass_mode LyCORIS does not decompose the weights: remove one of them";
        import.error("network_args", message);
    } else if arguments.is_not_false("dora_wd") {
        kwargs.insert("dora_wd".into(), json!(true));
        if arguments
            .get("wd_on_output")
            .is_some_and(|argument| !argument.is_not_false())
        {
            kwargs.insert("wd_on_out".into(), json!(false));
        }
    }
    if network.get("type") == Some(&json!("lokr")) {
        // LyCORIS passes the text on, and any text is true.
        let splits_both = arguments
            .get("decompose_both")
            .is_some_and(|argument| !argument.text.is_empty());
        if splits_both && !splits_nothing(import, arguments) {
            kwargs.insert("decompose_both".into(), json!(true));
        }
        if arguments.is_not_false("unbalanced_factorization") {
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
    if arguments.is_not_false("use_scalar") {
        kwargs.insert("use_scalar".into(), json!(true));
    }
    if arguments.is_not_false("train_norm") {
        kwargs.insert("train_norm".into(), json!(true));
        if import.script.family() == ScriptFamily::Sd {
            // The only norm of the U-Net outside of the blocks.
            kwargs.insert("ignore_if_contains".into(), json!(["conv_norm_out"]));
        }
        if let Some(name) = ["rank_dropout", "module_dropout"]
            .into_iter()
            .find(|name| arguments.is_chance(name))
        {
            let message = format!(
                "train_norm: LyCORIS drops changes of norms too with {name}, which aitk does not: remove one of them"
            );
            import.error("network_args", message);
        }
    }
}
