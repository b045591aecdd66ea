//! Machines join, renew their certificates and are revoked.

use super::Access;
use super::enrolments::{
    Certified, ENROLMENT, EnrolError, Enrolment, JOIN, JoinAnswer, JoinToken, NAMELESS, as_name, document, fresh,
};
use super::error::{AccessError, Denied};
use super::identity::{Identity, address};
use super::limit;
use super::records::MACHINE;
use crate::pki::{Signer, wall};
use crate::store::AuditLine;
use aitk_common::control::UnixMillis;
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
    /// Whoever shows this certificate, which TLS has found to be one of our authority.
    pub(crate) fn enter_certified(
        &self,
        shown: &WorkerCertificate,
        from: Option<SocketAddr>,
    ) -> Result<Identity, Denied> {
        let who = Identity {
            name: shown.name.clone(),
            role: Role::Worker,
            by: shown.enrolment.clone(),
            from,
            certificate: Some(shown.not_after),
        };
        let now = self.inner.clock.date();
        let known = self.inner.enrolments.get(&shown.enrolment);
        let problem = match known {
            None => "is of no worker that this coordinator knows",
            Some(known) if known.name != shown.name => "has a name that is not the worker's",
            Some(known) if known.revoked.is_some() => "was revoked",
            Some(_) if wall() >= shown.not_after => "has expired",
            Some(_) => {
                let ip = limit::place(from.map_or(IpAddr::from([127, 0, 0, 1]), |from| from.ip()));
                let serial = ContentHash::of(shown.serial.as_bytes());
                let mut limit = self.inner.limit.lock().unwrap_or_else(PoisonError::into_inner);
                let first = limit.right(Instant::now(), ip, serial);
                drop(limit);
                if first {
                    self.note(who.line(now, "certificate.use", &shown.serial));
                }
                return Ok(who);
            }
        };
        let mut line = who.line(now, "login", &shown.serial);
        (line.done, line.detail) = (false, format!("the certificate {problem}"));
        self.note(line);
        Err(Denied::Certificate(problem))
    }

    /// TLS refused somebody's certificate.
    pub(crate) fn note_refused_certificate(&self, from: SocketAddr, problem: &str) {
        self.note(AuditLine {
            id: AuditLine::fresh_id(),
            time: self.inner.clock.date(),
            who: String::new(),
            by: String::new(),
            from: address(Some(from)),
            action: "login".to_owned(),
            object: String::new(),
            done: false,
            detail: AuditLine::quote(problem),
        });
    }

    /// A worker without the certificate that it must have here.
    pub(crate) fn note_no_certificate(&self, who: &Identity) {
        let mut line = who.line(self.inner.clock.date(), "refused", "");
        line.done = false;
        line.detail = "a worker on another machine needs a certificate here".to_owned();
        self.note(line);
    }

    /// Whoever shows this join token. None: it is none, which is a question for [`Self::enter`].
    pub(crate) fn enter_joining(&self, secret: &str, from: Option<SocketAddr>) -> Option<Result<Identity, Denied>> {
        if !join::is_join_secret(secret) {
            return None;
        }
        let ip = limit::place(from.map_or(IpAddr::from([127, 0, 0, 1]), |from| from.ip()));
        let sha256 = ContentHash::of(secret.as_bytes());
        {
            let limit = self.inner.limit.lock().unwrap_or_else(PoisonError::into_inner);
            if !limit.open(Instant::now(), ip, &sha256) {
                return None;
            }
        }
        // Looked up by its hash: how long that takes says nothing about any secret.
        let found = self.inner.enrolments.join(|join| join.sha256 == sha256)?;
        let who = Identity {
            name: found.name.clone().unwrap_or_else(|| UserName::new(NAMELESS)),
            role: Role::Worker,
            by: found.id.clone(),
            from,
            certificate: None,
        };
        let now = self.inner.clock.date();
        Some(match found.may_ask(now) {
            Ok(()) => Ok(who),
            Err(why) => {
                let mut line = who.line(now, "worker.enrol", &found.id);
                (line.done, line.detail) = (false, why.to_owned());
                self.note(line);
                Err(Denied::Join(why))
            }
        })
    }

    /// Makes a join token. The secret is known to the one who gets this answer only.
    pub(crate) async fn create_join(
        &self,
        by: &Identity,
        name: Option<UserName>,
        life: Duration,
    ) -> Result<(Token, JoinToken), AccessError> {
        let now = self.inner.clock.date();
        let secret = join::new_join_secret();
        let record = JoinToken {
            id: fresh('j'),
            name,
            sha256: ContentHash::of(secret.secret().as_bytes()),
            created: now,
            created_by: by.name.to_string(),
            expires: now.after(life),
            used: None,
            revoked: None,
            answer: None,
        };
        let mut line = by.line(now, "join_token.create", &record.id);
        line.detail = record
            .name
            .as_ref()
            .map_or_else(|| "for any worker".to_owned(), |name| format!("for {name}"));
        let document = document(JOIN, &record.id, &record)?;
        self.inner.store.administer(&[document], &[line]).await?;
        self.inner.enrolments.put_join(record.clone());
        Ok((secret, record))
    }

    /// Turns the join token that this caller showed into a certificate. A refusal uses nothing up.
    pub(crate) async fn enrol(
        &self,
        who: &Identity,
        signer: &Signer,
        request: CertificateRequest,
        host: &str,
        worker: Option<WorkerId>,
    ) -> Result<Certified, EnrolError> {
        let result = self.try_enrol(who, signer, request, host, worker).await;
        if let Err(error) = &result {
            let mut line = who.line(self.inner.clock.date(), "worker.enrol", &who.by);
            (line.done, line.detail) = (false, AuditLine::quote(&error.to_string()));
            self.note(line);
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
    ) -> Result<Certified, EnrolError> {
        let request = CheckedRequest::check(request)?;
        let known = &self.inner.enrolments;
        let _changing = known.changing.lock().await;
        let now = self.inner.clock.date();
        let mut join = known
            .join(|join| join.id == who.by)
            .ok_or(EnrolError::Token("the join token is not known"))?;
        if let Some(why) = join.ended(now) {
            return self
                .answer_again(who, &join, &request, now)
                .ok_or(EnrolError::Token(why));
        }
        let name = match (&join.name, request.requested_name()) {
            (Some(name), _) => name.clone(),
            (None, asked) => {
                let wanted = asked.map_or_else(|| as_name(host), ToOwned::to_owned);
                UserName::parse(&wanted).map_err(|_| EnrolError::BadName(AuditLine::quote(&wanted)))?
            }
        };
        let taken = |other: &Enrolment| other.name == name && other.revoked.is_none() && wall() < other.expires;
        if known.all().iter().any(taken) {
            return Err(EnrolError::NameTaken(name));
        }
        let fresh_worker = WorkerId::new(format!("w{}", uuid::Uuid::new_v4().simple()));
        let mut documents = Vec::new();
        let worker = match worker {
            None => {
                documents.push(document(MACHINE, fresh_worker.as_str(), &name)?);
                fresh_worker
            }
            // Whose that id is gets decided when it registers; but never somebody else's.
            Some(worker) => match self.owner_of(&worker).await {
                Some(owner) if owner != name => return Err(AccessError::NotYours(worker.to_string()).into()),
                _ => worker,
            },
        };
        let id = fresh('c');
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
        documents.push(document(JOIN, &join.id, &join)?);
        documents.push(document(ENROLMENT, &enrolment.id, &enrolment)?);
        let mut line = who.line(now, "worker.enrol", worker.as_str());
        line.who = name.to_string();
        line.detail = format!("{} with {}", enrolment.id, join.id);
        let owns = documents.len() == 3;
        self.inner
            .store
            .administer(&documents, &[line])
            .await
            .map_err(AccessError::from)?;
        if owns {
            self.inner.machines.lock().await.insert(worker, name);
        }
        known.put_join(join);
        known.put(enrolment.clone());
        Ok(Certified { enrolment, pem })
    }

    /// The answer that this join token got before, for the machine that holds the same key: its own was lost.
    fn answer_again(
        &self,
        who: &Identity,
        join: &JoinToken,
        request: &CheckedRequest,
        now: UnixMillis,
    ) -> Option<Certified> {
        join.may_ask(now).ok()?;
        let answer = join.answer.as_ref().filter(|answer| answer.key == request.key_hash())?;
        let good = |enrolment: &Enrolment| enrolment.revoked.is_none() && wall() < enrolment.expires;
        let enrolment = self.inner.enrolments.get(&answer.enrolment).filter(good)?;
        let mut line = who.line(now, "worker.enrol", enrolment.worker.as_str());
        line.who = enrolment.name.to_string();
        line.detail = format!("{} with {}, again: the answer was lost", enrolment.id, join.id);
        self.note(line);
        Some(Certified {
            enrolment,
            pem: answer.certificate.clone(),
        })
    }

    /// A newer certificate for a worker that has a good one.
    pub(crate) async fn renew(
        &self,
        who: &Identity,
        signer: &Signer,
        request: CertificateRequest,
    ) -> Result<Certified, EnrolError> {
        if who.certificate.is_none() {
            return Err(EnrolError::NoCertificate);
        }
        let request = CheckedRequest::check(request)?;
        let known = &self.inner.enrolments;
        let _changing = known.changing.lock().await;
        let found = known.get(&who.by).filter(|found| found.revoked.is_none());
        let mut enrolment = found.ok_or(EnrolError::Token("the certificate was revoked"))?;
        let now = self.inner.clock.date();
        let signed = signer.worker(&request, &enrolment.name, &enrolment.id);
        let (pem, certificate) = signed.inspect_err(|error| {
            let mut line = who.line(now, "worker.renew", enrolment.worker.as_str());
            (line.done, line.detail) = (false, AuditLine::quote(&error.to_string()));
            self.note(line);
        })?;
        (enrolment.issued, enrolment.serial, enrolment.expires) = (now, certificate.serial, certificate.not_after);
        let mut line = who.line(now, "worker.renew", enrolment.worker.as_str());
        line.detail.clone_from(&enrolment.serial);
        let document = document(ENROLMENT, &enrolment.id, &enrolment)?;
        self.inner
            .store
            .administer(&[document], &[line])
            .await
            .map_err(AccessError::from)?;
        known.put(enrolment.clone());
        Ok(Certified { enrolment, pem })
    }

    /// Every worker that joined, the newest last.
    pub(crate) fn enrolments(&self) -> Vec<Enrolment> {
        self.inner.enrolments.all()
    }

    /// What a caller with a certificate registers as.
    pub(crate) fn enrolment_of(&self, who: &Identity) -> Option<Enrolment> {
        who.certificate?;
        self.inner.enrolments.get(&who.by)
    }

    /// Another worker's place was asked for with a certificate.
    pub(crate) fn note_other_place(&self, who: &Identity, wanted: &WorkerId) -> AccessError {
        let mut line = who.line(self.inner.clock.date(), "worker.join", wanted.as_str());
        (line.done, line.detail) = (false, "its certificate is another worker's".to_owned());
        self.note(line);
        AccessError::NotYours(wanted.to_string())
    }

    /// Ends every certificate and unused join token of a worker: calls are refused from now on, open sessions are cut.
    pub(crate) async fn revoke_worker(&self, by: &Identity, name: &str) -> Result<(Vec<Enrolment>, u32), AccessError> {
        let known = &self.inner.enrolments;
        let _changing = known.changing.lock().await;
        let now = self.inner.clock.date();
        let mut ended: Vec<Enrolment> = known.all();
        ended.retain(|enrolment| enrolment.name.as_str() == name && enrolment.revoked.is_none());
        let mut joins = {
            let joins = known.joins.read().unwrap_or_else(PoisonError::into_inner);
            let of_it = |join: &&JoinToken| {
                join.name.as_ref().is_some_and(|of| of.as_str() == name) && join.ended(now).is_none()
            };
            joins.values().filter(of_it).cloned().collect::<Vec<_>>()
        };
        if ended.is_empty() && joins.is_empty() {
            return Err(AccessError::NoWorker(AuditLine::quote(name)));
        }
        let mut documents = Vec::new();
        for enrolment in &mut ended {
            enrolment.revoked = Some(now);
            documents.push(document(ENROLMENT, &enrolment.id, enrolment)?);
        }
        for join in &mut joins {
            join.revoked = Some(now);
            documents.push(document(JOIN, &join.id, join)?);
        }
        let mut line = by.line(now, "worker.revoke", name);
        line.detail = format!("{} certificates, {} join tokens", ended.len(), joins.len());
        self.inner.store.administer(&documents, &[line]).await?;
        let count = u32::try_from(joins.len()).unwrap_or(u32::MAX);
        joins.into_iter().for_each(|join| known.put_join(join));
        ended.iter().for_each(|enrolment| known.put(enrolment.clone()));
        self.inner.revoked.send_modify(|count| *count += 1);
        Ok((ended, count))
    }

    /// When a certificate is no good any more, as far as that is known: at once, or at its end.
    pub(super) fn certificate_end(&self, who: &Identity, until: UnixMillis) -> Option<UnixMillis> {
        let known = self.inner.enrolments.get(&who.by)?;
        (known.revoked.is_none() && wall() < until).then_some(until)
    }
}
