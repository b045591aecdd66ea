//! Forecasts: on which devices a job could run, and why not on others.

use crate::capability::DeviceRef;
use crate::id::WorkerId;
use crate::plan::profile::MemoryProfile;
use serde::{Deserialize, Serialize};

/// The devices on which a job could run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// One sentence for users.
    pub summary: String,
    /// All connected devices: fitting ones first, the best of them first.
    pub devices: Vec<DeviceForecast>,
}

/// Whether and how a job could run on a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceForecast {
    /// The worker.
    pub worker: WorkerId,
    /// The worker's name.
    pub worker_name: String,
    /// The device.
    pub device: DeviceRef,
    /// The device's product name.
    pub device_name: String,
    /// Bytes that tasks may use on the device.
    pub budget: u64,
    /// Whether the job fits on the idle device.
    pub fits: bool,
    /// Whether the job could start there now.
    #[serde(rename = "ready")]
    pub can_start_now: bool,
    /// The memory profile that the job would get.
    pub profile: Option<MemoryProfile>,
    /// Predicted peak memory in bytes; none: unknown.
    pub memory: Option<u64>,
    /// Predicted run time in seconds; none: unknown.
    pub seconds: Option<f64>,
    /// Whether the speed was measured on such a device. Otherwise it is estimated from the kind of device.
    #[serde(rename = "measured")]
    pub is_speed_measured: bool,
    /// The same information as a sentence.
    #[serde(rename = "words")]
    pub description: String,
}

impl Forecast {
    /// Whether any connected device can run the job.
    #[must_use]
    pub fn fits_somewhere(&self) -> bool {
        self.devices.iter().any(|device| device.fits)
    }
}
