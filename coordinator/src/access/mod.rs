//! Authentication, authorization and the audit log.
//!
//! A token is 256 random bits; only its SHA-256 is stored, so a stolen database reveals no token. The token in the
//! data folder is the first administrator's. It is not in the database, so that it also works with a restored or an
//! empty one.

mod audit;
mod enrol;
mod enrolments;
mod error;
mod identity;
mod machines;
mod records;
mod token_guess_limit;
mod tokens;

pub(crate) use enrolments::{EnrolError, Enrolment, IssuedCertificate};
pub(crate) use error::{AccessError, AuthenticationError};
pub(crate) use identity::Identity;
pub(crate) use records::TokenRecord;
pub(crate) use token_guess_limit::network_of;

use identity::{DATA_FOLDER_TOKEN_ID, address};
use records::{TOKEN, read_worker_owner};

use crate::clock::Clock;
use crate::store::{AuditLine, Store, WORKER_OWNER};
use aitk_common::hash::ContentHash;
use aitk_common::id::{UserName, WorkerId};
use aitk_common::security::join;
use aitk_common::security::role::{Right, Role};
use aitk_common::security::token::Token;
use audit::RefusalBudget;
use enrolments::Enrolments;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Instant;
use token_guess_limit::{Failure, TokenGuessLimiter};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// Audit lines that wait for the store. Beyond that, lines are dropped and counted.
const AUDIT_QUEUE: usize = 256;
/// Name of the owner of the token in the data folder.
const ADMIN_NAME: &str = "admin";

/// Result of looking up a token.
enum TokenLookup {
    Valid(Identity),
    /// It was valid until it was revoked or expired.
    Ended(Identity, &'static str),
    Unknown,
}

/// Tokens, certificates, failed logins and the audit log. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    data_folder_token: Token,
    tokens: RwLock<HashMap<ContentHash, TokenRecord>>,
    limit: Mutex<TokenGuessLimiter>,
    store: Arc<dyn Store>,
    clock: Clock,
    lines: mpsc::Sender<AuditLine>,
    budget: Mutex<RefusalBudget>,
    lost_lines: AtomicU64,
    /// Incremented whenever a token is revoked.
    revoked: watch::Sender<u64>,
    /// Owner of each worker id.
    machines: tokio::sync::Mutex<HashMap<WorkerId, UserName>>,
    /// Shared by registrations, from the claim of the worker id until the scheduler has the event; exclusive while a worker is removed.
    registrations: Arc<tokio::sync::RwLock<()>>,
    enrolments: Enrolments,
}

impl Access {
    /// Loads the tokens and starts the task that writes audit lines. The task ends when every handle is dropped.
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
        audit::store_unwritten(store.as_ref(), &unwritten).await?;
        let mut tokens = HashMap::new();
        for document in store.admin_records(TOKEN).await? {
            let record: TokenRecord = serde_json::from_str(&document.record).map_err(AccessError::Record)?;
            tokens.insert(record.sha256, record);
        }
        let machines = store.admin_records(WORKER_OWNER).await?;
        let machines = machines.iter().map(read_worker_owner).collect::<Result<_, _>>()?;
        let enrolments = Enrolments::load(store.as_ref()).await?;
        let (lines, mut waiting) = mpsc::channel(AUDIT_QUEUE);
        let inner = Arc::new(Inner {
            data_folder_token: first,
            tokens: RwLock::new(tokens),
            limit: Mutex::default(),
            store: store.clone(),
            clock,
            lines,
            budget: Mutex::default(),
            lost_lines: AtomicU64::new(0),
            revoked: watch::Sender::new(0),
            machines: tokio::sync::Mutex::new(machines),
            registrations: Arc::default(),
            enrolments,
        });
        let weak = Arc::downgrade(&inner);
        let writing = tokio::spawn(async move {
            let mut batch = Vec::new();
            while waiting.recv_many(&mut batch, AUDIT_QUEUE).await > 0 {
                let lost = weak
                    .upgrade()
                    .map_or(0, |inner| inner.lost_lines.swap(0, Ordering::Relaxed));
                if let Some(last) = batch.last_mut().filter(|_| lost > 0) {
                    last.detail = format!("{}; {lost} lines before this one were not written", last.detail);
                }
                audit::write(store.as_ref(), &batch, &unwritten).await;
                batch.clear();
            }
        });
        Ok((Self { inner }, writing))
    }

    /// Authenticates a token that was sent from this address.
    pub(crate) fn authenticate(&self, secret: &str, from: Option<SocketAddr>) -> Result<Identity, AuthenticationError> {
        // A client should send only the secret; the full text with the CA hash is accepted as well.
        let (secret, _) = join::split(secret);
        // Only tests and local listeners have no peer address.
        let ip = token_guess_limit::network_of(from.map_or(IpAddr::from([127, 0, 0, 1]), |from| from.ip()));
        let (now, sha256) = (Instant::now(), ContentHash::of(secret.as_bytes()));
        let mut limit = self.inner.limit.lock().unwrap_or_else(PoisonError::into_inner);
        let open = limit.allows(now, ip, &sha256);
        let found = if open {
            self.find(secret, &sha256, from)
        } else {
            TokenLookup::Unknown
        };
        match found {
            TokenLookup::Valid(who) => {
                let first = limit.record_success(now, ip, sha256);
                drop(limit);
                if first {
                    self.record_audit(who.audit_line(self.inner.clock.wall_time(), "token.use", &who.by));
                }
                Ok(who)
            }
            // Not counted as a guess: a machine that keeps using an old token must not lock out others with the same
            // address.
            TokenLookup::Ended(who, why) => {
                drop(limit);
                let mut line = who.audit_line(self.inner.clock.wall_time(), "login", &who.by);
                (line.done, line.detail) = (false, format!("the token {why}"));
                self.record_audit(line);
                Err(AuthenticationError::InvalidToken)
            }
            TokenLookup::Unknown => {
                let failure = limit.record_failure(now, ip);
                drop(limit);
                self.audit_failure(failure, from);
                Err(if open {
                    AuthenticationError::InvalidToken
                } else {
                    AuthenticationError::TooManyFailures
                })
            }
        }
    }

    fn find(&self, secret: &str, sha256: &ContentHash, from: Option<SocketAddr>) -> TokenLookup {
        if self.inner.data_folder_token.is(secret) {
            return TokenLookup::Valid(Identity {
                name: UserName::new(ADMIN_NAME),
                role: Role::Admin,
                by: DATA_FOLDER_TOKEN_ID.to_owned(),
                from,
                certificate: None,
            });
        }
        // Looked up by hash, so that the time of the lookup reveals nothing about a secret.
        let tokens = self.inner.tokens.read().unwrap_or_else(PoisonError::into_inner);
        let Some(record) = tokens.get(sha256) else {
            return TokenLookup::Unknown;
        };
        let who = Identity {
            name: record.name.clone(),
            role: record.role,
            by: record.id.clone(),
            from,
            certificate: None,
        };
        match record.revoked {
            Some(_) => TokenLookup::Ended(who, "was revoked"),
            None if record.is_valid(self.inner.clock.wall_time()) => TokenLookup::Valid(who),
            None => TokenLookup::Ended(who, "has expired"),
        }
    }

    fn audit_failure(&self, failure: Failure, from: Option<SocketAddr>) {
        let detail = match failure {
            Failure::Ignored => return,
            Failure::Counted => "a token that is not known".to_owned(),
            Failure::Last => format!(
                "too many wrong tokens; no new token is accepted from this address for {} s",
                token_guess_limit::WINDOW.as_secs()
            ),
        };
        self.record_audit(AuditLine {
            id: AuditLine::new_id(),
            time: self.inner.clock.wall_time(),
            who: String::new(),
            by: String::new(),
            from: address(from),
            action: "login".to_owned(),
            object: String::new(),
            done: false,
            detail,
        });
    }

    /// Queues an audit line, for refusals and first uses. The caller does not wait until it is durable, and lines
    /// beyond the limit are dropped.
    pub(crate) fn record_audit(&self, line: AuditLine) {
        let mut budget = self.inner.budget.lock().unwrap_or_else(PoisonError::into_inner);
        let within = budget.try_spend(Instant::now(), &line.by);
        drop(budget);
        if !within || self.inner.lines.try_send(line).is_err() {
            self.inner.lost_lines.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether the caller has this right; a refusal is recorded in the audit log.
    pub(crate) fn allows(&self, who: &Identity, right: Right) -> bool {
        let allowed = who.role.may(right);
        if !allowed {
            let mut line = who.audit_line(self.inner.clock.wall_time(), "refused", "");
            line.done = false;
            line.detail = format!("a {} may not {right}", who.role);
            self.record_audit(line);
        }
        allowed
    }
}
