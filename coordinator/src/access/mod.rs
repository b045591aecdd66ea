//! Who is there, what they may do, and what they did.
//!
//! A token is 256 random bits; only its SHA-256 is stored, so a stolen database opens nothing. The token in the data
//! folder is the first administrator's: it is not in the database, so that it opens a restored or an empty one too.

mod audit;
mod enrol;
mod enrolments;
mod error;
mod identity;
mod limit;
mod machines;
mod records;
mod tokens;

pub(crate) use enrolments::{Certified, EnrolError, Enrolment};
pub(crate) use error::{AccessError, Denied};
pub(crate) use identity::Identity;
pub(crate) use limit::place;
pub(crate) use records::TokenRecord;

use identity::{FILE, address};
use records::{MACHINE, TOKEN, read_machine};

use crate::clock::Clock;
use crate::store::{AuditLine, Store};
use aitk_common::hash::ContentHash;
use aitk_common::id::{UserName, WorkerId};
use aitk_common::security::join;
use aitk_common::security::role::{Right, Role};
use aitk_common::security::token::Token;
use audit::Budget;
use enrolments::Enrolments;
use limit::{Failure, Limit};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Instant;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// Lines that wait for the store. When a flood of them comes, the rest is only counted.
const WAITING: usize = 256;
/// What the first administrator is called.
const FIRST: &str = "admin";

/// What a token is.
enum Found {
    Good(Identity),
    /// It was one of ours, until that happened.
    Ended(Identity, &'static str),
    Unknown,
}

/// The door's book: tokens, failures, and the way into the audit log. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    first: Token,
    tokens: RwLock<HashMap<ContentHash, TokenRecord>>,
    limit: Mutex<Limit>,
    store: Arc<dyn Store>,
    clock: Clock,
    lines: mpsc::Sender<AuditLine>,
    budget: Mutex<Budget>,
    lost: AtomicU64,
    /// Grows whenever a token is revoked.
    revoked: watch::Sender<u64>,
    /// Whose which worker is.
    machines: tokio::sync::Mutex<HashMap<WorkerId, UserName>>,
    enrolments: Enrolments,
}

impl Access {
    /// Reads the tokens, and starts the task that writes lines nobody waits for. It ends when every handle is gone.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub(crate) async fn open(
        store: Arc<dyn Store>,
        first: Token,
        clock: Clock,
        data_dir: &Path,
    ) -> Result<(Self, JoinHandle<()>), AccessError> {
        let unwritten = data_dir.join(audit::UNWRITTEN);
        audit::write_kept(store.as_ref(), &unwritten).await?;
        let mut tokens = HashMap::new();
        for document in store.documents(TOKEN).await? {
            let record: TokenRecord = serde_json::from_str(&document.record).map_err(AccessError::Record)?;
            tokens.insert(record.sha256, record);
        }
        let machines = store.documents(MACHINE).await?;
        let machines = machines.iter().map(read_machine).collect::<Result<_, _>>()?;
        let enrolments = Enrolments::load(store.as_ref()).await?;
        let (lines, mut waiting) = mpsc::channel(WAITING);
        let inner = Arc::new(Inner {
            first,
            tokens: RwLock::new(tokens),
            limit: Mutex::default(),
            store: store.clone(),
            clock,
            lines,
            budget: Mutex::default(),
            lost: AtomicU64::new(0),
            revoked: watch::Sender::new(0),
            machines: tokio::sync::Mutex::new(machines),
            enrolments,
        });
        let weak = Arc::downgrade(&inner);
        let writing = tokio::spawn(async move {
            let mut batch = Vec::new();
            while waiting.recv_many(&mut batch, WAITING).await > 0 {
                let lost = weak.upgrade().map_or(0, |inner| inner.lost.swap(0, Ordering::Relaxed));
                if let Some(last) = batch.last_mut().filter(|_| lost > 0) {
                    last.detail = format!("{}; {lost} lines before this one were not written", last.detail);
                }
                audit::write(store.as_ref(), &batch, &unwritten).await;
                batch.clear();
            }
        });
        Ok((Self { inner }, writing))
    }

    /// Whoever shows this token from this address.
    pub(crate) fn enter(&self, secret: &str, from: Option<SocketAddr>) -> Result<Identity, Denied> {
        // What a client shows should be the secret alone; one that shows the whole text is understood.
        let (secret, _) = join::split(secret);
        // A listener without an address is one of a test or of this machine.
        let ip = limit::place(from.map_or(IpAddr::from([127, 0, 0, 1]), |from| from.ip()));
        let (now, sha256) = (Instant::now(), ContentHash::of(secret.as_bytes()));
        let mut limit = self.inner.limit.lock().unwrap_or_else(PoisonError::into_inner);
        let open = limit.open(now, ip, &sha256);
        let found = if open {
            self.find(secret, &sha256, from)
        } else {
            Found::Unknown
        };
        match found {
            Found::Good(who) => {
                let first = limit.right(now, ip, sha256);
                drop(limit);
                if first {
                    self.note(who.line(self.inner.clock.date(), "token.use", &who.by));
                }
                Ok(who)
            }
            // No guess: a machine that goes on with an old token shuts nobody out who shares its address.
            Found::Ended(who, why) => {
                drop(limit);
                let mut line = who.line(self.inner.clock.date(), "login", &who.by);
                (line.done, line.detail) = (false, format!("the token {why}"));
                self.note(line);
                Err(Denied::Wrong)
            }
            Found::Unknown => {
                let failure = limit.wrong(now, ip);
                drop(limit);
                self.tell_failure(failure, from);
                Err(if open { Denied::Wrong } else { Denied::TooMany })
            }
        }
    }

    fn find(&self, secret: &str, sha256: &ContentHash, from: Option<SocketAddr>) -> Found {
        if self.inner.first.is(secret) {
            return Found::Good(Identity {
                name: UserName::new(FIRST),
                role: Role::Admin,
                by: FILE.to_owned(),
                from,
                certificate: None,
            });
        }
        // Looked up by its hash: how long that takes says nothing about any secret.
        let tokens = self.inner.tokens.read().unwrap_or_else(PoisonError::into_inner);
        let Some(record) = tokens.get(sha256) else {
            return Found::Unknown;
        };
        let who = Identity {
            name: record.name.clone(),
            role: record.role,
            by: record.id.clone(),
            from,
            certificate: None,
        };
        match record.revoked {
            Some(_) => Found::Ended(who, "was revoked"),
            None if record.is_good(self.inner.clock.date()) => Found::Good(who),
            None => Found::Ended(who, "has expired"),
        }
    }

    fn tell_failure(&self, failure: Failure, from: Option<SocketAddr>) {
        let detail = match failure {
            Failure::Ignored => return,
            Failure::Counted => "a token that is not known".to_owned(),
            Failure::Last => format!(
                "too many wrong tokens; nothing new is let in from there for {} s",
                limit::WINDOW.as_secs()
            ),
        };
        self.note(AuditLine {
            id: AuditLine::fresh_id(),
            time: self.inner.clock.date(),
            who: String::new(),
            by: String::new(),
            from: address(from),
            action: "login".to_owned(),
            object: String::new(),
            done: false,
            detail,
        });
    }

    /// Adds a line soon. For what was refused, and for first uses: nobody waits for that to be durable, and a flood of it
    /// is cut.
    pub(crate) fn note(&self, line: AuditLine) {
        let mut budget = self.inner.budget.lock().unwrap_or_else(PoisonError::into_inner);
        let within = budget.spend(Instant::now(), &line.by);
        drop(budget);
        if !within || self.inner.lines.try_send(line).is_err() {
            self.inner.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether a caller may do that; a refusal is noted.
    pub(crate) fn may(&self, who: &Identity, right: Right) -> bool {
        let may = who.role.may(right);
        if !may {
            let mut line = who.line(self.inner.clock.date(), "refused", "");
            line.done = false;
            line.detail = format!("a {} may not {right}", who.role);
            self.note(line);
        }
        may
    }
}
