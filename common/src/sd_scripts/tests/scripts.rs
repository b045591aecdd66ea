//! Which script a config is for.

use super::support::{base, folder, import_in};
use crate::sd_scripts::Script;

#[test]
fn scripts_are_found_by_options_and_names() {
    let folder = folder();
    for script in Script::ALL {
        let text = base(script);
        let found = import_in(folder.path(), &text, None).map(|imported| imported.script);
        let expected = match script {
            // fine_tune needs a metadata file, which the small config does not have.
            Script::FineTune => Script::TrainDb,
            script => script,
        };
        assert_eq!(
            found.unwrap_or_else(|errors| panic!("{}: {errors:?}", script.name())),
            expected
        );
        assert_eq!(Script::from_name(&format!("{}.py", script.name())), Ok(script));
    }
    // fine_tune.py stops without a metadata file, so that train_text_encoder alone is one of train_db.py, which ignores it.
    for (options, expected) in [
        ("in_json = \"meta.json\"", Script::FineTune),
        ("train_text_encoder = true", Script::TrainDb),
        (
            "train_text_encoder = true\ndataset_config = \"sd21_lion.dataset.toml\"",
            Script::FineTune,
        ),
    ] {
        let text = format!("{}{options}\n", base(Script::FineTune));
        assert_eq!(
            import_in(folder.path(), &text, None).unwrap().script,
            expected,
            "{options}"
        );
    }
    let text = format!("{}in_json = \"meta.json\"\n", base(Script::TrainDb));
    let imported = import_in(folder.path(), &text, Some(Script::TrainDb)).unwrap();
    assert!(
        imported.notes.iter().any(|note| note.key == "in_json"),
        "{:?}",
        imported.notes
    );
    assert!(!imported.yaml.contains("captions_file"), "{}", imported.yaml);
}

#[test]
fn a_config_that_may_be_for_several_scripts_is_an_error() {
    let folder = folder();
    let text = base(Script::TrainNetwork).replace("sd15", "dreamshaper_8.safetensors");
    let errors = import_in(folder.path(), &text, None).unwrap_err();
    assert_eq!(errors.len(), 1);
    assert!(
        errors[0].message.contains("--script sdxl_train_network"),
        "{}",
        errors[0]
    );
    assert_eq!(
        (errors[0].line, errors[0].key.as_str()),
        (Some(5), "pretrained_model_name_or_path")
    );
    import_in(folder.path(), &text, Some(Script::TrainNetwork)).unwrap();
    // The scripts of the hint fit what is trained.
    for (script, expected) in [
        (Script::TrainDb, "--script train_db (Stable Diffusion"),
        (
            Script::TrainTextualInversion,
            "--script train_textual_inversion (Stable",
        ),
    ] {
        let text = base(script).replace("sd15", "dreamshaper_8.safetensors");
        let errors = import_in(folder.path(), &text, None).unwrap_err();
        assert!(
            errors.len() == 1 && errors[0].message.contains(expected),
            "{expected}: {errors:?}"
        );
    }
    let text = format!("{}dataset_config = \"data.toml\"\n", base(Script::TrainDb));
    let errors = import_in(folder.path(), &text, None).unwrap_err();
    assert!(errors[0].message.contains("--script train_db"), "{}", errors[0]);
    assert_eq!(errors[0].key, "dataset_config");
    let text = format!("{}token_string = \"vorx\"\n", base(Script::FluxTrainNetwork));
    let errors = import_in(folder.path(), &text, None).unwrap_err();
    assert_eq!((errors[0].line, errors[0].key.as_str()), (Some(10), "token_string"));
    assert!(
        Script::from_name("train_controlnet")
            .unwrap_err()
            .contains("flux_train_network")
    );
}
