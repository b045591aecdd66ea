//! The components that several model families share.

pub mod clip;
pub mod codec;
pub mod config;
pub mod flux;
mod mmdit;
pub mod sd3;
pub mod t5;
pub mod unet;
pub mod vae;

#[cfg(test)]
mod tests;
