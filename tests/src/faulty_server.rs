//! An HTTP server that injects faults on demand and logs its requests. It wraps another service, see [`crate::s3_server`] and
//! [`crate::hub_server`].
//!
//! A file contains the current fault, see [`ServerFault`]; it is read for every request. Each request prints two lines on
//! standard output, one when it begins and one when its answer is sent or its connection is closed:
//!
//! ```text
//! begin 12 PUT /aitk/blobs/ab/ab12…
//! end 12 200 in=4096 out=0
//! ```

use crate::server_fault::{COORDINATOR_KEY, ServerFault};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use std::future::Future;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::time::{Sleep, sleep};

/// Any error.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// How often a delayed request reads the fault file.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The wrapped service.
pub type Service = Arc<dyn Fn(Request<s3s::Body>) -> ResponseFuture + Send + Sync>;
/// The future of a response.
pub type ResponseFuture = Pin<Box<dyn Future<Output = Result<Response<s3s::Body>, BoxError>> + Send>>;

/// Serves until the process ends, with the faults from `fault_file`.
///
/// # Errors
/// When the listener fails.
pub async fn serve(listener: TcpListener, fault_file: Option<PathBuf>, service: Service) -> anyhow::Result<()> {
    let fault_file = fault_file.map(Arc::<Path>::from);
    let numbers = Arc::new(AtomicU64::new(1));
    loop {
        let (socket, _) = listener.accept().await?;
        let (service, fault_file, numbers) = (service.clone(), fault_file.clone(), numbers.clone());
        tokio::spawn(async move {
            let handler = service_fn(move |request: Request<Incoming>| {
                let number = numbers.fetch_add(1, Ordering::Relaxed);
                answer(service.clone(), fault_file.clone(), number, request)
            });
            // Broken connections are not reported here, because the lines of their requests show them.
            let _ = Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(socket), handler)
                .await;
        });
    }
}

async fn answer(
    service: Service,
    fault_file: Option<Arc<Path>>,
    number: u64,
    request: Request<Incoming>,
) -> Result<Response<s3s::Body>, BoxError> {
    let record = Arc::new(Record::begin(number, &request));
    let current_fault = || fault_file.as_deref().map_or(ServerFault::None, ServerFault::read);
    let fault = current_fault();
    if matches!(fault, ServerFault::Hang | ServerFault::Late) {
        while current_fault() == fault {
            sleep(POLL_INTERVAL).await;
        }
    }
    if fault == ServerFault::DenyCoordinator && is_signed_with(&request, COORDINATOR_KEY) {
        record.status.store(403, Ordering::Relaxed);
        let text = String::from("<Error><Code>InvalidAccessKeyId</Code></Error>");
        let mut answer = Response::new(s3s::Body::from(text));
        *answer.status_mut() = StatusCode::FORBIDDEN;
        return Ok(answer);
    }
    let fails = match fault {
        ServerFault::Hang => return Err("the connection is cut without an answer".into()),
        ServerFault::Fail => true,
        ServerFault::Flaky(every) => number.is_multiple_of(every.max(1)),
        _ => false,
    };
    if fails {
        record.status.store(500, Ordering::Relaxed);
        let text = String::from("<Error><Code>InternalError</Code></Error>");
        let mut answer = Response::new(s3s::Body::from(text));
        *answer.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        return Ok(answer);
    }
    let (cut_upload, cut_answer) = match fault {
        ServerFault::CutUpload(bytes) => (Some(bytes), None),
        ServerFault::CutAnswer(bytes) => (None, Some(bytes)),
        _ => (None, None),
    };
    let rate = match fault {
        ServerFault::Slow(rate) => Some(rate.max(1)),
        _ => None,
    };
    let metered = |received, left| Meter {
        record: record.clone(),
        received,
        left,
        rate,
        pause: None,
    };
    let (upload, download) = (metered(true, cut_upload), metered(false, cut_answer));
    let request = request.map(|body| s3s::Body::http_body_unsync(MeteredBody { body, meter: upload }));
    let answer = service(request).await;
    if record.cut.load(Ordering::Relaxed) {
        return Err("the connection is cut in the middle of the request".into());
    }
    let answer = answer?;
    record.status.store(answer.status().as_u16(), Ordering::Relaxed);
    Ok(answer.map(|body| s3s::Body::http_body_unsync(MeteredBody { body, meter: download })))
}

/// Whether a request has a signature of S3 by this access key.
fn is_signed_with(request: &Request<Incoming>, key: &str) -> bool {
    let authorization = request.headers().get(hyper::header::AUTHORIZATION);
    let text = authorization.and_then(|value| value.to_str().ok()).unwrap_or_default();
    text.contains(&format!("Credential={key}/"))
}

/// The log record of a request. The request ends when the last reference is dropped.
struct Record {
    number: u64,
    /// The status code; 0 for no answer.
    status: AtomicU16,
    received: AtomicU64,
    sent: AtomicU64,
    cut: AtomicBool,
}

impl Record {
    fn begin(number: u64, request: &Request<Incoming>) -> Self {
        print_line(&format!("begin {number} {} {}", request.method(), request.uri()));
        Self {
            number,
            status: AtomicU16::new(0),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            cut: AtomicBool::new(false),
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let get = |value: &AtomicU64| value.load(Ordering::Relaxed);
        print_line(&format!(
            "end {} {} in={} out={}",
            self.number,
            self.status.load(Ordering::Relaxed),
            get(&self.received),
            get(&self.sent)
        ));
    }
}

/// Prints a line at once, so that lines of parallel requests do not mix.
fn print_line(line: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}");
    let _ = out.flush();
}

/// Counts the bytes of a body, slows them down, and cuts them off.
struct Meter {
    record: Arc<Record>,
    received: bool,
    left: Option<u64>,
    rate: Option<u64>,
    pause: Option<(Pin<Box<Sleep>>, Frame<Bytes>)>,
}

struct MeteredBody<B> {
    body: B,
    meter: Meter,
}

impl<B> Body for MeteredBody<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let Self { body, meter } = &mut *self;
        if let Some((pause, _)) = &mut meter.pause
            && pause.as_mut().poll(context).is_pending()
        {
            return Poll::Pending;
        }
        if let Some((_, frame)) = meter.pause.take() {
            return Poll::Ready(Some(Ok(frame)));
        }
        let frame = match Pin::new(body).poll_frame(context) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(None) => return Poll::Ready(None),
            Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(error.into()))),
            Poll::Ready(Some(Ok(frame))) => frame,
        };
        let bytes = frame.data_ref().map_or(0, |data| data.len() as u64);
        if let Some(left) = &mut meter.left {
            if bytes >= *left {
                meter.record.cut.store(true, Ordering::Relaxed);
                return Poll::Ready(Some(Err("cut off".into())));
            }
            *left -= bytes;
        }
        let counter = if meter.received {
            &meter.record.received
        } else {
            &meter.record.sent
        };
        counter.fetch_add(bytes, Ordering::Relaxed);
        if let Some(rate) = meter.rate.filter(|_| bytes > 0) {
            let mut pause = Box::pin(sleep(Duration::from_secs_f64(bytes as f64 / rate as f64)));
            if pause.as_mut().poll(context).is_pending() {
                meter.pause = Some((pause, frame));
                return Poll::Pending;
            }
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.meter.pause.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
