//! The memory of a job: what counts, and what does not.

use super::test_helpers::{GIB, generation_gib, gib, lora};
use super::*;
use crate::capability::DeviceKind;
use crate::plan::profile::MemoryProfile;
use serde_json::json;

#[test]
fn conversions_of_files_have_a_bound_in_memory_and_none_on_a_gpu() {
    for kind in ["extract", "rescale_lora"] {
        let job = json!({"process": [{"type": kind, "kind": {kind: {}}}, {"type": kind, "kind": {kind: {}}}]});
        let demand = Demand::of_job(&job, None, &[]).unwrap();
        assert_eq!(demand.family, kind);
        let need = demand.memory.unwrap();
        let (cpu, gpu) = (
            need.under(MemoryProfile::CpuOnly, DeviceKind::Cpu),
            need.under(MemoryProfile::FullGpu, DeviceKind::Cuda),
        );
        assert!((2 << 30..=3 << 30).contains(&cpu) && gpu == 0, "{kind}: {cpu}, {gpu}");
    }
}

#[test]
fn predictions_are_at_least_the_published_figures() {
    // Each is at least the published or measured figure, and at most 1.5 times it.
    let sd = gib(&lora("sd1", 512, "bf16", 16));
    assert!((2.9..6.0).contains(&sd[0]), "SD 1.5 LoRA runs in about 4 GB: {sd:?}");
    let sdxl = gib(&lora("sdxl", 1024, "bf16", 16));
    // On an H100 6.8 GiB were measured, with captions that were encoded before; others advise a card of 10 GB.
    assert!((6.8..10.0).contains(&sdxl[1]), "SDXL LoRA: 6.8 GiB measured: {sdxl:?}");
    // Published for a U-Net that stays in memory, of which half is streamed here: 2.4 GiB.
    assert!(
        (8.0 - 2.4 - 1.5..8.0).contains(&sdxl[2]),
        "SDXL LoRA: 8 GB possible: {sdxl:?}"
    );
    let flux = gib(&lora("flux", 1024, "bf16", 16));
    assert!(
        (27.0..44.0).contains(&flux[1]),
        "FLUX LoRA in bf16: above 30 GB: {flux:?}"
    );
    assert!(
        (15.0..20.0).contains(&flux[2]),
        "FLUX LoRA on an 8-bit base: about 17 GB: {flux:?}"
    );
    // Published with 28 of 35 blocks swapped; `extreme` keeps none in memory, which saves 4.4 GiB.
    assert!(
        (8.0 - 4.4..8.0).contains(&flux[3]),
        "FLUX LoRA, blocks swapped: 8 GB: {flux:?}"
    );
    // Published with captions that were encoded before; `balanced` streams the text encoder.
    let z_image = gib(&lora("zimage", 1024, "bf16", 16));
    assert!(
        (12.9..19.4).contains(&z_image[1]) && (7.25..10.9).contains(&z_image[2]),
        "Z-Image LoRA: 12.9 GiB in bf16, 7.25 on an 8-bit base: {z_image:?}"
    );
}

#[test]
fn a_full_fine_tune_of_flux_needs_its_weights_gradients_and_optimizer() {
    let mut job = lora("flux", 512, "float32", 4);
    job["process"][0]["kind"]["train"]["network"] = Value::Null;
    let need = gib(&job);
    // 12 billion weights and gradients in float32, and the two numbers of adamw8bit.
    assert!(need[0] > 11.9 * 10.0 / 1.0737, "{need:?}");
    // Gradients are freed one by one under the smaller profiles.
    assert!(need[3] < need[0] && need[3] > 11.9 * 6.0 / 1.0737, "{need:?}");
}

#[test]
fn smaller_profiles_need_less() {
    for arch in ["sd1", "sd2", "sdxl", "sd3", "chroma", "flux", "zimage"] {
        for dtype in ["bf16", "float32"] {
            let need = gib(&lora(arch, 1024, dtype, 32));
            assert!(
                need[0] >= need[1] && need[1] >= need[2] && need[2] >= need[3],
                "{arch}: {need:?}"
            );
        }
    }
}

#[test]
fn the_sizes_of_the_images_count_if_they_were_seen() {
    let job = lora("sd1", 768, "float32", 16);
    let batch = |process: u32, width: u32, height: u32| ImageBatch {
        process,
        width,
        height,
        images: 1,
    };
    let bytes = |batches: &[ImageBatch]| {
        let need = Demand::of_job(&job, None, batches).unwrap().memory.unwrap();
        need.under(MemoryProfile::CpuOnly, DeviceKind::Cpu)
    };
    let usual = bytes(&[]);
    assert_eq!(bytes(&[batch(0, 768, 768)]), usual);
    assert!(bytes(&[batch(0, 1024, 448)]) < usual, "a wide bucket has fewer pixels");
    assert!(bytes(&[batch(0, 256, 256)]) < usual);
    assert_eq!(
        bytes(&[batch(0, 256, 256), batch(0, 768, 768)]),
        usual,
        "the largest decides"
    );
    assert_eq!(bytes(&[batch(1, 64, 64)]), usual, "another process has these images");
    let absurd = ImageBatch {
        images: u32::MAX,
        ..batch(0, u32::MAX, u32::MAX)
    };
    assert!(bytes(&[absurd]) > 1 << 50);
}

/// `batch_img2img` makes images of the size of those of its data sets, and encodes them before.
#[test]
fn image_to_image_is_predicted_from_the_sizes_of_its_images() {
    let process = |kind: &str, more: Value| {
        let mut body = json!({"model": {"arch": "sd1", "dtype": "float32"}});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"process": [{"kind": {kind: body}}]})
    };
    let changed = |resolution: u32| {
        process(
            "img2_img",
            json!({"datasets": [{"resolution": [256, resolution]}], "generate": {"sample_steps": 4, "guidance_scale": 7.0}}),
        )
    };
    let bytes = |job: &Value, batches: &[ImageBatch]| {
        let demand = Demand::of_job(job, None, batches).unwrap();
        let need = demand.memory.unwrap();
        (
            need.under(MemoryProfile::CpuOnly, DeviceKind::Cpu),
            need.under(MemoryProfile::FullGpu, DeviceKind::Cuda),
            demand.millipasses,
        )
    };
    let of_prompts = |side: u32| {
        let prompts = json!({"generate": {"width": side, "height": side, "prompts": ["a", "b"], "sample_steps": 4}});
        bytes(&process("generate", prompts), &[])
    };
    for side in [512, 768, 1024] {
        let (found, expected) = (bytes(&changed(side), &[]), of_prompts(side));
        assert!(
            // The work is that of one image, here of two.
            found.0 >= expected.0 && found.1 >= expected.1 && found.2 >= expected.2 / 2,
            "{side}: {found:?}, without an image {expected:?}"
        );
        assert!(
            found.0 as f64 <= 1.3 * expected.0 as f64,
            "{side}: {found:?}, {expected:?}"
        );
    }
    assert!(bytes(&changed(1024), &[]).0 > bytes(&changed(512), &[]).0);
    let seen = |width: u32, height: u32| ImageBatch {
        process: 0,
        width,
        height,
        images: 1,
    };
    let small = bytes(&changed(1024), &[seen(512, 512)]);
    assert_eq!(small, bytes(&changed(512), &[]), "smaller images than the resolution");
    assert_eq!(
        bytes(&changed(1024), &[seen(512, 512), seen(1024, 1024)]),
        bytes(&changed(1024), &[])
    );
}

#[test]
fn text_encoders_that_leave_the_memory_are_not_counted() {
    let need = |keys: &[(&str, &str)]| {
        let mut job = lora("sdxl", 512, "float32", 16);
        for (section, key) in keys {
            match *section {
                "datasets" => job["process"][0]["kind"]["train"]["datasets"][0][*key] = true.into(),
                section => job["process"][0]["kind"]["train"][section][*key] = true.into(),
            }
        }
        let need = Demand::of_job(&job, None, &[]).unwrap().memory.unwrap();
        need.under(MemoryProfile::CpuOnly, DeviceKind::Cpu) as f64 / GIB
    };
    let all = need(&[]);
    for keys in [
        ("train", "cache_text_embeddings"),
        ("train", "unload_text_encoder"),
        ("datasets", "cache_text_embeddings"),
    ] {
        let less = all - need(&[keys]);
        // 0.82 billion weights in float32, with the allocator's share.
        assert!((3.0..3.7).contains(&less), "{keys:?}: {less} GiB less than {all}");
    }
    let trained = need(&[("train", "unload_text_encoder"), ("train", "train_text_encoder")]);
    assert!(trained >= all, "{trained} and {all}");
}

/// The layers of FLUX.1's blocks have 5.4 million numbers for each rank: a LoRA of rank 32 takes 0.64 GiB in float32.
#[test]
fn the_lora_files_of_a_config_are_counted() {
    let need = |keys: &[&str]| {
        let mut job = lora("flux", 512, "bf16", 16);
        for key in keys {
            job["process"][0]["kind"]["train"]["model"][*key] = json!("a.safetensors");
        }
        gib(&job)[2]
    };
    let plain = need(&[]);
    for keys in [&["lora_path"][..], &["assistant_lora_path"], &["inference_lora_path"]] {
        let more = need(keys) - plain;
        assert!((0.5..0.9).contains(&more), "{keys:?}: {more} GiB more than {plain}");
    }
    let more = need(&["lora_path", "assistant_lora_path"]) - plain;
    assert!((1.1..1.7).contains(&more), "{more} GiB more than {plain}");
    // A generation does not load the LoRA of a training.
    let generation = |key: &str| generation_gib(&json!({key: "a.safetensors"}), 256, None)[0];
    assert_eq!(generation("assistant_lora_path"), generation("vae_path"));
    assert!(generation("lora_path") > generation("vae_path"));
}

#[test]
fn tiny_models_and_quantised_models_need_less() {
    let job = lora("sd1", 512, "bf16", 4);
    let tiny = ParameterCounts {
        denoiser: 1_000_000,
        text: 100_000,
        vae: 0,
        ..ParameterCounts::default()
    };
    let need = Demand::of_job(&job, Some(tiny), &[]).unwrap().memory.unwrap();
    assert!(
        MemoryProfile::on(false)
            .iter()
            .all(|one| need.under(*one, DeviceKind::Cuda) <= 1 << 30),
        "{need:?}"
    );
    let mut quantised = lora("flux", 1024, "bf16", 16);
    let mut base = |te: bool| {
        let model = &mut quantised["process"][0]["kind"]["train"]["model"];
        model["quantize"] = json!(true);
        model["quantize_te"] = json!(te);
        gib(&quantised)[1]
    };
    let one = base(false);
    assert!(one < 20.0, "{one}");
    // T5 is streamed; if it is quantised as well, it is kept in host memory.
    assert!((base(true) - one).abs() < 0.6, "{one} {}", base(true));
}

#[test]
fn trained_weights_are_not_quantised() {
    let full = |quantize: bool| {
        let mut job = lora("sd1", 512, "bf16", 4);
        let train = job.pointer_mut("/process/0/kind/train").unwrap();
        train.as_object_mut().unwrap().remove("network");
        train["model"]["quantize"] = json!(quantize);
        train["model"]["quantize_te"] = json!(false);
        gib(&job)
    };
    assert_eq!(full(true), full(false));
}

#[test]
fn all_gradients_are_counted_when_the_update_needs_them_together() {
    let poor = |change: &dyn Fn(&mut Value)| {
        let mut job = lora("sd1", 512, "float32", 4);
        let body = job.pointer_mut("/process/0/kind/train").unwrap();
        body["network"] = json!(null);
        body["train"]["optimizer"] = json!("adamw");
        change(&mut body["train"]);
        gib(&job)[2]
    };
    let apart = poor(&|_| {});
    for (key, value) in [
        ("gradient_accumulation", json!(2)),
        ("gradient_accumulation_steps", json!(-1)),
    ] {
        let together = poor(&|train| train[key] = value.clone());
        assert!(together > apart + 2.5, "{key}: {together} {apart}");
    }
    let [one, all] = ["automagic2", "automagic3"].map(|name| poor(&|train| train["optimizer"] = json!(name)));
    // Not all 3.2 GiB: when the last gradients are complete, few activations are left.
    assert!(all > one + 1.9, "{all} {one}");
}

#[test]
fn unknown_models_give_no_memory_and_absurd_values_are_handled() {
    let wan = Demand::of_job(&lora("wan21", 512, "bf16", 4), None, &[]).unwrap();
    assert_eq!((wan.family.as_str(), wan.memory), ("wan21", None));
    for job in [
        json!(null),
        json!({}),
        json!({"process": []}),
        json!({"process": [7, {"kind": "x"}, {"kind": {"train": {}}}, {"kind": {"caption": {"model": {"arch": "sd1"}}}}]}),
    ] {
        assert_eq!(Demand::of_job(&job, None, &[]), None, "{job}");
    }
    let mut absurd = lora("flux", 512, "bf16", 4);
    absurd["process"][0]["kind"]["train"]["train"]["batch_size"] = json!(1e300);
    absurd["process"][0]["kind"]["train"]["train"]["steps"] = json!(-5);
    let need = Demand::of_job(&absurd, None, &[]).unwrap();
    assert!(need.memory.unwrap().under(MemoryProfile::Extreme, DeviceKind::Cuda) > 1 << 50);
}
