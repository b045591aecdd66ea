//! What the queue needs to know of a submitted job.

use aitk_common::control::{MAX_CONFIG_BYTES, Submission, UnixMillis};
use aitk_common::hash::ContentHash;
use aitk_common::id::JobId;
use aitk_common::job::cluster::{Split, TimeSpan};
use aitk_common::job::{Finding, JobSpec, summary};
use aitk_common::plan::demand::Demand;
use aitk_common::telemetry::context::TraceContext;
use aitk_scheduler::{Condition, Prerequisite, Wants};
use serde_json::Value;

/// Jobs that a job may wait for.
const AFTER_LIMIT: usize = 64;
/// Labels that a job may ask for: as many as a machine can have.
const LABELS_LIMIT: usize = 256;
/// Bytes of a label, of a kind, and of the name of a job to wait for.
const TEXT_LIMIT: usize = 256;
/// Inputs that placement looks at.
const DATA_LIMIT: usize = 16;

/// Everything that the queue needs to know of a job.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) named: BlobReference,
    pub(crate) wants: Wants,
    pub(crate) after: Vec<Prerequisite>,
    pub(crate) not_before: Option<UnixMillis>,
    /// To be cut into parts, of so many images.
    pub(crate) split: Option<(Split, u64)>,
    /// The span of the call that submits it.
    pub(crate) trace: Option<TraceContext>,
}

/// Name and kind of a job.
#[derive(Clone, Debug)]
pub(crate) struct BlobReference {
    pub(crate) name: String,
    pub(crate) kind: String,
}

/// Reads name, kind and wishes out of the job; a message for a person when it is no job.
///
/// The job is checked as its config was when it was read: whoever sends it may have no such client, or one that was
/// made to lie. What it names has to be there: every path is an input that was sent with it, or the name of a model's
/// repository. The worker checks the same again, by the keys that it knows.
pub(crate) fn wants(submission: &Submission, retries: u32) -> Result<Asked, String> {
    read(submission, retries, !submission.local)
}

/// Whether a submission would be taken, as far as its job alone says: everything but what its inputs and its owner say.
///
/// # Errors
/// What `Submit` answers.
pub fn check_submission(submission: &Submission) -> Result<(), String> {
    wants(submission, 0).map(|_| ())
}

/// [`wants`] of a job that is only asked about: nothing was sent for it, and nothing will run.
pub(crate) fn wants_to_fit(submission: &Submission, retries: u32) -> Result<Asked, String> {
    read(submission, retries, false)
}

fn read(submission: &Submission, retries: u32, all_sent: bool) -> Result<Asked, String> {
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
    // No config needs it, and a text of PostgreSQL cannot hold it.
    for (what, text) in [
        ("config_text", &submission.config_text),
        ("config_format", &submission.config_format),
    ] {
        if text.contains('\0') {
            return Err(format!("{what} holds a NUL character; it is no text"));
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
    let named = BlobReference {
        name: spec.name,
        kind: spec.job.name().to_owned(),
    };
    let cluster = spec.cluster;
    for (what, text) in [("job", &named.kind)]
        .into_iter()
        .chain(cluster.after.0.iter().map(|one| ("cluster.after", one)))
    {
        short(what, text)?;
    }
    let labels = &cluster.labels.0;
    if labels.len() > LABELS_LIMIT {
        return Err(format!(
            "cluster.labels: {} labels; at most {LABELS_LIMIT}",
            labels.len()
        ));
    }
    labels
        .iter()
        .flat_map(|(name, value)| [name, value])
        .try_for_each(|text| short("cluster.labels", text))?;
    let limit = |limit: TimeSpan| u64::try_from(limit.0.as_millis()).unwrap_or(u64::MAX);
    let mut after: Vec<Prerequisite> = Vec::new();
    for (jobs, condition) in [
        (cluster.after.0, Condition::Completed),
        (cluster.after_any.0, Condition::Ended),
        (cluster.after_failed.0, Condition::Failed),
    ] {
        after.extend(jobs.into_iter().map(|job| Prerequisite { job, condition }));
    }
    if after.len() > AFTER_LIMIT {
        return Err(format!(
            "cluster.after, after_any and after_failed: {} jobs; at most {AFTER_LIMIT}",
            after.len()
        ));
    }
    let split = cluster.split.filter(|_| !submission.local);
    let split = split.map(|split| countable(&job, submission.images).map(|images| (split, images)));
    let split = split.transpose()?;
    let counted = |demand: Demand| match submission.images {
        Some(images) => demand.with_images(&job, images),
        None => demand,
    };
    let wants = Wants {
        priority: cluster.priority,
        owner: submission.owner.clone().unwrap_or_default(),
        yields: cluster.yields,
        alone: cluster.alone,
        device: cluster.device,
        labels: cluster.labels.0,
        profile: cluster.memory_profile,
        memory: cluster.memory_budget.map(|bytes| bytes.0),
        demand: Demand::of_job(&job, submission.anatomy).map(counted),
        data: inputs(submission, &job),
        time_limit: cluster.time_limit.map(limit),
        retries: cluster.retries.unwrap_or(retries),
    };
    Ok(Asked {
        named,
        wants,
        after,
        not_before: cluster.not_before.map(|moment| moment.0),
        split,
        trace: None,
    })
}

/// The queue keeps it in memory, and in a record that is written whenever the job changes.
fn short(what: &str, text: &str) -> Result<(), String> {
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

/// The images of a job that is to be cut into parts.
fn countable(job: &Value, images: Option<u64>) -> Result<u64, String> {
    let processes = job.get("process").and_then(Value::as_array);
    let one = processes.is_some_and(|list| list.len() == 1) && job.pointer("/process/0/kind/generate").is_some();
    images.filter(|images| one && *images > 0).ok_or_else(|| {
        "cluster.split: only a job with one `to_folder` process can be cut into parts; take the key out, or put the \
         other processes into jobs of their own"
            .into()
    })
}

/// What the job reads: its snapshots, and models that the worker fetches by their name.
fn inputs(submission: &Submission, job: &Value) -> Vec<ContentHash> {
    let mut data = least(submission.inputs.values());
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
    least(&data)
}

/// The smallest of these, each once: there may be thousands, and members of an array are many.
fn least<'a>(hashes: impl IntoIterator<Item = &'a ContentHash>) -> Vec<ContentHash> {
    let mut least: Vec<ContentHash> = Vec::with_capacity(DATA_LIMIT + 1);
    for hash in hashes {
        if least.len() == DATA_LIMIT && least.last() <= Some(hash) {
            continue;
        }
        if let Err(at) = least.binary_search(hash) {
            least.insert(at, *hash);
            least.truncate(DATA_LIMIT);
        }
    }
    least
}

/// `j` and 8 characters of 32: 2^40 ids, short enough to type a beginning of.
pub(crate) fn fresh_job_id() -> JobId {
    // No i, l, o, u: read aloud and typed, they are taken for others.
    const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
    let bits = uuid::Uuid::new_v4().as_u128();
    let mut text = String::from("j");
    // The low 62 bits of a version 4 UUID are random.
    text.extend((0..8).map(|place| char::from(ALPHABET[(bits >> (place * 5)) as usize & 31])));
    JobId::new(text)
}

/// A seed that is exact in every language's numbers: below 2^32, as torch and ai-toolkit draw theirs.
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
            anatomy: None,
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
    fn wishes_come_out_of_the_job() {
        let json = job(
            "generate",
            &images(r#"["a cat"]"#),
            r#""priority":5,"device":"cuda","labels":{"zone":"x"},"retries":1"#,
        );
        let Asked { named, wants, .. } = wants(&submission(&json), 3).unwrap();
        assert_eq!((named.name.as_str(), named.kind.as_str()), ("a", "generate"));
        assert_eq!((wants.priority, wants.retries), (5, 1));
        assert_eq!(wants.labels["zone"], "x");
        let unknown_model = images(r#"["a cat"]"#).replace(r#""arch":"sd1","#, "");
        let plain = super::wants(&submission(&job("generate", &unknown_model, "")), 3)
            .unwrap()
            .wants;
        assert_eq!(
            plain,
            Wants {
                retries: 3,
                data: vec![ContentHash::of(b"org/sd1")],
                ..Wants::default()
            }
        );
    }

    #[test]
    fn the_rules_of_the_queue_come_out_of_the_job() {
        let json = job(
            "generate",
            &images(r#"["a cat"]"#),
            r#""after":["j1"],"not_before":1000,"time_limit":{"secs":60,"nanos":0},"yields":true,"alone":true"#,
        );
        let asked = Submission {
            owner: Some(aitk_common::id::UserName::new("ada")),
            ..submission(&json)
        };
        let asked = wants(&asked, 3).unwrap();
        assert_eq!(
            (asked.after, asked.not_before),
            (vec!["j1".into()], Some(UnixMillis(1000)))
        );
        let wants = asked.wants;
        assert_eq!((wants.owner.as_str(), wants.time_limit), ("ada", Some(60_000)));
        assert!(wants.yields && wants.alone);
        assert_eq!(wants.demand.unwrap().family, "sd1");
        assert_eq!(wants.data, [ContentHash::of(b"org/sd1")]);
        let many = job(
            "generate",
            &images(r#"["a"]"#),
            &format!(r#""after":{:?}"#, vec!["j"; 65]),
        );
        assert!(
            super::wants(&submission(&many), 3)
                .unwrap_err()
                .contains("cluster.after")
        );
    }

    #[test]
    fn only_images_from_prompts_are_cut_into_parts() {
        let asked = |kind: &str, process: &str, split: &str, images| {
            let mut asked = Submission {
                images,
                ..submission(&job(kind, process, &format!(r#""split":{split}"#)))
            };
            for input in ["data", "p.txt"] {
                asked.inputs.insert(input.into(), ContentHash::of(b"it"));
            }
            wants(&asked, 3)
        };
        let from_file = images(r#""p.txt""#);
        let parts = asked("generate", &from_file, r#"{"parts":4}"#, Some(40)).unwrap();
        assert_eq!(parts.split, Some((Split::Parts(4), 40)));
        // The prompts lie in a file: the client counted them.
        let one = asked("generate", &from_file, "null", Some(1)).unwrap();
        assert_eq!(one.split, None);
        let (one, many) = (one.wants.demand.unwrap(), parts.wants.demand.unwrap());
        assert_eq!(many.millipasses, 40 * one.millipasses);
        assert_eq!(
            asked("generate", &from_file, r#""auto""#, Some(2)).unwrap().split,
            Some((Split::Auto, 2))
        );
        for (kind, process, images) in [
            ("generate", from_file.as_str(), None),
            ("generate", &from_file, Some(0)),
            ("extension", TRAINING, Some(3)),
        ] {
            let error = asked(kind, process, r#""auto""#, images).unwrap_err();
            assert!(
                error.starts_with("cluster.split: only a job with one `to_folder`"),
                "{error}"
            );
        }
    }

    #[test]
    fn what_is_no_job_is_said_so() {
        let unknown_priority = job("generate", &images(r#"["a"]"#), r#""priority":"high""#);
        for bad in [
            "",
            "[]",
            r#"{"job":"x"}"#,
            r#"{"job":"x","name":""}"#,
            r#"{"job":"generate","name":"a","meta":{},"config":{},"cluster":{},"process":[]}"#,
            &unknown_priority,
        ] {
            let error = wants(&submission(bad), 3).unwrap_err();
            assert!(error.starts_with("job_json"), "{bad}: {error}");
        }
        assert!(
            wants(&submission(&" ".repeat(MAX_CONFIG_BYTES + 1)), 3)
                .unwrap_err()
                .contains("at most")
        );
    }

    /// What a client refuses to send is refused here too, whoever sends it.
    #[test]
    fn a_job_is_checked_as_its_config_was() {
        let sent = |json: &str, inputs: &[&str], local: bool| {
            let inputs = inputs.iter().map(|path| ((*path).to_owned(), ContentHash::of(b"it")));
            let asked = Submission {
                inputs: inputs.collect(),
                local,
                ..submission(json)
            };
            wants(&asked, 3).map(|_| ())
        };
        let training = job("extension", TRAINING, "");
        sent(&training, &["data"], false).unwrap();
        let unsent = sent(&training, &[], false).unwrap_err();
        assert!(
            unsent.contains("config.process[0].datasets[0].folder_path: `data` is not an input of this job"),
            "{unsent}"
        );
        // In place, paths are those of whoever runs it.
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
            (r#""arch":"sd1""#, r#""arch":"flux""#, "config.process[0].model.arch"),
            (
                r#""network":{}"#,
                r#""network":{"linear":0}"#,
                "the rank must be at least 1",
            ),
            ("sd_trainer", "concept_slider", "config.process[0].type"),
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
