//! The trace context in the metadata of calls.

use aitk_common::telemetry::context::{TRACEPARENT, TraceContext};
use tonic::metadata::MetadataMap;

/// Inserts a trace context.
pub fn insert(metadata: &mut MetadataMap, trace: Option<TraceContext>) {
    // The text is ASCII, so parsing cannot fail.
    if let Some(value) = trace.and_then(|trace| trace.to_string().parse().ok()) {
        metadata.insert(TRACEPARENT, value);
    }
}

/// Reads the trace context. None if it is missing or invalid.
#[must_use]
pub fn extract(metadata: &MetadataMap) -> Option<TraceContext> {
    // Several values are invalid.
    let mut all = metadata.get_all(TRACEPARENT).iter();
    let value = all.next().filter(|_| all.next().is_none())?;
    value.to_str().ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_context_round_trips_and_invalid_values_are_ignored() {
        let trace: TraceContext = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            .parse()
            .unwrap();
        let mut metadata = MetadataMap::new();
        insert(&mut metadata, None);
        assert_eq!(extract(&metadata), None);
        insert(&mut metadata, Some(trace));
        assert_eq!(extract(&metadata), Some(trace));
        metadata.append(TRACEPARENT, "00".parse().unwrap());
        assert_eq!(extract(&metadata), None);
        metadata.remove(TRACEPARENT);
        metadata.insert(TRACEPARENT, "00-nonsense".parse().unwrap());
        assert_eq!(extract(&metadata), None);
    }
}
