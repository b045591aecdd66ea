//! Tests of the import.

mod examples;
mod mistakes;
mod options;
mod random;
mod scripts;
mod support;
