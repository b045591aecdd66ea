//! Into how many parts a job is cut.

use super::model::Wants;
use super::state::State;
use super::state::classes::{Needs, fit};
use super::state::speeds::TOO_SLOW;
use aitk_common::control::MAX_ARRAY_MEMBERS;
use aitk_common::job::cluster::Split;

/// Parts per device: enough that a device which is slower than it seemed takes fewer, few enough that loading the model
/// again and again does not show.
const PARTS_PER_DEVICE: u64 = 4;
/// Seconds of work that a part must have on the fastest device: loading a model takes a few of them.
const SECONDS_LEAST: f64 = 60.0;

impl State {
    /// Into how many parts a job of so many images is cut now; 1: it stays whole.
    #[must_use]
    pub fn parts(&self, wants: &Wants, images: u64, split: Split) -> u64 {
        let most = images.min(MAX_ARRAY_MEMBERS as u64).max(1);
        match split {
            Split::Parts(parts) => u64::from(parts).clamp(1, most),
            Split::Auto => self.parts_that_pay(wants).clamp(1, most),
        }
    }

    fn parts_that_pay(&self, wants: &Wants) -> u64 {
        let needs = Needs::of_wants(wants, false, None);
        let family = needs.family.as_deref();
        let speeds: Vec<f64> = self
            .slots
            .iter()
            .filter(|(_, slot)| slot.open)
            .filter_map(|(_, slot)| {
                let worker = self.workers.get(&slot.worker)?;
                let (profile, _) = fit(&needs, worker, &slot.device).ok()?;
                Some(self.speeds.seconds_per_unit(&slot.device, family, profile))
            })
            .collect();
        let best = speeds.iter().copied().fold(f64::INFINITY, f64::min);
        let usable = speeds
            .iter()
            .filter(|speed| needs.device.is_some() || **speed <= best * TOO_SLOW)
            .count() as u64;
        if usable < 2 {
            return 1;
        }
        let by_devices = usable * PARTS_PER_DEVICE;
        match &wants.demand {
            None => by_devices,
            Some(demand) => {
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
                let by_time = (demand.units() * best / SECONDS_LEAST).clamp(0.0, 1e6) as u64;
                by_devices.min(by_time)
            }
        }
    }
}
