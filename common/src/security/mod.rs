//! Who may talk to whom.

pub mod token;
