//! Options of a config that change the memory or the work of a job.

use super::test_helpers::{GIB, gib, lora};
use super::*;
use crate::capability::DeviceKind;
use crate::plan::profile::MemoryProfile;
use serde_json::json;

/// `batch_img2img` runs only the last steps.
#[test]
fn image_to_image_is_as_much_work_as_its_steps() {
    let passes = |strength: f64| {
        let job = json!({"process": [{"kind": {"img2_img": {"model": {"arch": "sd1", "dtype": "float32"},
            "datasets": [{"resolution": [512]}],
            "generate": {"sample_steps": 40, "guidance_scale": 7.0, "denoise_strength": strength}}}}]});
        Demand::of_job(&job, None, &[]).unwrap().passes()
    };
    let [none, fifth, half, all] = [0.0, 0.2, 0.5, 1.0].map(passes);
    // An image is decoded in any case.
    assert!(((half - none) / (all - none) - 0.5).abs() < 1e-3, "{none} {half} {all}");
    assert!(
        ((fifth - none) / (all - none) - 0.2).abs() < 1e-3,
        "{none} {fifth} {all}"
    );
}

#[test]
fn what_a_data_set_says_about_its_images_counts() {
    let need = |sets: Value| {
        let mut job = lora("sd1", 512, "float32", 16);
        job["process"][0]["kind"]["train"]["datasets"] = sets;
        let need = Demand::of_job(&job, None, &[]).unwrap().memory.unwrap();
        need.under(MemoryProfile::CpuOnly, DeviceKind::Cpu)
    };
    // The size of its images takes the place of their resolution.
    let square = need(json!([{"resolution": [768]}]));
    assert_eq!(
        need(json!([{"resolution": [512], "buckets": false, "size": [768, 768]}])),
        square
    );
    assert!(need(json!([{"resolution": [512], "buckets": false, "size": [1024, 768]}])) > square);
    // Images are encoded while the model is in memory, unless all latents are cached.
    let cached = need(json!([{"resolution": [512], "cache_latents": true}]));
    let with_controls = json!([{"resolution": [512], "cache_latents": true, "control_from_same_folder": true}]);
    assert_eq!(need(with_controls), need(json!([{"resolution": [512]}])));
    assert!(cached < need(json!([{"resolution": [512]}])));
    let sized = json!({"resolution": [256], "buckets": false, "size": [512, 512]});
    let mixed = need(json!([{"resolution": [512], "cache_latents": true}, sized]));
    assert_eq!(mixed, need(json!([{"resolution": [512]}])));
}

/// The table of the text encoder has 38 million numbers, which are read from its file and written in float16.
#[test]
fn the_save_of_a_merged_network_is_that_of_a_whole_model() {
    let need = |merges: bool| {
        let mut job = lora("sd1", 256, "float32", 4);
        let body = job.pointer_mut("/process/0/kind/train").unwrap();
        body["datasets"] = json!([{"resolution": [256]}]);
        body["train"]["merge_network_on_save"] = json!(merges);
        let need = Demand::of_job(&job, None, &[]).unwrap().memory.unwrap();
        need.under(MemoryProfile::CpuOnly, DeviceKind::Cpu) as f64 / GIB
    };
    let more = need(true) - need(false);
    assert!((0.05..0.6).contains(&more), "{more} GiB more");
}

#[test]
fn a_step_that_trains_a_share_of_the_tensors_has_their_gradients_alone() {
    let full = |changes: &[(&str, Value)]| {
        let mut job = lora("sd1", 512, "float32", 4);
        let body = job.pointer_mut("/process/0/kind/train").unwrap();
        body["network"] = json!(null);
        body["datasets"] = json!([{"resolution": [512], "cache_latents": true}]);
        body["train"]["optimizer"] = json!("adafactor");
        for (key, value) in changes {
            body["train"][*key] = value.clone();
        }
        gib(&job)[0]
    };
    let all = full(&[]);
    let share = |factor: f64| {
        full(&[
            ("do_paramiter_swapping", json!(true)),
            ("paramiter_swapping_factor", json!(factor)),
        ])
    };
    // 0.86 billion gradients of 4 bytes. Activations of a whole pass are beside those of a share.
    let (tenth, half) = (share(0.1), share(0.5));
    assert!((1.5..3.2).contains(&(all - tenth)), "{all} {tenth}");
    assert!((1.2..1.5).contains(&(half - tenth)), "{half} {tenth}");
    assert_eq!(full(&[("paramiter_swapping_factor", json!(0.1))]), all);
}

#[test]
fn parameters_of_an_optimizer_change_its_state() {
    let full = |optimizer: &str, params: Value| {
        let mut job = lora("sd1", 512, "float32", 4);
        let body = job.pointer_mut("/process/0/kind/train").unwrap();
        body["network"] = json!(null);
        body["train"]["optimizer"] = json!(optimizer);
        body["train"]["optimizer_params"] = params;
        gib(&job)[0]
    };
    // For each of 0.86 billion weights.
    for (optimizer, params, bytes) in [
        ("adafactor", json!({"beta1": 0.9}), 4.0),
        ("adafactor", json!({"beta1": null}), 0.0),
        ("prodigy", json!({"slice_p": 8}), -7.0),
        ("adamw8bit", json!({"min_8bit_size": 1_000_000_000}), 6.0),
    ] {
        let more = full(optimizer, params.clone()) - full(optimizer, json!({}));
        let expected = bytes * 0.86e9 * 1.02 / GIB;
        assert!((more - expected).abs() < 0.2, "{optimizer} {params}: {more} GiB more");
    }
}

/// A model in bfloat16 has gradients of 2 bytes, whose sums have 4: 1.6 and 3.2 GiB.
#[test]
fn sums_of_gradients_are_in_float32() {
    let need = |accumulation: u32| {
        let mut job = lora("sd1", 512, "bf16", 4);
        let body = job.pointer_mut("/process/0/kind/train").unwrap();
        body["network"] = json!(null);
        body["train"]["gradient_accumulation"] = json!(accumulation);
        gib(&job)[0]
    };
    let [one, two, three, four] = [1, 2, 3, 4].map(need);
    // The update of the sums, and of the gradients of one batch.
    assert!((1.3..1.9).contains(&(two - one)), "{two} {one}");
    // The gradients of a batch beside the sums.
    assert!((0.6..1.7).contains(&(three - two)), "{three} {two}");
    assert_eq!(four, three);
}

/// The prediction with the prompt and that without it are in one batch, or, under smaller profiles, one after the other. Both have gradients.
#[test]
fn a_training_with_guidance_predicts_twice() {
    let need = |batch: u32, changes: &[(&str, Value)]| {
        let mut job = lora("sd1", 512, "float32", 16);
        let body = job.pointer_mut("/process/0/kind/train").unwrap();
        // The steps need more than the encoding of an image.
        body["datasets"] = json!([{"resolution": [512], "cache_latents": true}]);
        let train = &mut body["train"];
        train["batch_size"] = json!(batch);
        train["gradient_checkpointing"] = json!(false);
        for (key, value) in changes {
            train[*key] = value.clone();
        }
        let demand = Demand::of_job(&job, None, &[]).unwrap();
        let memory = demand.memory.unwrap();
        let bytes =
            [MemoryProfile::CpuOnly, MemoryProfile::GpuPoor].map(|profile| memory.under(profile, DeviceKind::Cpu));
        (demand.passes(), bytes)
    };
    let (one, two) = (need(2, &[]), need(4, &[]));
    let close = |a: u64, b: u64| (a as f64 / b as f64 - 1.0).abs() < 0.01;
    for changes in [
        &[("do_cfg", json!(true)), ("cfg_scale", json!(3.0))][..],
        &[("do_cfg", json!(true)), ("cfg_rescale", json!(2.0))],
        &[("do_random_cfg", json!(true)), ("max_cfg_scale", json!(3.0))],
    ] {
        let (passes, [whole, poor]) = need(2, changes);
        assert!((passes / one.0 - 2.0).abs() < 1e-3, "{changes:?}: {passes}");
        assert!(close(whole, two.1[0]), "{changes:?}: {whole}, {two:?}");
        // What is kept for the backward pass is kept twice.
        assert!(
            one.1[1] < poor && poor < two.1[1],
            "{changes:?}: {poor}, {one:?}, {two:?}"
        );
    }
    // At a scale of 1 there is one prediction.
    assert_eq!(need(2, &[("do_cfg", json!(true))]), one);
    assert_eq!(need(2, &[("cfg_scale", json!(3.0))]), one);
    let trained = |changes: &[(&str, Value)]| {
        let text = ("train_text_encoder", json!(true));
        need(2, &[changes, &[text]].concat()).1[0]
    };
    let guided = trained(&[("do_cfg", json!(true)), ("cfg_scale", json!(3.0))]);
    let plain = trained(&[]);
    // The text encoder reads the negative prompts without gradients.
    assert!(
        guided > plain && guided < plain + (two.1[0] - one.1[0]) * 11 / 10,
        "{guided} {plain}"
    );
}

/// Weights and gradients in float32 and two moments in 8 bits of each parameter, beside the model and its activations.
#[test]
fn an_adapter_takes_the_memory_of_its_parameters_and_of_its_passes() {
    let demand = |adapter: Value| {
        let mut job = lora("sd1", 512, "float32", 4);
        let body = job.pointer_mut("/process/0/kind/train").unwrap();
        body["network"] = Value::Null;
        body["adapter"] = adapter;
        Demand::of_job(&job, None, &[]).unwrap()
    };
    let need = |demand: &Demand| {
        let memory = demand.memory.unwrap();
        memory.under(MemoryProfile::CpuOnly, DeviceKind::Cpu) as f64 / GIB
    };
    let t2i = |resnets: u32| demand(json!({"type": "t2i", "train": true, "num_res_blocks": resnets}));
    let (small, large, control_net) = (t2i(2), t2i(4), demand(json!({"type": "control_net", "train": true})));
    // 76 million parameters more, with 10 bytes each, and the activations of their blocks.
    let more = need(&large) - need(&small);
    assert!((0.6..2.5).contains(&more), "{more} GiB more");
    // 361 million parameters instead of 77.
    let more = need(&control_net) - need(&small);
    assert!(more > 2.4, "{more} GiB more");
    // Its blocks are a third of the U-Net, whose weights have no gradients.
    let work = control_net.passes() / small.passes();
    assert!((1.2..2.0).contains(&work), "{work} times the work");
}

/// A VGG16 sees decoded images; a file may have the largest network.
#[test]
fn a_loss_of_features_needs_memory_and_work() {
    let demand = |key: &str, path: &str, checkpointed: bool| {
        let mut job = lora("flux", 1024, "bf16", 16);
        let train = job.pointer_mut("/process/0/kind/train/train").unwrap();
        train["gradient_checkpointing"] = json!(checkpointed);
        train[key] = json!(path);
        (gib(&job)[0], Demand::of_job(&job, None, &[]).unwrap().passes())
    };
    let path = "latent_feature_extractor_path";
    let of = |value: &str| demand(path, value, true);
    let (plain, vgg, file) = (of(""), of("timm/vgg16.tv_in1k"), of("a.safetensors"));
    println!("{plain:?} {vgg:?} {file:?} {:?}", demand(path, "a.safetensors", false));
    assert!(vgg.0 > plain.0 + 1.0 && vgg.0 < plain.0 + 16.0, "{plain:?} {vgg:?}");
    assert!(vgg.1 > plain.1 && file.1 >= vgg.1);
    assert!(file.0 >= vgg.0 && file.0 < plain.0 + 24.0, "{plain:?} {file:?}");
    assert!(demand(path, "timm/vgg16.tv_in1k", false).0 > vgg.0);
    // The older name has precedence.
    assert_eq!(demand("diffusion_feature_extractor_path", "a.safetensors", true), file);
}

/// Vision transformers are known by their repositories; another folder may have the largest of them.
#[test]
fn a_loss_of_features_counts_the_network_of_its_repository() {
    use crate::job::feature_extractor::{
        DINOV3_REPOSITORY, SAPIENS_REPOSITORY, SIGLIP2_NAFLEX_REPOSITORY, SIGLIP2_SQUARE_REPOSITORY,
        TIPS_ENCODER_REPOSITORY, TIPS_REPOSITORY, VGG16_REPOSITORY,
    };
    let demand = |path: &str, second: &str| {
        let mut job = lora("flux", 512, "bf16", 16);
        let train = job.pointer_mut("/process/0/kind/train/train").unwrap();
        train["latent_feature_extractor_path"] = json!(path);
        train["latent_feature_extractor_second_path"] = json!(second);
        (gib(&job)[0], Demand::of_job(&job, None, &[]).unwrap().passes())
    };
    let plain = demand("", "");
    // Millions of parameters in bf16; VGG16 has 15 million in float32.
    for (path, second, parameters) in [
        (SIGLIP2_SQUARE_REPOSITORY, VGG16_REPOSITORY, 413.0 + 2.0 * 15.0),
        (SIGLIP2_NAFLEX_REPOSITORY, "", 397.0),
        (DINOV3_REPOSITORY, "", 840.0),
        (TIPS_REPOSITORY, TIPS_ENCODER_REPOSITORY, 86.0 + 3.0 * 23.8),
        (SAPIENS_REPOSITORY, "", 1462.0),
    ] {
        let (found, passes) = demand(path, second);
        let weights = parameters * 2e6 / f64::from(1 << 30);
        let more = found - plain.0;
        println!(
            "{path}: {more:.2} GiB more, weights {weights:.2}, {:.2} times the work",
            passes / plain.1
        );
        // Decoded images and activations.
        assert!(
            more > weights && more < 1.1 * weights + 3.5,
            "{path}: {more} GiB, weights {weights}"
        );
        assert!(passes > 1.02 * plain.1, "{path}: {passes} and {}", plain.1);
        let folder = demand("some/folder", second);
        assert!(
            folder.0 >= found && folder.1 >= passes,
            "{path}: {found} and {folder:?}"
        );
    }
    let file = demand("models/sapiens2_1b_pretrain.safetensors", "");
    assert_eq!(file, demand(SAPIENS_REPOSITORY, ""));
    assert!(demand("models/vgg16.safetensors", "").0 < file.0);
}
