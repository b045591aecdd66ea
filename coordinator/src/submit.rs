//! Parses and validates submitted jobs.

use crate::training_fit::fills_device;
use aitk_common::control_plane::{MAX_CONFIG_BYTES, Submission, UnixMillis};
use aitk_common::hash::ContentHash;
use aitk_common::id::JobId;
use aitk_common::job::cluster::{Split, TimeSpan};
use aitk_common::job::{Finding, JobSpec, summary};
use aitk_common::plan::demand::Demand;
use aitk_common::plan::prompt_files::with_longest_prompt;
use aitk_common::telemetry::context::TraceContext;
use aitk_scheduler::{Dependency, DependencyCondition, Requirements};
use serde_json::Value;

/// Maximum jobs that a job may depend on.
const AFTER_LIMIT: usize = 64;
/// Maximum labels of a job: as many as a machine can have.
const LABELS_LIMIT: usize = 256;
/// Maximum bytes of a label, of a kind, and of the name of a job to wait for.
const TEXT_LIMIT: usize = 256;
/// Maximum inputs considered by placement.
const DATA_LIMIT: usize = 16;

/// What the scheduler needs to know of a job.
#[derive(Clone, Debug)]
pub(crate) struct ParsedSubmission {
    pub(crate) title: JobTitle,
    pub(crate) requirements: Requirements,
    pub(crate) after: Vec<Dependency>,
    pub(crate) not_before: Option<UnixMillis>,
    /// How to split the job, and its number of images.
    pub(crate) split: Option<(Split, u64)>,
    /// Trace context of the submission.
    pub(crate) trace: Option<TraceContext>,
}

/// Name and kind of a job.
#[derive(Clone, Debug)]
pub(crate) struct JobTitle {
    pub(crate) name: String,
    pub(crate) kind: String,
}

/// Parses a submission; the error is a message for the user.
///
/// The job is validated again as the client did, because the sender may use another or a manipulated client. Every
/// path must be an input that was sent with it, or the name of a model repository. The worker validates the job again
/// with the keys that it knows.
pub(crate) fn parse_submission(submission: &Submission, retries: u32) -> Result<ParsedSubmission, String> {
    parse(submission, retries, !submission.local)
}

/// Checks a submission without its inputs and owner.
///
/// # Errors
/// The message that `Submit` returns.
pub fn check_submission(submission: &Submission) -> Result<(), String> {
    parse_submission(submission, 0).map(|_| ())
}

/// Parses a job for a forecast: nothing was uploaded for it, and it will not run.
pub(crate) fn parse_for_fit(submission: &Submission, retries: u32) -> Result<ParsedSubmission, String> {
    parse(submission, retries, false)
}

fn parse(submission: &Submission, retries: u32, all_sent: bool) -> Result<ParsedSubmission, String> {
    for (what, bytes) in [
        ("config_text", submission.config_text.len()),
        ("job_json", submission.job_json.len()),
    ] {
        if bytes > MAX_CONFIG_BYTES {
            return Err(format!(
                "{what} has {bytes} bytes; a config may have at most {MAX_CONFIG_BYTES}"
            ));
        }
    }
    // No config needs NUL, and PostgreSQL cannot store it in a text.
    for (what, text) in [
        ("config_text", &submission.config_text),
        ("config_format", &submission.config_format),
    ] {
        if text.contains('\0') {
            return Err(format!(
                "{what} contains a NUL character, which is not allowed in a text"
            ));
        }
    }
    let job: Value = serde_json::from_str(&submission.job_json).map_err(|error| format!("job_json: {error}"))?;
    let spec = JobSpec::from_value(&job).map_err(|error| problems(error.findings()))?;
    let support = spec.unsupported();
    if !support.errors.is_empty() {
        return Err(problems(&support.errors));
    }
    if all_sent {
        let foreign = spec.foreign_paths(|path| submission.inputs.contains_key(path));
        if !foreign.is_empty() {
            return Err(problems(&foreign));
        }
    }
    let labels = spec.required_labels();
    let title = JobTitle {
        name: spec.name,
        kind: spec.job.name().to_owned(),
    };
    let cluster = spec.cluster;
    for (what, text) in [("job", &title.kind)]
        .into_iter()
        .chain(cluster.after.0.iter().map(|one| ("cluster.after", one)))
        .chain(cluster.after_any.0.iter().map(|one| ("cluster.after_any", one)))
        .chain(cluster.after_failed.0.iter().map(|one| ("cluster.after_failed", one)))
    {
        check_length(what, text)?;
    }
    if labels.len() > LABELS_LIMIT {
        return Err(format!(
            "cluster.labels: {} labels; at most {LABELS_LIMIT}",
            labels.len()
        ));
    }
    labels
        .iter()
        .flat_map(|(name, value)| [name, value])
        .try_for_each(|text| check_length("cluster.labels", text))?;
    let limit = |limit: TimeSpan| u64::try_from(limit.0.as_millis()).unwrap_or(u64::MAX);
    let mut after: Vec<Dependency> = Vec::new();
    for (jobs, condition) in [
        (cluster.after.0, DependencyCondition::Completed),
        (cluster.after_any.0, DependencyCondition::Ended),
        (cluster.after_failed.0, DependencyCondition::Failed),
    ] {
        after.extend(jobs.into_iter().map(|job| Dependency { job, condition }));
    }
    if after.len() > AFTER_LIMIT {
        return Err(format!(
            "cluster.after, after_any and after_failed: {} jobs; at most {AFTER_LIMIT}",
            after.len()
        ));
    }
    let split = cluster.split.filter(|_| !submission.local);
    let split = split.map(|split| check_split(&job, submission.images).map(|images| (split, images)));
    let split = split.transpose()?;
    let counted = |demand: Demand| match submission.images {
        Some(images) => demand.with_images(&job, images),
        None => demand,
    };
    let planned = with_longest_prompt(job.clone(), submission.longest_prompt);
    let requirements = Requirements {
        priority: cluster.priority,
        owner: submission.owner.clone().unwrap_or_default(),
        yields: cluster.yields,
        // A job that fills its device shares it with no other one.
        exclusive: cluster.alone || fills_device(&job),
        device: cluster.device,
        labels,
        profile: cluster.memory_profile,
        memory: cluster.memory_budget.map(|bytes| bytes.0),
        demand: Demand::of_job(&planned, submission.parameter_counts, &submission.image_batches).map(counted),
        data: inputs(submission, &job),
        time_limit: cluster.time_limit.map(limit),
        retries: cluster.retries.unwrap_or(retries),
    };
    Ok(ParsedSubmission {
        title,
        requirements,
        after,
        not_before: cluster.not_before.map(|moment| moment.0),
        split,
        trace: None,
    })
}

/// Checks the length of a text that the scheduler keeps in memory and writes at every change of the job.
fn check_length(what: &str, text: &str) -> Result<(), String> {
    if text.len() <= TEXT_LIMIT {
        return Ok(());
    }
    Err(format!(
        "job_json: {what}: a text of {} bytes; at most {TEXT_LIMIT}",
        text.len()
    ))
}

fn problems(findings: &[Finding]) -> String {
    format!("job_json: {}", summary(findings))
}

/// Returns the number of images of a job that is to be split.
fn check_split(job: &Value, images: Option<u64>) -> Result<u64, String> {
    let processes = job.get("process").and_then(Value::as_array);
    let one = processes.is_some_and(|list| list.len() == 1) && job.pointer("/process/0/kind/generate").is_some();
    images.filter(|images| one && *images > 0).ok_or_else(|| {
        "cluster.split: only a job with one `to_folder` process can be cut into parts; remove the key, or put the \
         other processes into jobs of their own"
            .into()
    })
}

/// Returns hashes for the job's inputs: its snapshots, and the names of models that the worker downloads.
fn inputs(submission: &Submission, job: &Value) -> Vec<ContentHash> {
    let mut data = smallest(submission.inputs.values());
    let processes = job.get("process").and_then(Value::as_array).into_iter().flatten();
    for process in processes {
        let body = process
            .get("kind")
            .and_then(Value::as_object)
            .and_then(|kinds| kinds.values().next());
        let model = body
            .and_then(|body| body.pointer("/model/name_or_path"))
            .and_then(Value::as_str);
        if let Some(model) = model.filter(|model| !model.is_empty() && !submission.inputs.contains_key(*model)) {
            data.push(ContentHash::of(model.as_bytes()));
        }
    }
    smallest(&data)
}

/// Returns the [`DATA_LIMIT`] smallest distinct hashes: a job may have thousands of inputs, and an array many members.
fn smallest<'a>(hashes: impl IntoIterator<Item = &'a ContentHash>) -> Vec<ContentHash> {
    let mut smallest: Vec<ContentHash> = Vec::with_capacity(DATA_LIMIT + 1);
    for hash in hashes {
        if smallest.len() == DATA_LIMIT && smallest.last() <= Some(hash) {
            continue;
        }
        if let Err(at) = smallest.binary_search(hash) {
            smallest.insert(at, *hash);
            smallest.truncate(DATA_LIMIT);
        }
    }
    smallest
}

/// Returns a random job id: `j` and 8 characters of 32, so 2^40 ids, of which users can type a prefix.
pub(crate) fn fresh_job_id() -> JobId {
    // Without i, l, o and u, which are easily confused.
    const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
    let bits = uuid::Uuid::new_v4().as_u128();
    let mut text = String::from("j");
    // The low 62 bits of a version 4 UUID are random.
    text.extend((0..8).map(|digit| char::from(ALPHABET[(bits >> (digit * 5)) as usize & 31])));
    JobId::new(text)
}

/// Returns a random seed below 2^32, like torch and ai-toolkit, which is exact in every language's number type.
pub(crate) fn fresh_seed() -> u64 {
    uuid::Uuid::new_v4().as_u128() as u64 & 0xffff_ffff
}

#[cfg(test)]
mod tests {
    use super::*;

    fn submission(job_json: &str) -> Submission {
        Submission {
            config_text: String::new(),
            config_format: "yaml".into(),
            job_json: job_json.into(),
            inputs: Default::default(),
            local: false,
            idempotency_key: None,
            owner: None,
            parameter_counts: None,
            image_batches: Vec::new(),
            longest_prompt: None,
            images: None,
        }
    }

    /// A job with these processes and this `cluster` section.
    fn job(kind: &str, process: &str, cluster: &str) -> String {
        format!(
            r#"{{"job":"{kind}","name":"a","meta":{{}},"config":{{}},"process":[{process}],"cluster":{{{cluster}}}}}"#
        )
    }

    fn images(prompts: &str) -> String {
        format!(
            r#"{{"type":"to_folder","kind":{{"generate":{{"output_folder":"out","model":{{"arch":"sd1","name_or_path":"org/sd1"}},"generate":{{"prompts":{prompts}}}}}}}}}"#
        )
    }

    const TRAINING: &str = r#"{"type":"sd_trainer","kind":{"train":{"training_folder":"out","model":{"arch":"sd1","name_or_path":"org/sd1","dtype":"float32"},"network":{},"datasets":[{"folder_path":"data"}]}}}"#;

    #[test]
    fn requirements_are_parsed_from_the_job() {
        let json = job(
            "generate",
            &images(r#"["a cat"]"#),
            r#""priority":5,"device":"cuda","labels":{"zone":"x"},"retries":1"#,
        );
        let ParsedSubmission {
            title, requirements, ..
        } = parse_submission(&submission(&json), 3).unwrap();
        assert_eq!((title.name.as_str(), title.kind.as_str()), ("a", "generate"));
        assert_eq!((requirements.priority, requirements.retries), (5, 1));
        assert_eq!(requirements.labels["zone"], "x");
        let unknown_model = images(r#"["a cat"]"#).replace(r#""arch":"sd1","#, "");
        let plain = super::parse_submission(&submission(&job("generate", &unknown_model, "")), 3)
            .unwrap()
            .requirements;
        assert_eq!(
            plain,
            Requirements {
                retries: 3,
                data: vec![ContentHash::of(b"org/sd1")],
                ..Requirements::default()
            }
        );
    }

    #[test]
    fn scheduling_options_are_parsed_from_the_job() {
        let json = job(
            "generate",
            &images(r#"["a cat"]"#),
            r#""after":["j1"],"not_before":1000,"time_limit":{"secs":60,"nanos":0},"yields":true,"alone":true"#,
        );
        let parsed = Submission {
            owner: Some(aitk_common::id::UserName::new("ada")),
            ..submission(&json)
        };
        let parsed = parse_submission(&parsed, 3).unwrap();
        assert_eq!(
            (parsed.after, parsed.not_before),
            (vec!["j1".into()], Some(UnixMillis(1000)))
        );
        let requirements = parsed.requirements;
        assert_eq!(
            (requirements.owner.as_str(), requirements.time_limit),
            ("ada", Some(60_000))
        );
        assert!(requirements.yields && requirements.exclusive);
        assert_eq!(requirements.demand.unwrap().family, "sd1");
        assert_eq!(requirements.data, [ContentHash::of(b"org/sd1")]);
        let many = job(
            "generate",
            &images(r#"["a"]"#),
            &format!(r#""after":{:?}"#, vec!["j"; 65]),
        );
        assert!(
            super::parse_submission(&submission(&many), 3)
                .unwrap_err()
                .contains("cluster.after")
        );
        for key in ["after", "after_any", "after_failed"] {
            let long = format!(r#""{key}":["{}"]"#, "j".repeat(TEXT_LIMIT + 1));
            let long = job("generate", &images(r#"["a"]"#), &long);
            let error = super::parse_submission(&submission(&long), 3).unwrap_err();
            assert_eq!(
                error,
                format!("job_json: cluster.{key}: a text of 257 bytes; at most 256")
            );
        }
    }

    #[test]
    fn only_jobs_that_generate_images_can_be_split() {
        let parsed = |kind: &str, process: &str, split: &str, images| {
            let mut parsed = Submission {
                images,
                ..submission(&job(kind, process, &format!(r#""split":{split}"#)))
            };
            for input in ["data", "p.txt"] {
                parsed.inputs.insert(input.into(), ContentHash::of(b"it"));
            }
            parse_submission(&parsed, 3)
        };
        let from_file = images(r#""p.txt""#);
        let parts = parsed("generate", &from_file, r#"{"parts":4}"#, Some(40)).unwrap();
        assert_eq!(parts.split, Some((Split::Parts(4), 40)));
        // The prompts are in a file: the client counted them.
        let one = parsed("generate", &from_file, "null", Some(1)).unwrap();
        assert_eq!(one.split, None);
        let (one, many) = (one.requirements.demand.unwrap(), parts.requirements.demand.unwrap());
        assert_eq!(many.millipasses, 40 * one.millipasses);
        assert_eq!(
            parsed("generate", &from_file, r#""auto""#, Some(2)).unwrap().split,
            Some((Split::Auto, 2))
        );
        for (kind, process, images) in [
            ("generate", from_file.as_str(), None),
            ("generate", &from_file, Some(0)),
            ("extension", TRAINING, Some(3)),
        ] {
            let error = parsed(kind, process, r#""auto""#, images).unwrap_err();
            assert!(
                error.starts_with("cluster.split: only a job with one `to_folder`"),
                "{error}"
            );
        }
    }

    #[test]
    fn an_invalid_job_is_refused_with_a_message() {
        let unknown_priority = job("generate", &images(r#"["a"]"#), r#""priority":"high""#);
        for bad in [
            "",
            "[]",
            r#"{"job":"x"}"#,
            r#"{"job":"x","name":""}"#,
            r#"{"job":"generate","name":"a","meta":{},"config":{},"cluster":{},"process":[]}"#,
            &unknown_priority,
        ] {
            let error = parse_submission(&submission(bad), 3).unwrap_err();
            assert!(error.starts_with("job_json"), "{bad}: {error}");
        }
        assert!(
            parse_submission(&submission(&" ".repeat(MAX_CONFIG_BYTES + 1)), 3)
                .unwrap_err()
                .contains("at most")
        );
    }

    /// A job that a client rejects is rejected here too.
    #[test]
    fn a_job_is_validated_like_its_config() {
        let sent = |json: &str, inputs: &[&str], local: bool| {
            let inputs = inputs.iter().map(|path| ((*path).to_owned(), ContentHash::of(b"it")));
            let parsed = Submission {
                inputs: inputs.collect(),
                local,
                ..submission(json)
            };
            parse_submission(&parsed, 3).map(|_| ())
        };
        let training = job("extension", TRAINING, "");
        sent(&training, &["data"], false).unwrap();
        let unsent = sent(&training, &[], false).unwrap_err();
        assert!(
            unsent.contains("config.process[0].datasets[0].folder_path: `data` is not an input of this job"),
            "{unsent}"
        );
        // A job in place uses paths of the machine.
        sent(&training, &[], true).unwrap();
        for (from, to, said) in [
            (r#""name":"a""#, r#""name":"../../a""#, "cannot name a folder"),
            (
                r#""training_folder""#,
                r#""name":"/etc/x","training_folder""#,
                "config.process[0].name: `/etc/x` cannot name a folder",
            ),
            ("org/sd1", "/models/sd1", "`/models/sd1` is not an input"),
            ("org/sd1", "../sd1", "`../sd1` is not an input"),
            (
                r#""arch":"sd1""#,
                r#""arch":"auraflow""#,
                "config.process[0].model.arch",
            ),
            (
                r#""network":{}"#,
                r#""network":{"linear":0}"#,
                "the rank must be at least 1",
            ),
            ("sd_trainer", "concept_replacer", "config.process[0].type"),
            ("sd_trainer", "to_folder", "`to_folder` is a process of `job: generate`"),
        ] {
            assert!(training.contains(from), "{from}");
            let error = sent(&training.replace(from, to), &["data"], false).unwrap_err();
            assert!(error.starts_with("job_json: ") && error.contains(said), "{to}: {error}");
        }
        let secret = job("generate", &images(r#""/proc/self/environ""#), "");
        assert!(
            sent(&secret, &[], false)
                .unwrap_err()
                .contains("config.process[0].generate.prompts: `/proc/self/environ`")
        );
        let long = job("generate", &images(&format!("{:?}", "x".repeat(100_000))), "");
        assert!(sent(&long, &[], false).unwrap_err().len() < 4_000);
    }

    #[test]
    fn ids_are_short_and_differ() {
        let ids: std::collections::BTreeSet<_> = (0..1000).map(|_| fresh_job_id()).collect();
        assert_eq!(ids.len(), 1000);
        assert!(
            ids.iter()
                .all(|id| id.as_str().len() == 9 && JobId::parse(id.as_str()).is_ok())
        );
    }
}
