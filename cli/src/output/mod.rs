//! What a person or a script sees: data on standard output, everything else on standard error.

pub mod format;
pub mod progress;
pub mod table;
pub mod ui;

pub use table::{Align, Column, Table};
pub use ui::{Format, Ui, Wait};

/// Version of every JSON document and line that the program prints. It grows when a field
/// changes its meaning or goes away, not when one is added.
pub const SCHEMA_VERSION: u32 = 1;
