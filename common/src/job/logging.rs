//! `logging`: how often metrics are logged, and where to.

use super::declare::section;

section! {
    /// How often metrics are logged, and where to.
    pub struct LoggingConfig("logging") {
        /// Steps between log lines; null logs every step.
        log_every: Option<u64> = Some(100), Works;
        /// No effect, as in ai-toolkit.
        verbose: bool = false, Accepted("never had an effect");
        /// Report to Weights & Biases.
        use_wandb: bool = false, Ignored("no maintained Rust library writes its format; metrics are in `metrics.jsonl`, and for TensorBoard with `log_dir`");
        /// Write `loss_log.db` for the web UI of ai-toolkit.
        use_ui_logger: bool = false, Ignored("aitk does not use that web UI; metrics are in `metrics.jsonl`, and for TensorBoard with `log_dir`");
        /// Weights & Biases project.
        project_name: String = "ai-toolkit".into(), DependsOn("use_wandb");
        /// Weights & Biases run.
        run_name: Option<String> = None, DependsOn("use_wandb");
    }
}

impl LoggingConfig {
    /// Steps between log lines, at least 1.
    #[must_use]
    pub fn every(&self) -> u64 {
        self.log_every.unwrap_or(1).max(1)
    }
}
