//! The networks that have no control images or masks to make.

use aitk_common::job::controls::ControlType;
use aitk_common::job::{JobSpec, Process};

/// Data sets whose control images or masks of a type all exist: the index of the process, and that of the data set in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompleteControls(pub(super) Vec<(usize, usize, ControlType)>);

impl CompleteControls {
    /// Leaves the networks out that would make the files, so that they are neither uploaded nor downloaded. Returns whether there
    /// were any.
    pub fn leave_out_generators(&self, spec: &mut JobSpec) -> bool {
        for &(process, dataset, kind) in &self.0 {
            if let Some(process) = spec.process.get_mut(process).and_then(Process::trainer_mut) {
                process.leave_out_control_generator(dataset, kind);
            }
        }
        !self.0.is_empty()
    }
}
