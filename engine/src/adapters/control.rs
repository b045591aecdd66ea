//! Recognises the control LoRAs of FLUX.1 (Black Forest Labs' Canny and Depth), which cannot be used as plain LoRAs: they
//! widen the first layer, so that it reads a control image beside the latents, and change biases and norms.

/// Features of an image token of a control model: twice those of FLUX.1.
const CONTROL_FEATURES: usize = 128;

/// What to say about the file with these tensor names and shapes if it is a control LoRA.
pub(super) fn control_lora(keys: &[(String, Vec<usize>)]) -> Option<String> {
    let has = |part: &str| keys.iter().any(|(key, _)| key.contains(part));
    let is_of_first_layer = |key: &str| ["img_in", "x_embedder"].iter().any(|layer| key.contains(layer));
    // FLUX.2 reads as many features, but has no modulation in its blocks. A file with the first layer alone can be of either.
    let has_only_first_layer = keys.iter().all(|(key, _)| is_of_first_layer(key));
    let is_flux1 = has(".lora_B.bias") || has("img_mod") || has("norm1.linear") || has("norm1_linear");
    if !is_flux1 && !has_only_first_layer {
        return None;
    }
    let (key, features) = keys.iter().find_map(|(key, shape)| {
        let is_first = is_of_first_layer(key);
        let is_down = [".lora_A.", ".lora_down."].iter().any(|down| key.contains(down));
        let features = *shape.get(1)?;
        (is_first && is_down && features >= CONTROL_FEATURES).then_some((key, features))
    })?;
    let or_flux2 = if is_flux1 { "" } else { ", or a LoRA of FLUX.2" };
    Some(format!(
        "this is a control LoRA of FLUX.1 (Canny, Depth){or_flux2}: its `{key}` reads {features} features, those of a control image \
         included; control images are not supported yet, so use a LoRA of the plain model"
    ))
}
