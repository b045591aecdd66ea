//! Connections of which nobody knows yet whose they are.
//!
//! A connection is a peer_entry's until its first call with a good token. Strangers have a little time for that, and there
//! is room for a few of them only: when they are too many, the oldest from the address with the most of them makes room
//! for the next one. So whoever opens connections and says nothing, or says it one byte at a time, uses up neither files
//! nor memory, and keeps nobody out who has a token.

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

/// Nobody is sent away sooner: time for a first call. When a whole lab comes back at once, the next ones wait so long.
const STAY: Duration = Duration::from_secs(2);
/// How often those who wait look whether there is room.
const LOOK: Duration = Duration::from_millis(10);
/// Pause after the system had no connection to give, for example because all files are in use.
const OUT_OF_FILES: Duration = Duration::from_millis(100);

/// A peer_entry is 0.
const KNOWN: u8 = 1;
const GONE: u8 = 2;

/// What a connection and the limiter know of each other.
#[derive(Debug, Default)]
struct Standing {
    is: AtomicU8,
    changed: Notify,
}

#[derive(Debug)]
struct UnauthenticatedPeer {
    peer: SocketAddr,
    came: Instant,
    standing: Arc<Standing>,
}

#[derive(Debug, Default)]
struct Inner {
    /// In the order they came.
    unauthenticated: BTreeMap<u64, UnauthenticatedPeer>,
    by_peer: HashMap<SocketAddr, u64>,
    by_place: HashMap<IpAddr, usize>,
    next: u64,
}

impl Inner {
    fn remove(&mut self, number: u64) -> Option<UnauthenticatedPeer> {
        let peer_entry = self.unauthenticated.remove(&number)?;
        // Another connection may have the same port already.
        if self.by_peer.get(&peer_entry.peer) == Some(&number) {
            self.by_peer.remove(&peer_entry.peer);
        }
        let place = access::place(peer_entry.peer.ip());
        if let Some(count) = self.by_place.get_mut(&place) {
            *count -= 1;
            if *count == 0 {
                self.by_place.remove(&place);
            }
        }
        Some(peer_entry)
    }

    fn send_away(&mut self, number: u64) {
        if let Some(peer_entry) = self.remove(number) {
            peer_entry.standing.is.store(GONE, Ordering::Relaxed);
            peer_entry.standing.changed.notify_one();
        }
    }
}

/// See the module. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionLimiter {
    inner: Arc<Mutex<Inner>>,
    patience: Duration,
    most: usize,
}

impl ConnectionLimiter {
    /// A limiter at which unauthenticated may stand for so long, and so many of them.
    pub(crate) fn new(patience: Duration, most: usize) -> Self {
        Self {
            inner: Arc::default(),
            patience,
            most,
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whoever calls from there has shown a good token.
    pub(crate) fn known(&self, peer: SocketAddr) {
        let mut inner = self.inner();
        if let Some(number) = inner.by_peer.get(&peer).copied()
            && let Some(peer_entry) = inner.remove(number)
        {
            peer_entry.standing.is.store(KNOWN, Ordering::Relaxed);
        }
    }

    /// Makes room for one more, by sending somebody away if need be; or says that nobody has been here long enough.
    fn has_room(&self, now: Instant) -> bool {
        let mut inner = self.inner();
        if inner.unauthenticated.len() < self.most {
            return true;
        }
        let crowd = inner.by_place.iter().max_by_key(|(_, count)| **count);
        let Some(crowd) = crowd.map(|(place, _)| *place) else {
            return true;
        };
        let of_it = |peer_entry: &UnauthenticatedPeer| access::place(peer_entry.peer.ip()) == crowd;
        let oldest = inner.unauthenticated.iter().find(|(_, peer_entry)| of_it(peer_entry));
        let Some((number, _)) = oldest.filter(|(_, peer_entry)| now.duration_since(peer_entry.came) >= STAY) else {
            return false;
        };
        let number = *number;
        inner.send_away(number);
        true
    }

    fn enter(&self, peer: SocketAddr, now: Instant) -> (u64, Arc<Standing>) {
        let mut inner = self.inner();
        let number = inner.next;
        inner.next += 1;
        let standing = Arc::new(Standing::default());
        let peer_entry = UnauthenticatedPeer {
            peer,
            came: now,
            standing: standing.clone(),
        };
        inner.unauthenticated.insert(number, peer_entry);
        inner.by_peer.insert(peer, number);
        *inner.by_place.entry(access::place(peer.ip())).or_default() += 1;
        (number, standing)
    }

    /// The next connection.
    pub(crate) async fn accept(&self, listener: &TcpListener) -> (Connection, SocketAddr) {
        // Whoever has no room yet waits in the system's own queue.
        while !self.has_room(Instant::now()) {
            tokio::time::sleep(LOOK).await;
        }
        loop {
            match listener.accept().await {
                Ok((stream, peer)) => {
                    // A call is a few packets; waiting for more of them only costs time.
                    let _ = stream.set_nodelay(true);
                    return (self.connection(stream, peer), peer);
                }
                // It went away before it was looked at.
                Err(error) if is_its_own(&error) => {}
                Err(error) => {
                    tracing::error!(%error, "no connection can be accepted");
                    tokio::time::sleep(OUT_OF_FILES).await;
                }
            }
        }
    }

    fn connection(&self, stream: TcpStream, peer: SocketAddr) -> Connection {
        let (number, standing) = self.enter(peer, Instant::now());
        let (patience, watched) = (self.patience, standing.clone());
        let judgement = async move {
            tokio::select! {
                () = tokio::time::sleep(patience) => {}
                () = watched.changed.notified() => {}
            }
        };
        Connection {
            stream,
            limiter: self.clone(),
            number,
            standing,
            judgement: Some(Box::pin(judgement)),
        }
    }

    /// Every connection of a listener, for ever.
    pub(crate) fn incoming(self, listener: TcpListener) -> impl tokio_stream::Stream<Item = io::Result<Connection>> {
        let state = (self, listener);
        futures::stream::unfold(state, |(limiter, listener)| async move {
            let (connection, _) = limiter.accept(&listener).await;
            Some((Ok(connection), (limiter, listener)))
        })
    }
}

fn is_its_own(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::Interrupted
    )
}

/// A connection that fails when its peer_entry's time is over.
pub(crate) struct Connection {
    stream: TcpStream,
    limiter: ConnectionLimiter,
    number: u64,
    standing: Arc<Standing>,
    /// Ends when it is time to look whose it is.
    judgement: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Connection {
    fn judge(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if let Some(judgement) = &mut self.judgement {
            if judgement.as_mut().poll(context).is_pending() {
                return Ok(());
            }
            if self.standing.is.load(Ordering::Relaxed) == KNOWN {
                self.judgement = None;
                return Ok(());
            }
            self.judgement = None;
            self.standing.is.store(GONE, Ordering::Relaxed);
        }
        if self.standing.is.load(Ordering::Relaxed) == GONE {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "nobody showed a token in time on this connection",
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
        self.judge(context)?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.judge(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.judge(context)?;
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
        self.judge(context)?;
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
    async fn whoever_shows_no_token_is_cut_and_whoever_does_stays() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let limiter = ConnectionLimiter::new(Duration::from_millis(50), 8);
        let (mut silent, mut peer_entry) = pair(&limiter, &listener).await;
        let (mut client, mut known) = pair(&limiter, &listener).await;
        limiter.known(client.local_addr().unwrap());
        let mut byte = [0];
        // Half a word does not help.
        silent.write_all(b"P").await.unwrap();
        let error = loop {
            if let Err(error) = peer_entry.read_exact(&mut byte).await {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(peer_entry.read_exact(&mut byte).await.is_err(), "for good");
        assert!(peer_entry.write_all(b"x").await.is_err());
        client.write_all(b"x").await.unwrap();
        known.read_exact(&mut byte).await.unwrap();
        known.write_all(b"x").await.unwrap();
        assert_eq!(limiter.inner().unauthenticated.len(), 1);
        drop(peer_entry);
        assert!(limiter.inner().unauthenticated.is_empty() && limiter.inner().by_place.is_empty());
        assert!(limiter.inner().by_peer.is_empty());
    }

    #[test]
    fn the_oldest_of_the_largest_crowd_makes_room() {
        let (limiter, begin) = (ConnectionLimiter::new(Duration::from_secs(600), 8), Instant::now());
        let peer = |place: u8, port: u16| SocketAddr::from(([10, 0, 0, place], port));
        let calm = limiter.enter(peer(1, 1), begin);
        let crowd: Vec<_> = (1..8)
            .map(|port| {
                assert!(limiter.has_room(begin));
                limiter.enter(peer(2, port), begin)
            })
            .collect();
        let is = |(_, standing): &(u64, Arc<Standing>)| standing.is.load(Ordering::Relaxed);
        // Not before it has had its time.
        assert!(!limiter.has_room(begin) && crowd.iter().all(|one| is(one) == 0));
        assert!(limiter.has_room(begin + STAY));
        assert_eq!((is(&calm), is(&crowd[0]), is(&crowd[1])), (0, GONE, 0));
        // Whoever is known takes no room.
        limiter.enter(peer(3, 1), begin);
        assert!(!limiter.has_room(begin));
        limiter.known(peer(1, 1));
        assert!(limiter.has_room(begin) && is(&calm) == KNOWN);
        let inner = limiter.inner();
        assert_eq!(
            (inner.unauthenticated.len(), inner.by_peer.len(), inner.by_place.len()),
            (7, 7, 2)
        );
    }
}
