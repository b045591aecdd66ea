//! Images that are held out of the training.

use super::support::{base, folder, import_in, job};
use crate::sd_scripts::Script;

/// `validation_timesteps` of train_network.py: `np.linspace(min_timestep, max_timestep, 6, dtype=int)[1:-1]`.
#[test]
fn images_are_validated_between_the_timesteps_of_the_training() {
    let folder = folder();
    let levels = |script: Script, more: &str| {
        let held_out = "validation_split = 0.5\nvalidation_seed = 1\nvalidate_every_n_steps = 5\n";
        let text = format!("{}{held_out}{more}", base(script));
        let job = job(&import_in(folder.path(), &text, Some(script)).unwrap().yaml);
        let train = &job.process[0].trainer().unwrap().train;
        train.validation_config.as_ref().unwrap().validation_sigmas.clone()
    };
    assert_eq!(levels(Script::TrainNetwork, ""), [0.2, 0.4, 0.6, 0.8]);
    let half = "min_timestep = 1\nmax_timestep = 500\n";
    assert_eq!(levels(Script::SdxlTrainNetwork, half), [0.1, 0.2, 0.3, 0.4]);
    assert_eq!(levels(Script::FluxTrainNetwork, half), [0.2, 0.4, 0.6, 0.8]);
}

/// `config_util.py` takes the options of data sets from the training config whichever options the script's own parser has, and only
/// train_network.py validates.
#[test]
fn scripts_for_whole_models_and_words_hold_images_out_and_validate_none() {
    let folder = folder();
    for script in [
        Script::TrainDb,
        Script::SdxlTrain,
        Script::FluxTrain,
        Script::TrainTextualInversion,
    ] {
        let text = format!("{}validation_split = 0.5\nvalidation_seed = 1\n", base(script));
        let imported = import_in(folder.path(), &text, Some(script)).unwrap();
        let job = job(&imported.yaml);
        let trainer = job.process[0].trainer().unwrap();
        assert_eq!(trainer.datasets[0].excluded_images.len(), 6, "{}", imported.yaml);
        assert!(trainer.train.validation_config.is_none(), "{}", imported.yaml);
        let is_noted = imported.notes.iter().any(|note| note.key.starts_with("validation_"));
        assert!(!is_noted, "{:?}", imported.notes);
    }
}
