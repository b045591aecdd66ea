//! The work of a job: how often the denoiser passes over its images.

use super::test_helpers::lora;
use super::*;
use crate::capability::DeviceKind;
use crate::plan::profile::MemoryProfile;
use serde_json::json;

#[test]
fn a_preservation_loss_is_more_work_and_a_second_set_of_gradients() {
    let with = |changes: &[(&str, Value)]| {
        let mut job = lora("sd1", 512, "bf16", 128);
        for (key, value) in changes {
            job["process"][0]["kind"]["train"]["train"][*key] = value.clone();
        }
        let demand = Demand::of_job(&job, None, &[]).unwrap();
        (demand.passes(), demand.memory)
    };
    let (plain, accumulated) = (with(&[]), with(&[("gradient_accumulation", json!(2))]));
    for key in ["diff_output_preservation", "blank_prompt_preservation"] {
        let (units, memory) = with(&[(key, json!(true))]);
        assert!((units / plain.0 - 7.0 / 3.0).abs() < 1e-3, "{key}");
        assert_eq!(memory, accumulated.1, "{key}");
        assert_ne!(memory, plain.1, "{key}");
    }
}

#[test]
fn a_slider_has_the_passes_of_docs_sliders_md() {
    let with = |kind: &str, slider: Value| {
        let mut job = lora("sd1", 512, "bf16", 128);
        let body = &mut job["process"][0]["kind"]["train"];
        body["type"] = json!(kind);
        body["slider"] = slider;
        if kind != "concept_slider" {
            body["datasets"] = json!([]);
            body["train"]["max_denoising_steps"] = json!(30);
        }
        let demand = Demand::of_job(&job, None, &[]).unwrap();
        (demand.passes(), demand.memory.unwrap())
    };
    let pairs = json!({"datasets": [{"size": 512}]});
    let (plain, plain_memory) = with("sd_trainer", json!({}));
    for (kind, slider, passes) in [
        ("concept_slider", json!({}), 3.0),
        ("concept_slider", json!({"anchor_class": ""}), 16.0 / 3.0),
        ("slider", json!({"resolutions": [[512, 512]]}), 48.0),
        (
            "slider",
            json!({"resolutions": [[512, 512]], "batch_full_slide": false}),
            12.0,
        ),
        (
            "slider",
            json!({"resolutions": [[512, 512]], "anchors": [{}]}),
            48.0 + 16.0 / 3.0,
        ),
        ("image_reference_slider_trainer", pairs.clone(), 2.0),
        ("ultimate_slider_trainer", pairs, 6.0),
    ] {
        let (units, memory) = with(kind, slider.clone());
        assert!(
            (units / plain / passes - 1.0).abs() < 1e-3,
            "{kind} {slider}: {}",
            units / plain
        );
        assert!(memory > plain_memory, "{kind} {slider}: gradients exist twice");
    }
    let sized = |side: u32| with("slider", json!({"resolutions": [[side, side]]})).1;
    assert!(sized(1024) > sized(512));
    let sized = |side: u32| with("image_reference_slider_trainer", json!({"datasets": [{"size": side}]})).1;
    assert!(sized(1024) > sized(512));
}

#[test]
fn predictions_to_compare_with_are_a_third_of_a_step_each() {
    type Change<'a> = &'a dyn Fn(&mut Value);
    let units = |change: Change<'_>| {
        let mut job = lora("sd1", 512, "bf16", 128);
        change(&mut job["process"][0]["kind"]["train"]);
        Demand::of_job(&job, None, &[]).unwrap().passes()
    };
    let plain = units(&|_| ());
    let cases: [(&str, f64, Change<'_>); 7] = [
        ("timestep_type", 4.0 / 3.0, &|body| {
            body["train"]["timestep_type"] = json!("next_sample")
        }),
        ("correct_pred_norm", 4.0 / 3.0, &|body| {
            body["train"]["correct_pred_norm"] = json!(true)
        }),
        ("masks alone", 1.0, &|body| {
            body["datasets"][0]["mask_path"] = json!("masks")
        }),
        ("inverted_mask_prior without masks", 1.0, &|body| {
            body["train"]["inverted_mask_prior"] = json!(true)
        }),
        ("inverted_mask_prior", 4.0 / 3.0, &|body| {
            body["train"]["inverted_mask_prior"] = json!(true);
            body["datasets"][0]["mask_path"] = json!("masks");
        }),
        ("prior_reg", 4.0 / 3.0, &|body| {
            body["datasets"][0]["prior_reg"] = json!(true)
        }),
        ("two", 5.0 / 3.0, &|body| {
            body["train"]["do_prior_divergence"] = json!(true);
            body["train"]["do_guidance_loss"] = json!(true);
        }),
    ];
    for (name, expected, change) in cases {
        let ratio = units(change) / plain;
        assert!((ratio - expected).abs() < 1e-3, "{name}: {ratio}");
    }
}

#[test]
fn the_pairs_of_images_are_as_much_work_again() {
    let units = |guidance: Option<&str>| {
        let mut job = lora("sd1", 512, "bf16", 128);
        let body = &mut job["process"][0]["kind"]["train"];
        // The steps need more than the encoding of an image.
        body["train"]["batch_size"] = json!(16);
        if let Some(guidance) = guidance {
            let set = &mut body["datasets"][0];
            set["unconditional_path"] = json!("before");
            set["guidance_type"] = json!(guidance);
        }
        let demand = Demand::of_job(&job, None, &[]).unwrap();
        let memory = demand.memory.unwrap().under(MemoryProfile::CpuOnly, DeviceKind::Cpu);
        (demand.passes(), memory)
    };
    let (plain, memory) = units(None);
    for (guidance, expected) in [
        ("targeted", 7.0 / 3.0),
        ("polarity", 2.0),
        ("tnt", 2.0),
        ("targeted_flow", 4.0 / 3.0),
    ] {
        let (passes, more) = units(Some(guidance));
        assert!(
            (passes / plain / expected - 1.0).abs() < 0.01,
            "{guidance}: {}",
            passes / plain
        );
        assert_eq!(more > memory, guidance != "targeted_flow", "{guidance}");
    }
}

#[test]
fn work_counts_steps_images_and_pixels() {
    let one = Demand::of_job(&lora("sd1", 512, "bf16", 4), None, &[]).unwrap();
    let four = Demand::of_job(&lora("sd1", 1024, "bf16", 4), None, &[]).unwrap();
    // The forward pass, the same again for the backward pass, and the gradients of what lies between frozen weights.
    assert!((3000.0..3500.0).contains(&one.passes()), "{}", one.passes());
    // Attention grows with the square of the pixels.
    let more = four.passes() / one.passes();
    assert!((4.0..7.0).contains(&more), "{more}");
    let mut full = lora("sd1", 512, "bf16", 4);
    full["process"][0]["kind"]["train"]["network"] = Value::Null;
    let full = Demand::of_job(&full, None, &[]).unwrap();
    assert!((3900.0..4200.0).contains(&full.passes()), "{}", full.passes());
    let images = json!({"process": [{"kind": {"generate": {"model": {"arch": "sdxl", "dtype": "float16"},
        "generate": {"width": 1024, "height": 1024, "sample_steps": 20, "guidance_scale": 7.0, "prompts": ["a", "b"], "num_repeats": 3}}}}]});
    let made = Demand::of_job(&images, None, &[]).unwrap();
    // Two passes a step, of four times the pixels; and the autoencoder.
    let passes = made.passes() / (6.0 * 20.0 * 2.0 * 4.0);
    assert!((1.0..1.4).contains(&passes), "{passes}");
    assert_eq!(made.family, "sdxl");
    let mut second_order = images.clone();
    second_order["process"][0]["kind"]["generate"]["generate"]["sampler"] = json!("dpm_2");
    let more = Demand::of_job(&second_order, None, &[]).unwrap().passes() / made.passes();
    assert!((1.8..1.96).contains(&more), "{more}");
    // Attention over the tokens of the text too is a smaller part of a transformer's work.
    let flux = |side| {
        let demand = Demand::of_job(&lora("flux", side, "bf16", 4), None, &[]).unwrap();
        demand.passes() / 1000.0
    };
    // The forward pass, again, and the gradients of what lies between frozen weights.
    assert!((2.8..3.3).contains(&flux(512)), "{}", flux(512));
    // Text tokens are the same for images of any size.
    assert!(
        (2.8..4.0).contains(&(flux(1024) / flux(512))),
        "{} {}",
        flux(1024),
        flux(512)
    );
    // Of families that the planner does not know, passes are counted.
    let wan = Demand::of_job(&lora("wan21", 1024, "bf16", 4), None, &[]).unwrap();
    assert_eq!(wan.passes(), 16_000.0);
}

#[test]
fn small_models_are_less_work() {
    let job = lora("sd1", 512, "bf16", 4);
    let units = |denoiser: u64| {
        let counts = ParameterCounts {
            denoiser,
            text: 100_000,
            ..ParameterCounts::default()
        };
        Demand::of_job(&job, Some(counts), &[]).unwrap().passes()
    };
    let (small, usual) = (units(86_000_000), units(860_000_000));
    assert!((0.08..0.2).contains(&(small / usual)), "{small} {usual}");
}
