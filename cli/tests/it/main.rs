//! Tests of the program from outside. They are one test binary, because each additional one takes a minute to build.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod client;
#[cfg(feature = "embedded")]
mod clone;
#[cfg(feature = "embedded")]
mod coordinator;
mod doc_links;
#[cfg(feature = "embedded")]
mod doctor;
#[cfg(feature = "embedded")]
mod downloads;
mod exit_codes;
#[cfg(feature = "embedded")]
mod extensions;
#[cfg(feature = "embedded")]
mod image_sizes;
#[cfg(feature = "embedded")]
mod imports;
#[cfg(feature = "embedded")]
mod login;
#[cfg(feature = "embedded")]
mod model_parts;
#[cfg(feature = "embedded")]
mod notify;
#[cfg(feature = "embedded")]
mod preflight;
#[cfg(feature = "embedded")]
mod preflight_inputs;
#[cfg(feature = "embedded")]
mod push;
#[cfg(feature = "embedded")]
mod records;
#[cfg(feature = "embedded")]
mod run;
mod support;
mod terminal;
#[cfg(feature = "embedded")]
mod traces;
#[cfg(feature = "embedded")]
mod uploads;
