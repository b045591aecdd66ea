//! Files that are either old or new, never half.
