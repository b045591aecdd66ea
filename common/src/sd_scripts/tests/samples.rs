//! Prompts of samples.

use super::support::{base, folder, import_in, job};
use crate::sd_scripts::Script;

/// sd-scripts replaces nothing in the texts of a config.
#[test]
fn texts_in_which_aitk_replaces_something_are_noted() {
    let folder = folder();
    std::fs::write(
        folder.path().join("p.txt"),
        "a [name]\na [name] on a bench\na [cat:1.2]\n",
    )
    .unwrap();
    let text = format!(
        "{}sample_prompts = \"p.txt\"\nsample_every_n_steps = 5\ncaption_prefix = \"${{X}} of\"\ncaption_suffix = \"$ {{}}\"\n",
        base(Script::TrainNetwork)
    );
    let imported = import_in(folder.path(), &text, None).unwrap();
    let notes = imported
        .notes
        .iter()
        .filter(|note| note.message.contains("aitk replaces"));
    let notes: Vec<String> = notes.map(ToString::to_string).collect();
    assert_eq!(
        notes,
        [
            "config.toml:7:1: sample_prompts: aitk replaces `[name]` by the name of the run; sd-scripts takes the text as it is",
            "config.toml:9:1: caption_prefix: aitk replaces `${…}` by a variable of the environment; sd-scripts takes the text as it is",
        ]
    );
}

#[test]
fn what_samples_do_not_have_is_noted_once() {
    let folder = folder();
    let files = [
        (
            "p.toml",
            "[prompt]\nscale = 4\nsample_sampler = \"euler\"\n[[prompt.subset]]\nprompt = \"a\"\nwidth = \"64\"\n[[prompt.subset]]\nprompt = \"b\"\n",
        ),
        (
            "p.json",
            r#"[{"prompt": "a", "scale": 4, "sample_sampler": "euler", "width": "64"}, {"prompt": "b", "scale": 4, "sample_sampler": "euler"}]"#,
        ),
    ];
    for (name, prompts) in files {
        std::fs::write(folder.path().join(name), prompts).unwrap();
        let text = format!(
            "{}sample_prompts = \"{name}\"\nsample_every_n_steps = 5\n",
            base(Script::TrainNetwork)
        );
        let imported = import_in(folder.path(), &text, None).unwrap();
        let notes = imported.notes.iter().filter(|note| note.key == "sample_prompts");
        let notes: Vec<&str> = notes.map(|note| note.message.as_str()).collect();
        let mut sorted = notes.clone();
        sorted.sort_unstable();
        assert_eq!(
            sorted,
            [
                "`sample_sampler` of a prompt is ignored",
                "`width` of a prompt is ignored"
            ],
            "{name}"
        );
        let job = job(&imported.yaml);
        let samples = &job.process[0].trainer().unwrap().sample.samples;
        let scales: Vec<_> = samples.iter().map(|sample| sample.guidance_scale).collect();
        assert_eq!(scales, [Some(4.0), Some(4.0)], "{name}");
    }
}
