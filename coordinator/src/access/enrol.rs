//! Lets machines join, renews their certificates and revokes them.

use super::Access;
use super::enrolments::{
    ENROLMENT, EnrolError, Enrolment, IssuedCertificate, JOIN, JoinAnswer, JoinToken, UNNAMED, document, new_id,
    worker_name_from_host,
};
use super::error::{AccessError, AuthenticationError};
use super::identity::{Identity, address};
use super::token_guess_limit;
use crate::pki::{Signer, wall_clock};
use crate::store::{AuditLine, WORKER_OWNER};
use aitk_common::control_plane::UnixMillis;
use aitk_common::hash::ContentHash;
use aitk_common::id::{UserName, WorkerId};
use aitk_common::security::ca::{CheckedRequest, WorkerCertificate};
use aitk_common::security::join::{self, CertificateRequest};
use aitk_common::security::role::Role;
use aitk_common::security::token::Token;
use std::net::{IpAddr, SocketAddr};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

impl Access {
    /// Identifies the owner of a client certificate that TLS has already verified against our CA.
    pub(crate) fn authenticate_certificate(
        &self,
        shown: &WorkerCertificate,
        from: Option<SocketAddr>,
    ) -> Result<Identity, AuthenticationError> {
        let who = Identity {
            name: shown.name.clone(),
            role: Role::Worker,
            by: shown.enrolment.clone(),
            from,
            certificate: Some(shown.not_after),
        };
        let now = self.inner.clock.wall_time();
        let known = self.inner.enrolments.get(&shown.enrolment);
        let problem = match known {
            None => "belongs to no worker that this coordinator knows",
            Some(known) if known.name != shown.name => "does not have the worker's name",
            Some(known) if known.revoked.is_some() => "was revoked",
            Some(_) if wall_clock() >= shown.not_after => "has expired",
            Some(_) => {
                let ip = token_guess_limit::network_of(from.map_or(IpAddr::from([127, 0, 0, 1]), |from| from.ip()));
                let serial = ContentHash::of(shown.serial.as_bytes());
                let mut limit = self.inner.limit.lock().unwrap_or_else(PoisonError::into_inner);
                let first = limit.record_success(Instant::now(), ip, serial);
                drop(limit);
                if first {
                    self.record_audit(who.audit_line(now, "certificate.use", &shown.serial));
                }
                return Ok(who);
            }
        };
        let mut line = who.audit_line(now, "login", &shown.serial);
        (line.done, line.detail) = (false, format!("the certificate {problem}"));
        self.record_audit(line);
        Err(AuthenticationError::Certificate(problem))
    }

    /// Records in the audit log that TLS refused a certificate.
    pub(crate) fn audit_refused_certificate(&self, from: SocketAddr, problem: &str) {
        self.record_audit(AuditLine {
            id: AuditLine::new_id(),
            time: self.inner.clock.wall_time(),
            who: String::new(),
            by: String::new(),
            from: address(Some(from)),
            action: "login".to_owned(),
            object: String::new(),
            done: false,
            detail: AuditLine::quote(problem),
        });
    }

    /// Records in the audit log that a worker has no certificate although it needs one.
    pub(crate) fn audit_missing_certificate(&self, who: &Identity) {
        let mut line = who.audit_line(self.inner.clock.wall_time(), "refused", "");
        line.done = false;
        line.detail = "a worker on another machine needs a certificate here".to_owned();
        self.record_audit(line);
    }

    /// Identifies a machine by its join token. `None`: the secret is not a join token; check it with
    /// [`Self::authenticate`].
    pub(crate) fn authenticate_join_token(
        &self,
        secret: &str,
        from: Option<SocketAddr>,
    ) -> Option<Result<Identity, AuthenticationError>> {
        if !join::is_join_secret(secret) {
            return None;
        }
        let ip = token_guess_limit::network_of(from.map_or(IpAddr::from([127, 0, 0, 1]), |from| from.ip()));
        let sha256 = ContentHash::of(secret.as_bytes());
        {
            let limit = self.inner.limit.lock().unwrap_or_else(PoisonError::into_inner);
            if !limit.allows(Instant::now(), ip, &sha256) {
                return None;
            }
        }
        // Looked up by hash, so that the time of the lookup reveals nothing about a secret.
        let found = self.inner.enrolments.join(|join| join.sha256 == sha256)?;
        let who = Identity {
            name: found.name.clone().unwrap_or_else(|| UserName::new(UNNAMED)),
            role: Role::Worker,
            by: found.id.clone(),
            from,
            certificate: None,
        };
        let now = self.inner.clock.wall_time();
        Some(match found.check_usable(now) {
            Ok(()) => Ok(who),
            Err(why) => {
                let mut line = who.audit_line(now, "worker.enrol", &found.id);
                (line.done, line.detail) = (false, why.to_owned());
                self.record_audit(line);
                Err(AuthenticationError::Join(why))
            }
        })
    }

    /// Creates a join token. Its secret exists only in this return value.
    pub(crate) async fn create_join_token(
        &self,
        by: &Identity,
        name: Option<UserName>,
        life: Duration,
    ) -> Result<(Token, JoinToken), AccessError> {
        let now = self.inner.clock.wall_time();
        let secret = join::new_join_secret();
        let record = JoinToken {
            id: new_id('j'),
            name,
            sha256: ContentHash::of(secret.secret().as_bytes()),
            created: now,
            created_by: by.name.to_string(),
            expires: now.after(life),
            used: None,
            revoked: None,
            answer: None,
        };
        let mut line = by.audit_line(now, "join_token.create", &record.id);
        line.detail = record
            .name
            .as_ref()
            .map_or_else(|| "for any worker".to_owned(), |name| format!("for {name}"));
        let document = document(JOIN, &record.id, &record)?;
        self.inner.store.administer(&[document], &[line]).await?;
        self.inner.enrolments.put_join(record.clone());
        Ok((secret, record))
    }

    /// Exchanges the caller's join token for a certificate. A refused request does not use up the token.
    pub(crate) async fn enrol(
        &self,
        who: &Identity,
        signer: &Signer,
        request: CertificateRequest,
        host: &str,
        worker: Option<WorkerId>,
    ) -> Result<IssuedCertificate, EnrolError> {
        let result = self.try_enrol(who, signer, request, host, worker).await;
        if let Err(error) = &result {
            let mut line = who.audit_line(self.inner.clock.wall_time(), "worker.enrol", &who.by);
            (line.done, line.detail) = (false, AuditLine::quote(&error.to_string()));
            self.record_audit(line);
        }
        result
    }

    async fn try_enrol(
        &self,
        who: &Identity,
        signer: &Signer,
        request: CertificateRequest,
        host: &str,
        worker: Option<WorkerId>,
    ) -> Result<IssuedCertificate, EnrolError> {
        let request = CheckedRequest::check(request)?;
        let known = &self.inner.enrolments;
        let _write_guard = known.write_lock.lock().await;
        let now = self.inner.clock.wall_time();
        let mut join = known
            .join(|join| join.id == who.by)
            .ok_or(EnrolError::Token("the join token is not known"))?;
        if let Some(why) = join.unusable_reason(now) {
            return self
                .repeat_join_answer(who, &join, &request, now)
                .ok_or(EnrolError::Token(why));
        }
        let name = match (&join.name, request.requested_name()) {
            (Some(name), _) => name.clone(),
            (None, asked) => {
                let wanted = asked.map_or_else(|| worker_name_from_host(host), ToOwned::to_owned);
                UserName::parse(&wanted).map_err(|_| EnrolError::BadName(AuditLine::quote(&wanted)))?
            }
        };
        let taken = |other: &Enrolment| other.name == name && other.revoked.is_none() && wall_clock() < other.expires;
        if known.all().iter().any(taken) {
            return Err(EnrolError::NameTaken(name));
        }
        let fresh_worker = WorkerId::new(format!("w{}", uuid::Uuid::new_v4().simple()));
        let mut admin_records = Vec::new();
        let worker = match worker {
            None => {
                admin_records.push(document(WORKER_OWNER, fresh_worker.as_str(), &name)?);
                fresh_worker
            }
            // The owner of this id is set when the worker registers; here, an id of another owner is refused.
            Some(worker) => match self.owner_of(&worker).await {
                Some(owner) if owner != name => return Err(AccessError::NotYours(worker.to_string()).into()),
                None if known.is_of_other(&worker, &name) => {
                    return Err(AccessError::NotYours(worker.to_string()).into());
                }
                _ => worker,
            },
        };
        let id = new_id('c');
        let (pem, certificate) = signer.worker(&request, &name, &id)?;
        let enrolment = Enrolment {
            id,
            name: name.clone(),
            worker: worker.clone(),
            joined: now,
            by: join.id.clone(),
            issued: now,
            serial: certificate.serial,
            expires: certificate.not_after,
            revoked: None,
        };
        join.used = Some(now);
        join.answer = Some(JoinAnswer {
            key: request.key_hash(),
            certificate: pem.clone(),
            enrolment: enrolment.id.clone(),
        });
        admin_records.push(document(JOIN, &join.id, &join)?);
        admin_records.push(document(ENROLMENT, &enrolment.id, &enrolment)?);
        let mut line = who.audit_line(now, "worker.enrol", worker.as_str());
        line.who = name.to_string();
        line.detail = format!("{} with {}", enrolment.id, join.id);
        let owns = admin_records.len() == 3;
        self.inner
            .store
            .administer(&admin_records, &[line])
            .await
            .map_err(AccessError::from)?;
        if owns {
            self.inner.machines.lock().await.insert(worker, name);
        }
        known.put_join(join);
        known.put(enrolment.clone());
        Ok(IssuedCertificate { enrolment, pem })
    }

    /// Returns the earlier answer again if the same key asks, because the machine lost it.
    fn repeat_join_answer(
        &self,
        who: &Identity,
        join: &JoinToken,
        request: &CheckedRequest,
        now: UnixMillis,
    ) -> Option<IssuedCertificate> {
        join.check_usable(now).ok()?;
        let answer = join.answer.as_ref().filter(|answer| answer.key == request.key_hash())?;
        let good = |enrolment: &Enrolment| enrolment.revoked.is_none() && wall_clock() < enrolment.expires;
        let enrolment = self.inner.enrolments.get(&answer.enrolment).filter(good)?;
        let mut line = who.audit_line(now, "worker.enrol", enrolment.worker.as_str());
        line.who = enrolment.name.to_string();
        line.detail = format!("{} with {}, again: the answer was lost", enrolment.id, join.id);
        self.record_audit(line);
        Some(IssuedCertificate {
            enrolment,
            pem: answer.certificate.clone(),
        })
    }

    /// Issues a new certificate for a worker with a valid one.
    pub(crate) async fn renew(
        &self,
        who: &Identity,
        signer: &Signer,
        request: CertificateRequest,
    ) -> Result<IssuedCertificate, EnrolError> {
        if who.certificate.is_none() {
            return Err(EnrolError::NoCertificate);
        }
        let request = CheckedRequest::check(request)?;
        let known = &self.inner.enrolments;
        let _write_guard = known.write_lock.lock().await;
        let found = known.get(&who.by).filter(|found| found.revoked.is_none());
        let mut enrolment = found.ok_or(EnrolError::Token("the certificate was revoked"))?;
        let now = self.inner.clock.wall_time();
        let signed = signer.worker(&request, &enrolment.name, &enrolment.id);
        let (pem, certificate) = signed.inspect_err(|error| {
            let mut line = who.audit_line(now, "worker.renew", enrolment.worker.as_str());
            (line.done, line.detail) = (false, AuditLine::quote(&error.to_string()));
            self.record_audit(line);
        })?;
        (enrolment.issued, enrolment.serial, enrolment.expires) = (now, certificate.serial, certificate.not_after);
        let mut line = who.audit_line(now, "worker.renew", enrolment.worker.as_str());
        line.detail.clone_from(&enrolment.serial);
        let document = document(ENROLMENT, &enrolment.id, &enrolment)?;
        self.inner
            .store
            .administer(&[document], &[line])
            .await
            .map_err(AccessError::from)?;
        known.put(enrolment.clone());
        Ok(IssuedCertificate { enrolment, pem })
    }

    /// Returns all workers that joined, newest last.
    pub(crate) fn enrolments(&self) -> Vec<Enrolment> {
        self.inner.enrolments.all()
    }

    /// Returns the enrolment of a caller with a certificate.
    pub(crate) fn enrolment_of(&self, who: &Identity) -> Option<Enrolment> {
        who.certificate?;
        self.inner.enrolments.get(&who.by)
    }

    /// Records in the audit log that a certificate was used for another worker's id.
    pub(crate) fn audit_foreign_worker_id(&self, who: &Identity, wanted: &WorkerId) -> AccessError {
        let mut line = who.audit_line(self.inner.clock.wall_time(), "worker.join", wanted.as_str());
        (line.done, line.detail) = (false, "its certificate is another worker's".to_owned());
        self.record_audit(line);
        AccessError::NotYours(wanted.to_string())
    }

    /// Revokes all certificates and unused join tokens of a worker. Calls are refused from now on, and open sessions
    /// are closed.
    pub(crate) async fn revoke_worker(&self, by: &Identity, name: &str) -> Result<(Vec<Enrolment>, u32), AccessError> {
        let known = &self.inner.enrolments;
        let _write_guard = known.write_lock.lock().await;
        let now = self.inner.clock.wall_time();
        let mut ended: Vec<Enrolment> = known.all();
        ended.retain(|enrolment| enrolment.name.as_str() == name && enrolment.revoked.is_none());
        let mut joins = {
            let joins = known.joins.read().unwrap_or_else(PoisonError::into_inner);
            let of_it = |join: &&JoinToken| {
                join.name.as_ref().is_some_and(|of| of.as_str() == name) && join.unusable_reason(now).is_none()
            };
            joins.values().filter(of_it).cloned().collect::<Vec<_>>()
        };
        if ended.is_empty() && joins.is_empty() {
            return Err(AccessError::NoWorker(AuditLine::quote(name)));
        }
        let mut admin_records = Vec::new();
        for enrolment in &mut ended {
            enrolment.revoked = Some(now);
            admin_records.push(document(ENROLMENT, &enrolment.id, enrolment)?);
        }
        for join in &mut joins {
            join.revoked = Some(now);
            admin_records.push(document(JOIN, &join.id, join)?);
        }
        let mut line = by.audit_line(now, "worker.revoke", name);
        line.detail = format!("{} certificates, {} join tokens", ended.len(), joins.len());
        self.inner.store.administer(&admin_records, &[line]).await?;
        let count = u32::try_from(joins.len()).unwrap_or(u32::MAX);
        joins.into_iter().for_each(|join| known.put_join(join));
        ended.iter().for_each(|enrolment| known.put(enrolment.clone()));
        self.inner.revoked.send_modify(|count| *count += 1);
        Ok((ended, count))
    }

    /// Returns when a certificate expires; `None` when it is already expired or revoked.
    pub(super) fn certificate_expiry(&self, who: &Identity, until: UnixMillis) -> Option<UnixMillis> {
        let known = self.inner.enrolments.get(&who.by)?;
        (known.revoked.is_none() && wall_clock() < until).then_some(until)
    }
}
