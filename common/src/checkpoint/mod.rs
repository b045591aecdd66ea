//! Complete training states on disk.
