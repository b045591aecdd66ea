//! Object storage behind our nouns.
