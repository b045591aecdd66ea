//! Output for people and scripts: results on standard output, everything else on standard error.

pub mod format;
pub mod indicator;
pub mod json;
pub mod progress;
pub mod table;
pub mod ui;

pub use indicator::ProgressIndicator;
pub use table::{Align, Column, Table};
pub use ui::{Format, Ui};

/// The schema version of every JSON document and line that the program prints. It is increased when a field changes its
/// meaning or is removed, not when one is added.
pub const SCHEMA_VERSION: u32 = 1;
