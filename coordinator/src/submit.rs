//! What the queue needs to know of a submitted job.

use crate::core::Wants;
use aitk_common::control::Submission;
use aitk_common::id::JobId;
use aitk_common::job::cluster::ClusterConfig;
use serde::Deserialize;

/// The largest config, in bytes, each for its text and its parsed form.
const CONFIG_LIMIT: usize = 4 << 20;

/// Name and kind of a job.
#[derive(Debug, Deserialize)]
pub(crate) struct Named {
    pub(crate) name: String,
    #[serde(rename = "job")]
    pub(crate) kind: String,
}

#[derive(Deserialize)]
struct Spec {
    #[serde(flatten)]
    named: Named,
    #[serde(default)]
    cluster: ClusterConfig,
}

/// Reads name, kind and wishes out of the job; a message for a person when it is no job.
///
/// Only what the queue needs is read: the rest was validated by the client, and is again by the worker's child,
/// so that a coordinator does not refuse a key of a config which only a newer worker knows.
pub(crate) fn wants(submission: &Submission, retries: u32) -> Result<(Named, Wants), String> {
    for (what, bytes) in [
        ("config_text", submission.config_text.len()),
        ("job_json", submission.job_json.len()),
    ] {
        if bytes > CONFIG_LIMIT {
            return Err(format!(
                "{what} has {bytes} bytes; a config may have at most {CONFIG_LIMIT}"
            ));
        }
    }
    let Spec { named, cluster } =
        serde_json::from_str(&submission.job_json).map_err(|error| format!("job_json: {error}"))?;
    if named.name.is_empty() || named.name.len() > 256 || named.name.chars().any(char::is_control) {
        return Err("job_json: `name` must have 1 to 256 bytes and no control characters".into());
    }
    let wants = Wants {
        priority: cluster.priority,
        device: cluster.device,
        labels: cluster.labels.0,
        profile: cluster.memory_profile,
        memory: cluster.memory_budget.map(|bytes| bytes.0),
        retries: cluster.retries.unwrap_or(retries),
    };
    Ok((named, wants))
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
        }
    }

    #[test]
    fn wishes_come_out_of_the_job() {
        let json = r#"{"job":"extension","name":"a","process":[],"cluster":{"priority":5,"device":"cuda","labels":{"zone":"x"},"retries":1}}"#;
        let (named, wants) = wants(&submission(json), 3).unwrap();
        assert_eq!((named.name.as_str(), named.kind.as_str()), ("a", "extension"));
        assert_eq!((wants.priority, wants.retries), (5, 1));
        assert_eq!(wants.labels["zone"], "x");
        let (_, plain) = super::wants(&submission(r#"{"job":"generate","name":"a"}"#), 3).unwrap();
        assert_eq!(
            plain,
            Wants {
                retries: 3,
                ..Wants::default()
            }
        );
    }

    #[test]
    fn what_is_no_job_is_said_so() {
        for bad in [
            "",
            "[]",
            r#"{"job":"x"}"#,
            r#"{"job":"x","name":""}"#,
            r#"{"job":"x","name":"a","cluster":{"priority":"high"}}"#,
        ] {
            let error = wants(&submission(bad), 3).unwrap_err();
            assert!(error.starts_with("job_json"), "{bad}: {error}");
        }
        assert!(
            wants(&submission(&" ".repeat(CONFIG_LIMIT + 1)), 3)
                .unwrap_err()
                .contains("at most")
        );
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
