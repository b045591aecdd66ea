//! Ranks of blocks, and those of a file. Names as `networks/lora.py` counts blocks (`get_block_index`).

use super::support::{base, folder, import_in, job};
use crate::job::Finding;
use crate::job::network::{NetworkConfig, NetworkType};
use crate::sd_scripts::{Imported, Script};

/// Text encoders are not trained.
const UNET_ONLY: &str = "network_train_unet_only = true\n";

/// Imports the small config of a script with these lines. `module`: in place of `networks.lora`.
fn import_with(script: Script, module: &str, lines: &str) -> Result<Imported, Vec<Finding>> {
    let folder = folder();
    let text = format!("{}{lines}\n", base(script).replace("networks.lora", module));
    import_in(folder.path(), &text, Some(script))
}

/// Imports a config of `train_network.py` that trains the U-Net alone.
fn import_unet_only(module: &str, lines: &str) -> Result<Imported, Vec<Finding>> {
    import_with(Script::TrainNetwork, module, &format!("{UNET_ONLY}{lines}"))
}

/// The `network` section of an imported config.
fn network_of(imported: &Imported) -> NetworkConfig {
    let job = job(&imported.yaml);
    job.process[0].trainer().unwrap().network.clone().unwrap()
}

/// The `network` section of a small config with these lines, and the notes.
fn network(script: Script, lines: &str) -> (NetworkConfig, Vec<String>) {
    let imported = import_with(script, "networks.lora", lines).unwrap();
    let notes = imported.notes.iter().map(ToString::to_string).collect();
    (network_of(&imported), notes)
}

/// Whether a note has this text.
fn has_note(imported: &Imported, text: &str) -> bool {
    imported.notes.iter().any(|note| note.message.contains(text))
}

/// Linear rank and alpha, and those of convolutions, of the layers of this name.
fn of(network: &NetworkConfig, name: &str) -> (Option<u32>, Option<f64>, Option<u32>, Option<f64>) {
    let entry = network.layer_ranks.iter().find(|entry| name.contains(&entry.contains));
    let entry = entry.unwrap_or_else(|| panic!("no entry for {name}"));
    (entry.linear, entry.linear_alpha, entry.conv, entry.conv_alpha)
}

fn list(first: u32, count: u32) -> String {
    let numbers: Vec<String> = (first..first + count).map(|number| number.to_string()).collect();
    numbers.join(",")
}

#[test]
fn blocks_have_their_own_ranks() {
    let arguments = format!(
        "network_args = [\"block_dims={}\", \"block_alphas={}\", \"conv_block_dims={}\", \"conv_alpha=0.5\"]",
        list(0, 25),
        list(100, 25),
        list(200, 25)
    );
    let (found, _) = network(Script::TrainNetwork, &arguments);
    let expected = |place: u32| (Some(place), Some(f64::from(100 + place)), Some(200 + place), Some(0.5));
    for (name, place) in [
        ("unet.down_blocks.0.resnets.0.conv1", 1),
        ("unet.down_blocks.0.downsamplers.0.conv", 3),
        ("unet.down_blocks.1.attentions.1.proj_in", 5),
        ("unet.down_blocks.3.resnets.1.conv2", 11),
        ("unet.mid_block.attentions.0.proj_in", 12),
        ("unet.up_blocks.0.upsamplers.0.conv", 15),
        ("unet.up_blocks.3.attentions.2.proj_out", 24),
    ] {
        assert_eq!(of(&found, name), expected(place), "{name}");
    }
    let only = found.network_kwargs.only_if_contains.unwrap();
    assert!(only.contains(&"resnets".to_owned()), "{only:?}");

    let arguments = format!("network_args = [\"block_dims={}\"]", list(0, 23));
    let (found, _) = network(Script::SdxlTrainNetwork, &arguments);
    for (name, place) in [
        ("unet.down_blocks.1.attentions.0.proj_in", 5),
        ("unet.mid_block.attentions.0.proj_in", 11),
        ("unet.up_blocks.1.attentions.2.proj_in", 18),
    ] {
        assert_eq!(of(&found, name), (Some(place), Some(1.0), None, None), "{name}");
    }
    // The rank of the network itself, 4, needs no entry, and blocks without attentions have no LoRA here.
    assert!(
        found
            .layer_ranks
            .iter()
            .all(|entry| entry.linear != Some(4) && entry.contains.contains("attentions"))
    );
}

/// sd-scripts makes no LoRA for a block of rank 0, whatever its weight: a factor for it would match no tensor.
#[test]
fn a_block_of_rank_0_has_no_factor_of_the_learning_rate() {
    let factors = |arguments: &str| -> Vec<String> {
        let lines = format!("network_args = [{arguments}]");
        let imported = import_with(Script::TrainNetwork, "networks.lora", &lines).unwrap();
        let job = job(&imported.yaml);
        let factors = job.process[0].trainer().unwrap().train.lr_factors.iter();
        factors.map(|factor| factor.contains.clone()).collect()
    };
    // Places 1 and 2 are the two attentions of the first block.
    let ranks = |second: u32| {
        let mut ranks = vec!["4".to_owned(); 25];
        ranks[2] = second.to_string();
        format!("\"block_dims={}\"", ranks.join(","))
    };
    let weights = "\"down_lr_weight=1,0.5,0.25,1,1,1,1,1,1,1,1,1\"";
    let [first, second] = ["down_blocks_0_attentions_0_", "down_blocks_0_attentions_1_"];
    let has = |found: &[String], name: &str| found.iter().any(|factor| factor == name);
    let found = factors(&format!("{}, {weights}", ranks(4)));
    assert!(has(&found, first) && has(&found, second), "{found:?}");
    let found = factors(&format!("{}, {weights}", ranks(0)));
    assert!(has(&found, first) && !has(&found, second), "{found:?}");
    // Samplers have no other layers than convolutions.
    let sampler = "down_blocks_1_downsamplers_0_";
    let weights_of_samplers = "\"down_lr_weight=1,1,1,1,1,1,0.5,1,1,1,1,1\"";
    let found = factors(&format!("{weights_of_samplers}, \"conv_dim=0\""));
    assert!(found.is_empty(), "{found:?}");
    let found = factors(&format!("{weights_of_samplers}, \"conv_dim=2\""));
    assert_eq!(found, [sampler]);
    // The convolutions of a block have a rank of their own.
    let resnet = "down_blocks_0_resnets_1_";
    let found = factors(&format!("{}, {weights}, \"conv_dim=2\"", ranks(0)));
    assert!(has(&found, resnet) && !has(&found, second), "{found:?}");
    let mut convolutions = vec!["2"; 25];
    convolutions[2] = "0";
    let found = factors(&format!(
        "{}, {weights}, \"conv_block_dims={}\"",
        ranks(0),
        convolutions.join(",")
    ));
    assert!(
        !has(&found, resnet) && has(&found, "down_blocks_0_resnets_0_"),
        "{found:?}"
    );
}

#[test]
fn alphas_of_blocks_count_beside_ranks_or_weights() {
    let alphas = format!("\"block_alphas={}\"", list(1, 25));
    let (found, notes) = network(Script::TrainNetwork, &format!("network_args = [{alphas}]"));
    assert!(found.layer_ranks.is_empty());
    assert!(
        notes
            .iter()
            .any(|note| note.contains("block_alphas is ignored without block_dims")),
        "{notes:?}"
    );
    let (found, notes) = network(
        Script::TrainNetwork,
        &format!("network_args = [{alphas}, \"mid_lr_weight=0.5\"]"),
    );
    assert_eq!(of(&found, "mid_block.x"), (Some(4), Some(13.0), None, None));
    assert!(!notes.iter().any(|note| note.contains("block_alphas")), "{notes:?}");
}

/// Blocks and convolutions have other ranks than the network, so that the rank is that of each layer.
#[test]
fn an_alpha_of_0_is_the_rank_of_each_layer() {
    let blocks = ["8"; 25].join(",");
    let lines = format!("network_dim = 16\nnetwork_alpha = 0\nnetwork_args = [\"block_dims={blocks}\"]");
    let (found, _) = network(Script::TrainNetwork, &lines);
    assert_eq!((found.linear, found.linear_alpha), (16, 0.0));
    let of_block = of(&found, "unet.down_blocks.0.attentions.0.proj_in");
    assert_eq!(of_block, (Some(8), Some(0.0), None, None));

    let lines = "network_dim = 16\nnetwork_alpha = 0\nnetwork_args = [\"conv_dim=4\"]";
    let found = network_of(&import_unet_only("lycoris.kohya", lines).unwrap());
    assert_eq!(
        (found.linear_alpha, found.conv, found.conv_alpha),
        (0.0, Some(4), Some(4.0))
    );

    // The scale of a transformer is 1.
    let (found, _) = network(Script::FluxTrainNetwork, "network_dim = 4");
    assert_eq!(found.linear_alpha, 4.0);
}

/// `networks/lora.py` adapts the blocks around convolutions as soon as `conv_dim` is given; `lycoris/kohya.py` reads it as text, so that
/// `0` is 0.
#[test]
fn convolutions_of_rank_0_have_no_lora_and_the_layers_beside_them_have_one() {
    for module in ["networks.lora", "lycoris.kohya"] {
        let lines = "network_args = [\"conv_dim=0\", \"conv_alpha=0\"]";
        let network = network_of(&import_with(Script::TrainNetwork, module, lines).unwrap());
        assert_eq!((network.linear, network.conv), (4, None), "{module}");
        let only = network.network_kwargs.only_if_contains;
        // LyCORIS adapts all of this U-Net.
        let has_resnets = only.is_none_or(|names| names.contains(&"resnets".to_owned()));
        assert!(has_resnets, "{module}");
    }
    let lines = "network_args = [\"conv_dim=8\", \"conv_alpha=0\", \"algo=lokr\", \"decompose_both=False\"]";
    let imported = import_with(Script::TrainNetwork, "lycoris.kohya", lines).unwrap();
    let network = network_of(&imported);
    assert_eq!((network.conv, network.conv_alpha), (Some(8), Some(8.0)));
    assert!(has_note(&imported, "takes any text for True"), "{:?}", imported.notes);
}

/// A LoKr of whole matrices has no ranks in a config of aitk, also none that leaves out convolutions.
#[test]
fn a_lokr_of_whole_matrices_has_no_convolutions_of_rank_0() {
    let import = |lines: &str| import_unet_only("lycoris.kohya", lines);
    for lines in [
        "network_args = [\"algo=lokr\", \"conv_dim=0\", \"full_matrix=True\"]",
        "network_dim = 100000\nnetwork_args = [\"algo=lokr\", \"conv_dim=0\", \"use_cp=True\"]",
    ] {
        let errors = import(lines).unwrap_err();
        assert!(
            errors.len() == 1
                && errors[0].key == "network_args"
                && errors[0]
                    .message
                    .starts_with("conv_dim=0: aitk's LoKr of whole matrices"),
            "{lines}: {errors:?}"
        );
    }
    for lines in [
        "network_args = [\"algo=lokr\", \"conv_dim=0\"]",
        "network_args = [\"algo=lokr\", \"full_matrix=True\"]",
        "network_args = [\"algo=loha\", \"conv_dim=0\"]",
    ] {
        import(lines).unwrap();
    }
}

/// `LoConModule.make_weight` and `get_weight` of LyCORIS zero rows of the weight's change; `networks/lora.py` rows of the first matrix.
#[test]
fn each_kind_of_network_drops_what_its_software_drops() {
    let import = |module: &str, algo: &str| {
        let arguments = "\"rank_dropout=0.25\", \"module_dropout=0.1\", \"rank_dropout_scale=True\"";
        let lines = format!("network_dropout = 0.125\nnetwork_args = [{algo}{arguments}]");
        let imported = import_unet_only(module, &lines).unwrap();
        let notes = imported
            .notes
            .iter()
            .filter(|note| note.key == "network_dropout")
            .count();
        let network = network_of(&imported);
        let kwargs = network.network_kwargs;
        assert_eq!(kwargs.module_dropout, Some(0.1), "{module} {algo}");
        (kwargs.rank_dropout, kwargs.output_dropout, network.dropout, notes)
    };
    let (some, module) = (Some(0.25), "lycoris.kohya");
    assert_eq!(import("networks.lora", ""), (some, None, Some(0.125), 0));
    for algo in ["", "\"algo=locon\", ", "\"algo=LoCon\", \"use_scalar=True\", "] {
        assert_eq!(import(module, algo), (None, some, None, 1), "{algo}");
    }
    for algo in ["\"algo=loha\", ", "\"algo=lokr\", "] {
        assert_eq!(import(module, algo), (some, None, None, 1), "{algo}");
    }
}

/// `create_network` of `lycoris/kohya.py` has three names for it, and takes the first one that is given.
#[test]
fn convolutions_of_lycoris_have_a_third_matrix() {
    let decomposes = |arguments: &str| {
        let imported = import_unet_only("lycoris.kohya", &format!("network_args = [{arguments}]")).unwrap();
        network_of(&imported).network_kwargs.use_cp
    };
    for algo in ["locon", "loha", "lokr"] {
        for name in ["use_tucker", "use_cp", "use_conv_cp", "disable_conv_cp"] {
            assert!(
                decomposes(&format!("\"algo={algo}\", \"{name}=True\"")),
                "{algo}, {name}"
            );
        }
        for off in [
            "\"use_cp=False\"",
            "\"disable_conv_cp=False\"",
            "\"use_cp=False\", \"use_tucker=True\"",
            "\"disable_conv_cp=False\", \"use_tucker=True\"",
            "\"disable_conv_cp=True\", \"use_cp=False\"",
            "\"use_tucker=True\", \"conv_dim=0\"",
        ] {
            assert!(!decomposes(&format!("\"algo={algo}\", {off}")), "{algo}, {off}");
        }
    }
    assert!(!decomposes("\"algo=lokr\", \"use_cp=True\", \"full_matrix=True\""));
}

/// `LokrModule` multiplies whole matrices with sqrt(network_dim), and its own files are read without that.
#[test]
fn rank_stabilised_networks_of_lycoris_are_trained_so() {
    let is_stabilised = |module: &str, arguments: &str| {
        let imported = import_unet_only(module, &format!("network_args = [{arguments}]")).unwrap();
        network_of(&imported).network_kwargs.rs_lora
    };
    for algo in ["locon", "loha", "lokr"] {
        let with = |value: &str| is_stabilised("lycoris.kohya", &format!("\"algo={algo}\", \"rs_lora={value}\""));
        assert!(with("True") && !with("False"), "{algo}");
    }
    assert!(!is_stabilised("networks.lora", "\"rs_lora=True\""));
    for lines in [
        "network_args = [\"algo=lokr\", \"rs_lora=True\", \"full_matrix=True\"]",
        "network_dim = 100000\nnetwork_args = [\"algo=lokr\", \"rs_lora=True\"]",
    ] {
        let errors = import_unet_only("lycoris.kohya", lines).unwrap_err();
        assert!(
            errors.len() == 1 && errors[0].message.starts_with("rs_lora: LyCORIS multiplies"),
            "{lines}: {errors:?}"
        );
    }
}

/// `bypass_forward` of LyCORIS' modules adds the product of the change to that of the weight. What it drops is not what
/// `_rebuild_forward` drops.
#[test]
fn a_change_that_is_computed_apart_is_the_same_without_dropout() {
    let import = |lines: &str| import_unet_only("lycoris.kohya", lines);
    let network_and_notes = |lines: &str| {
        let imported = import(lines).unwrap();
        let notes = ["LyCORIS 3 leaves", "of a LoKr with bypass_mode"].map(|text| has_note(&imported, text));
        (network_of(&imported), notes)
    };
    for algo in ["locon", "loha", "lokr"] {
        for dropout in ["", "\"module_dropout=0.1\", "] {
            let lines = |bypass: &str| {
                format!("network_dim = 8\nnetwork_alpha = 2\nnetwork_args = [{dropout}{bypass}\"algo={algo}\"]")
            };
            let (plain, _) = network_and_notes(&lines(""));
            let (apart, notes) = network_and_notes(&lines("\"bypass_mode=True\", "));
            assert_eq!((apart, notes), (plain, [algo == "lokr", false]), "{algo}");
        }
    }
    let lines =
        "network_dim = 8\nnetwork_alpha = 8\nnetwork_args = [\"algo=lokr\", \"bypass_mode=True\", \"rs_lora=True\"]";
    assert_eq!(network_and_notes(lines).1, [true, false]);
    let (of_loha, _) = network_and_notes("network_args = [\"algo=loha\", \"bypass_mode=True\", \"rank_dropout=0.2\"]");
    assert_eq!(of_loha.network_kwargs.rank_dropout, Some(0.2));
    let lines = "network_dim = 8\nnetwork_alpha = 8\nnetwork_args = [\"algo=lokr\", \"bypass_mode=True\", \"rank_dropout=0.2\"]";
    let (of_lokr, notes) = network_and_notes(lines);
    assert_eq!((of_lokr.network_kwargs.rank_dropout, notes), (None, [false, true]));
    for (lines, key, part) in [
        (
            "network_args = [\"bypass_mode=True\", \"rank_dropout=0.2\"]",
            "network_args",
            "bypass_mode: LyCORIS drops rows",
        ),
        (
            "network_args = [\"algo=loha\", \"bypass_mode=True\", \"dropout=0.2\"]",
            "network_args",
            "dropout: with bypass_mode LyCORIS drops",
        ),
        (
            "network_dropout = 0.2\nnetwork_args = [\"bypass_mode=True\"]",
            "network_dropout",
            "with bypass_mode LyCORIS drops",
        ),
    ] {
        let errors = import(lines).unwrap_err();
        assert!(
            errors.len() == 1 && errors[0].key == key && errors[0].message.starts_with(part),
            "{lines}: {errors:?}"
        );
    }
}

/// `weight_decompose` and `wd_on_out` of LyCORIS' modules.
#[test]
fn weights_are_decomposed_as_by_lycoris() {
    let import = |module: &str, arguments: &str| import_unet_only(module, &format!("network_args = [{arguments}]"));
    let decomposes = |module: &str, arguments: &str| {
        let kwargs = network_of(&import(module, arguments).unwrap()).network_kwargs;
        (kwargs.dora_wd, kwargs.wd_on_out)
    };
    for algo in ["locon", "loha", "lokr"] {
        for (arguments, expected) in [
            ("\"dora_wd=True\"", (true, true)),
            ("\"dora_wd=True\", \"wd_on_output=True\"", (true, true)),
            ("\"dora_wd=True\", \"wd_on_output=False\"", (true, false)),
            ("\"dora_wd=False\", \"wd_on_output=False\"", (false, true)),
            ("\"dora_wd=True\", \"rank_dropout=0.1\"", (true, true)),
        ] {
            let arguments = format!("\"algo={algo}\", {arguments}");
            assert_eq!(decomposes("lycoris.kohya", &arguments), expected, "{arguments}");
        }
    }
    assert!(!decomposes("networks.lora", "\"dora_wd=True\"").0);
    let imported = import("networks.lora", "\"dora_wd=True\", \"rank_dropout=0.1\", \"algo=\"").unwrap();
    let notes = imported.notes.iter().filter(|note| note.key == "network_args");
    let notes: Vec<&str> = notes.map(|note| note.message.as_str()).collect();
    assert_eq!(
        notes,
        ["dora_wd is ignored, as in sd-scripts: networks.lora does not have it"]
    );
    let errors = import("lycoris.kohya", "\"dora_wd=True\", \"bypass_mode=True\"").unwrap_err();
    assert!(
        errors.len() == 1 && errors[0].message.starts_with("dora_wd: with bypass_mode"),
        "{errors:?}"
    );
}

/// `str_bool` of `lycoris/utils`: only `False` is false.
#[test]
fn flags_of_lycoris_are_on_whatever_their_text_is_but_false() {
    let sd = base(Script::TrainNetwork).replace("networks.lora", "lycoris.kohya");
    let import = |argument: &str| {
        let folder = folder();
        let arguments = format!("[\"algo=loha\", \"dora_wd=True\", \"{argument}\"]");
        let text = format!("{sd}network_train_unet_only = true\nnetwork_args = {arguments}\n");
        let imported = import_in(folder.path(), &text, Some(Script::TrainNetwork)).unwrap();
        let notes = imported.notes.iter().map(ToString::to_string).collect::<Vec<_>>();
        let network = job(&imported.yaml).process[0].trainer().unwrap().network.clone();
        let has_note = notes.iter().any(|note| note.contains("any text but False"));
        (network.unwrap().network_kwargs, has_note)
    };
    for (text, is_on, has_note) in [
        ("True", true, false),
        ("false", false, false),
        ("0", true, true),
        ("None", true, true),
        ("", true, true),
    ] {
        let (scalar, of_scalar) = import(&format!("use_scalar={text}"));
        assert_eq!((scalar.use_scalar, of_scalar), (is_on, has_note), "{text}");
        let (norms, of_norms) = import(&format!("train_norm={text}"));
        assert_eq!((norms.train_norm, of_norms), (is_on, has_note), "{text}");
        let (outputs, of_outputs) = import(&format!("wd_on_output={text}"));
        assert_eq!((outputs.wd_on_out, of_outputs), (is_on, has_note), "{text}");
        let (cores, of_cores) = import(&format!("use_tucker={text}"));
        assert_eq!((cores.use_cp, of_cores), (is_on, has_note), "{text}");
    }
}

/// `use_scalar` of LyCORIS' modules. `type: locon` would leave out the layers outside of the blocks.
#[test]
fn changes_have_a_trained_number_as_of_lycoris() {
    let sd = base(Script::TrainNetwork).replace("networks.lora", "lycoris.kohya");
    let import = |lines: &str| {
        let folder = folder();
        let text = format!("{sd}network_train_unet_only = true\n{lines}\n");
        import_in(folder.path(), &text, Some(Script::TrainNetwork))
    };
    for (algo, kind) in [
        ("locon", NetworkType::Lora),
        ("loha", NetworkType::Loha),
        ("lokr", NetworkType::Lokr),
    ] {
        let lines = format!("network_args = [\"algo={algo}\", \"use_scalar=True\"]");
        let imported = import(&lines).unwrap();
        let network = job(&imported.yaml).process[0].trainer().unwrap().network.clone();
        let network = network.unwrap();
        assert_eq!(
            (network.kind, network.network_kwargs.use_scalar),
            (kind, true),
            "{algo}"
        );
        let imported = import(&format!("scale_weight_norms = 1\n{lines}")).unwrap();
        let network = job(&imported.yaml).process[0].trainer().unwrap().network.clone();
        let network = network.unwrap();
        assert_eq!(
            (network.network_kwargs.use_scalar, network.scale_weight_norms),
            (true, Some(1.0)),
            "{algo}"
        );
    }
}

/// `NormModule` of LyCORIS: the norms in the blocks of the U-Net.
#[test]
fn norms_are_trained_as_by_lycoris() {
    let import = |script: Script, module: &str, arguments: &str| {
        import_with(script, module, &format!("{UNET_ONLY}network_args = [{arguments}]"))
    };
    let kwargs = |script: Script, module: &str, arguments: &str| {
        network_of(&import(script, module, arguments).unwrap()).network_kwargs
    };
    let on = "\"algo=loha\", \"train_norm=True\"";
    let of_sd = kwargs(Script::TrainNetwork, "lycoris.kohya", on);
    assert!(of_sd.train_norm && of_sd.only_if_contains.is_none());
    assert_eq!(of_sd.ignore_if_contains.0, ["conv_norm_out"]);
    let of_sdxl = kwargs(Script::SdxlTrainNetwork, "lycoris.kohya", on);
    // Its name has none of the blocks in it.
    assert!(of_sdxl.train_norm && of_sdxl.ignore_if_contains.0.is_empty());
    let blocks = of_sdxl.only_if_contains.unwrap();
    assert!(
        blocks
            .iter()
            .all(|block| !"unet.conv_norm_out".contains(block.as_str()))
    );
    assert!(!kwargs(Script::TrainNetwork, "lycoris.kohya", "\"train_norm=False\"").train_norm);
    assert!(!kwargs(Script::TrainNetwork, "networks.lora", "\"train_norm=True\"").train_norm);
    for dropout in ["rank_dropout=0.1", "module_dropout=0.1"] {
        let arguments = format!("\"{dropout}\", \"train_norm=True\"");
        let errors = import(Script::TrainNetwork, "lycoris.kohya", &arguments).unwrap_err();
        assert!(
            errors.len() == 1 && errors[0].message.starts_with("train_norm: LyCORIS drops"),
            "{errors:?}"
        );
    }
}

/// `LokrModule` and `factorization` of LyCORIS; `create_network` of `lycoris/kohya.py` takes any text of decompose_both for True.
#[test]
fn a_lokr_of_lycoris_is_split_as_there() {
    let kwargs = |arguments: &str| {
        let imported = import_unet_only("lycoris.kohya", &format!("network_args = [{arguments}]")).unwrap();
        let kwargs = network_of(&imported).network_kwargs;
        let splits = [
            kwargs.decompose_both,
            kwargs.unbalanced_factorization,
            kwargs.smaller_factor_first,
        ];
        (splits, has_note(&imported, "takes any text for True"))
    };
    let of = |arguments: &str| kwargs(&format!("\"algo=lokr\", {arguments}"));
    assert_eq!(of("\"factor=-1\""), ([false; 3], false));
    assert_eq!(of("\"decompose_both=True\""), ([true, false, false], false));
    assert_eq!(of("\"decompose_both=False\""), ([true, false, false], true));
    assert_eq!(of("\"decompose_both=\""), ([false; 3], false));
    assert_eq!(of("\"decompose_both=True\", \"full_matrix=True\""), ([false; 3], false));
    assert_eq!(of("\"unbalanced_factorization=True\""), ([false, true, false], false));
    assert_eq!(
        of("\"unbalanced_factorization=False\", \"factor=8\""),
        ([false, false, true], false)
    );
    let of_loha = kwargs("\"algo=loha\", \"decompose_both=True\", \"unbalanced_factorization=True\", \"factor=8\"");
    assert_eq!(of_loha, ([false; 3], false));
}

#[test]
fn transformers_have_no_convolutions() {
    let (found, notes) = network(Script::Sd3TrainNetwork, "network_args = [\"conv_dim=4\"]");
    assert_eq!(found.conv, None);
    assert!(
        notes.iter().any(|note| note.contains("conv_dim is ignored")),
        "{notes:?}"
    );
}

#[test]
fn a_file_decides_the_ranks() {
    let lines = "dim_from_weights = true\nnetwork_weights = \"lora.safetensors\"\nnetwork_dim = 64\nnetwork_dropout = 0.1\n\
                 network_args = [\"conv_dim=4\", \"loraplus_lr_ratio=4\", \"rank_dropout=0.1\"]";
    let (found, notes) = network(Script::TrainNetwork, lines);
    assert!(found.ranks_of_pretrained_lora);
    assert_eq!((found.linear, found.conv), (6, Some(3)));
    assert_eq!((found.dropout, found.network_kwargs.rank_dropout), (None, None));
    for ignored in [
        "network_dim",
        "network_dropout",
        "conv_dim",
        "loraplus_lr_ratio",
        "rank_dropout",
    ] {
        assert!(notes.iter().any(|note| note.contains(ignored)), "{ignored}: {notes:?}");
    }
    let (found, _) = network(
        Script::FluxTrainNetwork,
        "dim_from_weights = true\nnetwork_weights = \"lora.safetensors\"",
    );
    assert!(found.ranks_of_pretrained_lora && found.network_kwargs.only_if_contains.is_none());
}
