//! `smctl config`: checks and explains the policy file.

use crate::output;
use clap::ValueEnum;
use serde::Serialize;
use smc_core::policy::{
    self, Action, Endpoint, Identity, Policy, PolicyError, Role, Rule, Tunables,
};
use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

/// The commands below `smctl config`.
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Say what is wrong in a policy file, or what its rules are
    Check(CheckArgs),
    /// Say what the policy decides for a program and a connection
    Explain(ExplainArgs),
}

/// Options of `smctl config check`.
#[derive(clap::Args)]
pub(crate) struct CheckArgs {
    /// The policy file [default: $XSMC_CONFIG, else /etc/xsmc.toml]
    file: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Options of `smctl config explain`.
#[derive(clap::Args)]
pub(crate) struct ExplainArgs {
    /// The policy file [default: $XSMC_CONFIG, else /etc/xsmc.toml]
    #[arg(long)]
    config: Option<PathBuf>,
    /// Full path of the program
    #[arg(long, value_name = "PATH")]
    program: String,
    /// The user id it runs as [default: yours]
    #[arg(long)]
    uid: Option<u32>,
    /// Its control group, such as /system.slice/redis.service
    #[arg(long, default_value = "")]
    cgroup: String,
    /// Address of the program's end of the connection
    #[arg(long, value_name = "ADDR:PORT")]
    local: SocketAddr,
    /// Address of the other end
    #[arg(long, value_name = "ADDR:PORT")]
    peer: SocketAddr,
    /// Whether the program accepts the connection or opens it
    #[arg(long, value_name = "ROLE", default_value = "unknown")]
    role: RoleArg,
}

#[derive(Clone, Copy, ValueEnum)]
enum RoleArg {
    Listen,
    Connect,
    Unknown,
}

pub(crate) fn run(command: &Command) -> io::Result<ExitCode> {
    let (out, err) = (&mut io::stdout().lock(), &mut io::stderr());
    match command {
        Command::Check(args) => {
            let file = named_file(args.file.as_deref().map(|p| p.as_os_str()));
            check(out, err, file.as_deref(), args.json)
        }
        Command::Explain(args) => {
            let file = named_file(args.config.as_deref().map(|p| p.as_os_str()));
            explain(out, err, file.as_deref(), args)
        }
    }
}

/// The file that was named here or in the environment.
fn named_file(argument: Option<&OsStr>) -> Option<OsString> {
    argument
        .map(OsStr::to_owned)
        .or_else(|| std::env::var_os("XSMC_CONFIG"))
        .filter(|name| !name.is_empty())
}

/// Reads the named file, or the default one, which may be absent (`Ok(None)`).
fn read(named: Option<&OsStr>) -> Result<Option<Policy>, Vec<PolicyError>> {
    let path = named.unwrap_or(OsStr::new(policy::DEFAULT_PATH));
    let shown = path.to_string_lossy();
    match policy::read_file(path) {
        Ok(bytes) => Policy::check_bytes(&bytes, &shown).map(Some),
        Err(e) if named.is_none() && e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(vec![PolicyError::of_file(
            &shown,
            format!("can't read the policy file: {e}"),
            "check the name and the permissions",
        )]),
    }
}

/// JSON of `config check`.
#[derive(Serialize)]
struct Report<'a> {
    /// The file, `null` when there is none and the built-in policy counts.
    file: Option<String>,
    ok: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    problems: Option<Vec<Problem<'a>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    defaults: Option<Defaults>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rules: Option<&'a [Rule]>,
}

#[derive(Serialize)]
struct Problem<'a> {
    line: usize,
    column: usize,
    what: &'a str,
    help: &'a str,
}

#[derive(Serialize)]
struct Defaults {
    action: Action,
    #[serde(flatten)]
    tunables: Tunables,
}

fn check(
    out: &mut dyn Write,
    err: &mut dyn Write,
    file: Option<&OsStr>,
    json: bool,
) -> io::Result<ExitCode> {
    let shown = file
        .unwrap_or(OsStr::new(policy::DEFAULT_PATH))
        .to_string_lossy();
    match read(file) {
        Err(problems) => {
            if json {
                let problems = problems
                    .iter()
                    .map(|p| Problem {
                        line: p.line,
                        column: p.column,
                        what: &p.what,
                        help: &p.help,
                    })
                    .collect();
                let report = Report {
                    file: Some(shown.into_owned()),
                    ok: false,
                    problems: Some(problems),
                    defaults: None,
                    rules: None,
                };
                output::json(out, &report)?;
            } else {
                for problem in &problems {
                    writeln!(err, "{problem}")?;
                }
            }
            Ok(ExitCode::FAILURE)
        }
        Ok(found) => {
            let file = found.is_some().then(|| shown.clone().into_owned());
            let policy = found.unwrap_or_default();
            if json {
                let defaults = Defaults {
                    action: policy.default_action(),
                    tunables: policy.defaults(),
                };
                let report = Report {
                    file,
                    ok: true,
                    problems: None,
                    defaults: Some(defaults),
                    rules: Some(policy.rules()),
                };
                output::json(out, &report)?;
            } else {
                if file.is_some() {
                    writeln!(
                        out,
                        "{shown}: good, {}",
                        count(policy.rules().len(), "rule")
                    )?;
                } else {
                    writeln!(out, "{shown} is not there, so the built-in policy counts")?;
                }
                summary(out, &policy)?;
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// The rules in words, first match first.
fn summary(out: &mut dyn Write, policy: &Policy) -> io::Result<()> {
    for rule in policy.rules() {
        writeln!(out, "  {rule}: {}", rule.action)?;
        for condition in conditions(rule) {
            writeln!(out, "    {condition}")?;
        }
        if rule.action == Action::Smc {
            writeln!(out, "    {}", rule.tunables)?;
        }
    }
    let which = if policy.rules().is_empty() {
        "all connections"
    } else {
        "all others"
    };
    writeln!(out, "  {which}: {}", policy.default_action())?;
    if policy.default_action() == Action::Smc {
        writeln!(out, "    {}", policy.defaults())?;
    }
    Ok(())
}

fn conditions(rule: &Rule) -> Vec<String> {
    fn any<T: ToString>(what: &str, list: impl IntoIterator<Item = T>) -> Option<String> {
        let words: Vec<String> = list.into_iter().map(|item| item.to_string()).collect();
        (!words.is_empty()).then(|| format!("{what} {}", words.join(" or ")))
    }
    let listen = any("accepted on", &rule.listen);
    let connect = any("connected to", &rule.connect);
    let place = match (listen, connect) {
        (Some(listen), Some(connect)) => Some(format!("{listen}, or {connect}")),
        (listen, connect) => listen.or(connect),
    };
    [
        any("program", rule.program.iter().map(|glob| glob.as_str())),
        any("uid", &rule.uid),
        any("cgroup", rule.cgroup.iter().map(|glob| glob.as_str())),
        place,
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn explain(
    out: &mut dyn Write,
    err: &mut dyn Write,
    file: Option<&OsStr>,
    args: &ExplainArgs,
) -> io::Result<ExitCode> {
    let policy = match read(file) {
        Ok(policy) => policy.unwrap_or_default(),
        Err(problems) => {
            for problem in &problems {
                writeln!(err, "{problem}")?;
            }
            writeln!(
                err,
                "smctl: with this policy file all connections stay on TCP"
            )?;
            return Ok(ExitCode::FAILURE);
        }
    };
    let base = args.program.rsplit('/').next().unwrap_or_default();
    let identity = Identity {
        exe: args.program.clone(),
        comm: base.chars().take(15).collect(),
        // SAFETY: geteuid has no arguments and no failure.
        uid: args.uid.unwrap_or_else(|| unsafe { libc::geteuid() }),
        cgroup: args.cgroup.clone(),
    };
    let role = match args.role {
        RoleArg::Listen => Role::Listen,
        RoleArg::Connect => Role::Connect,
        RoleArg::Unknown => Role::Unknown,
    };
    let endpoint = Endpoint {
        local: args.local,
        peer: args.peer,
        role,
    };
    let decision = policy.decide(&identity, &endpoint);
    match decision.rule {
        Some(rule) => writeln!(out, "{}, by {rule}", decision.action)?,
        None if policy.rules().is_empty() => writeln!(out, "{}, no rules", decision.action)?,
        None => writeln!(out, "{}, no rule matches", decision.action)?,
    }
    if decision.action == Action::Smc {
        writeln!(out, "  {}", decision.tunables)?;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(text: &str, json: bool) -> (String, String, ExitCode) {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("p.toml");
        std::fs::write(&file, text).unwrap();
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let code = check(&mut out, &mut err, Some(file.as_os_str()), json).unwrap();
        let clean = |bytes| {
            String::from_utf8(bytes)
                .unwrap()
                .replace(&*dir.path().to_string_lossy(), "DIR")
        };
        (clean(out), clean(err), code)
    }

    const GOOD: &str = "[[rule]]\nname = \"cache\"\nprogram = [\"redis-*\", \"keydb\"]\nuid = 7\n\
        listen = \":6379\"\nconnect = [\"10.0.0.0/8\"]\naction = \"smc\"\nrmb_size = \"1MiB\"\n\
        [[rule]]\naction = \"tcp\"\n";

    #[test]
    fn a_good_file_is_summed_up() {
        let (out, err, code) = checked(GOOD, false);
        assert_eq!(err, "");
        assert_eq!(code, ExitCode::SUCCESS);
        assert_eq!(
            out,
            "DIR/p.toml: good, 2 rules\n\
             \x20 rule 1 \"cache\" (line 1): smc\n\
             \x20   program redis-* or keydb\n\
             \x20   uid 7\n\
             \x20   accepted on :6379, or connected to 10.0.0.0/8\n\
             \x20   rmb 1MiB, spin 50 us, upgrade after 16 calls or 32KiB, idle after 60000 ms\n\
             \x20 rule 2 (line 9): tcp\n\
             \x20 all others: smc\n\
             \x20   rmb 256KiB, spin 50 us, upgrade after 16 calls or 32KiB, idle after 60000 ms\n"
        );
    }

    #[test]
    fn a_good_file_as_json() {
        let (out, _, code) = checked(GOOD, true);
        assert_eq!(code, ExitCode::SUCCESS);
        let json: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!(json["ok"], true);
        assert_eq!(json["defaults"]["action"], "smc");
        assert_eq!(json["defaults"]["rmb_size"], 262_144);
        assert_eq!(json["rules"][0]["program"][1], "keydb");
        assert_eq!(json["rules"][0]["listen"][0], ":6379");
        assert_eq!(json["rules"][0]["tunables"]["rmb_size"], 1 << 20);
        assert_eq!(json["rules"][1]["action"], "tcp");
        assert!(json.get("problems").is_none());
    }

    #[test]
    fn every_problem_is_named() {
        let text = "[[rule]]\nprogram = 1\naction = \"smc\"\n[defaults]\nspin_us = 5000\n";
        let (out, err, code) = checked(text, false);
        assert_eq!((&*out, code), ("", ExitCode::FAILURE));
        assert_eq!(
            err,
            "DIR/p.toml:2:11: program must be a string or a list of strings, not an integer; \
             write program = \"redis-*\"\n\
             DIR/p.toml:5:11: spin_us is out of range; write a number from 0 to 1000\n"
        );
        let (out, err, code) = checked(text, true);
        assert_eq!((&*err, code), ("", ExitCode::FAILURE));
        let json: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!(json["ok"], false);
        assert_eq!(json["problems"][1]["line"], 5);
        assert_eq!(json["problems"][1]["column"], 11);
    }

    #[test]
    fn a_named_file_must_be_there() {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let code = check(&mut out, &mut err, Some(OsStr::new("/no/such.toml")), false).unwrap();
        assert_eq!(code, ExitCode::FAILURE);
        let err = String::from_utf8(err).unwrap();
        assert!(
            err.starts_with("/no/such.toml: can't read the policy file: No such"),
            "{err}"
        );
    }

    #[test]
    fn explaining() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("p.toml");
        std::fs::write(&file, GOOD).unwrap();
        let explained = |program: &str, local: &str| {
            let args = ExplainArgs {
                config: None,
                program: program.into(),
                uid: Some(7),
                cgroup: String::new(),
                local: local.parse().unwrap(),
                peer: "127.0.0.1:40000".parse().unwrap(),
                role: RoleArg::Listen,
            };
            let (mut out, mut err) = (Vec::new(), Vec::new());
            explain(&mut out, &mut err, Some(file.as_os_str()), &args).unwrap();
            assert_eq!(String::from_utf8(err).unwrap(), "");
            String::from_utf8(out).unwrap()
        };
        assert_eq!(
            explained("/usr/bin/redis-server", "127.0.0.1:6379"),
            "smc, by rule 1 \"cache\" (line 1)\n  rmb 1MiB, spin 50 us, upgrade after 16 calls or \
             32KiB, idle after 60000 ms\n"
        );
        assert_eq!(
            explained("/usr/bin/nginx", "127.0.0.1:6379"),
            "tcp, by rule 2 (line 9)\n"
        );
    }
}
