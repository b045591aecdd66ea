//! Where a job could run, and why not elsewhere.

use crate::capability::DeviceRef;
use crate::id::WorkerId;
use crate::plan::profile::MemoryProfile;
use serde::{Deserialize, Serialize};

/// Where a job could run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// In one sentence.
    pub summary: String,
    /// Every connected device, those that fit first, the best of them first.
    pub devices: Vec<DeviceForecast>,
}

/// What a device is to a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceForecast {
    /// The worker.
    pub worker: WorkerId,
    /// What people call it.
    pub worker_name: String,
    /// The device.
    pub device: DeviceRef,
    /// What its vendor calls it.
    pub device_name: String,
    /// Bytes that tasks may use on it.
    pub budget: u64,
    /// Whether the job fits on it when it is idle.
    pub fits: bool,
    /// Whether the job could start on it now.
    pub ready: bool,
    /// The memory profile that it would get.
    pub profile: Option<MemoryProfile>,
    /// Bytes that it would need there at the most; none: not known.
    pub memory: Option<u64>,
    /// Seconds that the work would take; none: not known.
    pub seconds: Option<f64>,
    /// Whether that was measured on a device like this one; otherwise it is a guess by kind of device.
    pub measured: bool,
    /// All of it as one would say it.
    pub words: String,
}

impl Forecast {
    /// Whether some connected device can run the job.
    #[must_use]
    pub fn fits_somewhere(&self) -> bool {
        self.devices.iter().any(|device| device.fits)
    }
}
