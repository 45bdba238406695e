//! `smctl enable` and `smctl disable`: the SMC option of TCP, by eBPF programs.
//!
//! Root enables it once, for a control group and all below it; from then on unprivileged processes there may
//! mark their sockets (`smc_core::negotiate::option`). The programs are held by links in the bpf file system
//! and need no process of ours.

mod error;
mod link;
mod pins;
mod places;
mod program;

use crate::output;
use error::EnableError;
use link::Link;
use pins::{Pins, State};
use program::{Object, PARTS};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Options of `smctl enable`.
#[derive(clap::Args)]
pub(crate) struct EnableArgs {
    /// Only for processes in this control group and below it (a folder of the cgroup2 file system)
    /// [default: all]
    #[arg(long, value_name = "PATH", conflicts_with = "status")]
    cgroup: Option<PathBuf>,
    /// Change nothing; say whether it is enabled (exit code 0) or not (1)
    #[arg(long)]
    status: bool,
    /// Print JSON: {"enabled": …, "cgroup": …, "links": …, "problem": …}
    #[arg(long)]
    json: bool,
}

pub(crate) fn enable(args: &EnableArgs) -> io::Result<ExitCode> {
    let pins = Pins::new(Path::new(places::BPF_FS));
    let state = if args.status {
        pins.state()
    } else {
        attach(&pins, args.cgroup.as_deref()).and_then(|()| pins.state())
    };
    match state {
        Ok(state) => show(&mut io::stdout().lock(), &state, args.json),
        Err(e) => Ok(complain("enable", &e)),
    }
}

pub(crate) fn disable() -> io::Result<ExitCode> {
    match Pins::new(Path::new(places::BPF_FS)).remove() {
        Ok(true) => writeln!(io::stdout(), "disabled")?,
        Ok(false) => writeln!(io::stdout(), "not enabled: nothing to do")?,
        Err(e) => return Ok(complain("disable", &e)),
    }
    Ok(ExitCode::SUCCESS)
}

fn complain(command: &str, error: &EnableError) -> ExitCode {
    eprintln!("smctl {command}: {error}");
    ExitCode::FAILURE
}

/// Loads, attaches and pins everything, or nothing.
fn attach(pins: &Pins, cgroup: Option<&Path>) -> Result<(), EnableError> {
    let (path, folder) = places::cgroup(cgroup)?;
    places::bpf_fs()?;
    pins.claim()?;
    let attached = pins
        .note(&path)
        .and_then(|()| attach_to(pins, &path, &folder));
    if attached.is_err() {
        // The first error is the one to report.
        let _ = pins.remove();
    }
    attached
}

fn attach_to(pins: &Pins, path: &Path, folder: &File) -> Result<(), EnableError> {
    let mut object = Object::load()?;
    for part in &PARTS {
        let program = object.program(part)?;
        let link = Link::new(&program, folder, part.hook).map_err(|e| {
            EnableError::io(
                format!(
                    "attach the eBPF program {} to {}",
                    part.file,
                    path.display()
                ),
                e,
            )
        })?;
        pins.keep(part.file, &link)?;
    }
    Ok(())
}

fn show(out: &mut dyn Write, state: &State, json: bool) -> io::Result<ExitCode> {
    if json {
        output::json(out, state)?;
    } else {
        let links = state.links.display();
        match (&state.problem, &state.cgroup) {
            (Some(problem), _) => writeln!(
                out,
                "not working: {problem} (links in {links}): run smctl disable, then smctl enable"
            )?,
            (None, Some(cgroup)) => {
                writeln!(out, "enabled on {} (links in {links})", cgroup.display())?;
            }
            (None, None) => writeln!(out, "not enabled (no links in {links})")?,
        }
    }
    Ok(if state.enabled {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(state: &State, json: bool) -> (String, ExitCode) {
        let mut out = Vec::new();
        let code = show(&mut out, state, json).unwrap();
        (String::from_utf8(out).unwrap(), code)
    }

    #[test]
    fn every_state_is_said() {
        let mut state = State {
            enabled: true,
            cgroup: Some("/cg".into()),
            links: "/pins".into(),
            problem: None,
        };
        let (text, code) = shown(&state, false);
        assert_eq!(text, "enabled on /cg (links in /pins)\n");
        assert_eq!(code, ExitCode::SUCCESS);
        let (text, _) = shown(&state, true);
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["enabled"], true);
        assert_eq!(json["cgroup"], "/cg");
        state.enabled = false;
        state.problem = Some("it broke".into());
        let (text, code) = shown(&state, false);
        assert!(text.starts_with("not working: it broke"), "{text}");
        assert_eq!(code, ExitCode::FAILURE);
        state.problem = None;
        state.cgroup = None;
        let (text, code) = shown(&state, false);
        assert_eq!(text, "not enabled (no links in /pins)\n");
        assert_eq!(code, ExitCode::FAILURE);
    }
}
