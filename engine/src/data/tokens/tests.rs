//! Documents, rows and batches.
