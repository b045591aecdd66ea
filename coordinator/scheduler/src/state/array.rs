//! What the scheduler knows of an array of jobs.

use crate::model::QueueKey;
use aitk_common::id::JobId;
use std::collections::{BTreeMap, BTreeSet};

/// What is known of an array: all of it is derived from its members.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Array {
    pub(crate) name: String,
    /// Those that are not forgotten, by their index.
    pub(crate) members: BTreeMap<u32, JobId>,
    pub(crate) size: u32,
    pub(crate) at_most: Option<u32>,
    pub(crate) split: bool,
    /// Members that have completed.
    pub(crate) completed: usize,
    /// Members with a live attempt.
    pub(crate) running: BTreeSet<JobId>,
    /// Where there is a limit: members that wait for a device. Together with those that run they are never above it.
    pub(crate) ready: BTreeSet<JobId>,
    /// Members that wait for nothing but the limit, in queue order.
    pub(crate) held: BTreeMap<QueueKey, JobId>,
}

impl Array {
    /// Whether one more member may wait for a device.
    pub(crate) fn has_room(&self) -> bool {
        let most = self.at_most.map_or(usize::MAX, |most| most as usize);
        self.running.len() + self.ready.len() < most
    }
}
