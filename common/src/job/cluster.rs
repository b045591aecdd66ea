//! `cluster`: wishes about where and when a job runs. Ours; ai-toolkit has no such section.

use super::node::Node;
use super::schema::{Cx, FieldValue, Status, section};
use super::values::read_choice;
use crate::capability::DeviceKind;
use crate::plan::profile::MemoryProfile;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Names with values that a worker must carry, all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Labels(pub BTreeMap<String, String>);

/// A number of bytes, written as a number or with a unit: `12GiB`, `800 MB`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ByteCount(pub u64);

section! {
    /// Wishes about where and when a job runs.
    pub struct ClusterConfig("cluster") {
        /// Jobs of a higher priority start first.
        priority: i64 = 0, Works;
        /// How a task is laid out in memory: `full_gpu`, `balanced`, `gpu_poor`, `extreme`, `cpu_only`. Absent: what the worker offers.
        memory_profile: Option<MemoryProfile> = None, Works;
        /// Device memory that a task may use, such as `12GiB`. Absent: what the worker offers.
        memory_budget: Option<ByteCount> = None, Works;
        /// Labels that a worker must carry, all of them.
        labels: Labels = Labels::default(), Works;
        /// Kind of device that the job needs: `cuda`, `metal` or `cpu`. Absent: any.
        device: Option<DeviceKind> = None, Works;
        /// How often a failed attempt is tried again. Absent: the coordinator decides.
        retries: Option<u32> = None, Works;
    }
}

impl FieldValue for MemoryProfile {
    fn kind() -> String {
        "name of a memory profile".into()
    }
    fn read(node: &Node, cx: &mut Cx) -> Option<Self> {
        let names: Vec<&'static str> = Self::ALL.iter().map(|profile| profile.name()).collect();
        read_choice(node, cx, "memory profile", &names, |name| {
            Self::from_name(&name.to_ascii_lowercase())
        })
    }
    fn show(&self) -> String {
        self.name().into()
    }
    fn is_off(&self) -> bool {
        false
    }
    fn values() -> Vec<(&'static str, Status)> {
        Self::ALL
            .iter()
            .map(|profile| (profile.name(), Status::Works))
            .collect()
    }
}

const DEVICE_KINDS: [DeviceKind; 3] = [DeviceKind::Cuda, DeviceKind::Metal, DeviceKind::Cpu];

impl FieldValue for DeviceKind {
    fn kind() -> String {
        "name of a device kind".into()
    }
    fn read(node: &Node, cx: &mut Cx) -> Option<Self> {
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
    fn is_off(&self) -> bool {
        false
    }
    fn values() -> Vec<(&'static str, Status)> {
        DEVICE_KINDS.iter().map(|kind| (kind.name(), Status::Works)).collect()
    }
}

impl FieldValue for Labels {
    fn kind() -> String {
        "map of name: value".into()
    }
    fn read(node: &Node, cx: &mut Cx) -> Option<Self> {
        let mut labels = BTreeMap::new();
        for entry in cx.map(node, "labels")? {
            let value = cx.below(&entry.key, entry.mark, |cx| match entry.node.value {
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
    fn is_off(&self) -> bool {
        self.0.is_empty()
    }
}

impl ByteCount {
    /// Reads `12GiB`, `12 GB`, `800m`, `1024`. Decimal units are powers of 1000, `i` units powers of 1024.
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
    fn read(node: &Node, cx: &mut Cx) -> Option<Self> {
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
    fn is_off(&self) -> bool {
        self.0 == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_counts() {
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
