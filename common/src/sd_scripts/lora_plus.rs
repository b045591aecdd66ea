//! `train.lr_factors`: the learning rates of text encoders, of blocks, and of LoRA+ of `network_args`, with which the second matrix of
//! each LoRA has a higher one (<https://arxiv.org/abs/2402.12354>).

use super::arguments::parse_arguments;
use super::block_ranks;
use super::block_rates::block_rates;
use super::optimizer::Rates;
use super::report::Import;

/// `train.lr_factors`. The first entry that a tensor's name has is used.
pub(super) fn lr_factors(import: &mut Import<'_>, rates: &Rates) -> Vec<(String, f64)> {
    if !import.script.trains_adapter() {
        return rates.factors.clone();
    }
    // What is not an argument is reported with the others of the network.
    let arguments = parse_arguments(import.settings, "network_args");
    // sd-scripts ignores ratios with dim_from_weights.
    let has_ratios = !import.settings.flag("dim_from_weights");
    let mut ratio = |name: &str| {
        let argument = arguments.iter().find(|argument| argument.name == name)?;
        if argument.is_off() {
            return None;
        }
        let ratio = argument.number().filter(|ratio| *ratio > 0.0);
        if ratio.is_none() {
            import.error(
                "network_args",
                format!(
                    "{name}: expected a number above 0, found \"{}\"",
                    argument.text.escape_debug()
                ),
            );
        }
        ratio
    };
    let both = ratio("loraplus_lr_ratio");
    let denoiser = ratio("loraplus_unet_lr_ratio")
        .or(both)
        .filter(|_| rates.trains_denoiser && has_ratios);
    let text = ratio("loraplus_text_encoder_lr_ratio")
        .or(both)
        .filter(|_| rates.trains_text_encoder && has_ratios);
    let blocks = block_rates(import, &arguments, block_ranks::has_convolutions(&arguments));
    let has_ratio = denoiser.is_some() || text.is_some();
    if has_ratio && import.settings.text("network_module") == Some("lycoris.kohya") {
        import.error(
            "network_args",
            "LoRA+ (loraplus_lr_ratio) is for networks.lora, networks.lora_flux and networks.lora_sd3",
        );
    }
    let (up, texts) = match import.script.is_flow() {
        true => ("lora_B", "text_encoder"),
        false => ("lora_up", "lora_te"),
    };
    let mut of_text = rates.factors.clone();
    // Otherwise the entry of all second matrices would be theirs.
    if of_text.is_empty() && rates.trains_text_encoder && has_ratio {
        of_text.push((texts.to_owned(), 1.0));
    }
    let mut factors = Vec::new();
    let mut push = |name: String, factor: f64, ratio: Option<f64>| {
        if let Some(ratio) = ratio {
            factors.push((format!("{name}*{up}"), factor * ratio));
        }
        factors.push((name, factor));
    };
    for (name, factor) in of_text {
        push(name, factor, text);
    }
    // A block of weight 0 has no LoRA.
    for block in blocks {
        if rates.trains_denoiser && block.weight != 1.0 && block.weight != 0.0 {
            push(block.flattened(), block.weight, denoiser);
        }
    }
    factors.extend(denoiser.map(|ratio| (up.to_owned(), ratio)));
    factors
}
