//! The W3C trace context that links the spans of a job.
//!
//! Ids that several programs must agree on are derived, not transmitted. If a job's submission has no trace, its trace id
//! is derived from the job's id; the span ids of the job and of its attempts are derived from the trace id. So a restarted
//! coordinator, a new leader and a worker without a trace context all use the same ids.

use crate::id::{AttemptId, JobId};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest, Sha256};
use std::fmt;
use std::num::{NonZeroU64, NonZeroU128};
use std::str::FromStr;

/// The HTTP and gRPC header that carries a [`TraceContext`]. In upper case, the name of the environment variable.
pub const TRACEPARENT: &str = "traceparent";

/// The id of a trace: all spans of one job, on all machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceId(NonZeroU128);

impl TraceId {
    /// The trace id of a job whose submission has no trace.
    #[must_use]
    pub fn of_job(job: &JobId) -> Self {
        Self(not_zero_128(digest(&[b"aitk job", job.as_str().as_bytes()])))
    }

    /// A random id.
    #[must_use]
    pub fn random() -> Self {
        Self(NonZeroU128::new(uuid::Uuid::new_v4().as_u128()).unwrap_or(NonZeroU128::MIN))
    }

    /// The id's 16 bytes, big-endian.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.get().to_be_bytes()
    }
}

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// The id of a span within a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SpanId(NonZeroU64);

impl SpanId {
    /// The id of the span from a job's submission to its end.
    #[must_use]
    pub fn of_job(trace: TraceId, job: &JobId) -> Self {
        Self::derived(trace, b"job", job.as_str())
    }

    /// The id of the coordinator's span of an attempt.
    #[must_use]
    pub fn of_assignment(trace: TraceId, attempt: &AttemptId) -> Self {
        Self::derived(trace, b"assigned", attempt.as_str())
    }

    /// A random id.
    #[must_use]
    pub fn random() -> Self {
        let (high, low) = uuid::Uuid::new_v4().as_u64_pair();
        Self(NonZeroU64::new(high ^ low).unwrap_or(NonZeroU64::MIN))
    }

    /// The id's 8 bytes, big-endian.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 8] {
        self.0.get().to_be_bytes()
    }

    fn derived(trace: TraceId, what: &[u8], id: &str) -> Self {
        let all = not_zero_128(digest(&[what, &trace.to_bytes(), id.as_bytes()]));
        // The upper half. It is zero with probability 2^-64.
        Self(
            u64::try_from(all.get() >> 64)
                .ok()
                .and_then(NonZeroU64::new)
                .unwrap_or(NonZeroU64::MIN),
        )
    }
}

impl fmt::Display for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

fn digest(parts: &[&[u8]]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

fn not_zero_128(bytes: [u8; 32]) -> NonZeroU128 {
    let mut half = [0; 16];
    half.copy_from_slice(&bytes[..16]);
    NonZeroU128::new(u128::from_be_bytes(half)).unwrap_or(NonZeroU128::MIN)
}

/// A span within a trace, sent as `00-TRACE-SPAN-01`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceContext {
    /// The trace.
    pub trace: TraceId,
    /// The span.
    pub span: SpanId,
    /// Whether the trace is recorded. Child spans are recorded only if it is.
    pub sampled: bool,
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{}-{}-{:02x}", self.trace, self.span, u8::from(self.sampled))
    }
}

/// A text that is not a trace context. Receivers ignore it: a wrong trace context never fails a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a trace context; expected 00-TRACE-SPAN-FLAGS, in 32, 16 and 2 hexadecimal digits")]
pub struct BadTraceContext;

impl FromStr for TraceContext {
    type Err = BadTraceContext;

    /// Parses as <https://www.w3.org/TR/trace-context/> says: of later versions, only the known first fields are used.
    fn from_str(text: &str) -> Result<Self, BadTraceContext> {
        let mut parts = text.split('-');
        let mut next = |digits| {
            let part = parts.next().filter(|part| part.len() == digits)?;
            let plain = part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
            plain.then(|| u128::from_str_radix(part, 16).ok())?
        };
        let version = next(2).filter(|version| *version != 0xff).ok_or(BadTraceContext)?;
        let trace = next(32).and_then(NonZeroU128::new).ok_or(BadTraceContext)?;
        let span = next(16).and_then(|span| u64::try_from(span).ok());
        let span = span.and_then(NonZeroU64::new).ok_or(BadTraceContext)?;
        let flags = next(2).ok_or(BadTraceContext)?;
        if version == 0 && parts.next().is_some() {
            return Err(BadTraceContext);
        }
        Ok(Self {
            trace: TraceId(trace),
            span: SpanId(span),
            sampled: flags & 1 == 1,
        })
    }
}

impl Serialize for TraceContext {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for TraceContext {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn the_examples_of_the_w3c_recommendation_parse() {
        let context: TraceContext = GOOD.parse().unwrap();
        assert_eq!(context.to_string(), GOOD);
        assert!(context.sampled);
        let later: TraceContext = GOOD
            .replacen("00", "cc", 1)
            .replace("-01", "-03-what-comes-later")
            .parse()
            .unwrap();
        assert_eq!(later, context);
        assert!(!GOOD.replace("-01", "-00").parse::<TraceContext>().unwrap().sampled);
        for bad in [
            String::new(),
            GOOD.replacen("00", "ff", 1),
            GOOD.to_uppercase(),
            format!("{GOOD}-more"),
            GOOD.replace("-01", "-1"),
            GOOD.replace("b7ad6b7169203331", "0000000000000000"),
            GOOD.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            GOOD.replace('a', "+"),
            GOOD.replace('-', ""),
        ] {
            assert_eq!(bad.parse::<TraceContext>(), Err(BadTraceContext), "{bad}");
        }
    }

    #[test]
    fn derived_ids_are_stable_across_versions() {
        // Different versions of the program may trace attempts of the same job.
        let (job, attempt) = (JobId::new("j0123abcd"), AttemptId::new("j0123abcd-1"));
        let trace = TraceId::of_job(&job);
        assert_eq!(trace.to_string(), "4508f91c9ecc1b93af6c847033f6904c");
        assert_eq!(SpanId::of_job(trace, &job).to_string(), "48b6fed29315b044");
        assert_eq!(SpanId::of_assignment(trace, &attempt).to_string(), "7a14b873c5b12ff8");
        assert_ne!(trace, TraceId::of_job(&JobId::new("j0123abce")));
    }

    proptest! {
        #[test]
        fn any_text_is_an_error_or_round_trips(text in "[0-9a-f-]{0,70}") {
            if let Ok(context) = text.parse::<TraceContext>() {
                prop_assert_eq!(context.to_string().parse::<TraceContext>(), Ok(context));
            }
        }

        #[test]
        fn every_context_round_trips_through_text_and_json(trace in 1_u128.., span in 1_u64.., sampled: bool) {
            let context = TraceContext {
                trace: TraceId(NonZeroU128::new(trace).unwrap()),
                span: SpanId(NonZeroU64::new(span).unwrap()),
                sampled,
            };
            prop_assert_eq!(context.to_string().parse(), Ok(context));
            let json = serde_json::to_string(&context).unwrap();
            prop_assert_eq!(serde_json::from_str::<TraceContext>(&json).unwrap(), context);
        }
    }
}
