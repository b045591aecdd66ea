//! The `lm_generate` process (docs/code-models.md): continues texts, or fills gaps in them, with a language model.
//!
//! Each completion depends only on its prompt, the seed and its number, so that another attempt generates the same texts.

mod prompts;
mod results;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use super::context::{Context, artifact_name};
use super::language_model_part::load_language_model_lora;
use super::rate::Progress;
use crate::device;
use crate::device::allocator::FreedMemory;
use crate::error::{EngineError, Result};
use crate::models::causal_lm::{CausalLm, CausalLmOptions, open_tokenizer};
use crate::pipelines::text::{
    Completion, SamplingParams, TextEvents, TextRequest, TextSettings, check_prompt, generate_texts,
};
use aitk_common::attempt::{ChildEvent, Outcome};
use aitk_common::fsutil;
use aitk_common::job::lm_generate::{LmGenerateConfig, LmGenerateProcess};
use aitk_common::plan::memory_options::MemoryOptions;
use prompts::Prompt;
use results::Results;
use std::time::Instant;

/// The most completions of a process.
const MAX_TEXTS: usize = 1_000_000;

/// Generates every completion of the process.
///
/// # Errors
/// When the model, the prompts or the folder cannot be used.
pub(super) fn run(process: &LmGenerateProcess, cx: &mut Context<'_>) -> Result<Outcome> {
    let (prompts, requests) = read_requests(process, cx)?;
    let total = requests.len();
    let folder = cx.output_root(Some(&process.output_folder));
    fsutil::create_dir_all(&folder)?;
    let mut results = Results::open(&folder, cx, process, total as u64)?;
    let mut remaining = requests;
    remaining.retain(|(index, request)| {
        prompts
            .get(*index)
            .is_none_or(|prompt| !results.has(request.number, prompt))
    });
    let finished = total - remaining.len();
    if finished > 0 {
        cx.log("info", format!("{finished} of {total} texts are already finished"));
    }
    if !remaining.is_empty() && !generate_remaining(process, &prompts, &remaining, total, &mut results, cx)? {
        return Ok(Outcome::stopped());
    }
    let path = results.publish()?;
    cx.log("info", format!("{}: {total} texts", artifact_name(&folder, &path)));
    cx.artifact("completions", &folder, &path, None, None);
    Ok(Outcome::Completed)
}

/// Checks the prompts, and the model by its configs and the names and shapes of its tensors.
///
/// # Errors
/// The error with which [`run`] would end before it generates.
pub(super) fn check(process: &LmGenerateProcess, cx: &Context<'_>) -> Result<()> {
    let options = CausalLmOptions {
        shapes_only: true,
        ..CausalLmOptions::cpu()
    };
    let mut model = CausalLm::load(&cx.local_path(&process.model.name_or_path)?, &options)?;
    for (lora, strength) in process.model.all_loras() {
        load_language_model_lora(&mut model, &cx.local_path(lora)?, strength)?;
    }
    read_requests(process, cx).map(drop)
}

/// Attaches the LoRAs of the config.
fn attach_loras(process: &LmGenerateProcess, model: &mut CausalLm, cx: &mut Context<'_>) -> Result<()> {
    for (lora, strength) in process.model.all_loras() {
        let path = cx.local_path(lora)?;
        let loaded = load_language_model_lora(model, &path, strength)?;
        cx.log_loaded_lora(&path, &loaded);
    }
    Ok(())
}

/// A request with the index of its prompt.
type Indexed = (usize, TextRequest);

/// The prompts, and the request of each completion.
fn read_requests(process: &LmGenerateProcess, cx: &Context<'_>) -> Result<(Vec<Prompt>, Vec<Indexed>)> {
    let generate = &process.generate;
    let prompts = prompts::read(generate, cx)?;
    let repeats = generate.num_completions.max(1) as usize;
    if prompts.len().saturating_mul(repeats) > MAX_TEXTS {
        return Err(EngineError::bad_input(format!(
            "generate: {} prompts times {repeats} completions are more than {MAX_TEXTS} texts: split them into several jobs",
            prompts.len()
        )));
    }
    let model = cx.local_path(&process.model.name_or_path)?;
    let requests = requests(&prompts, repeats, &model)?;
    Ok((prompts, requests))
}

/// The tokens of each prompt, by its index, once for each of its completions.
fn requests(prompts: &[Prompt], repeats: usize, model: &std::path::Path) -> Result<Vec<Indexed>> {
    let (config, tokenizer) = open_tokenizer(model)?;
    let mut requests = Vec::with_capacity(prompts.len() * repeats);
    for (index, prompt) in prompts.iter().enumerate() {
        let tokens = prompt.tokens(&tokenizer)?;
        for repeat in 0..repeats {
            let request = TextRequest {
                prompt: tokens.clone(),
                number: (index * repeats + repeat) as u64,
            };
            check_prompt(&request, config.max_positions)?;
            requests.push((index, request));
        }
    }
    Ok(requests)
}

/// Generates texts. Returns `false` if it was stopped.
fn generate_remaining(
    process: &LmGenerateProcess,
    prompts: &[Prompt],
    remaining: &[Indexed],
    total: usize,
    results: &mut Results,
    cx: &mut Context<'_>,
) -> Result<bool> {
    cx.phase("loading model");
    let compute = device::open_with_dtype(cx.spec.device, process.model.dtype.name())?;
    for note in &compute.notes {
        cx.log("info", note.clone());
    }
    // Memory that is freed while loading is returned to the system.
    FreedMemory::Release.apply();
    let memory = MemoryOptions::of(cx.spec.profile);
    let folder = cx.local_path(&process.model.name_or_path)?;
    let options = CausalLmOptions {
        device: compute.device.clone(),
        dtype: compute.dtype,
        streamed: memory.denoiser_streamed,
        keeps_stored_table: true,
        ..CausalLmOptions::cpu()
    };
    let mut model = CausalLm::load(&folder, &options)?;
    attach_loras(process, &mut model, cx)?;
    let (_, tokenizer) = open_tokenizer(&folder)?;
    if !memory.returns_freed_memory {
        FreedMemory::Retain.apply();
    }
    let done = (total - remaining.len()) as u64;
    cx.phase("generating");
    cx.events.emit(ChildEvent::Progress {
        done,
        total: total as u64,
        seconds_per_step: None,
    });
    let (indices, requests): (Vec<usize>, Vec<TextRequest>) = remaining.iter().cloned().unzip();
    let mut events = Events {
        cx,
        results,
        prompts,
        requests: &requests,
        indices: &indices,
        streams: process.generate.stream,
        progress: Progress::new(),
        done,
        total: total as u64,
        tokens: 0,
    };
    let start = Instant::now();
    let settings = settings(&process.generate, events.cx.spec.seed);
    let is_complete = generate_texts(&model, &tokenizer, &settings, &requests, &mut events)?;
    let (tokens, seconds) = (events.tokens, start.elapsed().as_secs_f64());
    let rate = tokens as f64 / seconds.max(1e-9);
    cx.log(
        "info",
        format!("{tokens} tokens in {seconds:.2} s ({rate:.1} tokens/s)"),
    );
    Ok(is_complete)
}

fn settings(generate: &LmGenerateConfig, job_seed: u64) -> TextSettings {
    TextSettings {
        choice: SamplingParams {
            temperature: generate.temperature,
            top_k: generate.top_k as usize,
            top_p: generate.top_p,
            min_p: generate.min_p,
            repetition_penalty: generate.repetition_penalty,
        },
        max_new_tokens: generate.max_new_tokens as usize,
        stop: generate.stop.clone(),
        seed: u64::try_from(generate.seed).unwrap_or(job_seed),
        batch_size: generate.batch_size as usize,
    }
}

/// Passes what a generation reports to the log and the results.
struct Events<'a, 'b> {
    cx: &'a mut Context<'b>,
    results: &'a mut Results,
    prompts: &'a [Prompt],
    /// In the order of their numbers.
    requests: &'a [TextRequest],
    /// The index of each request's prompt.
    indices: &'a [usize],
    streams: bool,
    progress: Progress,
    done: u64,
    total: u64,
    tokens: usize,
}

impl TextEvents for Events<'_, '_> {
    fn before_step(&mut self) -> bool {
        self.progress.keep_alive(self.cx, self.done, self.total);
        !self.cx.stop.is_set()
    }

    fn line(&mut self, number: u64, line: &str) -> Result<()> {
        if self.streams {
            self.cx.log("info", format!("text {number}: {line}"));
        }
        Ok(())
    }

    fn complete(&mut self, number: u64, completion: Completion) -> Result<()> {
        let at = self.requests.binary_search_by_key(&number, |request| request.number);
        let found = at.ok().and_then(|at| {
            let prompt = self.prompts.get(*self.indices.get(at)?)?;
            Some((prompt, self.requests.get(at)?.prompt.len()))
        });
        let Some((prompt, prompt_tokens)) = found else {
            return Err(EngineError::Internal(format!("text {number} was not asked for")));
        };
        self.tokens += completion.tokens.len();
        self.cx.log(
            "info",
            format!(
                "text {number}: {} tokens, ended by {}",
                completion.tokens.len(),
                completion.reason.name()
            ),
        );
        self.results.add(number, prompt, prompt_tokens, &completion)?;
        self.done += 1;
        self.progress.step(self.cx, self.done, self.total);
        Ok(())
    }
}
