//! Writes the status of nodes for people.

use crate::linkgroup;
use crate::output::{bytes, duration, printable};
use crate::table::{Align, Table};
use smc_core::observe::Reason;
use smc_core::observe::status::{
    ConnectionState, ConnectionStatus, DeclineCount, DirectionStatus, Fabric, GroupState,
    LinkStatus, NodeStatus, ReasonCount, TotalsStatus,
};
use smc_core::wire::clc::Diagnosis;
use std::io::{self, Write};
use std::time::{Duration, SystemTime};

/// Writes one node: what it is, its links, connections and fallbacks.
pub(super) fn node(out: &mut dyn Write, node: &NodeStatus, now: SystemTime) -> io::Result<()> {
    write!(
        out,
        "{}  pid {}  uid {}",
        printable(&node.program),
        node.pid,
        node.uid
    )?;
    if let Some(age) = age(node, now) {
        write!(out, "  up {}", duration(age.as_secs()))?;
    }
    writeln!(
        out,
        "  node {}  xsmc {}",
        printable(&node.node),
        printable(&node.version)
    )?;

    let all = &node.connections;
    let of = |state| all.iter().filter(|c| c.state == state).count();
    let groups = node.link_groups.iter();
    let groups = groups.filter(|g| g.state != GroupState::Down);
    writeln!(
        out,
        "  connections {} (managed {}, negotiating {}, published {}, plain {})  links {}  \
         link groups {}",
        all.len(),
        of(ConnectionState::Managed),
        of(ConnectionState::Negotiating),
        of(ConnectionState::Published),
        of(ConnectionState::Plain),
        node.links.len(),
        groups.count()
    )?;
    let c = &node.counters;
    writeln!(
        out,
        "  upgrades {}  downgrades {}  published {}  opens {} (accepted {}, declined {})  \
         doorbells {}  spins {}  sleeps {}",
        c.upgrades,
        c.downgrades,
        c.published,
        c.opens_sent,
        c.opens_accepted,
        c.opens_declined,
        c.doorbells,
        c.spins,
        c.sleeps
    )?;
    links(out, &node.links)?;
    link_groups(out, node, now)?;
    connections(out, all)?;
    rdma_connections(out, all)?;
    fallbacks(out, &node.fallbacks)?;
    declines(out, &node.declines)
}

/// Writes what the nodes of a directory have counted together.
pub(super) fn totals(out: &mut dyn Write, totals: &TotalsStatus) -> io::Result<()> {
    let c = &totals.counters;
    writeln!(
        out,
        "all nodes of {} so far, those that have ended as well",
        printable(&totals.directory)
    )?;
    writeln!(
        out,
        "  by RMB, on ended connections: sent {}  received {}  upgrades {}  downgrades {}",
        bytes(c.rmb_sent),
        bytes(c.rmb_received),
        c.upgrades,
        c.downgrades
    )?;
    fallbacks(out, &totals.fallbacks)?;
    declines(out, &totals.declines)
}

/// How long the node has been there.
fn age(node: &NodeStatus, now: SystemTime) -> Option<Duration> {
    let started =
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(node.started_unix_ms?))?;
    now.duration_since(started).ok()
}

fn links(out: &mut dyn Write, links: &[LinkStatus]) -> io::Result<()> {
    if links.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(&[
        ("LINK TO", Align::Left),
        ("PID", Align::Right),
        ("CONNECTIONS", Align::Right),
        ("CHUNKS", Align::Right),
        ("NODE", Align::Left),
    ]);
    for link in links {
        table.row([
            printable(link.peer_program.as_deref().unwrap_or("?")),
            link.peer_pid.to_string(),
            link.slots_used.to_string(),
            link.chunks.to_string(),
            printable(&link.peer_node),
        ]);
    }
    writeln!(out)?;
    table.write(out, "  ")
}

fn link_groups(out: &mut dyn Write, node: &NodeStatus, now: SystemTime) -> io::Result<()> {
    if node.link_groups.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(&linkgroup::COLUMNS);
    for group in &node.link_groups {
        linkgroup::rows(group, now).for_each(|row| table.row(row));
    }
    writeln!(out)?;
    table.write(out, "  ")
}

fn connections(out: &mut dyn Write, connections: &[ConnectionStatus]) -> io::Result<()> {
    if connections.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(&[
        ("FD", Align::Right),
        ("LOCAL", Align::Left),
        ("PEER", Align::Left),
        ("STATE", Align::Left),
        ("FABRIC", Align::Left),
        ("TX", Align::Left),
        ("BY TCP", Align::Right),
        ("BY RMB", Align::Right),
        ("RMB", Align::Right),
        ("FILL", Align::Right),
        ("RX", Align::Left),
        ("BY TCP", Align::Right),
        ("BY RMB", Align::Right),
        ("RMB", Align::Right),
        ("FILL", Align::Right),
        ("REASON", Align::Left),
    ]);
    for c in connections {
        let mut row = vec![
            c.fd.to_string(),
            c.local.to_string(),
            c.peer.to_string(),
            c.state.name().to_owned(),
            c.fabric.map_or("-", Fabric::name).to_owned(),
        ];
        row.extend(direction(&c.tx));
        row.extend(direction(&c.rx));
        row.push(reason(c));
        table.row(row);
    }
    writeln!(out)?;
    table.write(out, "  ")
}

/// Why a connection is on TCP, with the diagnosis of the Decline if there was one.
fn reason(c: &ConnectionStatus) -> String {
    let reason = printable(c.reason.as_deref().unwrap_or(""));
    match &c.diagnosis {
        Some(d) => format!("{reason} ({} {:#010x})", printable(&d.name), d.code),
        None => reason,
    }
}

/// What only connections on SMC-R have.
fn rdma_connections(out: &mut dyn Write, connections: &[ConnectionStatus]) -> io::Result<()> {
    let mut table = Table::new(&[
        ("FD", Align::Right),
        ("GROUP", Align::Right),
        ("SLOT", Align::Right),
        ("CONTACT", Align::Left),
        ("TOKEN", Align::Right),
        ("PEER TOKEN", Align::Right),
    ]);
    let mut any = false;
    for (c, r) in connections.iter().filter_map(|c| Some((c, c.rdma?))) {
        any = true;
        let contact = if r.first_contact {
            "first"
        } else {
            "subsequent"
        };
        table.row([
            c.fd.to_string(),
            r.link_group.to_string(),
            r.slot.to_string(),
            contact.to_owned(),
            format!("{:#x}", r.own.alert_token),
            r.peer
                .map_or("-".into(), |p| format!("{:#x}", p.alert_token)),
        ]);
    }
    if !any {
        return Ok(());
    }
    writeln!(out)?;
    table.write(out, "  ")
}

/// Carrier, bytes by TCP, bytes by RMB, size of the RMB, how full it is.
fn direction(d: &DirectionStatus) -> [String; 5] {
    let (size, fill) = match d.rmb_size {
        0 => ("-".to_owned(), "-".to_owned()),
        size => {
            // The node's numbers are not trusted to make sense.
            let percent = u128::from(d.rmb_fill) * 100 / u128::from(size);
            (bytes(size), format!("{}%", percent.min(100)))
        }
    };
    [
        d.carrier.name().to_owned(),
        bytes(d.bytes_tcp),
        bytes(d.bytes_rmb),
        size,
        fill,
    ]
}

fn fallbacks(out: &mut dyn Write, fallbacks: &[ReasonCount]) -> io::Result<()> {
    if fallbacks.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(&[
        ("TIMES", Align::Right),
        ("FALLBACK", Align::Left),
        ("", Align::Left),
    ]);
    for entry in fallbacks {
        let sentence = Reason::from_code(entry.code).map_or(
            "A reason that this version of smctl does not know; update smctl.",
            Reason::sentence,
        );
        table.row([
            entry.count.to_string(),
            printable(&entry.name),
            sentence.to_owned(),
        ]);
    }
    writeln!(out)?;
    table.write(out, "  ")
}

fn declines(out: &mut dyn Write, declines: &[DeclineCount]) -> io::Result<()> {
    if declines.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(&[
        ("SENT", Align::Right),
        ("RECEIVED", Align::Right),
        ("DECLINE", Align::Left),
        ("", Align::Left),
    ]);
    for entry in declines {
        table.row([
            entry.sent.to_string(),
            entry.received.to_string(),
            printable(&entry.diagnosis.name),
            Diagnosis::from(entry.diagnosis.code).sentence().to_owned(),
        ]);
    }
    writeln!(out)?;
    table.write(out, "  ")
}

#[cfg(test)]
mod tests {
    use super::super::fake::{sample, sample_rdma};
    use super::*;

    fn text(status: &NodeStatus) -> String {
        let mut out = Vec::new();
        node(
            &mut out,
            status,
            SystemTime::UNIX_EPOCH + Duration::from_secs(1000),
        )
        .unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn everything_is_shown() {
        assert_eq!(
            text(&sample(4242)),
            "\
redis-server  pid 4242  uid 999  node 0000000000001092  xsmc 0.1.0
  connections 2 (managed 1, negotiating 0, published 0, plain 1)  links 1  link groups 0
  upgrades 2  downgrades 0  published 2  opens 0 (accepted 0, declined 0)  doorbells 0  spins 0  \
sleeps 0

  LINK TO           PID  CONNECTIONS  CHUNKS  NODE
  redis-benchmark  4243            1       2  00000000000000ff

  FD  LOCAL           PEER             STATE    FABRIC  TX   BY TCP  BY RMB   RMB  FILL  RX   \
BY TCP  BY RMB   RMB  FILL  REASON
   8  127.0.0.1:6379  127.0.0.1:40000  managed  shm     rmb     512      3G  256K   25%  rmb     \
512      3G  256K   25%
   9  127.0.0.1:6379  127.0.0.1:40001  plain    -       tcp    1000       0     -     -  tcp    \
1000       0     -     -  no-peer

  TIMES  FALLBACK
      3  no-peer   The other end does not run under xsmc, or has not used this connection through \
it yet.
"
        );
    }

    #[test]
    fn connections_with_another_host_are_shown() {
        let text = text(&sample_rdma(4242));
        let (_, text) = text.split_once("sleeps 0\n").unwrap();
        assert_eq!(
            text,
            "
  GROUP  ROLE    STATE       LINK  DEVICE  PORT   MTU  GID               PEER GID          PEER QPN  \
PEER ID           CONNECTIONS  CDC OUT  CDC IN  WRITTEN  CHUNKS
     16  client  down           1  rxe0       1  4096  ::ffff:10.9.0.1   ::ffff:10.9.0.2         33  \
0000525400090002        0/255       12      11       3M     1+1  the link failed: the peer does not \
answer
     17  server  up             1  rxe0       1  4096  ::ffff:10.9.0.1   ::ffff:10.9.0.2         33  \
0000525400090002        1/255       12      11       3M     1+1
                                2  rxe1       1  4096  ::ffff:10.9.0.11  ::ffff:10.9.0.12        33
     18  server  confirming     1  rxe0       1     -  ::ffff:10.9.0.1   -                        -  \
0000525400090002            1        0       0        0     1+1

  FD  LOCAL          PEER            STATE        FABRIC  TX   BY TCP  BY RMB   RMB  FILL  RX   \
BY TCP  BY RMB   RMB  FILL  REASON
   8  10.9.0.1:6379  10.9.0.2:40000  managed      rdma    rmb     512      3G  256K   25%  rmb     \
512      3G  256K   25%
   9  10.9.0.1:6379  10.9.0.2:40001  negotiating  -       tcp    1000       0     -     -  tcp    \
1000       0     -     -
  10  10.9.0.1:6379  10.9.0.2:40002  plain        -       tcp    1000       0     -     -  tcp    \
1000       0     -     -  smc-declined (NOSMCDEV 0x03030000)

  FD  GROUP  SLOT  CONTACT  TOKEN  PEER TOKEN
   8     17     0  first    0x101       0x102

  TIMES  FALLBACK
      1  smc-declined  The other host declined SMC-R; 'smctl status' shows its diagnosis.

  SENT  RECEIVED  DECLINE
     0         1  NOSMCDEV  No device for SMC was found, or the two hosts have no enterprise id \
(UEID) in common.
"
        );
    }

    #[test]
    fn empty_parts_are_left_out() {
        let mut status = sample(1);
        status.links.clear();
        status.connections.clear();
        status.fallbacks.clear();
        status.started_unix_ms = Some(808_000);
        let text = text(&status);
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(
            text.starts_with("redis-server  pid 1  uid 999  up 3m12s  node "),
            "{text}"
        );
    }

    #[test]
    fn odd_values_do_no_harm() {
        let mut status = sample(1);
        status.program = "evil\u{1b}[2J\n".into();
        status.started_unix_ms = Some(u64::MAX);
        status.connections[0].tx.rmb_size = 1;
        status.connections[0].tx.rmb_fill = u64::MAX;
        status.fallbacks[0].code = 250;
        let text = text(&status);
        assert!(!text.contains('\u{1b}'));
        assert!(text.contains("100%"));
        assert!(text.contains("update smctl"));
    }
}
