//! Into how many parts a job of images is split.

use super::class_fits::device_fit;
use super::model::Requirements;
use super::state::State;
use super::state::classes::DeviceNeeds;
use aitk_common::control_plane::MAX_ARRAY_MEMBERS;
use aitk_common::job::cluster::Split;

/// Parts per device: enough that a device which is slower than predicted takes fewer parts, and few enough that loading the
/// model for each part does not matter.
const PARTS_PER_DEVICE: u64 = 4;
/// The least seconds of work of a part on the fastest device. Loading a model takes a few seconds.
const MIN_PART_SECONDS: f64 = 60.0;

impl State {
    /// The number of parts into which a job of this many images is split now; 1: it is not split.
    #[must_use]
    pub fn part_count(&self, requirements: &Requirements, images: u64, split: Split) -> u64 {
        let max = images.min(MAX_ARRAY_MEMBERS as u64).max(1);
        match split {
            Split::Parts(parts) => u64::from(parts).clamp(1, max),
            Split::Auto => self.useful_parts(requirements).clamp(1, max),
        }
    }

    /// The number of parts for `auto`: by the number of usable devices and the predicted work.
    fn useful_parts(&self, requirements: &Requirements) -> u64 {
        let needs = DeviceNeeds::of_requirements(requirements, false, None);
        let speeds: Vec<f64> = self
            .slots
            .iter()
            .filter(|(_, slot)| slot.accepts_jobs)
            .filter_map(|(_, slot)| {
                let worker = self.workers.get(&slot.worker)?;
                let fit = device_fit(&self.speeds, &needs, worker, &slot.device).ok()?;
                Some(fit.seconds_per_pass)
            })
            .collect();
        let best = speeds.iter().copied().fold(f64::INFINITY, f64::min);
        let usable = speeds.iter().filter(|speed| !needs.is_too_slow(**speed, best)).count() as u64;
        if usable < 2 {
            return 1;
        }
        let by_devices = usable * PARTS_PER_DEVICE;
        match &requirements.demand {
            None => by_devices,
            Some(demand) => {
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
                let by_time = (demand.passes() * best / MIN_PART_SECONDS).clamp(0.0, 1e6) as u64;
                by_devices.min(by_time)
            }
        }
    }
}
