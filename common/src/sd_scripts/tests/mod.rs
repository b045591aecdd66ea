//! Tests of the import.

mod examples;
mod kinds;
mod mistakes;
mod options;
mod presets;
mod random;
mod ranks;
mod rates;
mod resumed;
mod scripts;
mod support;
