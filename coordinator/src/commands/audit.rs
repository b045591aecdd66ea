//! `audit`: prints the audit log.

use super::console::{date, print_line};
use super::remote::{RemoteArgs, call_error};
use aitk_proto::v1;
use clap::Args;

/// Arguments of `audit`.
#[derive(Debug, Args)]
pub(crate) struct AuditArgs {
    /// Lines after this one.
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    after: u64,
    /// One JSON object per line.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    remote: RemoteArgs,
}

pub(super) async fn audit(args: AuditArgs) -> anyhow::Result<()> {
    let mut clients = args.remote.connect().await?;
    let mut after = args.after;
    loop {
        let request = v1::ReadAuditRequest { after, limit: 0 };
        let reply = clients
            .admin
            .read_audit(request)
            .await
            .map_err(|status| call_error(&status))?;
        let lines = reply.into_inner().lines;
        let Some(last) = lines.last() else { return Ok(()) };
        after = last.seq;
        for line in lines {
            if args.json {
                let value = serde_json::json!({
                    "seq": line.seq, "time": date(line.time_ms), "who": line.who, "by": line.by, "from": line.from,
                    "action": line.action, "object": line.object, "done": line.done, "detail": line.detail,
                });
                print_line(&value.to_string())?;
            } else {
                let verdict = if line.done { "done" } else { "REFUSED" };
                let (who, from) = (or_dash(&line.who), or_dash(&line.from));
                let (time, action) = (date(line.time_ms), &line.action);
                print_line(&format!(
                    "{} {time} {who} {from} {action} {} {verdict} {}",
                    line.seq, line.object, line.detail
                ))?;
            }
        }
    }
}

fn or_dash(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}
