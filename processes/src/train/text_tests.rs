//! Prompts that are encoded before the model is loaded: the same results, files that are checked, text encoders that go.

use super::tests::{logs, losses, run_spec, saved_lora, spec, stop_at, trainer};
use crate::adapters::is_of_text;
use crate::families::{self, Conditioning, LoadOptions, PartRole, Prompt, TextEmbeddings};
use crate::testing::{
    copy_folder, fixtures, in_portable_mode, runs_all_cases, sampled_cases, schnell_folder, zimage_folder,
};
use aitk_common::attempt::{AttemptSpec, ChildEvent, Outcome};
use aitk_common::capability::DeviceRef;
use aitk_common::job::arch::{Arch, ArchName};
use aitk_common::job::process::TrainerProcess;
use aitk_common::job::sample::SampleItem;
use aitk_common::job::sampler::SamplerName;
use aitk_common::job::save::SaveFormat;
use aitk_common::job::values::{Float, TextOrFalse, TextSource};
use aitk_common::model_files::PartPaths;
use candle_core::{DType, Device, Tensor};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const FAMILIES: [(ArchName, &str); 5] = [
    (ArchName::Sd1, "tiny_sd"),
    (ArchName::Sdxl, "tiny_sdxl"),
    (ArchName::Flux, "tiny_flux"),
    (ArchName::Sd3, "tiny_sd35"),
    (ArchName::Zimage, "tiny_zimage"),
];

/// The folder of the model of a family. Z-Image's has its VAE elsewhere, and is put together below `root`.
fn model_folder(root: &Path, (arch, model): (ArchName, &str)) -> PathBuf {
    let folder = root.join(model);
    match arch {
        ArchName::Zimage => {
            if !folder.exists() {
                std::fs::rename(zimage_folder(false).keep(), &folder).unwrap();
            }
            folder
        }
        _ => fixtures().join(model),
    }
}

/// LoRAs of those families; those of Stable Diffusion 1.x and XL are on text encoders too.
const LORAS: [&str; 5] = [
    "lora/ai_toolkit.safetensors",
    "lora_sdxl/ai_toolkit.safetensors",
    "lora_flux/ai_toolkit.safetensors",
    "lora_sd35/ai_toolkit.safetensors",
    "pipelines_zimage/lora.safetensors",
];

/// A training of one family, with two samples.
fn family(root: &Path, (arch, model): (ArchName, &str), steps: u64) -> TrainerProcess {
    let mut process = trainer(root, steps);
    process.model.arch = Arch::from(arch);
    process.model.name_or_path = model_folder(root, (arch, model)).display().to_string();
    process.train.disable_sampling = false;
    let sampler = match arch.is_flow() {
        true => SamplerName::FlowMatch,
        false => SamplerName::Ddim,
    };
    if arch.is_flow() {
        process.train.noise_scheduler = sampler;
    }
    process.sample.sampler = sampler;
    process.sample.format = "png".into();
    let sample = |prompt: &str| SampleItem {
        prompt: prompt.into(),
        ..SampleItem::default()
    };
    process.sample.samples = vec![sample("a [trigger] in the rain"), sample("a blue square")];
    process.sample.neg = TextOrFalse("red".into());
    (process.sample.width, process.sample.height) = (32, 32);
    process.sample.sample_steps = 1;
    process.datasets[0].shuffle_tokens = false;
    process
}

/// The results of a training: its losses, its LoRA, and its samples by file name.
#[derive(PartialEq)]
struct Trained {
    losses: Vec<f64>,
    lora: Vec<u8>,
    samples: BTreeMap<String, Vec<u8>>,
}

/// The attempt of a process: on the CPU in portable mode if the process computes in bfloat16, because otherwise a CPU computes in
/// float32.
fn attempt(process: &TrainerProcess) -> AttemptSpec {
    let mut spec = spec(process.clone());
    if process.train.dtype == aitk_common::job::dtype::DType::BF16 {
        spec.device = DeviceRef::PORTABLE_CPU;
    }
    spec
}

fn complete(process: &TrainerProcess) -> Vec<ChildEvent> {
    let (outcome, events) = run_spec(&attempt(process));
    assert_eq!(outcome, Outcome::Completed, "{}", logs(&events));
    events
}

fn samples(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(root.join("out/tiny/samples"))
        .into_iter()
        .flatten()
        .flatten();
    let sample = |path: PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let (_, name) = name.split_once("__").unwrap();
        (name.to_owned(), std::fs::read(&path).unwrap())
    };
    entries
        .map(|entry| entry.path())
        .filter(|path| path.is_file())
        .map(sample)
        .collect()
}

fn trained(root: &Path, process: &TrainerProcess) -> Trained {
    let losses = losses(&complete(process));
    Trained {
        losses,
        lora: saved_lora(root),
        samples: samples(root),
    }
}

/// The cached captions beside the images.
fn files(root: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root.join("data/_t_e_cache"))
        .into_iter()
        .flatten()
        .flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.sort();
    files
}

#[derive(Clone, Debug)]
struct Case {
    family: usize,
    dropout: f64,
    trigger: Option<&'static str>,
    bf16: bool,
    quantize_te: bool,
    regularisation: bool,
    repeats: u32,
    flip: bool,
    shuffle: bool,
    random_triggers: bool,
    lora_path: bool,
    stop_after: u64,
    seed: i64,
}

const STEPS: u64 = 4;

/// The number of random cases. Each of them trains four times.
fn cases() -> u32 {
    if runs_all_cases() { 12 } else { 1 }
}

fn case() -> impl Strategy<Value = Case> {
    let rules = (
        0..FAMILIES.len(),
        proptest::sample::select(vec![0.0, 0.4, 1.0]),
        proptest::option::of(Just("zorb")),
    );
    let switches = proptest::array::uniform7(any::<bool>());
    (rules, switches, 1..3u32, 1..STEPS, 0..1000i64).prop_map(|(rules, switches, repeats, stop_after, seed)| Case {
        family: rules.0,
        dropout: rules.1,
        trigger: rules.2,
        bf16: switches[0],
        quantize_te: switches[1],
        regularisation: switches[2],
        flip: switches[3],
        shuffle: switches[4],
        random_triggers: switches[5],
        lora_path: switches[6],
        repeats,
        stop_after,
        seed,
    })
}

impl Case {
    fn process(&self, root: &Path) -> TrainerProcess {
        let mut process = family(root, FAMILIES[self.family], STEPS);
        process.training_seed = Some(self.seed);
        process.trigger_word = self.trigger.map(str::to_owned);
        if self.bf16 {
            process.train.dtype = aitk_common::job::dtype::DType::BF16;
        }
        process.model.quantize_te = Some(self.quantize_te);
        if self.lora_path {
            process.model.lora_path = Some(fixtures().join(LORAS[self.family]).display().to_string());
        }
        let set = &mut process.datasets[0];
        set.caption_dropout_rate = Float(self.dropout);
        set.num_repeats = self.repeats;
        set.flip_x = self.flip;
        if self.regularisation {
            let mut second = set.clone();
            second.is_reg = true;
            process.datasets.push(second);
        }
        process
    }

    /// Adds caption rules that are random: with cached captions they are applied once, otherwise at each step.
    fn with_drawn_captions(&self, mut process: TrainerProcess) -> TrainerProcess {
        let set = &mut process.datasets[0];
        set.shuffle_tokens = self.shuffle;
        if self.random_triggers {
            set.random_triggers = TextSource::List(vec!["one".into(), "two".into()]);
        }
        process
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 4, ..ProptestConfig::default() })]

    #[test]
    fn cached_captions_change_no_number_and_runs_resume_exactly(case in case()) {
        let [plain, cached, parts] = [0; 3].map(|_| tempfile::tempdir().unwrap());
        let process = |root: &Path| {
            let mut process = case.process(root);
            process.train.cache_text_embeddings = true;
            process
        };
        let with_cache = trained(cached.path(), &process(cached.path()));
        let without = trained(plain.path(), &case.process(plain.path()));
        prop_assert!(with_cache == without, "{:?} and {:?}", with_cache.losses, without.losses);
        prop_assert!(files(plain.path()).is_empty() && !files(cached.path()).is_empty());

        let mut drawn = case.with_drawn_captions(process(cached.path()));
        drawn.training_folder = Some(cached.path().join("drawn").display().to_string());
        let whole = losses(&complete(&drawn));
        let interrupted = case.with_drawn_captions(process(parts.path()));
        let (outcome, first) = stop_at(&attempt(&interrupted), case.stop_after);
        prop_assert_eq!(outcome, Outcome::stopped());
        let second = losses(&complete(&interrupted));
        prop_assert_eq!([losses(&first), second].concat(), whole);
    }
}

#[test]
fn a_few_steps_change_no_number() {
    for kind in sampled_cases(FAMILIES.to_vec()) {
        let [plain, cached] = [0; 2].map(|_| tempfile::tempdir().unwrap());
        let without = trained(plain.path(), &family(plain.path(), kind, 2));
        let mut process = family(cached.path(), kind, 2);
        process.train.cache_text_embeddings = true;
        assert!(trained(cached.path(), &process) == without, "{kind:?}");
    }
}

in_portable_mode!(a_few_steps_change_no_number);

/// The captions and the prompts of samples are encoded once, whichever of these LoRAs is on.
#[test]
fn loras_of_training_or_samples_alone_change_no_text_encoder() {
    let lora = fixtures().join(LORAS[0]).display().to_string();
    for is_of_training in [true, false] {
        let [plain, cached] = [false, true].map(|caches| {
            let dir = tempfile::tempdir().unwrap();
            let mut process = family(dir.path(), FAMILIES[0], 2);
            let model = &mut process.model;
            match is_of_training {
                true => model.assistant_lora_path = Some(lora.clone()),
                false => model.inference_lora_path = Some(lora.clone()),
            }
            process.train.cache_text_embeddings = caches;
            trained(dir.path(), &process)
        });
        assert!(plain == cached, "{:?} and {:?}", plain.losses, cached.losses);
    }
}

#[test]
fn a_lora_of_text_encoders_alone_changes_the_prompts_that_are_encoded_before() {
    let files = tempfile::tempdir().unwrap();
    let lora = files.path().join("text.safetensors");
    let mut tensors = candle_core::safetensors::load(fixtures().join(LORAS[0]), &Device::Cpu).unwrap();
    tensors.retain(|name, _| is_of_text(name));
    candle_core::safetensors::save(&tensors, &lora).unwrap();
    let run = |lora: Option<&Path>, caches: bool| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = family(dir.path(), FAMILIES[0], 2);
        process.model.lora_path = lora.map(|path| path.display().to_string());
        process.train.cache_text_embeddings = caches;
        trained(dir.path(), &process)
    };
    let [plain, cached] = [false, true].map(|caches| run(Some(lora.as_path()), caches));
    assert!(plain == cached, "{:?} and {:?}", plain.losses, cached.losses);
    assert!(plain != run(None, false), "it changed nothing");
}

#[test]
fn text_encoders_are_loaded_once_and_a_second_run_does_not_need_them() {
    for (kind, count) in sampled_cases(FAMILIES.into_iter().zip([1, 2, 2, 2, 2]).collect()) {
        let dir = tempfile::tempdir().unwrap();
        let mut process = family(dir.path(), kind, 2);
        process.datasets[0].cache_text_embeddings = true;
        let log = logs(&complete(&process));
        // Five captions, the empty one, two prompts and a negative one.
        assert!(log.contains("9 of 9 prompts were encoded"), "{log}");
        assert_eq!(files(dir.path()).len(), 9, "{kind:?}: {log}");
        process.train.steps = 3;
        let log = logs(&complete(&process));
        assert!(log.contains("9 prompts are encoded already"), "{log}");

        #[derive(Debug)]
        struct Nothing;
        impl TextEmbeddings for Nothing {
            fn get(&self, prompt: &Prompt) -> crate::error::Result<Conditioning> {
                Err(crate::error::EngineError::bad_input(format!("not `{}`", prompt.text)))
            }
        }
        let path = model_folder(dir.path(), kind);
        let mut options = LoadOptions::cpu();
        let mut encoders = families::load_text_encoders(&path, kind.0, &options).unwrap();
        assert!(encoders.parts().iter().all(|part| part.role == PartRole::TextEncoder));
        options.prompts = Some(Arc::new(Nothing));
        let mut model = families::load(&path, kind.0, &options).unwrap();
        assert!(model.parts().iter().all(|part| part.role == PartRole::Denoiser));
        assert_eq!(
            model.encode_prompts(&[Prompt::new("x")]).unwrap_err().to_string(),
            "not `x`"
        );
        let whole = families::load(&path, kind.0, &LoadOptions::cpu()).unwrap();
        let prompts = [Prompt::new("a red circle"), Prompt::default()];
        let ours = encoders.encode_prompts(&prompts).unwrap();
        let expected = whole.encode_prompts(&prompts).unwrap();
        assert_eq!(ours.tensors().count(), count);
        for (name, tensor) in ours.tensors() {
            let [ours, theirs] = [tensor, expected.get(name).unwrap()].map(|t| t.to_dtype(DType::F32).unwrap());
            assert_eq!(crate::testing::gap(&ours, &theirs), 0.0, "{name}");
        }
    }
}

#[test]
fn without_its_text_encoders_a_model_is_saved_whole() {
    if crate::testing::skips_long_tests() {
        return;
    }
    for format in [SaveFormat::Safetensors, SaveFormat::Diffusers] {
        let [plain, cached] = [false, true].map(|caches| {
            let dir = tempfile::tempdir().unwrap();
            let mut process = family(dir.path(), FAMILIES[0], 1);
            process.network = None;
            process.save.save_format = format;
            process.train.cache_text_embeddings = caches;
            complete(&process);
            dir
        });
        let tensors = |root: &Path| -> BTreeMap<String, Vec<u8>> {
            let save = root.join("out/tiny");
            let mut files = super::super::save_files::files_in_save(&match format {
                SaveFormat::Safetensors => save.join("tiny.safetensors"),
                SaveFormat::Diffusers => save.join("tiny"),
            });
            files.retain(|file| file.extension().is_some_and(|suffix| suffix == "safetensors"));
            let name = |file: &PathBuf| file.strip_prefix(&save).unwrap().display().to_string();
            files
                .iter()
                .map(|file| (name(file), std::fs::read(file).unwrap()))
                .collect()
        };
        let (plain, cached) = (tensors(plain.path()), tensors(cached.path()));
        assert!(
            !plain.is_empty() && plain.keys().eq(cached.keys()),
            "{:?}",
            cached.keys()
        );
        for (name, bytes) in &plain {
            assert!(bytes == &cached[name], "{name} of {format:?}");
        }
    }
}

#[test]
fn damaged_and_foreign_files_are_encoded_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = family(dir.path(), FAMILIES[2], 2);
    process.train.cache_text_embeddings = true;
    let expected = trained(dir.path(), &process);
    let originals: Vec<(PathBuf, Vec<u8>)> = files(dir.path())
        .into_iter()
        .map(|path| (path.clone(), std::fs::read(&path).unwrap()))
        .collect();
    let longest = originals.iter().map(|(_, bytes)| bytes.len()).max().unwrap();
    let foreign = crate::adapters::safetensors_bytes(
        &BTreeMap::from([(
            "text_embed".to_owned(),
            Tensor::zeros((1, 2), DType::F32, &Device::Cpu).unwrap(),
        )]),
        &BTreeMap::new(),
    )
    .unwrap();
    let mut generator = crate::rng::generator_for(7, "damage", 0, 0);
    let mut number = |below: usize| generator.randint(0, below as i64, 1)[0] as usize;
    for round in sampled_cases(vec![0, 1, 2]) {
        let mut damaged = 0;
        for (index, (path, bytes)) in originals.iter().enumerate() {
            let mut bytes = bytes.clone();
            match (index + round) % 6 {
                0 => bytes.truncate(number(longest).min(bytes.len() - 1)),
                1 => {
                    let at = number(bytes.len());
                    bytes[at] ^= 1 << number(8);
                }
                2 => bytes = foreign.clone(),
                // A valid cache file, of another caption.
                3 => bytes = originals[(index + 1) % originals.len()].1.clone(),
                4 => bytes.clear(),
                _ => continue,
            }
            damaged += 1;
            std::fs::write(path, bytes).unwrap();
        }
        std::fs::remove_dir_all(dir.path().join("out")).unwrap();
        let events = complete(&process);
        let log = logs(&events);
        assert!(
            log.contains(&format!("{damaged} of {} prompts were", originals.len())),
            "{log}"
        );
        assert_eq!(losses(&events), expected.losses);
        assert!(samples(dir.path()) == expected.samples && saved_lora(dir.path()) == expected.lora);
        for (path, bytes) in &originals {
            assert!(&std::fs::read(path).unwrap() == bytes, "{}", path.display());
        }
    }
}

/// The scheduler says whether FLUX.1 without guidance is schnell, whose prompts have half as many tokens.
#[test]
fn captions_of_another_scheduler_are_not_those_of_this_one() {
    let folder = schnell_folder();
    let model = folder.path();
    let config = model.join("scheduler/scheduler_config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::remove_file(model.join("scheduler")).unwrap();
    std::fs::create_dir(model.join("scheduler")).unwrap();
    let read = |shifts: bool| {
        let shifting = format!("\"use_dynamic_shifting\": {shifts}");
        std::fs::write(&config, text.replace("\"use_dynamic_shifting\": false", &shifting)).unwrap();
        let encoders = families::load_text_encoders(model, ArchName::Flux, &LoadOptions::cpu()).unwrap();
        let encoded = encoders.encode_prompts(&[Prompt::new("a red circle")]).unwrap();
        let tokens = encoded.get("context").unwrap().dim(1).unwrap();
        let fingerprint = super::fingerprints::text_fingerprint(model, &PartPaths::default(), &[]).unwrap();
        (tokens, fingerprint)
    };
    let [schnell, other, again] = [false, true, false].map(read);
    assert_eq!((schnell.0, other.0), (256, 512));
    assert_ne!(schnell.1, other.1);
    assert_eq!(schnell, again);
}

#[test]
fn other_texts_encoders_dtypes_and_families_have_other_files() {
    if crate::testing::skips_long_tests() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut process = family(dir.path(), FAMILIES[2], 1);
    process.train.cache_text_embeddings = true;
    process.train.disable_sampling = true;
    let mut count = 0;
    let mut adds = |process: &TrainerProcess, added: usize, what: &str| {
        std::fs::remove_dir_all(dir.path().join("out")).ok();
        complete(process);
        count += added;
        assert_eq!(files(dir.path()).len(), count, "{what}");
    };
    adds(&process, 6, "five captions and the empty one");
    std::fs::write(dir.path().join("data/p1.txt"), "a green circle").unwrap();
    adds(&process, 1, "another text");
    process.train.dtype = aitk_common::job::dtype::DType::BF16;
    adds(&process, 6, "another dtype");
    process.model.quantize_te = Some(true);
    adds(&process, 6, "quantised");
    process.train.dtype = aitk_common::job::dtype::DType::F32;
    process.model.quantize_te = None;
    adds(&process, 0, "as at first");

    // Another text encoder, and another tokenizer, give other cache files.
    let copy = dir.path().join("model");
    copy_folder(&fixtures().join("tiny_flux"), &copy);
    process.model.name_or_path = copy.display().to_string();
    adds(&process, 0, "a copy");
    let config = copy.join("transformer/config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace('{', "{ ")).unwrap();
    adds(&process, 6, "another config");
    let file = copy.join("text_encoder/model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    adds(&process, 6, "another weight");
    let mut process = family(dir.path(), FAMILIES[0], 1);
    std::fs::write(dir.path().join("data/p1.txt"), "a green circle").unwrap();
    process.train.cache_text_embeddings = true;
    process.train.disable_sampling = true;
    adds(&process, 6, "another family");
}

#[test]
fn captions_that_cannot_be_written_stay_in_memory() {
    let [plain, cached] = [0; 2].map(|_| tempfile::tempdir().unwrap());
    let without = trained(plain.path(), &family(plain.path(), FAMILIES[2], 2));
    let mut process = family(cached.path(), FAMILIES[2], 2);
    process.train.cache_text_embeddings = true;
    // The cache folder cannot be created, because a file has its name.
    std::fs::write(cached.path().join("data/_t_e_cache"), "").unwrap();
    assert!(trained(cached.path(), &process) == without);
}

/// Removes the cache folder of captions when this step reports its metrics.
struct RemoveFiles {
    step: u64,
    folder: PathBuf,
}

impl crate::EventSink for RemoveFiles {
    fn emit(&mut self, event: ChildEvent) {
        if matches!(&event, ChildEvent::Metrics { step, .. } if *step == self.step) {
            std::fs::remove_dir_all(&self.folder).unwrap();
        }
    }
}

#[test]
fn a_caption_that_is_removed_while_the_training_runs_is_an_error_that_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = family(dir.path(), FAMILIES[0], 4);
    process.train.cache_text_embeddings = true;
    process.train.skip_first_sample = true;
    let mut sink = RemoveFiles {
        step: 1,
        folder: dir.path().join("data/_t_e_cache"),
    };
    let outcome = crate::run(&spec(process.clone()), &mut sink, &crate::StopSignal::new());
    let Outcome::Failed { message, .. } = outcome else {
        panic!("{outcome:?}");
    };
    assert!(message.contains("run the job again"), "{message}");
    complete(&process);
}

#[test]
fn without_captions_only_the_trigger_word_is_encoded() {
    for kind in sampled_cases(FAMILIES.to_vec()) {
        let [plain, unloaded] = [0; 2].map(|_| tempfile::tempdir().unwrap());
        let mut process = family(unloaded.path(), kind, 2);
        process.trigger_word = Some("zorb".into());
        process.train.unload_text_encoder = true;
        let found = trained(unloaded.path(), &process);
        // The empty prompt, the trigger word, two samples and their negative prompt.
        assert_eq!(files(unloaded.path()).len(), 5);
        // The same captions from files, with the text encoders in memory.
        let mut process = family(plain.path(), kind, 2);
        process.trigger_word = Some("zorb".into());
        for i in 0..5 {
            std::fs::write(plain.path().join(format!("data/p{i}.txt")), "zorb").unwrap();
        }
        assert!(trained(plain.path(), &process) == found, "{kind:?}");
    }
}

#[test]
fn a_run_stops_while_captions_are_encoded() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = family(dir.path(), FAMILIES[0], 2);
    process.train.cache_text_embeddings = true;
    let stop = crate::StopSignal::new();
    stop.stop();
    let mut events: Vec<ChildEvent> = Vec::new();
    let outcome = crate::run(&spec(process), &mut events, &stop);
    assert_eq!(outcome, Outcome::stopped());
    assert!(files(dir.path()).is_empty());
}
