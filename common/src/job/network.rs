//! `network`: the adapter (LoRA, LoCon, DoRA, LoKr, LoHa, whole differences) that is trained while the base model is frozen.

use super::declare::{choices, section};
use super::layer_rank::LayerRank;
use super::limits::{MAX_FACTOR, MAX_LAYER_RANKS, MAX_RANK};
use super::lora_containers::{is_known, known_classes, target_classes};
use super::schema::{PresentKeys, ReadContext};
use super::values::{Integer, OneOrMany};

/// The ranks and alphas of `lokr_full_rank: true`, as in ai-toolkit: above every size of a weight.
pub const LOKR_FULL_RANK: u64 = 9_999_999_999;

choices! {
    /// Kind of network.
    pub enum NetworkType("network type") {
        /// Standard low rank.
        Lora = "lora", Works;
        /// Old slider configs; the same as `lora`.
        Lierla = "lierla", Works;
        /// LyCORIS LoCon: a LoRA of the blocks of a U-Net, with a trained factor for each layer.
        Locon = "locon", Works;
        /// The same as `locon`.
        Lycoris = "lycoris", Works;
        /// Kronecker product.
        Lokr = "lokr", Works;
        /// Element-wise product of two low-rank products, as LyCORIS; ai-toolkit has none.
        Loha = "loha", Works;
        /// Weight-decomposed LoRA: a LoRA and a magnitude for each output.
        Dora = "dora", Works;
        /// Whole differences of weights and biases, which start at zero.
        Fullrank = "fullrank", Works;
        /// Layers replaced by low-rank factors.
        Lorm = "lorm", Refused("ai-toolkit's own training with it stops with an error, because its layers return nothing (`lorm_forward`): use `lora`");
    }
}

section! {
    /// Options that ai-toolkit passes to the network's constructor. Names match by plain substring.
    pub struct NetworkKwargs("network_kwargs") {
        /// Only layers whose dotted or flattened name contains one of these.
        only_if_contains: Option<OneOrMany<String>> = None, Works;
        /// No layers whose dotted name contains one of these; wins over `only_if_contains`.
        ignore_if_contains: OneOrMany<String> = OneOrMany(Vec::new()), Works;
        /// Whole differences of weight and bias instead of the network's type for layers whose name contains one of these, and for such
        /// norms.
        full_if_contains: OneOrMany<String> = OneOrMany(Vec::new()), Works;
        /// Chance that a row of the down projection is dropped for an image while training; of `lokr` and `loha`, as in LyCORIS, that an
        /// output of a layer's change is dropped in a pass. Not for `fullrank`.
        rank_dropout: Option<f64> = None, Works;
        /// Chance that an output of a layer's change is dropped in a pass while training (ours): LyCORIS' `rank_dropout` of a LoRA; for
        /// `lora`, `locon` and `dora`.
        output_dropout: Option<f64> = None, Works;
        /// Chance that the whole change of a layer is dropped in a pass while training. Not for `fullrank`.
        module_dropout: Option<f64> = None, Works;
        /// Larger convolutions have a Tucker decomposition: a third matrix, with the kernel, between the two others, as LyCORIS'
        /// `use_tucker`. For `lora`, `locon`, `lokr` and `loha`.
        use_cp: bool = false, Works;
        /// The scale is alpha / sqrt(rank) in place of alpha / rank, as LyCORIS' `rs_lora` (ours). Not for `fullrank`, nor for models with a
        /// transformer.
        rs_lora: bool = false, Works;
        /// The weight with its change is normalised and multiplied with trained magnitudes, as LyCORIS' `dora_wd` (ours). Unlike `type: dora`,
        /// the norms get gradients. For `lora` and `locon` of U-Nets, and for `lokr` and `loha`.
        dora_wd: bool = false, Works;
        /// With `dora_wd`: a magnitude for each output of a layer; false: for each input.
        wd_on_out: bool = true, Works;
        /// A trained scalar multiplies the change of each layer. It starts at 0, so that no matrix has to, as LyCORIS' `use_scalar` (ours). For
        /// `lora`, `lokr` and `loha`; `locon` has it always.
        use_scalar: bool = false, Works;
        /// Also train differences of the norms, as `all_layers`, with LyCORIS' names in files: `….w_norm` and `….b_norm` (ours).
        train_norm: bool = false, Works;
        /// `type: lokr` without `lokr_full_rank`: the first matrix is a product of two matrices, too, where twice the rank is below its larger
        /// side, as LyCORIS' `decompose_both` (ours).
        decompose_both: bool = false, Works;
        /// `type: lokr`: the factors of the outputs change places, as with LyCORIS' `unbalanced_factorization` (ours).
        unbalanced_factorization: bool = false, Works;
        /// `type: lokr`: the first matrix has the smaller factor of each side, as in LyCORIS, also where `lokr_factor` is the larger one (ours).
        smaller_factor_first: bool = false, Works;
        /// U-Nets: train the first and the last convolution themselves beside the network.
        full_train_in_out: bool = false, Works;
        /// Skip layers with fewer weights and biases.
        parameter_threshold: u64 = 0, Works;
        /// U-Nets: class names in diffusers (`Transformer2DModel`) of the modules in which layers get a LoRA; empty: all layers do. Of models
        /// with a transformer it has no effect, as in ai-toolkit.
        target_lin_modules: OneOrMany<String> = OneOrMany(Vec::new()), Works;
        /// The same, in addition, if convolutions get a LoRA (`conv`).
        target_conv_modules: OneOrMany<String> = OneOrMany(Vec::new()), Works;
        /// No effect, as in ai-toolkit.
        attn_only: bool = false, Accepted("never had an effect");
        /// Print each layer.
        varbose: bool = false, Accepted("only prints more");
    }
}

section! {
    /// The adapter (LoRA) that is trained while the base model is frozen.
    pub struct NetworkConfig("network") {
        /// Kind of network.
        kind as "type": NetworkType = NetworkType::Lora, Works;
        /// Rank for linear layers and 1x1 convolutions.
        linear: u32 = 4, Works;
        /// Older name of `linear`; wins if both are given.
        rank: Option<u32> = None, Works;
        /// Older name of `linear_alpha`, used when that is absent.
        alpha: f64 = 1.0, Works;
        /// The LoRA's output is scaled by alpha / rank; 0 means the rank. No effect on transformer models, where the scale is 1.
        linear_alpha: f64 = 1.0, Works, shown "`alpha`";
        /// Rank for larger convolutions; null skips them.
        conv: Option<u32> = None, Works;
        /// Alpha for larger convolutions.
        conv_alpha: Option<f64> = None, Works, shown "`conv`";
        /// Other ranks and alphas for some of the layers; the first entry whose text is in a layer's name is used.
        layer_ranks: Vec<LayerRank> = Vec::new(), Works;
        /// Chance that an input of the up projection is dropped while training; for `lora`, `locon` and `dora`.
        dropout: Option<f64> = None, Works;
        /// sd-scripts' limit of the norm of each layer's change, after each step; 1 is usual. Only for `lora`, `lokr` and `loha`.
        scale_weight_norms: Option<f64> = None, Works;
        /// Layer filters and other options.
        network_kwargs: NetworkKwargs = NetworkKwargs::default(), Works;
        /// Transformer models: only layers inside the repeated blocks.
        transformer_only: bool = true, Works;
        /// `type: lokr`: no low-rank split of the second matrix, on linear layers and all convolutions. `linear`, `conv` and the alphas
        /// have no effect then.
        lokr_full_rank: bool = true, Works;
        /// `type: lokr`: the first factor of each side of a weight where it divides that side; -1 splits as square as possible.
        lokr_factor: Integer = Integer(-1), Works;
        /// `type: lokr` of transformer models: the names `lycoris_…` of older files, and the alphas of the config.
        old_lokr_format: bool = false, Works;
        /// Wan 2.2 14B: two files, one per expert.
        split_multistage_loras: bool = true, Accepted("only Wan 2.2 14B uses it");
        /// Keep the network's weights in RAM.
        layer_offloading: bool = false, Ignored("saves memory only; the LoRA stays on the device");
        /// Start from this LoRA if the run has no checkpoint yet.
        pretrained_lora_path: Option<String> = None, Works, input Lora;
        /// `type: lora`: train the layers that `pretrained_lora_path` has, each with its rank and alpha there. Memory is planned for
        /// `linear` and `conv`: set them to the largest ranks of the file.
        ranks_of_pretrained_lora: bool = false, Works;
        /// Also train whole differences of weight and bias for the norms of the U-Net or transformer.
        all_layers: bool = false, Works;
    }
    rare {
        "lorm" => DependsOn("type: lorm");
    }
    finish = finish;
}

fn finish(network: &mut NetworkConfig, present: &PresentKeys, cx: &mut ReadContext) {
    if let Some(rank) = network.rank {
        if present.has("linear") && rank != network.linear {
            cx.warn_at(
                "rank",
                format!(
                    "`rank` is the older name of `linear` and wins: the rank is {rank}, not {}",
                    network.linear
                ),
            );
        }
        network.linear = rank;
    }
    if !present.has("linear_alpha") {
        network.linear_alpha = network.alpha;
    }
    if network.conv == Some(0) {
        network.conv = None;
    }
    if network.conv_alpha.is_none() {
        network.conv_alpha = network.conv.map(f64::from);
    }
    if network
        .network_kwargs
        .only_if_contains
        .as_ref()
        .is_some_and(|parts| parts.is_empty())
    {
        network.network_kwargs.only_if_contains = None;
    }
    if let Some(max) = network.scale_weight_norms {
        if max == 0.0 {
            network.scale_weight_norms = None;
        }
        cx.check_in_range("scale_weight_norms", max, 0.0..=MAX_FACTOR);
        let limited = [
            NetworkType::Lora,
            NetworkType::Lierla,
            NetworkType::Lokr,
            NetworkType::Loha,
        ];
        if max != 0.0 && !limited.contains(&network.kind) {
            let message = format!(
                "limits the norms of a LoRA, LoKr or LoHa, and not of `type: {}`",
                network.kind
            );
            cx.error_at("scale_weight_norms", message);
        }
        let without_lora = [
            (
                !network.network_kwargs.full_if_contains.is_empty(),
                "network_kwargs.full_if_contains",
            ),
            (
                network.network_kwargs.full_train_in_out,
                "network_kwargs.full_train_in_out",
            ),
            (network.all_layers, "all_layers"),
        ];
        for (_, key) in without_lora.into_iter().filter(|(on, _)| max != 0.0 && *on) {
            let message = format!("cannot be used together with `{key}`, whose layers have no LoRA");
            cx.error_at("scale_weight_norms", message);
        }
    }
    let containers = [
        ("target_lin_modules", &network.network_kwargs.target_lin_modules),
        ("target_conv_modules", &network.network_kwargs.target_conv_modules),
    ];
    for (key, classes) in containers {
        if let Some(class) = classes.iter().find(|class| !is_known(class)) {
            let message = format!(
                "`{class}` is not a known class of a U-Net's modules: expected {}",
                known_classes()
            );
            cx.error_at(&format!("network_kwargs.{key}"), message);
        }
    }
    let without_effect = [
        (
            !network.network_kwargs.target_lin_modules.is_empty(),
            "network_kwargs.target_lin_modules",
        ),
        (
            !network.network_kwargs.target_conv_modules.is_empty(),
            "network_kwargs.target_conv_modules",
        ),
        (
            network.network_kwargs.full_train_in_out,
            "network_kwargs.full_train_in_out",
        ),
        (network.all_layers, "all_layers"),
    ];
    let is_locon = matches!(network.kind, NetworkType::Locon | NetworkType::Lycoris);
    for (_, key) in without_effect.into_iter().filter(|(on, _)| *on && is_locon) {
        let message = format!(
            "has no effect on `type: {}` in ai-toolkit: remove it, or use `type: lora`",
            network.kind
        );
        cx.error_at(key, message);
    }
    let key = if network.rank.is_some() { "rank" } else { "linear" };
    if network.linear == 0 {
        cx.error_at(key, "the rank must be at least 1");
    }
    cx.check_at_most(key, network.linear, MAX_RANK);
    for (key, value) in [
        ("alpha", network.alpha),
        ("linear_alpha", network.linear_alpha),
        ("conv_alpha", network.conv_alpha.unwrap_or(1.0)),
    ] {
        // `linear_alpha` follows `alpha`: one error for both.
        if key != "linear_alpha" || present.has(key) {
            cx.check_in_range(key, value, -MAX_FACTOR..=MAX_FACTOR);
        }
    }
    cx.check_at_most("conv", network.conv.unwrap_or(0), MAX_RANK);
    check_dropout(network, cx);
    check_tucker(network, cx);
    check_rank_stabilised(network, cx);
    check_weight_decomposition(network, cx);
    check_lokr_splits(network, cx);
    check_scalar(network, cx);
    check_layer_ranks(network, cx);
    check_ranks_of_file(network, cx);
    if network.kind == NetworkType::Lokr {
        finish_lokr(network, cx);
    }
}

fn check_tucker(network: &NetworkConfig, cx: &mut ReadContext) {
    if !network.network_kwargs.use_cp {
        return;
    }
    let key = "network_kwargs.use_cp";
    match network.kind {
        NetworkType::Dora | NetworkType::Fullrank => {
            let message = format!(
                "a network of `type: {}` has no such decomposition: remove it",
                network.kind
            );
            cx.error_at(key, message);
        }
        NetworkType::Lokr if network.lokr_full_rank => {
            cx.warn_at(key, "has no effect with `lokr_full_rank: true`, which splits no matrix");
        }
        _ if network.conv.is_none() && network.layer_ranks.is_empty() && !network.ranks_of_pretrained_lora => {
            cx.warn_at(key, "has no effect without `conv`, the rank of larger convolutions");
        }
        _ => {}
    }
}

fn check_rank_stabilised(network: &NetworkConfig, cx: &mut ReadContext) {
    if !network.network_kwargs.rs_lora {
        return;
    }
    let key = "network_kwargs.rs_lora";
    match network.kind {
        NetworkType::Fullrank => {
            cx.error_at(key, "has no effect on `type: fullrank`, which has no ranks: remove it");
        }
        NetworkType::Lokr if network.lokr_full_rank => {
            cx.warn_at(
                key,
                "has no effect with `lokr_full_rank: true`, whose matrices have no rank",
            );
        }
        _ if network.ranks_of_pretrained_lora => {
            cx.error_at(
                key,
                "cannot be used together with `ranks_of_pretrained_lora`, whose file has the alphas: remove one of them",
            );
        }
        _ => {}
    }
}

fn check_weight_decomposition(network: &NetworkConfig, cx: &mut ReadContext) {
    let (kind, kwargs) = (network.kind, &network.network_kwargs);
    if !kwargs.dora_wd {
        if !kwargs.wd_on_out {
            cx.warn_at("network_kwargs.wd_on_out", "has no effect without `dora_wd: true`");
        }
        return;
    }
    let key = "network_kwargs.dora_wd";
    match kind {
        NetworkType::Dora => {
            cx.error_at(
                key,
                "`type: dora` has magnitudes already: remove the key, or use it with `type: lora`, whose norms get gradients then",
            );
        }
        NetworkType::Fullrank => {
            cx.error_at(key, "a network of `type: fullrank` has no magnitudes: remove it");
        }
        _ => {}
    }
    if !matches!(
        kind,
        NetworkType::Lora | NetworkType::Lierla | NetworkType::Locon | NetworkType::Lycoris
    ) {
        return;
    }
    for (dropped, chance) in [
        ("dropout", network.dropout),
        ("network_kwargs.rank_dropout", kwargs.rank_dropout),
    ] {
        if chance.is_some_and(|chance| chance > 0.0) {
            cx.error_at(
                dropped,
                "cannot be used together with `dora_wd: true`, as in LyCORIS: remove it, or use `output_dropout` or `module_dropout`",
            );
        }
    }
}

fn check_lokr_splits(network: &NetworkConfig, cx: &mut ReadContext) {
    let kwargs = &network.network_kwargs;
    for (key, is_on) in [
        ("network_kwargs.decompose_both", kwargs.decompose_both),
        (
            "network_kwargs.unbalanced_factorization",
            kwargs.unbalanced_factorization,
        ),
        ("network_kwargs.smaller_factor_first", kwargs.smaller_factor_first),
    ] {
        if is_on && network.kind != NetworkType::Lokr {
            cx.error_at(
                key,
                format!("is for `type: lokr`, and not for `type: {}`: remove it", network.kind),
            );
        }
    }
    if kwargs.decompose_both && network.kind == NetworkType::Lokr && network.lokr_full_rank {
        let message = "has no effect with `lokr_full_rank: true`, which splits no matrix";
        cx.warn_at("network_kwargs.decompose_both", message);
    }
}

fn check_scalar(network: &NetworkConfig, cx: &mut ReadContext) {
    use NetworkType::{Dora, Fullrank};
    if !network.network_kwargs.use_scalar {
        return;
    }
    let key = "network_kwargs.use_scalar";
    if matches!(network.kind, Dora | Fullrank) {
        let message = format!(
            "is for `type: lora`, `lokr` and `loha`, and not for `type: {}`: remove it",
            network.kind
        );
        cx.error_at(key, message);
    }
}

fn check_layer_ranks(network: &NetworkConfig, cx: &mut ReadContext) {
    cx.check_item_count("layer_ranks", network.layer_ranks.len(), MAX_LAYER_RANKS);
    let problem = match network.kind {
        NetworkType::Lokr if network.lokr_full_rank => {
            "has no effect with `lokr_full_rank: true`: set that to false, or remove it"
        }
        NetworkType::Fullrank => "has no effect on `type: fullrank`, which has no ranks: remove it",
        _ => return,
    };
    if !network.layer_ranks.is_empty() {
        cx.error_at("layer_ranks", problem);
    }
}

fn check_ranks_of_file(network: &NetworkConfig, cx: &mut ReadContext) {
    if !network.ranks_of_pretrained_lora {
        return;
    }
    let problem = if network.pretrained_lora_path.is_none() {
        "needs `pretrained_lora_path`, the LoRA whose ranks are used"
    } else if !matches!(network.kind, NetworkType::Lora | NetworkType::Lierla) {
        "is for `type: lora`: set `linear` and `conv` to the ranks of the file"
    } else if !network.layer_ranks.is_empty() {
        "cannot be used together with `layer_ranks`: remove one of them"
    } else {
        return;
    };
    cx.error_at("ranks_of_pretrained_lora", problem);
}

/// Each type of network drops what the software that it is from drops.
fn check_dropout(network: &NetworkConfig, cx: &mut ReadContext) {
    use NetworkType::{Fullrank, Loha, Lokr};
    let (kind, kwargs) = (network.kind, &network.network_kwargs);
    for (key, chance) in [
        ("dropout", network.dropout),
        ("network_kwargs.rank_dropout", kwargs.rank_dropout),
        ("network_kwargs.output_dropout", kwargs.output_dropout),
        ("network_kwargs.module_dropout", kwargs.module_dropout),
    ] {
        let Some(chance) = chance else { continue };
        let is_refused = match kind {
            Lokr | Loha => key == "dropout",
            _ => kind == Fullrank,
        };
        if !(0.0..1.0).contains(&chance) {
            cx.error_at(key, "expected a chance from 0 to below 1");
        } else if chance > 0.0 && is_refused {
            cx.error_at(
                key,
                format!("a network of `type: {kind}` is trained without it: remove this key, or use `type: lora`"),
            );
        } else if chance > 0.0 && key.ends_with("output_dropout") && matches!(kind, Lokr | Loha) {
            cx.error_at(
                key,
                format!("of `type: {kind}` it is called `rank_dropout`, as in LyCORIS: use that key"),
            );
        } else if chance > 0.0
            && let Some(whole) = whole_differences(network)
        {
            cx.warn_at(
                key,
                format!("has no effect on what `{whole}` trains: whole differences are not dropped"),
            );
        }
    }
}

/// The key by which norms, or some layers, are trained as whole differences beside the network.
fn whole_differences(network: &NetworkConfig) -> Option<&'static str> {
    let kwargs = &network.network_kwargs;
    let keys = [
        ("network_kwargs.train_norm", kwargs.train_norm),
        ("all_layers", network.all_layers),
        ("network_kwargs.full_if_contains", !kwargs.full_if_contains.is_empty()),
    ];
    keys.into_iter().find(|(_, is_on)| *is_on).map(|(key, _)| key)
}

fn finish_lokr(network: &NetworkConfig, cx: &mut ReadContext) {
    let factor = *network.lokr_factor;
    if factor < 1 && factor != -1 {
        cx.error_at(
            "lokr_factor",
            "expected -1 (as square as possible), or a whole number from 1",
        );
    }
}
impl NetworkConfig {
    /// The classes of the modules in which the layers of a U-Net get a LoRA. Empty: all do. As in ai-toolkit, `target_conv_modules` counts
    /// if convolutions get a rank, and then for every kind of layer.
    #[must_use]
    pub fn target_classes(&self) -> Vec<String> {
        let (linear, conv) = (
            &self.network_kwargs.target_lin_modules,
            &self.network_kwargs.target_conv_modules,
        );
        target_classes(linear, conv, self.has_conv_rank())
    }

    /// Whether convolutions with a kernel above 1x1 get an adapter.
    fn has_conv_rank(&self) -> bool {
        self.conv.is_some() || (self.kind == NetworkType::Lokr && self.lokr_full_rank)
    }
}
