//! `smctl linkgroup`: the SMC-R link groups of all nodes, that is who is connected by RDMA with which process of which
//! other host.

use crate::output::{self, bytes, duration, printable};
use crate::status::{self, Place, Problem, Report};
use crate::table::{Align, Table};
use serde::Serialize;
use smc_core::observe::status::{GroupLinkStatus, LinkGroupStatus};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

/// Options of `smctl linkgroup`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print JSON: {"link_groups": [...], "problems": [...]}
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: Place,
}

#[derive(Serialize)]
struct Json<'a> {
    link_groups: Vec<Entry<'a>>,
    problems: &'a [Problem],
}

/// A link group and whose it is.
#[derive(Serialize)]
struct Entry<'a> {
    pid: u32,
    program: &'a str,
    #[serde(flatten)]
    group: &'a LinkGroupStatus,
}

pub(crate) fn run(args: &Args) -> io::Result<ExitCode> {
    let (out, err) = (&mut io::stdout().lock(), &mut io::stderr());
    show(out, err, &args.place.directories(), args.json)
}

fn show(
    out: &mut dyn Write,
    err: &mut dyn Write,
    directories: &[PathBuf],
    json: bool,
) -> io::Result<ExitCode> {
    let report = status::gather(directories, None);
    if json {
        let json = Json {
            link_groups: entries(&report).collect(),
            problems: &report.problems,
        };
        output::json(out, &json)?;
    } else {
        write(out, &report, SystemTime::now())?;
    }
    report.write_problems(err)?;
    Ok(if report.problems.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn entries(report: &Report) -> impl Iterator<Item = Entry<'_>> {
    report.nodes.iter().flat_map(|node| {
        node.link_groups.iter().map(|group| Entry {
            pid: node.pid,
            program: &node.program,
            group,
        })
    })
}

fn write(out: &mut dyn Write, report: &Report, now: SystemTime) -> io::Result<()> {
    let mut columns = vec![("PID", Align::Right), ("PROGRAM", Align::Left)];
    columns.extend(COLUMNS);
    let mut table = Table::new(&columns);
    let mut any = false;
    for entry in entries(report) {
        any = true;
        let mut whose = [entry.pid.to_string(), printable(entry.program)];
        for row in rows(entry.group, now) {
            table.row(core::mem::take(&mut whose).into_iter().chain(row));
        }
    }
    if any {
        table.write(out, "")
    } else {
        writeln!(
            out,
            "no link groups: no process here is connected with another host by SMC-R"
        )
    }
}

/// The columns of a table of link groups, in the order of the cells of [`rows`].
pub(crate) const COLUMNS: [(&str, Align); 17] = [
    ("GROUP", Align::Right),
    ("ROLE", Align::Left),
    ("STATE", Align::Left),
    ("LINK", Align::Right),
    ("DEVICE", Align::Left),
    ("PORT", Align::Right),
    ("MTU", Align::Right),
    ("GID", Align::Left),
    ("PEER GID", Align::Left),
    ("PEER QPN", Align::Right),
    ("PEER ID", Align::Left),
    ("CONNECTIONS", Align::Right),
    ("CDC OUT", Align::Right),
    ("CDC IN", Align::Right),
    ("WRITTEN", Align::Right),
    ("CHUNKS", Align::Right),
    ("", Align::Left),
];

/// One link group: a row for each link, of which the first one says what is the group's; the last cell for how long it
/// has been idle, or why it has ended.
pub(crate) fn rows(group: &LinkGroupStatus, now: SystemTime) -> impl Iterator<Item = Vec<String>> {
    let first = group.links.first().map_or_else(
        || vec![String::new(); LINK_CELLS],
        |link| link_cells(link).to_vec(),
    );
    let mut row = vec![
        group.id.to_string(),
        group.role.name().to_owned(),
        group.state.name().to_owned(),
    ];
    row.extend(first);
    row.extend([
        printable(&group.peer_system_id),
        match group.max_conns {
            0 => group.connections.to_string(),
            most => format!("{}/{most}", group.connections),
        },
        group.cdc_sent.to_string(),
        group.cdc_received.to_string(),
        bytes(group.bytes_written),
        format!("{}+{}", group.rmb_chunks, group.send_chunks),
        remark(group, now),
    ]);
    let others = group.links.iter().skip(1);
    std::iter::once(row).chain(others.map(|link| {
        let indent = std::iter::repeat_n(String::new(), 3);
        indent.chain(link_cells(link)).collect()
    }))
}

const LINK_CELLS: usize = 7;

fn link_cells(link: &GroupLinkStatus) -> [String; LINK_CELLS] {
    let peer = link.peer.as_ref();
    let absent = || "-".to_owned();
    [
        link.number.to_string(),
        printable(&link.device),
        link.port.to_string(),
        link.mtu.map_or_else(absent, |mtu| mtu.to_string()),
        printable(&link.own.gid),
        peer.map_or_else(absent, |peer| printable(&peer.gid)),
        peer.map_or_else(absent, |peer| peer.qpn.to_string()),
    ]
}

fn remark(group: &LinkGroupStatus, now: SystemTime) -> String {
    let parts: Vec<&str> = [&group.down, &group.failure]
        .into_iter()
        .flatten()
        .map(|why| &**why)
        .collect();
    if !parts.is_empty() {
        return printable(&parts.join(": "));
    }
    let since = group.idle_since_unix_ms.map(Duration::from_millis);
    since
        .and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since))
        .and_then(|since| now.duration_since(since).ok())
        .map_or_else(String::new, |idle| {
            format!("idle {}", duration(idle.as_secs()))
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::fake::{FakeNode, sample, sample_rdma};
    use smc_core::observe::status::GroupState;

    fn text(report: &Report) -> String {
        let mut out = Vec::new();
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        write(&mut out, report, now).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn one_table_for_all_nodes() {
        let mut second = sample_rdma(2);
        second.link_groups.truncate(1);
        second.link_groups[0].state = GroupState::Up;
        second.link_groups[0].down = None;
        second.link_groups[0].failure = None;
        let report = Report {
            totals: Vec::new(),
            nodes: vec![sample_rdma(1), second, sample(3)],
            problems: Vec::new(),
        };
        assert_eq!(
            text(&report),
            "\
PID  PROGRAM       GROUP  ROLE    STATE       LINK  DEVICE  PORT   MTU  GID               PEER GID          PEER QPN  \
PEER ID           CONNECTIONS  CDC OUT  CDC IN  WRITTEN  CHUNKS
  1  redis-server     16  client  down           1  rxe0       1  4096  ::ffff:10.9.0.1   ::ffff:10.9.0.2         33  \
0000525400090002        0/255       12      11       3M     1+1  the link failed: the peer does not answer
  1  redis-server     17  server  up             1  rxe0       1  4096  ::ffff:10.9.0.1   ::ffff:10.9.0.2         33  \
0000525400090002        1/255       12      11       3M     1+1
                                                 2  rxe1       1  4096  ::ffff:10.9.0.11  ::ffff:10.9.0.12        33
  1  redis-server     18  server  confirming     1  rxe0       1     -  ::ffff:10.9.0.1   -                        -  \
0000525400090002            1        0       0        0     1+1
  2  redis-server     16  client  up             1  rxe0       1  4096  ::ffff:10.9.0.1   ::ffff:10.9.0.2         33  \
0000525400090002        0/255       12      11       3M     1+1  idle 5s
"
        );
    }

    #[test]
    fn odd_values_do_no_harm() {
        let mut node = sample_rdma(1);
        let group = &mut node.link_groups[0];
        group.down = None;
        group.failure = Some("evil\u{1b}[2J".into());
        group.links[0].device = "\u{1b}".into();
        group.idle_since_unix_ms = Some(u64::MAX);
        node.link_groups[1].idle_since_unix_ms = Some(u64::MAX);
        let report = Report {
            totals: Vec::new(),
            nodes: vec![node],
            problems: Vec::new(),
        };
        assert!(!text(&report).contains('\u{1b}'));
    }

    #[test]
    fn json_and_a_host_without_any() {
        let dir = tempfile::tempdir().unwrap();
        let dirs = [dir.path().to_owned()];
        let node = FakeNode::with_status(&dir.path().join("node-1.sock"), &sample_rdma(1));
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let code = show(&mut out, &mut err, &dirs, true).unwrap();
        node.join();
        assert_eq!((&*err, code), (&b""[..], ExitCode::SUCCESS));
        let json: serde_json::Value = serde_json::from_slice(&out).unwrap();
        let group = &json["link_groups"][1];
        assert_eq!(group["pid"], 1);
        assert_eq!(group["program"], "redis-server");
        assert_eq!(group["state"], "up");
        assert_eq!(group["links"][0]["own"]["gid"], "::ffff:10.9.0.1");
        assert_eq!(group["links"][1]["peer"]["qpn"], 33);
        let confirming = &json["link_groups"][2]["links"][0];
        assert!(confirming.get("peer").is_none());
        assert_eq!(json["problems"], serde_json::json!([]));

        let _silent = FakeNode::listener(&dir.path().join("node-1b.sock"));
        std::fs::remove_file(dir.path().join("node-1.sock")).unwrap();
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let code = show(&mut out, &mut err, &dirs, false).unwrap();
        assert!(out.starts_with(b"no link groups"));
        assert!(!err.is_empty());
        assert_eq!(code, ExitCode::FAILURE);
    }
}
