//! Datasets, captions, buckets and caches.
