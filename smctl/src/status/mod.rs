//! `smctl status`: asks every node and shows what its connections ride on.

mod discover;
#[cfg(test)]
pub(crate) mod fake;
mod query;
mod view;

use crate::output;
use query::QueryError;
use serde::Serialize;
use smc_core::negotiate::Directory;
use smc_core::observe::status::{NodeStatus, TotalsStatus};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

/// Options of `smctl status`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print JSON: {"nodes": [...], "totals": [...], "problems": [...]}; with --watch one line each time
    #[arg(long)]
    json: bool,
    /// Show it again every SECS seconds (1 if not given) until interrupted
    #[arg(long, value_name = "SECS", num_args = 0..=1, default_missing_value = "1",
          value_parser = clap::value_parser!(u64).range(1..=86400))]
    watch: Option<u64>,
    #[command(flatten)]
    place: Place,
    /// Show only the process with this id
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

/// Where nodes are looked for.
#[derive(clap::Args)]
pub(crate) struct Place {
    /// Look into this directory only [default: $XSMC_RUNTIME_DIR, else /run/xsmc and
    /// /dev/shm/xsmc-UID; for root those of all users]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
}

impl Place {
    /// The directories to look into that exist now.
    pub(crate) fn directories(&self) -> Vec<PathBuf> {
        let named = self.runtime_dir.clone().or_else(|| {
            std::env::var_os("XSMC_RUNTIME_DIR")
                .filter(|dir| !dir.is_empty())
                .map(PathBuf::from)
        });
        // SAFETY: geteuid has no arguments and no failure.
        let uid = unsafe { libc::geteuid() };
        discover::directories(named, uid, &discover::Roots::default())
    }
}

/// What was found at one moment.
#[derive(Serialize, Default)]
pub(crate) struct Report {
    pub(crate) nodes: Vec<NodeStatus>,
    /// For each runtime directory what its nodes have counted, those that have ended as well.
    pub(crate) totals: Vec<TotalsStatus>,
    pub(crate) problems: Vec<Problem>,
}

/// A node or a directory that could not be asked.
#[derive(Serialize)]
pub(crate) struct Problem {
    /// The socket or directory.
    path: String,
    /// The process behind it, where known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    what: String,
}

/// Nodes asked at the same time: each may take its second.
const PARALLEL: usize = 32;

pub(crate) fn run(args: &Args) -> io::Result<ExitCode> {
    let (out, err) = (&mut io::stdout().lock(), &mut io::stderr());
    let Some(seconds) = args.watch else {
        return show(out, err, &args.place.directories(), args);
    };
    let clear = !args.json && io::stdout().is_terminal();
    loop {
        let directories = args.place.directories();
        let report = gather(&directories, args.pid);
        if clear {
            out.write_all(b"\x1b[H\x1b[2J")?;
        }
        if args.json {
            serde_json::to_writer(&mut *out, &report)?;
            out.write_all(b"\n")?;
        } else {
            write(out, &report, &directories)?;
            report.write_problems(out)?;
            if !clear {
                writeln!(out)?;
            }
        }
        out.flush()?;
        let _ = err.flush();
        std::thread::sleep(Duration::from_secs(seconds));
    }
}

/// Gathers and writes once.
fn show(
    out: &mut dyn Write,
    err: &mut dyn Write,
    directories: &[PathBuf],
    args: &Args,
) -> io::Result<ExitCode> {
    let report = gather(directories, args.pid);
    if args.json {
        output::json(out, &report)?;
    } else {
        write(out, &report, directories)?;
    }
    report.write_problems(err)?;
    let absent = match args.pid {
        Some(pid) if report.nodes.is_empty() && report.problems.is_empty() => {
            writeln!(
                err,
                "smctl: process {pid} is not a node here; it is not under xsmc, has no peer yet, \
                 or uses another runtime directory"
            )?;
            true
        }
        _ => false,
    };
    Ok(if absent || !report.problems.is_empty() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// Asks the nodes in all directories, many at a time.
pub(crate) fn gather(directories: &[PathBuf], pid: Option<u32>) -> Report {
    let mut report = Report::default();
    let mut sockets = Vec::new();
    for dir in directories {
        if pid.is_none() {
            report.add_totals(dir);
        }
        match discover::sockets(dir) {
            Ok(found) => sockets.extend(found),
            Err(e) => report.problems.push(Problem {
                path: dir.display().to_string(),
                pid: None,
                what: format!("can't list the runtime directory: {e}"),
            }),
        }
    }
    for batch in sockets.chunks(PARALLEL) {
        let answers = std::thread::scope(|scope| {
            let asked: Vec<_> = batch
                .iter()
                .map(|path| scope.spawn(move || query::query(path)))
                .collect();
            asked
                .into_iter()
                .map(|asked| asked.join().ok())
                .collect::<Vec<_>>()
        });
        for (path, answer) in batch.iter().zip(answers) {
            report.add(path, answer, pid);
        }
    }
    report
        .nodes
        .sort_by(|a, b| (a.pid, &a.node).cmp(&(b.pid, &b.node)));
    report
}

impl Report {
    /// Adds what the nodes of a directory have counted together.
    fn add_totals(&mut self, dir: &Path) {
        let directory = dir.display().to_string();
        match Directory::read_totals(dir) {
            Ok(Some(totals)) => self.totals.push(TotalsStatus {
                directory,
                counters: totals.values(),
                fallbacks: totals.fallbacks(),
                declines: totals.declines(),
            }),
            // What concerns the directory itself is said where its sockets are listed.
            Ok(None) => {}
            Err(e) if !dir.is_dir() => drop(e),
            Err(e) => self.problems.push(Problem {
                path: directory,
                pid: None,
                what: format!("can't read its totals: {e}"),
            }),
        }
    }

    /// Adds the answer at `path`, unless it is of another process than the wanted one.
    fn add(
        &mut self,
        path: &Path,
        answer: Option<Result<NodeStatus, QueryError>>,
        wanted: Option<u32>,
    ) {
        let problem = |pid, what| Problem {
            path: path.display().to_string(),
            pid,
            what,
        };
        match answer {
            Some(Ok(node)) => {
                if wanted.is_none_or(|pid| pid == node.pid) {
                    self.nodes.push(node);
                }
            }
            Some(Err(QueryError::Gone)) => {}
            Some(Err(e)) => {
                if wanted.is_none() || e.pid().is_none() || e.pid() == wanted {
                    self.problems.push(problem(e.pid(), e.to_string()));
                }
            }
            None => self
                .problems
                .push(problem(None, "smctl failed while asking it".into())),
        }
    }

    /// Says who could not be asked, and why.
    pub(crate) fn write_problems(&self, out: &mut dyn Write) -> io::Result<()> {
        for problem in &self.problems {
            let what = output::printable(&problem.what);
            writeln!(out, "smctl: {}: {what}", output::printable(&problem.path))?;
        }
        Ok(())
    }
}

fn write(out: &mut dyn Write, report: &Report, directories: &[PathBuf]) -> io::Result<()> {
    let now = SystemTime::now();
    for (index, node) in report.nodes.iter().enumerate() {
        if index != 0 {
            writeln!(out)?;
        }
        view::node(out, node, now)?;
    }
    for (index, totals) in report.totals.iter().enumerate() {
        if index != 0 || !report.nodes.is_empty() {
            writeln!(out)?;
        }
        view::totals(out, totals)?;
    }
    if report.nodes.is_empty() && report.problems.is_empty() {
        let places: Vec<String> = directories
            .iter()
            .map(|d| d.display().to_string())
            .collect();
        match places.is_empty() {
            true => writeln!(out, "no nodes: there is no runtime directory yet")?,
            false => writeln!(out, "no nodes in {}", places.join(", "))?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::fake::{FakeNode, sample};
    use super::*;
    use smc_core::negotiate::RuntimeDir;
    use smc_core::observe::Reason;
    use std::sync::atomic::Ordering::Relaxed;

    fn args(json: bool, pid: Option<u32>) -> Args {
        Args {
            json,
            watch: None,
            place: Place { runtime_dir: None },
            pid,
        }
    }

    /// Output, errors, exit code, with the directory's name replaced.
    fn shown(dir: &Path, args: &Args) -> (String, String, ExitCode) {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let code = show(&mut out, &mut err, &[dir.to_owned()], args).unwrap();
        let clean = |text| {
            String::from_utf8(text)
                .unwrap()
                .replace(&*dir.to_string_lossy(), "DIR")
        };
        (clean(out), clean(err), code)
    }

    #[test]
    fn nodes_as_json() {
        let dir = tempfile::tempdir().unwrap();
        let nodes = [20, 10].map(|pid| {
            let path = dir.path().join(format!("node-{pid}.sock"));
            FakeNode::with_status(&path, &sample(pid))
        });
        drop(FakeNode::listener(&dir.path().join("node-stale.sock")));
        let (out, err, code) = shown(dir.path(), &args(true, None));
        assert_eq!((&*err, code), ("", ExitCode::SUCCESS));
        let json: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!(json["nodes"][0]["pid"], 10);
        assert_eq!(json["nodes"][1]["pid"], 20);
        assert_eq!(json["nodes"][0]["connections"][0]["tx"]["carrier"], "rmb");
        assert_eq!(json["nodes"][0]["connections"][1]["rx"]["carrier"], "tcp");
        assert_eq!(json["nodes"][0]["connections"][1]["reason"], "no-peer");
        assert_eq!(json["problems"], serde_json::json!([]));
        nodes.into_iter().for_each(FakeNode::join);
    }

    #[test]
    fn nodes_as_text_and_one_that_is_silent() {
        let dir = tempfile::tempdir().unwrap();
        let node = FakeNode::with_status(&dir.path().join("node-1.sock"), &sample(1));
        let _silent = FakeNode::listener(&dir.path().join("node-2.sock"));
        let (out, err, code) = shown(dir.path(), &args(false, None));
        assert!(out.starts_with("redis-server  pid 1 "), "{out}");
        let expected = format!(
            "smctl: DIR/node-2.sock: process {} does not",
            std::process::id()
        );
        assert!(err.starts_with(&expected), "{err}");
        assert_eq!(code, ExitCode::FAILURE);
        node.join();
    }

    #[test]
    fn one_process_only() {
        let dir = tempfile::tempdir().unwrap();
        let serve = || {
            [1, 2].map(|pid| {
                let path = dir.path().join(format!("node-{pid}.sock"));
                let _ = std::fs::remove_file(&path);
                FakeNode::with_status(&path, &sample(pid))
            })
        };
        let nodes = serve();
        let (out, err, code) = shown(dir.path(), &args(true, Some(2)));
        let json: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!(json["nodes"].as_array().unwrap().len(), 1);
        assert_eq!(json["nodes"][0]["pid"], 2);
        assert_eq!((&*err, code), ("", ExitCode::SUCCESS));
        nodes.into_iter().for_each(FakeNode::join);

        let nodes = serve();
        let (_, err, code) = shown(dir.path(), &args(false, Some(3)));
        assert!(
            err.starts_with("smctl: process 3 is not a node here"),
            "{err}"
        );
        assert_eq!(code, ExitCode::FAILURE);
        nodes.into_iter().for_each(FakeNode::join);
    }

    #[test]
    fn totals_outlive_nodes() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::at(dir.path()).unwrap();
        let directory = Directory::open(&runtime).unwrap();
        directory.totals().rmb_sent.store(2048, Relaxed);
        directory.totals().count(Reason::NoPeer);
        drop(directory);
        let (out, err, code) = shown(dir.path(), &args(true, None));
        assert_eq!((&*err, code), ("", ExitCode::SUCCESS));
        let json: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!(json["totals"][0]["directory"], "DIR");
        assert_eq!(json["totals"][0]["counters"]["rmb_sent"], 2048);
        assert_eq!(json["totals"][0]["fallbacks"][0]["name"], "no-peer");
        let (out, _, _) = shown(dir.path(), &args(false, None));
        let first = "\
all nodes of DIR so far, those that have ended as well
  by RMB, on ended connections: sent 2K  received 0  upgrades 0  downgrades 0

  TIMES  FALLBACK
      1  no-peer ";
        assert!(
            out.starts_with(first) && out.ends_with("\nno nodes in DIR\n"),
            "{out}"
        );
        let (out, _, _) = shown(dir.path(), &args(true, Some(7)));
        let json: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!(json["totals"], serde_json::json!([]));
    }

    #[test]
    fn nothing_there() {
        let dir = tempfile::tempdir().unwrap();
        let (out, err, code) = shown(dir.path(), &args(false, None));
        assert_eq!(
            (&*out, &*err, code),
            ("no nodes in DIR\n", "", ExitCode::SUCCESS)
        );
        let (out, _, _) = shown(dir.path(), &args(true, None));
        let json: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"nodes": [], "totals": [], "problems": []})
        );

        let (out, err, code) = shown(&dir.path().join("absent"), &args(false, None));
        assert_eq!((&*out, code), ("", ExitCode::FAILURE));
        assert!(
            err.starts_with("smctl: DIR: can't list the runtime directory: No such"),
            "{err}"
        );
    }
}
