//! Who may talk to whom.

pub mod role;
pub mod token;
