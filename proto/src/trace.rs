//! The trace that a call belongs to, in its metadata.

use aitk_common::telemetry::context::{TRACEPARENT, TraceContext};
use tonic::metadata::MetadataMap;

/// Says which trace a call belongs to.
pub fn put(metadata: &mut MetadataMap, trace: Option<TraceContext>) {
    // Its text is always printable.
    if let Some(value) = trace.and_then(|trace| trace.to_string().parse().ok()) {
        metadata.insert(TRACEPARENT, value);
    }
}

/// Which trace a call belongs to; one that says so in no known way belongs to none.
#[must_use]
pub fn get(metadata: &MetadataMap) -> Option<TraceContext> {
    // Two of them say nothing.
    let mut all = metadata.get_all(TRACEPARENT).iter();
    let value = all.next().filter(|_| all.next().is_none())?;
    value.to_str().ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_is_got_and_nonsense_is_nothing() {
        let trace: TraceContext = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            .parse()
            .unwrap();
        let mut metadata = MetadataMap::new();
        put(&mut metadata, None);
        assert_eq!(get(&metadata), None);
        put(&mut metadata, Some(trace));
        assert_eq!(get(&metadata), Some(trace));
        metadata.append(TRACEPARENT, "00".parse().unwrap());
        assert_eq!(get(&metadata), None);
        metadata.remove(TRACEPARENT);
        metadata.insert(TRACEPARENT, "00-nonsense".parse().unwrap());
        assert_eq!(get(&metadata), None);
    }
}
