//! `cluster`: constraints on where and when a job runs. ai-toolkit has no such section.

use super::declare::section;
use super::node::Node;
use super::schema::{FieldValue, ReadContext, SupportLevel};
use super::secret::looks_like_token;
use super::values::{OneOrMany, read_choice};
use crate::capability::DeviceKind;
use crate::control_plane::UnixMillis;
use crate::plan::profile::MemoryProfile;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Label names and values; a worker must have all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Labels(pub BTreeMap<String, String>);

/// A number of bytes, written as a number or with a unit: `12GiB`, `800 MB`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ByteCount(pub u64);

section! {
    /// Constraints on where and when a job runs.
    pub struct ClusterConfig("cluster") {
        /// Jobs of a higher priority start first.
        priority: i64 = 0, Works;
        /// Memory profile. `full_gpu` (needs a GPU) and `cpu_only` (needs a CPU) keep everything in memory. `balanced` reads text encoders and VAE from their files when they run. `gpu_poor` also reads half of the U-Net this way, computes CFG in two passes, runs the VAE in tiles and recomputes activations in training. `extreme` reads the whole U-Net this way. Absent: the fastest profile that is predicted to fit.
        memory_profile: Option<MemoryProfile> = None, Works;
        /// Device memory that a task may use, such as `12GiB`; the memory profile is chosen by it. On a CPU under Linux it also limits all memory of the attempt's process, including the program itself. Absent: what the worker offers.
        memory_budget: Option<ByteCount> = None, Works;
        /// Labels that a worker must have, all of them.
        labels: Labels = Labels::default(), Works;
        /// Kind of device that the job needs: `cuda`, `metal` or `cpu`. Absent: any.
        device: Option<DeviceKind> = None, Works;
        /// How often a failed attempt is tried again. Absent: the coordinator decides.
        retries: Option<u32> = None, Works;
        /// Jobs, by id or name, that must complete first.
        after: OneOrMany<String> = OneOrMany(Vec::new()), Works;
        /// Jobs, by id or name, that must end first, however they end.
        after_any: OneOrMany<String> = OneOrMany(Vec::new()), Works;
        /// Jobs, by id or name, that must fail first, for a job that cleans up or retries with other settings. When one of them completes, this job is not needed and is stopped.
        after_failed: OneOrMany<String> = OneOrMany(Vec::new()), Works;
        /// The job does not start before this time, such as `2026-11-22T02:00:00Z`.
        not_before: Option<Timestamp> = None, Works;
        /// Running time after which the job saves and stops, such as `8h`. `aitk resume` grants the same time again.
        time_limit: Option<TimeSpan> = None, Works;
        /// How long the job may show no progress before its process is killed and the attempt is retried, such as `30m`. It grows automatically when the job's own steps take long. Absent: the worker's setting, 10 minutes by default.
        progress_timeout: Option<TimeSpan> = None, Works;
        /// Preemptible: the job saves and leaves its device when a job of a higher priority, or a job of the same priority that does not yield, waits for it, and resumes automatically later.
        yields: bool = false, Works;
        /// The job shares its device with no other job, however small both are. So does a training of a code model that leaves its batch size to the machine.
        alone: bool = false, Works;
        /// Splits a job of one `to_folder` process into at most this many parts, which several devices generate at the same time; `auto`: as many as save time. The images are the same.
        split: Option<Split> = None, Works;
        /// Name of a Hugging Face token that the workers' owners keep for the job's user (`aitk-worker --hub-secrets`). Private and gated models are downloaded with it. Never the token itself.
        hub_token: Option<SecretName> = None, Works;
    }
}

/// The name of a secret that workers keep for the job's user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SecretName(pub String);

impl SecretName {
    /// Whether this is a valid name of a secret: 1 to 64 letters, digits, `-` or `_`.
    #[must_use]
    pub fn is_name(text: &str) -> bool {
        (1..=64).contains(&text.len())
            && text
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    }
}

impl FieldValue for SecretName {
    fn kind() -> String {
        "name of a secret".into()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        let name = match &node.value {
            super::node::Value::Text(text) if Self::is_name(text) && !looks_like_token(text) => {
                Some(Self(text.clone()))
            }
            _ => None,
        };
        if name.is_none() {
            // The value may be the token itself, so the message does not repeat it.
            cx.error(
                "expected the name under which workers keep the token, 1 to 64 letters, digits, '-' or '_'; never the token itself",
            );
        }
        name
    }
    fn show(&self) -> String {
        self.0.clone()
    }
    fn is_falsy(&self) -> bool {
        false
    }
}

/// How many parts a job is split into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// As many as save time, given the devices and the length of the work.
    Auto,
    /// At most this many.
    Parts(u32),
}

impl FieldValue for Split {
    fn kind() -> String {
        "whole number from 1, or `auto`".into()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        let parsed = match &node.value {
            super::node::Value::Text(text) if text.eq_ignore_ascii_case("auto") => Some(Self::Auto),
            super::node::Value::Int(parts) => u32::try_from(*parts).ok().filter(|parts| *parts > 0).map(Self::Parts),
            _ => None,
        };
        if parsed.is_none() {
            cx.wrong_type(node, "a number of parts from 1, or `auto`");
        }
        parsed
    }
    fn show(&self) -> String {
        match self {
            Self::Auto => "auto".into(),
            Self::Parts(parts) => parts.to_string(),
        }
    }
    fn is_falsy(&self) -> bool {
        false
    }
}

/// A point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(pub UnixMillis);

/// A length of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TimeSpan(pub std::time::Duration);

impl FieldValue for Timestamp {
    fn kind() -> String {
        "time with its zone, as in RFC 3339".into()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        let parsed = match &node.value {
            super::node::Value::Text(text) => text.trim().parse::<jiff::Timestamp>().ok(),
            _ => None,
        };
        let parsed = parsed.and_then(|time| u64::try_from(time.as_millisecond()).ok());
        if parsed.is_none() {
            cx.wrong_type(node, "a time such as 2026-11-22T02:00:00Z or 2026-11-22T02:00:00+01:00");
        }
        parsed.map(|ms| Self(UnixMillis(ms)))
    }
    fn show(&self) -> String {
        i64::try_from(self.0.0)
            .ok()
            .and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok())
            .map_or_else(|| self.0.0.to_string(), |time| time.to_string())
    }
    fn is_falsy(&self) -> bool {
        false
    }
}

impl TimeSpan {
    /// Parses `90s`, `10m`, `8h`, `2d`, and several of them together: `1h30m`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut rest = text.trim();
        let mut seconds = 0_u64;
        if rest.is_empty() {
            return None;
        }
        while !rest.is_empty() {
            let digits = rest.find(|c: char| !c.is_ascii_digit())?;
            let number: u64 = rest.get(..digits)?.parse().ok()?;
            let unit = match rest.as_bytes().get(digits)? {
                b's' => 1,
                b'm' => 60,
                b'h' => 3600,
                b'd' => 86_400,
                _ => return None,
            };
            seconds = seconds.checked_add(number.checked_mul(unit)?)?;
            rest = rest.get(digits + 1..)?.trim_start();
        }
        // More than 100 years is a typing error.
        (seconds > 0 && seconds <= 100 * 366 * 86_400).then(|| Self(std::time::Duration::from_secs(seconds)))
    }
}

impl FieldValue for TimeSpan {
    fn kind() -> String {
        "length of time".into()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        let parsed = match &node.value {
            super::node::Value::Text(text) => Self::parse(text),
            _ => None,
        };
        if parsed.is_none() {
            cx.wrong_type(node, "a length of time such as 90s, 10m, 8h, 2d or 1h30m");
        }
        parsed
    }
    fn show(&self) -> String {
        format!("{}s", self.0.as_secs())
    }
    fn is_falsy(&self) -> bool {
        false
    }
}

impl FieldValue for MemoryProfile {
    fn kind() -> String {
        "name of a memory profile".into()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        let names: Vec<&'static str> = Self::ALL.iter().map(|profile| profile.name()).collect();
        read_choice(node, cx, "memory profile", &names, |name| {
            Self::from_name(&name.to_ascii_lowercase())
        })
    }
    fn show(&self) -> String {
        self.name().into()
    }
    fn is_falsy(&self) -> bool {
        false
    }
    fn values() -> Vec<(&'static str, SupportLevel)> {
        Self::ALL
            .iter()
            .map(|profile| (profile.name(), SupportLevel::Works))
            .collect()
    }
}

const DEVICE_KINDS: [DeviceKind; 3] = [DeviceKind::Cuda, DeviceKind::Metal, DeviceKind::Cpu];

impl FieldValue for DeviceKind {
    fn kind() -> String {
        "name of a device kind".into()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        let names: Vec<&'static str> = DEVICE_KINDS.iter().map(|kind| kind.name()).collect();
        read_choice(node, cx, "device kind", &names, |name| {
            DEVICE_KINDS
                .into_iter()
                .find(|kind| kind.name().eq_ignore_ascii_case(name))
        })
    }
    fn show(&self) -> String {
        self.name().into()
    }
    fn is_falsy(&self) -> bool {
        false
    }
    fn values() -> Vec<(&'static str, SupportLevel)> {
        DEVICE_KINDS
            .iter()
            .map(|kind| (kind.name(), SupportLevel::Works))
            .collect()
    }
}

impl FieldValue for Labels {
    fn kind() -> String {
        "map of name: value".into()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        let mut labels = BTreeMap::new();
        for entry in cx.read_map(node, "labels")? {
            let value = cx.descend(&entry.key, entry.mark, |cx| match entry.node.value {
                super::node::Value::Bool(value) => Some(entry.node.plain.clone().unwrap_or_else(|| value.to_string())),
                _ => String::read(&entry.node, cx),
            })?;
            labels.insert(entry.key.clone(), value);
        }
        Some(Self(labels))
    }
    fn show(&self) -> String {
        if self.0.is_empty() {
            "{}".into()
        } else {
            format!("{:?}", self.0)
        }
    }
    fn is_falsy(&self) -> bool {
        self.0.is_empty()
    }
}

impl ByteCount {
    /// Parses `12GiB`, `12 GB`, `800m`, `1024`. Decimal units are powers of 1000, `i` units powers of 1024.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let split = text
            .find(|c: char| !(c.is_ascii_digit() || c == '.'))
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let factor = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1.0,
            "k" | "kb" => 1e3,
            "m" | "mb" => 1e6,
            "g" | "gb" => 1e9,
            "t" | "tb" => 1e12,
            "kib" => 1024.0,
            "mib" => 1_048_576.0,
            "gib" => 1_073_741_824.0,
            "tib" => 1_099_511_627_776.0,
            _ => return None,
        };
        let bytes = number.parse::<f64>().ok()? * factor;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        (bytes.is_finite() && bytes <= 9.0e18).then_some(Self(bytes as u64))
    }
}

impl FieldValue for ByteCount {
    fn kind() -> String {
        "number of bytes, with or without a unit".into()
    }
    fn read(node: &Node, cx: &mut ReadContext) -> Option<Self> {
        let parsed = match &node.value {
            super::node::Value::Text(text) => Self::parse(text),
            super::node::Value::Int(value) => u64::try_from(*value).ok().map(Self),
            _ => None,
        };
        if parsed.is_none() {
            cx.wrong_type(node, "a number of bytes such as 12GiB or 800MB");
        }
        parsed
    }
    fn show(&self) -> String {
        self.0.to_string()
    }
    fn is_falsy(&self) -> bool {
        self.0 == 0
    }
}

#[cfg(test)]
mod tests {
    use super::super::change::Change;
    use super::super::tests::{MINIMAL, load_yaml};
    use super::super::{Format, LoadOptions, parse};
    use super::*;

    #[test]
    fn an_error_about_hub_token_does_not_repeat_the_token() {
        let token = "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH";
        for written in [
            token,
            "my other secret",
            "'my secret: 9'",
            "1234567",
            "12.5",
            "[my-secret]",
            "{my-secret: 1}",
        ] {
            let error = load_yaml(&format!("{MINIMAL}cluster:\n  hub_token: {written}\n")).unwrap_err();
            let [finding] = error.findings() else { panic!("{error}") };
            assert_eq!((finding.key.as_str(), finding.line), ("cluster.hub_token", Some(15)));
            assert!(
                finding.message.starts_with("expected the name under which"),
                "{finding}"
            );
            for part in [token, "secret", "1234567", "12.5"] {
                assert!(!error.to_string().contains(part), "{error}");
            }
        }
        assert!(load_yaml(&format!("{MINIMAL}cluster: {{hub_token: my-models_2}}\n")).is_ok());
        // A token at another key is not repeated either.
        let text = format!("{MINIMAL}cluster: {{priority: {token}, hub_token: {token}}}\n");
        let below = [Change {
            key: "cluster.hub_token.x".into(),
            value: "1".into(),
        }];
        for changes in [&below[..], &[]] {
            let options = LoadOptions {
                changes,
                ..LoadOptions::default()
            };
            let error = parse(&text, Format::Yaml, None, &options).unwrap_err().to_string();
            assert!(error.contains("cluster.") && !error.contains(token), "{error}");
        }
    }

    #[test]
    fn time_spans_are_parsed() {
        for (text, seconds) in [
            ("90s", 90),
            ("10m", 600),
            ("8h", 28_800),
            ("2d", 172_800),
            ("1h30m", 5400),
            ("1h 5s", 3605),
        ] {
            assert_eq!(
                TimeSpan::parse(text),
                Some(TimeSpan(std::time::Duration::from_secs(seconds))),
                "{text}"
            );
        }
        for text in [
            "",
            "h",
            "10",
            "0s",
            "-1h",
            "1.5h",
            "99999999999999999999d",
            "9999999d",
            "1h x",
            "1\u{e9}",
        ] {
            assert_eq!(TimeSpan::parse(text), None, "{text}");
        }
    }

    #[test]
    fn byte_counts_are_parsed() {
        for (text, bytes) in [
            ("12GiB", 12 << 30),
            ("1.5 GiB", 3 << 29),
            ("800MB", 800_000_000),
            ("1024", 1024),
            ("2g", 2_000_000_000),
        ] {
            assert_eq!(ByteCount::parse(text), Some(ByteCount(bytes)), "{text}");
        }
        for text in ["", "GiB", "12 apples", "-1GB", "1e99TB"] {
            assert_eq!(ByteCount::parse(text), None, "{text}");
        }
    }
}
