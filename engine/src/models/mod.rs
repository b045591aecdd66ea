//! Model families, and the components that several families share.

pub mod clip;
pub mod config;
pub mod flux;
pub mod sd;
pub mod unet;
pub mod vae;

#[cfg(test)]
mod tests;
