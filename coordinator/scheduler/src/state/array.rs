//! An array of jobs.

use crate::model::QueueKey;
use aitk_common::id::JobId;
use std::collections::{BTreeMap, BTreeSet};

/// An array of jobs. Everything in it is derived from its members.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Array {
    pub(crate) name: String,
    /// The members that still exist, by index.
    pub(crate) members: BTreeMap<u32, JobId>,
    pub(crate) size: u32,
    pub(crate) at_most: Option<u32>,
    pub(crate) split: bool,
    /// Members that have completed.
    pub(crate) completed: usize,
    /// Members with a live attempt.
    pub(crate) running: BTreeSet<JobId>,
    /// If there is a limit: members that wait for a device. Together with the running members they never exceed it.
    pub(crate) ready: BTreeSet<JobId>,
    /// Members that wait only because of the limit, in queue order.
    pub(crate) over_limit: BTreeMap<QueueKey, JobId>,
}

impl Array {
    /// Whether the limit allows one more member to wait for a device.
    pub(crate) fn can_admit(&self) -> bool {
        let max = self.at_most.map_or(usize::MAX, |max| max as usize);
        self.running.len() + self.ready.len() < max
    }
}
