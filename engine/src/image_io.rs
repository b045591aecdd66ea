//! Pictures in and out.
