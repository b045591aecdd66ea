//! Trainings that go on from a state folder of sd-scripts (`train_network.py`: `save_model_hook` writes its step).

use super::support::{base, folder, import_in, job};
use crate::sd_scripts::Script;
use std::path::Path;

/// The LoRA to continue from, the first step, and the notes.
type ResumedImport = (Option<String>, Option<u64>, Vec<String>);

fn imported(folder: &Path, lines: &str) -> Result<ResumedImport, String> {
    let text = format!("{}{lines}\n", base(Script::TrainNetwork));
    let imported = import_in(folder, &text, Some(Script::TrainNetwork));
    let imported = imported.map_err(|errors| errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))?;
    let job = job(&imported.yaml);
    let process = job.process[0].trainer().unwrap();
    let path = process.network.as_ref().unwrap().pretrained_lora_path.clone();
    let notes = imported.notes.iter().map(ToString::to_string).collect();
    Ok((path, process.train.start_step, notes))
}

#[test]
fn a_training_continues_at_the_step_of_its_state_folder() {
    let folder = folder();
    let folder = folder.path();
    let weights = Some("output/cat-state/model.safetensors".to_owned());
    for lines in ["resume = \"output/cat-state\"", "resume = \"output/cat-state/\""] {
        let (path, step, notes) = imported(folder, lines).unwrap();
        assert_eq!((path, step), (weights.clone(), Some(4)));
        for said in ["starts anew", "aitk trains steps 5 to"] {
            assert!(notes.iter().any(|note| note.contains(said)), "{said}: {notes:?}");
        }
    }
    let lines = "resume = \"output/cat-state\"\ninitial_step = 2\nskip_until_initial_step = true\nnetwork_weights = \"lora.safetensors\"";
    let (path, step, notes) = imported(folder, lines).unwrap();
    assert_eq!((path, step), (weights.clone(), Some(2)));
    assert!(
        notes.iter().any(|note| note.contains("network_weights: ignored")),
        "{notes:?}"
    );
    let (path, step, _) = imported(folder, "initial_step = 3").unwrap();
    assert_eq!((path, step), (None, Some(3)));

    std::fs::remove_file(folder.join("output/cat-state/train_state.json")).unwrap();
    let (path, step, notes) = imported(folder, "resume = \"output/cat-state\"").unwrap();
    assert_eq!((path, step), (weights, None));
    assert!(notes.iter().any(|note| note.contains("count from 0")), "{notes:?}");
}

#[test]
fn a_state_folder_that_cannot_be_continued_is_an_error_at_its_line() {
    let folder = folder();
    let folder = folder.path();
    let state = folder.join("output/cat-state/train_state.json");
    for (content, lines, expected) in [
        (
            "{\"current_step\": 4}",
            "resume = \"nowhere\"",
            "`nowhere` has no model.safetensors",
        ),
        (
            "{\"current_step\": 4000000}",
            "resume = \"output/cat-state\"",
            "step 4000000 is not before the end",
        ),
        (
            "{\"current_step\": -4}",
            "resume = \"output/cat-state\"",
            "step -4 is not before the end",
        ),
        (
            "{\"step\": 4}",
            "resume = \"output/cat-state\"",
            "expected {\"current_epoch\"",
        ),
        (
            "not JSON",
            "resume = \"output/cat-state\"",
            "train_state.json: expected",
        ),
        ("{}", "initial_step = 100000", "initial_step: step 100000"),
    ] {
        std::fs::write(&state, content).unwrap();
        let error = imported(folder, lines).unwrap_err();
        assert!(error.contains(expected), "{lines}: {error}");
    }
    let text = format!("{}resume = \"output/cat-state\"\n", base(Script::FineTune));
    let errors = import_in(folder, &text, Some(Script::FineTune)).unwrap_err();
    assert!(errors[0].to_string().contains("of a LoRA alone"), "{errors:?}");
}
