//! Ranks of layers: what contradicts them is an error at its key.

use super::JobError;
use super::tests::{MINIMAL, load_yaml};

/// The error about a network with these keys, if there is one.
fn problem(kind: &str, keys: &str) -> Option<String> {
    let network = format!("network: {{type: {kind}, linear: 8, {keys}}}");
    let text = MINIMAL.replace("network: {type: lora, linear: 8}", &network);
    assert!(text.contains(keys));
    match load_yaml(&text) {
        Ok(_) => None,
        Err(JobError::Invalid { findings }) => {
            assert_eq!(findings.len(), 1, "{keys}: {findings:?}");
            assert!(findings[0].line.is_some());
            Some(format!("{}: {}", findings[0].key, findings[0].message))
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn a_rank_stabilised_scale_needs_ranks() {
    let on = "network_kwargs: {rs_lora: true}";
    for kind in ["lora", "dora", "loha", "locon", "lokr"] {
        assert_eq!(problem(kind, on), None, "{kind}");
    }
    let found = problem("fullrank", on).unwrap();
    assert!(
        found.contains("network.network_kwargs.rs_lora: has no effect on `type: fullrank`"),
        "{found}"
    );
    let file = format!("ranks_of_pretrained_lora: true, pretrained_lora_path: a.safetensors, {on}");
    let found = problem("lora", &file).unwrap();
    assert!(
        found.contains("rs_lora: cannot be used together with `ranks_of_pretrained_lora`"),
        "{found}"
    );
}

#[test]
fn weights_of_types_with_two_factors_are_decomposed() {
    let on = "network_kwargs: {dora_wd: true, wd_on_out: false, module_dropout: 0.1}";
    for kind in ["lora", "locon", "lokr", "loha"] {
        assert_eq!(problem(kind, on), None, "{kind}");
    }
    for (kind, keys, expected) in [
        (
            "dora",
            on,
            "network_kwargs.dora_wd: `type: dora` has magnitudes already",
        ),
        (
            "lora",
            "dropout: 0.1, network_kwargs: {dora_wd: true}",
            "network.dropout: cannot be used together with `dora_wd: true`",
        ),
        (
            "locon",
            "network_kwargs: {dora_wd: true, rank_dropout: 0.1}",
            "network_kwargs.rank_dropout: cannot be used together with",
        ),
    ] {
        let found = problem(kind, keys).unwrap_or_else(|| panic!("{keys}"));
        assert!(found.contains(expected), "{found}");
    }
    assert_eq!(
        problem("loha", "network_kwargs: {dora_wd: true, rank_dropout: 0.1}"),
        None
    );
    let of_whole = problem("fullrank", "network_kwargs: {dora_wd: true}").unwrap();
    assert!(of_whole.contains("has no magnitudes"), "{of_whole}");
}

#[test]
fn matrices_are_split_of_a_lokr_alone() {
    for key in ["decompose_both", "unbalanced_factorization", "smaller_factor_first"] {
        let on = format!("network_kwargs: {{{key}: true}}");
        assert_eq!(problem("lokr", &on), None, "{key}");
        let found = problem("loha", &on).unwrap();
        assert!(
            found.contains(&format!("network_kwargs.{key}: is for `type: lokr`")),
            "{found}"
        );
    }
}

#[test]
fn a_number_that_multiplies_the_change_is_for_types_of_products() {
    let on = "network_kwargs: {use_scalar: true}";
    for kind in ["lora", "lokr", "loha", "locon"] {
        assert_eq!(problem(kind, on), None, "{kind}");
    }
    for kind in ["dora", "fullrank"] {
        let found = problem(kind, on).unwrap();
        assert!(
            found.contains("network_kwargs.use_scalar: is for `type: lora`, `lokr` and `loha`"),
            "{found}"
        );
    }
    for kind in ["lora", "lokr", "loha"] {
        assert_eq!(problem(kind, &format!("scale_weight_norms: 1, {on}")), None, "{kind}");
    }
}

/// Norms are trained as whole differences, of which nothing is dropped; LyCORIS drops them with `rank_dropout` and `module_dropout`.
#[test]
fn a_dropout_without_effect_on_norms_is_a_warning() {
    let warnings = |keys: &str| -> Vec<String> {
        let network = format!("network: {{type: loha, linear: 8, {keys}}}");
        let text = MINIMAL.replace("network: {type: lora, linear: 8}", &network);
        let loaded = load_yaml(&text).unwrap();
        let warnings = loaded.warnings.iter().map(ToString::to_string);
        warnings.filter(|warning| warning.contains("dropout")).collect()
    };
    for (dropout, norms) in [
        ("rank_dropout", "network_kwargs: {train_norm: true, rank_dropout: 0.1}"),
        (
            "module_dropout",
            "network_kwargs: {train_norm: true, module_dropout: 0.1}",
        ),
        (
            "module_dropout",
            "all_layers: true, network_kwargs: {module_dropout: 0.1}",
        ),
    ] {
        let found = warnings(norms);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].contains(&format!("network.network_kwargs.{dropout}: has no effect on what")),
            "{found:?}"
        );
    }
    for without in [
        "network_kwargs: {train_norm: true, rank_dropout: 0}",
        "network_kwargs: {rank_dropout: 0.1}",
    ] {
        assert!(warnings(without).is_empty(), "{without}");
    }
}

#[test]
fn ranks_of_layers_need_a_network_with_ranks() {
    let ranks = "layer_ranks: [{contains: attn1, linear: 0, conv_alpha: 2}]";
    let file = "ranks_of_pretrained_lora: true, pretrained_lora_path: a.safetensors";
    assert_eq!(problem("lora", file), None);
    for kind in ["lora", "dora", "loha", "locon"] {
        assert_eq!(problem(kind, ranks), None, "{kind}");
    }
    for (kind, keys, key, part) in [
        (
            "lora",
            "layer_ranks: [{linear: 3}]",
            "layer_ranks[0].contains",
            "needs a part of the names",
        ),
        (
            "lora",
            "layer_ranks: [{contains: a, linear: 20000}]",
            "layer_ranks[0].linear",
            "16384",
        ),
        (
            "lora",
            "layer_ranks: [{contains: a, conv_alpha: 2000000}]",
            "layer_ranks[0].conv_alpha",
            "1000000",
        ),
        ("fullrank", ranks, "network.layer_ranks", "which has no ranks"),
        ("lokr", ranks, "network.layer_ranks", "lokr_full_rank: true"),
        ("loha", file, "ranks_of_pretrained_lora", "is for `type: lora`"),
        (
            "lora",
            "ranks_of_pretrained_lora: true",
            "ranks_of_pretrained_lora",
            "needs `pretrained_lora_path`",
        ),
    ] {
        let found = problem(kind, keys).unwrap_or_else(|| panic!("{keys}"));
        assert!(found.contains(key) && found.contains(part), "{found}");
    }
    let both = problem("lora", &format!("{file}, {ranks}")).unwrap();
    assert!(
        both.contains("ranks_of_pretrained_lora: cannot be used together with `layer_ranks`"),
        "{both}"
    );
}
