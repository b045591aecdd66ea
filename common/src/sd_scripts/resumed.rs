//! `resume` and `initial_step`: trainings that go on.

use super::report::{Import, Section};
use crate::fsutil::regular;
use serde_json::{Value, json};
use std::path::Path;

/// The files of a state folder that are read: the weights of the network (accelerate's name), and the step.
const WEIGHTS: &str = "model.safetensors";
const STATE: &str = "train_state.json";
/// A state file has two numbers.
const MAX_STATE_BYTES: u64 = 1 << 16;

/// Continues from the weights and at the step of a state folder, or at `initial_step`, in a training of `steps` steps.
pub(super) fn resume(import: &mut Import<'_>, steps: u64, network: &mut Section, train: &mut Section) {
    let settings = import.settings;
    let mut step = settings.whole("initial_step").map(|step| ("initial_step", step));
    if let Some(folder) = settings.text("resume") {
        let path = import.directory.join(folder);
        let shown = folder.escape_debug().to_string();
        if !path.join(WEIGHTS).is_file() {
            let message = format!(
                "`{shown}` has no {WEIGHTS}: expected a state folder of sd-scripts, such as output/name-state, on this machine"
            );
            import.error("resume", message);
            return;
        }
        if settings.is_set("network_weights") {
            import.note(
                "network_weights",
                "ignored, as in sd-scripts: `resume` replaces the weights",
            );
        }
        network.insert("pretrained_lora_path".into(), json!(weights_path(folder)));
        match (step, step_of(&path)) {
            (None, Ok(Some(of_state))) => step = Some(("resume", of_state)),
            (None, Ok(None)) => {
                let message = format!("`{shown}` has no {STATE}: the steps count from 0, as in sd-scripts");
                import.note("resume", message);
            }
            (Some(_), _) => {}
            (None, Err(why)) => {
                import.error("resume", format!("`{shown}`: {STATE}: {why}"));
                return;
            }
        }
        import.note(
            "resume",
            "the weights and the step are those of the folder; the optimizer's state starts anew, because it is a pickle file, which \
             could run code when it is opened",
        );
    }
    let Some((option, step)) = step else { return };
    match u64::try_from(step) {
        Ok(step) if step < steps => {
            train.insert("start_step".into(), json!(step));
            if !settings.flag("skip_until_initial_step") {
                let message = format!(
                    "aitk trains steps {} to {steps}; without skip_until_initial_step, sd-scripts counts the steps from 1 again, and trains as \
                     many epochs as are left",
                    step + 1
                );
                import.note(option, message);
            }
        }
        _ => import.error(
            option,
            format!("step {step} is not before the end of the training: it has {steps} steps"),
        ),
    }
}

/// The weights in a folder, whose name may end with a slash.
fn weights_path(folder: &str) -> String {
    format!("{}/{WEIGHTS}", folder.trim_end_matches('/'))
}

/// The step of a state folder. `None`: it was written by a version of sd-scripts that keeps none.
fn step_of(folder: &Path) -> Result<Option<i64>, String> {
    let text = match regular::read_text(&folder.join(STATE), MAX_STATE_BYTES) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        read => read.map_err(|error| error.to_string())?,
    };
    let state: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    match state.get("current_step").and_then(Value::as_i64) {
        Some(step) => Ok(Some(step)),
        None => Err("expected {\"current_epoch\": 2, \"current_step\": 500}".to_owned()),
    }
}
