//! Limits connections that have not authenticated yet.
//!
//! A connection is unauthenticated until its first call with a valid token. It has a limited time for that call, and
//! only a limited number of unauthenticated connections is open at once. At the limit, the oldest connection from the
//! network with the most of them is closed to accept the next one. A client that opens connections and sends nothing,
//! or sends one byte at a time, therefore exhausts neither file descriptors nor memory, and does not block clients
//! with a token.

use crate::access;
use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tonic::transport::server::{Connected, TcpConnectInfo};

/// No connection is evicted sooner: this is the time for a first call. When many clients reconnect at once, the later
/// ones wait for this time.
const MIN_FIRST_CALL_TIME: Duration = Duration::from_secs(2);
/// Interval at which `accept` checks for a free slot while the limit is reached.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Pause after a failed `accept`, for example when the process is out of file descriptors.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Values of [`ConnectionState::value`]; 0 is unauthenticated.
const AUTHENTICATED: u8 = 1;
const CLOSED: u8 = 2;

/// State shared by a connection and the limiter.
#[derive(Debug, Default)]
struct ConnectionState {
    value: AtomicU8,
    closed: Notify,
}

#[derive(Debug)]
struct UnauthenticatedPeer {
    peer: SocketAddr,
    accepted_at: Instant,
    state: Arc<ConnectionState>,
}

#[derive(Debug, Default)]
struct Inner {
    /// In the order in which they were accepted.
    unauthenticated: BTreeMap<u64, UnauthenticatedPeer>,
    by_peer: HashMap<SocketAddr, u64>,
    count_by_network: HashMap<IpAddr, usize>,
    next: u64,
}

impl Inner {
    fn remove(&mut self, number: u64) -> Option<UnauthenticatedPeer> {
        let entry = self.unauthenticated.remove(&number)?;
        // Another connection may already use the same port.
        if self.by_peer.get(&entry.peer) == Some(&number) {
            self.by_peer.remove(&entry.peer);
        }
        let network = access::network_of(entry.peer.ip());
        if let Some(count) = self.count_by_network.get_mut(&network) {
            *count -= 1;
            if *count == 0 {
                self.count_by_network.remove(&network);
            }
        }
        Some(entry)
    }

    fn evict(&mut self, number: u64) {
        if let Some(entry) = self.remove(number) {
            entry.state.value.store(CLOSED, Ordering::Relaxed);
            entry.state.closed.notify_one();
        }
    }
}

/// Limits unauthenticated connections; see the module. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionLimiter {
    inner: Arc<Mutex<Inner>>,
    timeout: Duration,
    max_unauthenticated: usize,
}

impl ConnectionLimiter {
    /// Creates a limiter that closes a connection after `timeout` without authentication and allows
    /// `max_unauthenticated` of them at once.
    pub(crate) fn new(timeout: Duration, max_unauthenticated: usize) -> Self {
        Self {
            inner: Arc::default(),
            timeout,
            max_unauthenticated,
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the connection from this address as authenticated.
    pub(crate) fn mark_authenticated(&self, peer: SocketAddr) {
        let mut inner = self.inner();
        if let Some(number) = inner.by_peer.get(&peer).copied()
            && let Some(entry) = inner.remove(number)
        {
            entry.state.value.store(AUTHENTICATED, Ordering::Relaxed);
        }
    }

    /// Ensures a free slot, evicting a connection if necessary. Returns false when no connection is old enough to be
    /// evicted.
    fn make_room(&self, now: Instant) -> bool {
        let mut inner = self.inner();
        if inner.unauthenticated.len() < self.max_unauthenticated {
            return true;
        }
        let largest = inner.count_by_network.iter().max_by_key(|(_, count)| **count);
        let Some(largest) = largest.map(|(network, _)| *network) else {
            return true;
        };
        let in_largest = |entry: &UnauthenticatedPeer| access::network_of(entry.peer.ip()) == largest;
        let oldest = inner.unauthenticated.iter().find(|(_, entry)| in_largest(entry));
        let Some((number, _)) =
            oldest.filter(|(_, entry)| now.duration_since(entry.accepted_at) >= MIN_FIRST_CALL_TIME)
        else {
            return false;
        };
        let number = *number;
        inner.evict(number);
        true
    }

    fn insert(&self, peer: SocketAddr, now: Instant) -> (u64, Arc<ConnectionState>) {
        let mut inner = self.inner();
        let number = inner.next;
        inner.next += 1;
        let state = Arc::new(ConnectionState::default());
        let entry = UnauthenticatedPeer {
            peer,
            accepted_at: now,
            state: state.clone(),
        };
        inner.unauthenticated.insert(number, entry);
        inner.by_peer.insert(peer, number);
        *inner.count_by_network.entry(access::network_of(peer.ip())).or_default() += 1;
        (number, state)
    }

    /// Accepts the next connection. Errors are logged, and accepting continues.
    pub(crate) async fn accept(&self, listener: &TcpListener) -> (Connection, SocketAddr) {
        // Until then, new connections wait in the listen backlog of the system.
        while !self.make_room(Instant::now()) {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        loop {
            match listener.accept().await {
                Ok((stream, peer)) => {
                    // A call is a few packets; Nagle's algorithm would only delay them.
                    let _ = stream.set_nodelay(true);
                    return (self.connection(stream, peer), peer);
                }
                // The client closed the connection before it was accepted.
                Err(error) if is_connection_error(&error) => {}
                Err(error) => {
                    tracing::error!(%error, "cannot accept a connection; trying again");
                    tokio::time::sleep(ACCEPT_RETRY_PAUSE).await;
                }
            }
        }
    }

    fn connection(&self, stream: TcpStream, peer: SocketAddr) -> Connection {
        let (number, state) = self.insert(peer, Instant::now());
        let (timeout, watched) = (self.timeout, state.clone());
        let deadline = async move {
            tokio::select! {
                () = tokio::time::sleep(timeout) => {}
                () = watched.closed.notified() => {}
            }
        };
        Connection {
            stream,
            limiter: self.clone(),
            number,
            state,
            deadline: Some(Box::pin(deadline)),
        }
    }

    /// Returns an endless stream of the listener's connections.
    pub(crate) fn incoming(self, listener: TcpListener) -> impl tokio_stream::Stream<Item = io::Result<Connection>> {
        let acceptor = (self, listener);
        futures::stream::unfold(acceptor, |(limiter, listener)| async move {
            let (connection, _) = limiter.accept(&listener).await;
            Some((Ok(connection), (limiter, listener)))
        })
    }
}

fn is_connection_error(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::Interrupted
    )
}

/// A TCP connection whose reads and writes fail once it is evicted or its time to authenticate is over.
pub(crate) struct Connection {
    stream: TcpStream,
    limiter: ConnectionLimiter,
    number: u64,
    state: Arc<ConnectionState>,
    /// Completes when the timeout is over or the limiter evicts the connection.
    deadline: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Connection {
    fn check_state(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if let Some(deadline) = &mut self.deadline {
            if deadline.as_mut().poll(context).is_pending() {
                return Ok(());
            }
            if self.state.value.load(Ordering::Relaxed) == AUTHENTICATED {
                self.deadline = None;
                return Ok(());
            }
            self.deadline = None;
            self.state.value.store(CLOSED, Ordering::Relaxed);
        }
        if self.state.value.load(Ordering::Relaxed) == CLOSED {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the connection was closed: the client did not authenticate in time",
            ));
        }
        Ok(())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.limiter.inner().remove(self.number);
    }
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_state(context)?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.check_state(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_state(context)?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check_state(context)?;
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    async fn pair(limiter: &ConnectionLimiter, listener: &TcpListener) -> (TcpStream, Connection) {
        let (client, connection) = tokio::join!(
            TcpStream::connect(listener.local_addr().unwrap()),
            limiter.accept(listener)
        );
        (client.unwrap(), connection.0)
    }

    #[tokio::test]
    async fn a_connection_without_a_token_is_closed_and_one_with_a_token_stays() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let limiter = ConnectionLimiter::new(Duration::from_millis(50), 8);
        let (mut silent, mut entry) = pair(&limiter, &listener).await;
        let (mut client, mut known) = pair(&limiter, &listener).await;
        limiter.mark_authenticated(client.local_addr().unwrap());
        let mut byte = [0];
        // An incomplete request does not count.
        silent.write_all(b"P").await.unwrap();
        let error = loop {
            if let Err(error) = entry.read_exact(&mut byte).await {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(entry.read_exact(&mut byte).await.is_err(), "for good");
        assert!(entry.write_all(b"x").await.is_err());
        client.write_all(b"x").await.unwrap();
        known.read_exact(&mut byte).await.unwrap();
        known.write_all(b"x").await.unwrap();
        assert_eq!(limiter.inner().unauthenticated.len(), 1);
        drop(entry);
        assert!(limiter.inner().unauthenticated.is_empty() && limiter.inner().count_by_network.is_empty());
        assert!(limiter.inner().by_peer.is_empty());
    }

    #[test]
    fn the_oldest_connection_of_the_largest_network_is_evicted() {
        let (limiter, begin) = (ConnectionLimiter::new(Duration::from_secs(600), 8), Instant::now());
        let peer = |host: u8, port: u16| SocketAddr::from(([10, 0, 0, host], port));
        let from_other_network = limiter.insert(peer(1, 1), begin);
        let largest: Vec<_> = (1..8)
            .map(|port| {
                assert!(limiter.make_room(begin));
                limiter.insert(peer(2, port), begin)
            })
            .collect();
        let is = |(_, state): &(u64, Arc<ConnectionState>)| state.value.load(Ordering::Relaxed);
        // A connection is not evicted before its minimum time.
        assert!(!limiter.make_room(begin) && largest.iter().all(|one| is(one) == 0));
        assert!(limiter.make_room(begin + MIN_FIRST_CALL_TIME));
        assert_eq!(
            (is(&from_other_network), is(&largest[0]), is(&largest[1])),
            (0, CLOSED, 0)
        );
        // An authenticated connection does not count.
        limiter.insert(peer(3, 1), begin);
        assert!(!limiter.make_room(begin));
        limiter.mark_authenticated(peer(1, 1));
        assert!(limiter.make_room(begin) && is(&from_other_network) == AUTHENTICATED);
        let inner = limiter.inner();
        assert_eq!(
            (
                inner.unauthenticated.len(),
                inner.by_peer.len(),
                inner.count_by_network.len()
            ),
            (7, 7, 2)
        );
    }
}
