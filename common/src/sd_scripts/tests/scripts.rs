//! Which script a config is for.

use super::support::{base, folder, import_in};
use crate::sd_scripts::Script;

#[test]
fn scripts_are_found_by_options_and_names() {
    let folder = folder();
    for script in Script::ALL {
        let text = base(script);
        let found = import_in(folder.path(), &text, None).map(|imported| imported.script);
        match (script, found) {
            // train_db and fine_tune differ by no option of the small config.
            (Script::TrainDb | Script::FineTune, found) => {
                let errors = found.unwrap_err();
                assert!(errors[0].message.contains("--script"), "{errors:?}");
            }
            (_, found) => assert_eq!(
                found.unwrap_or_else(|errors| panic!("{}: {errors:?}", script.name())),
                script
            ),
        }
        assert_eq!(Script::from_name(&format!("{}.py", script.name())), Ok(script));
    }
    let fine_tune = format!("{}train_text_encoder = true\n", base(Script::FineTune));
    assert_eq!(
        import_in(folder.path(), &fine_tune, None).unwrap().script,
        Script::FineTune
    );
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
    let text = format!("{}token_string = \"vorx\"\n", base(Script::FluxTrainNetwork));
    let errors = import_in(folder.path(), &text, None).unwrap_err();
    assert_eq!((errors[0].line, errors[0].key.as_str()), (Some(10), "token_string"));
    assert!(
        Script::from_name("train_controlnet")
            .unwrap_err()
            .contains("flux_train_network")
    );
}
