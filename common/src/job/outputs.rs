//! Which jobs make outputs on request.

use super::lm_trainer::LmTrainerProcess;
use super::process::{Process, TrainerProcess};
use super::spec::JobSpec;
use crate::requested_outputs::RequestedOutputs;

impl JobSpec {
    /// Checks that a training of the job could make these outputs on request.
    ///
    /// # Errors
    /// Why none can, as the end of a sentence: `it has no training (…)`.
    pub fn check_requested_outputs(&self, outputs: RequestedOutputs) -> Result<(), String> {
        let trainings: Vec<&TrainerProcess> = self.process.iter().filter_map(Process::trainer).collect();
        let of_code: Vec<&LmTrainerProcess> = self.process.iter().filter_map(Process::lm_trainer).collect();
        if !of_code.is_empty() {
            // A job may have both; each training does what it can.
            let completes = of_code.iter().any(|training| !training.sample.prompts.is_empty());
            return match outputs.samples && !completes && trainings.is_empty() {
                true => {
                    Err("the section `sample` of its config has no prompts, so there is nothing to sample".to_owned())
                }
                false => Ok(()),
            };
        }
        if trainings.is_empty() {
            let mut types: Vec<&str> = self.process.iter().map(|process| process.process_type.name()).collect();
            types.dedup();
            return Err(format!(
                "it has no training (its process: {}), and only trainings save and sample on request",
                types.join(", ")
            ));
        }
        if !outputs.samples {
            return Ok(());
        }
        if trainings.iter().all(|training| training.train.disable_sampling) {
            return Err("`train.disable_sampling` of its config is true, so it makes no samples".to_owned());
        }
        let has_prompts = |training: &&TrainerProcess| {
            !training.train.disable_sampling && !training.sample_requests(&training.sample).is_empty()
        };
        if !trainings.iter().any(has_prompts) {
            return Err("the section `sample` of its config has no prompts, so there is nothing to sample".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::job::{Format, LoadOptions, parse};
    use crate::requested_outputs::RequestedOutputs;

    fn check(job: &str, outputs: RequestedOutputs) -> Result<(), String> {
        let job = parse(job, Format::Yaml, Some("a.yaml"), &LoadOptions::default()).unwrap();
        job.spec.check_requested_outputs(outputs)
    }

    fn training(process: &str) -> String {
        format!(
            "job: extension\nconfig:\n  name: a\n  process:\n    - type: sd_trainer\n      training_folder: out\n      \
             network: {{type: lora, linear: 4}}\n      model: {{name_or_path: org/model}}\n      datasets: [{{folder_path: \
             images}}]\n      {process}\n"
        )
    }

    #[test]
    fn a_training_saves_and_samples_its_prompts() {
        let with_prompts = training("sample: {prompts: [a cat]}");
        assert_eq!(check(&with_prompts, RequestedOutputs::SAVE), Ok(()));
        assert_eq!(check(&with_prompts, RequestedOutputs::SAMPLES), Ok(()));
        let without = training("sample: {sample_every: 10}");
        assert_eq!(check(&without, RequestedOutputs::SAVE), Ok(()));
        let refused = check(&without, RequestedOutputs::SAMPLES).unwrap_err();
        assert!(refused.contains("no prompts"), "{refused}");
        let disabled = training("sample: {prompts: [a cat]}\n      train: {disable_sampling: true}");
        let refused = check(&disabled, RequestedOutputs::SAMPLES).unwrap_err();
        assert!(refused.contains("disable_sampling"), "{refused}");
    }

    #[test]
    fn other_jobs_are_refused_with_the_types_of_their_processes() {
        let images = "job: generate\nconfig:\n  name: a\n  process:\n    - type: to_folder\n      output_folder: out\n      \
                      model: {name_or_path: org/model}\n      generate: {prompts: [a cat]}\n";
        let refused = check(images, RequestedOutputs::SAVE).unwrap_err();
        assert!(
            refused.starts_with("it has no training (its process: to_folder)"),
            "{refused}"
        );
    }
}
