//! Which trace something belongs to, as everybody on a job's way says it: the W3C trace context.
//!
//! Ids that several programs must agree on are derived instead of told. The trace of a job that nobody else traces
//! comes from the job's id, and the spans of its life and of its attempts come from the trace: so a coordinator that
//! was started again, the one that took over, and a worker that was told nothing all mean the same spans.

use crate::id::{AttemptId, JobId};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest, Sha256};
use std::fmt;
use std::num::{NonZeroU64, NonZeroU128};
use std::str::FromStr;

/// The header of HTTP and gRPC calls, and with capitals the environment variable, that carry a [`TraceContext`].
pub const TRACEPARENT: &str = "traceparent";

/// A trace: everything that happens for one purpose, on however many machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceId(NonZeroU128);

impl TraceId {
    /// The trace of a job whose submission belongs to none.
    #[must_use]
    pub fn of_job(job: &JobId) -> Self {
        Self(not_zero_128(digest(&[b"aitk job", job.as_str().as_bytes()])))
    }

    /// A new one.
    #[must_use]
    pub fn random() -> Self {
        Self(NonZeroU128::new(uuid::Uuid::new_v4().as_u128()).unwrap_or(NonZeroU128::MIN))
    }

    /// Its 16 bytes.
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

/// A span of a trace: one piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SpanId(NonZeroU64);

impl SpanId {
    /// The span of a job's whole life.
    #[must_use]
    pub fn of_job(trace: TraceId, job: &JobId) -> Self {
        Self::derived(trace, b"job", job.as_str())
    }

    /// The span of an attempt as the coordinator sees it.
    #[must_use]
    pub fn of_assignment(trace: TraceId, attempt: &AttemptId) -> Self {
        Self::derived(trace, b"assigned", attempt.as_str())
    }

    /// A new one.
    #[must_use]
    pub fn random() -> Self {
        let (high, low) = uuid::Uuid::new_v4().as_u64_pair();
        Self(NonZeroU64::new(high ^ low).unwrap_or(NonZeroU64::MIN))
    }

    /// Its 8 bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 8] {
        self.0.get().to_be_bytes()
    }

    fn derived(trace: TraceId, what: &[u8], id: &str) -> Self {
        let all = not_zero_128(digest(&[what, &trace.to_bytes(), id.as_bytes()]));
        // The upper half; zero there is as likely as guessing it.
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

/// A place in a trace, in the form that travels: `00-TRACE-SPAN-01`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceContext {
    /// Which trace.
    pub trace: TraceId,
    /// Which of its spans.
    pub span: SpanId,
    /// Whether it is kept; whoever follows keeps theirs only then.
    pub sampled: bool,
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{}-{}-{:02x}", self.trace, self.span, u8::from(self.sampled))
    }
}

/// A text that is no trace context. Whoever gets one goes on without: a trace is never a reason to refuse work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no trace context; expected 00-TRACE-SPAN-FLAGS, in 32, 16 and 2 hexadecimal digits")]
pub struct BadTraceContext;

impl FromStr for TraceContext {
    type Err = BadTraceContext;

    /// By <https://www.w3.org/TR/trace-context/>: of later versions the beginning counts.
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
    fn the_examples_of_the_recommendation() {
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
    fn derived_ids_stay_what_they_are() {
        // Two versions of the program must agree: attempts of one job may be traced by both.
        let (job, attempt) = (JobId::new("j0123abcd"), AttemptId::new("j0123abcd-1"));
        let trace = TraceId::of_job(&job);
        assert_eq!(trace.to_string(), "4508f91c9ecc1b93af6c847033f6904c");
        assert_eq!(SpanId::of_job(trace, &job).to_string(), "48b6fed29315b044");
        assert_eq!(SpanId::of_assignment(trace, &attempt).to_string(), "7a14b873c5b12ff8");
        assert_ne!(trace, TraceId::of_job(&JobId::new("j0123abce")));
    }

    proptest! {
        #[test]
        fn any_text_is_an_error_or_comes_back(text in "[0-9a-f-]{0,70}") {
            if let Ok(context) = text.parse::<TraceContext>() {
                prop_assert_eq!(context.to_string().parse::<TraceContext>(), Ok(context));
            }
        }

        #[test]
        fn every_context_survives_its_text(trace in 1_u128.., span in 1_u64.., sampled: bool) {
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
