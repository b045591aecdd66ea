//! Logging, set up once.
