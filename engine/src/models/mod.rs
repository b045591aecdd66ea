//! Model families, and the parts that several of them share.

pub mod clip;
pub mod config;
pub mod flux;
pub mod sd;
pub mod unet;
pub mod vae;

#[cfg(test)]
mod tests;
