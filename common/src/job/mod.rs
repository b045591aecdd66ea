//! Job configs: parsed, templated, validated.
