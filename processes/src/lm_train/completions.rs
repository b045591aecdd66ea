//! Completions of the config's prompts during a run, with greedy decoding.

use super::super::context::Context;
use super::super::rate::Progress;
use super::run::Run;
use crate::error::{EngineError, Result};
use aitk_common::fsutil;
use candle_core::{D, DType, Tensor};
use serde_json::json;
use std::io::Write as _;
use std::path::PathBuf;

/// Characters of a completion that the log shows.
const SHOWN: usize = 200;

impl Run<'_> {
    fn completions_path(&self, step: u64) -> PathBuf {
        self.folder.samples().join(format!("{step:09}.jsonl"))
    }

    /// Whether the completions after a step were written.
    pub(super) fn has_completions(&self, step: u64) -> bool {
        self.completions_path(step).is_file()
    }

    /// Completes the prompts after `step` steps, writes the texts into `samples/STEP.jsonl` and logs them. Returns `false` if it was stopped:
    /// then nothing is written. Without prompts nothing is done.
    pub(super) fn complete_prompts(&mut self, cx: &mut Context<'_>, step: u64) -> Result<bool> {
        let prompts = &self.process.sample.prompts;
        if prompts.is_empty() {
            return Ok(true);
        }
        cx.phase("sampling");
        let mut progress = Progress::new();
        let mut lines = String::new();
        for (index, prompt) in prompts.iter().enumerate() {
            let mut go_on = || {
                progress.keep_alive(cx, step.min(self.steps), self.steps);
                !cx.stop.is_set()
            };
            let Some(completion) = self.complete(prompt, &mut go_on)? else {
                return Ok(false);
            };
            let line = json!({"step": step, "prompt": prompt, "completion": &completion});
            lines.push_str(&format!("{line}\n"));
            let shown: String = completion.chars().take(SHOWN).collect();
            cx.log(
                "info",
                format!("step {step}: sample.prompts[{index}] is completed with {shown:?}"),
            );
        }
        let folder = self.folder.samples();
        fsutil::create_dir_all(&folder)?;
        let path = self.completions_path(step);
        fsutil::write_atomic(&path, |out| out.write_all(lines.as_bytes()))?;
        cx.artifact("completions", &self.folder.root, &path, Some(step), None);
        Ok(true)
    }

    /// The greedy continuation of a prompt, of at most `max_new_tokens` tokens. `go_on` is called before each token; `None` if it returned
    /// `false`.
    fn complete(&self, prompt: &str, go_on: &mut dyn FnMut() -> bool) -> Result<Option<String>> {
        let Some(tokenizer) = &self.tokenizer else {
            return Err(EngineError::Internal("a prompt without a tokenizer".into()));
        };
        let model = self.eval_model.as_ref().unwrap_or(&self.model);
        let ids = tokenizer.encode(prompt, true)?;
        let max = model.config().max_positions;
        if ids.is_empty() || ids.len() >= max {
            return Err(EngineError::bad_input(format!(
                "sample.prompts: a prompt has {} tokens; expected at least 1 and fewer than the model's {max} positions",
                ids.len()
            )));
        }
        let count = (self.process.sample.max_new_tokens as usize).min(max - ids.len());
        let mut caches = [model.new_cache()];
        let mut new: Vec<u32> = Vec::new();
        let mut next = ids.clone();
        for _ in 0..count {
            if !go_on() {
                return Ok(None);
            }
            let input = Tensor::from_slice(&next, (1, next.len()), model.device())?;
            let token = self.target.in_inference(|| -> Result<u32> {
                let hidden = model.next(&input, &mut caches)?;
                let last = hidden.narrow(1, next.len() - 1, 1)?;
                let logits = model.logits(&last)?.to_dtype(DType::F32)?;
                Ok(logits.argmax(D::Minus1)?.flatten_all()?.get(0)?.to_scalar::<u32>()?)
            })?;
            if Some(token) == tokenizer.end() || model.config().eos_token_ids.contains(&token) {
                break;
            }
            new.push(token);
            next = vec![token];
        }
        tokenizer.decode_continuation(&ids, &new).map(Some)
    }
}
