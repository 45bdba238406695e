//! Policy: which connections may leave TCP, and with what tunables.
//!
//! The file is `$XSMC_CONFIG`, else `/etc/xsmc.toml`. Without a file everything local may be
//! upgraded. A file that can't be used never stops a program: one warning, and all stays on TCP.
//!
//! ```toml
//! [defaults]
//! rmb_size = "256KiB"
//!
//! [[rule]]
//! name = "cache"
//! program = "redis-*"
//! listen = [":6379-6389"]
//! action = "smc"
//!
//! [[rule]]
//! action = "tcp"
//! ```

mod addr;
mod error;
mod parse;
mod rule;
mod size;

pub use addr::AddrPattern;
pub use error::PolicyError;
pub use rule::{Action, Glob, Rule, Tunables};
pub use size::format as format_size;

use crate::link::llc;
use crate::observe::log::warning;
use crate::observe::reason::Reason;
use crate::wire::Eid;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

/// The policy file if `XSMC_CONFIG` names no other.
pub const DEFAULT_PATH: &str = "/etc/xsmc.toml";

/// A larger file is taken for a mistake.
const FILE_MAX: u64 = 1 << 20;

/// Longest `comm` in bytes (proc(5)).
const COMM_MAX: usize = 15;

/// Who asks: facts about this process that rules may name.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Identity {
    /// Full path of the executable; empty where it can't be known.
    pub exe: String,
    /// Name of the main thread, as in `/proc/self/comm` (at most 15 bytes).
    pub comm: String,
    /// Effective user id.
    pub uid: u32,
    /// Path of the control group (v2); empty where there is none.
    pub cgroup: String,
}

impl Identity {
    /// The facts about this process, read from `/proc`. What can't be read stays empty.
    pub fn current() -> Identity {
        let exe = std::fs::read_link("/proc/self/exe").unwrap_or_default();
        let exe = exe.to_string_lossy();
        let comm = std::fs::read("/proc/self/comm").unwrap_or_default();
        let cgroup = std::fs::read("/proc/self/cgroup").unwrap_or_default();
        Identity {
            // A running program whose file was replaced by an update is still that program.
            exe: exe.strip_suffix(" (deleted)").unwrap_or(&exe).to_owned(),
            comm: String::from_utf8_lossy(&comm)
                .trim_end_matches('\n')
                .to_owned(),
            // SAFETY: geteuid has no arguments and no failure.
            uid: unsafe { libc::geteuid() },
            cgroup: unified_cgroup(&String::from_utf8_lossy(&cgroup)),
        }
    }

    /// Base name of the executable.
    pub fn executable(&self) -> &str {
        self.exe.rsplit('/').next().unwrap_or_default()
    }

    /// The name to show to people: `comm`, which is the name by which the program was started (a link to the
    /// executable, or a script) unless it has chosen another; or the base name of which `comm` is only the
    /// beginning.
    pub fn program(&self) -> &str {
        let cut = self.comm.len() >= COMM_MAX && self.executable().starts_with(&self.comm);
        if self.comm.is_empty() || cut {
            self.executable()
        } else {
            &self.comm
        }
    }
}

/// The path of the `0::` line, the one of cgroup v2.
fn unified_cgroup(text: &str) -> String {
    text.lines()
        .find_map(|line| line.strip_prefix("0::"))
        .unwrap_or_default()
        .to_owned()
}

/// How this process came to a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// It accepted it.
    Listen,
    /// It connected.
    Connect,
    /// It got the socket from elsewhere; both `listen` and `connect` conditions are tried.
    Unknown,
}

/// One connection, as seen from this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Endpoint {
    /// Address of this end.
    pub local: SocketAddr,
    /// Address of the other end.
    pub peer: SocketAddr,
    /// How we came to it.
    pub role: Role,
}

/// The environment's word on upgrades, `XSMC_UPGRADE`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Upgrade {
    /// As the policy says.
    #[default]
    Default,
    /// At the first moment that is safe: both thresholds are 1.
    Eager,
    /// Not at all.
    Never,
}

impl Upgrade {
    /// Parses `default`, `eager` or `never`.
    pub fn parse(word: &str) -> Option<Upgrade> {
        match word {
            "default" => Some(Upgrade::Default),
            "eager" => Some(Upgrade::Eager),
            "never" => Some(Upgrade::Never),
            _ => None,
        }
    }

    /// Reads `XSMC_UPGRADE`; unset or empty is `Default`, and so is, with a warning, another word.
    pub fn from_env() -> Upgrade {
        match crate::env::get("XSMC_UPGRADE") {
            Some(word) if !word.is_empty() => {
                word.to_str().and_then(Upgrade::parse).unwrap_or_else(|| {
                    warning(format_args!(
                        "XSMC_UPGRADE={word:?} is unknown and ignored; use default, eager or never"
                    ));
                    Upgrade::Default
                })
            }
            _ => Upgrade::Default,
        }
    }
}

/// Reads `XSMC_IDLE_MS`: milliseconds in the range of [`Tunables::idle_ms`].
fn idle_from_env() -> Option<u32> {
    ms_from_env("XSMC_IDLE_MS", rule::limits::IDLE_MS_MAX)
}

/// Reads `XSMC_KEEPALIVE_MS`: milliseconds in the range of [`SmcR::keepalive_ms`].
fn keepalive_from_env() -> Option<u32> {
    ms_from_env("XSMC_KEEPALIVE_MS", SmcR::KEEPALIVE_MS_MAX)
}

/// A number of milliseconds; unset or empty is `None`, and so is, with a warning, what is no number up to `max`.
fn ms_from_env(name: &str, max: u64) -> Option<u32> {
    let word = crate::env::get(name).filter(|word| !word.is_empty())?;
    let ms = word.to_str().and_then(|word| parse_ms(word, max));
    if ms.is_none() {
        warning(format_args!(
            "{name}={word:?} is ignored; use a number from 0 to {max}"
        ));
    }
    ms
}

fn parse_ms(word: &str, max: u64) -> Option<u32> {
    let ms = word.parse::<u32>().ok()?;
    (u64::from(ms) <= max).then_some(ms)
}

/// Where a policy comes from.
#[derive(Clone, PartialEq, Debug)]
pub enum Source {
    /// There is no file.
    Default,
    /// This file.
    File(String),
    /// A file that can't be used: everything stays on TCP.
    Broken(PolicyError),
}

/// The rules in force for a process.
#[derive(Clone, PartialEq, Debug)]
pub struct Policy {
    source: Source,
    rules: Vec<Rule>,
    default_action: Action,
    defaults: Tunables,
    upgrade: Upgrade,
    /// See [`Policy::rmb_memory`].
    rmb_memory: Option<u64>,
    /// The environment's word on `idle_ms`.
    idle_ms: Option<u32>,
    smc_r: SmcR,
}

/// What the policy says of SMC-R, between hosts.
#[derive(Clone, PartialEq, Debug)]
pub struct SmcR {
    /// Enterprise ids: a peer needs one of them too. None: nothing is offered to other hosts.
    pub ueids: Vec<Eid>,
    /// The RDMA device to use; `None`: the one whose network device has the connection's local address.
    pub device: Option<String>,
    /// Milliseconds of silence after which a link is tested, up to a day; 0: never.
    pub keepalive_ms: u32,
}

impl SmcR {
    /// Most UEIDs of a host (as in Linux).
    pub const UEIDS: usize = 4;
    /// A day.
    pub(crate) const KEEPALIVE_MS_MAX: u64 = 86_400_000;

    /// Silence after which a link is tested: what `XSMC_KEEPALIVE_MS` says, else the policy; `None`: never.
    pub fn keepalive(&self) -> Option<Duration> {
        let ms = keepalive_from_env().unwrap_or(self.keepalive_ms);
        (ms > 0).then(|| Duration::from_millis(ms.into()))
    }
}

impl Default for SmcR {
    fn default() -> SmcR {
        SmcR {
            ueids: Vec::new(),
            device: None,
            keepalive_ms: llc::KEEPALIVE.as_millis() as u32,
        }
    }
}

/// What the policy says about one connection.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Decision<'p> {
    /// May it be upgraded?
    pub action: Action,
    /// The rule that matched; `None`: the defaults.
    pub rule: Option<&'p Rule>,
    /// Tunables for it.
    pub tunables: Tunables,
    /// Why it stays on TCP, if `action` says so.
    pub reason: Option<Reason>,
}

impl Default for Policy {
    /// The policy without a file: everything may be upgraded.
    fn default() -> Self {
        Policy {
            source: Source::Default,
            rules: Vec::new(),
            default_action: Action::Smc,
            defaults: Tunables::default(),
            upgrade: Upgrade::Default,
            rmb_memory: None,
            idle_ms: None,
            smc_r: SmcR::default(),
        }
    }
}

impl Policy {
    /// The policy of this process: file and environment. Never fails; a file that can't be used
    /// means one warning on standard error and a policy that keeps everything on TCP.
    pub fn load() -> Policy {
        let upgrade = Upgrade::from_env();
        let policy = match Policy::read(crate::env::get("XSMC_CONFIG").as_deref()) {
            Ok(policy) => policy,
            Err(error) => {
                warning(format_args!("all connections stay on TCP: {error}"));
                Policy::broken(error)
            }
        };
        policy.with_upgrade(upgrade).with_idle_ms(idle_from_env())
    }

    /// Reads the file `config` (the value of `XSMC_CONFIG`), or the default one when `config` is
    /// `None` or empty. Only the default file may be absent.
    pub fn read(config: Option<&OsStr>) -> Result<Policy, PolicyError> {
        let named = config.filter(|path| !path.is_empty());
        let path = named.unwrap_or(OsStr::new(DEFAULT_PATH));
        let shown = path.to_string_lossy();
        match read_file(path) {
            Ok(bytes) => Policy::parse_bytes(&bytes, &shown),
            Err(e) if named.is_none() && e.kind() == std::io::ErrorKind::NotFound => {
                Ok(Policy::default())
            }
            Err(e) => Err(PolicyError::of_file(
                &shown,
                format!("can't read the policy file: {e}"),
                if named.is_some() {
                    "correct XSMC_CONFIG, or unset it"
                } else {
                    ""
                },
            )),
        }
    }

    /// Parses the text of a policy file. `path` is only used in errors. Gives the first problem.
    pub fn parse(text: &str, path: &str) -> Result<Policy, PolicyError> {
        Policy::check(text, path).map_err(|mut problems| problems.swap_remove(0))
    }

    /// Like [`Policy::parse`], but gives all problems (at least one), in the order of the file.
    pub fn check(text: &str, path: &str) -> Result<Policy, Vec<PolicyError>> {
        parse::parse(text, path)
    }

    /// Like [`Policy::check`], for the bytes of a file.
    pub fn check_bytes(bytes: &[u8], path: &str) -> Result<Policy, Vec<PolicyError>> {
        match std::str::from_utf8(bytes) {
            Ok(text) => Policy::check(text, path),
            Err(e) => {
                let good = bytes.get(..e.valid_up_to()).unwrap_or_default();
                let good = std::str::from_utf8(good).unwrap_or_default();
                let (line, column) = error::position(good, good.len());
                Err(vec![PolicyError {
                    path: path.to_owned(),
                    line,
                    column,
                    what: "the file is not UTF-8 here".into(),
                    help: "save it as UTF-8".into(),
                }])
            }
        }
    }

    fn parse_bytes(bytes: &[u8], path: &str) -> Result<Policy, PolicyError> {
        Policy::check_bytes(bytes, path).map_err(|mut problems| problems.swap_remove(0))
    }

    /// The policy that a broken file leads to: everything stays on TCP.
    pub fn broken(error: PolicyError) -> Policy {
        Policy {
            source: Source::Broken(error),
            default_action: Action::Tcp,
            ..Policy::default()
        }
    }

    /// The same policy with the environment's word on upgrades.
    pub fn with_upgrade(mut self, upgrade: Upgrade) -> Policy {
        self.upgrade = upgrade;
        self
    }

    /// The same policy with the environment's word on `idle_ms`, if it has one.
    pub fn with_idle_ms(mut self, idle_ms: Option<u32>) -> Policy {
        self.idle_ms = idle_ms;
        self
    }

    /// The same policy without the rules that can't match this process, and without the conditions
    /// that always hold for it. Decisions for `identity` stay the same and get cheaper.
    pub fn narrow(mut self, identity: &Identity) -> Policy {
        self.rules.retain(|rule| rule.matches_identity(identity));
        for rule in &mut self.rules {
            rule.program.clear();
            rule.uid.clear();
            rule.cgroup.clear();
        }
        self
    }

    /// Decides about one connection: the first matching rule wins. Doesn't allocate.
    pub fn decide(&self, identity: &Identity, endpoint: &Endpoint) -> Decision<'_> {
        let rule = self
            .rules
            .iter()
            .find(|r| r.matches_endpoint(endpoint) && r.matches_identity(identity));
        let mut tunables = rule.map_or(self.defaults, |r| r.tunables);
        let mut action = rule.map_or(self.default_action, |r| r.action);
        tunables.idle_ms = self.idle_ms.unwrap_or(tunables.idle_ms);
        let mut reason = match (action, &self.source) {
            (Action::Smc, _) => None,
            (Action::Tcp, Source::Broken(_)) => Some(Reason::PolicyBroken),
            (Action::Tcp, _) => Some(Reason::PolicyTcp),
        };
        match self.upgrade {
            Upgrade::Default => {}
            Upgrade::Eager => {
                tunables.upgrade_after_ops = 1;
                tunables.upgrade_after_bytes = 1;
            }
            Upgrade::Never => {
                action = Action::Tcp;
                reason = reason.or(Some(Reason::UpgradeNever));
            }
        }
        Decision {
            action,
            rule,
            tunables,
            reason,
        }
    }

    /// What is said of SMC-R.
    pub fn smc_r(&self) -> &SmcR {
        &self.smc_r
    }

    /// Whether connections to `peer` may be offered to be SMC-R: a rule says so. What is not said by a rule
    /// stays on the host.
    pub fn offers_connect(&self, identity: &Identity, peer: SocketAddr) -> bool {
        let local = match peer {
            SocketAddr::V4(_) => SocketAddr::from(([0, 0, 0, 0], 0)),
            SocketAddr::V6(_) => SocketAddr::from(([0u16; 8], 0)),
        };
        let at = Endpoint {
            local,
            peer,
            role: Role::Connect,
        };
        self.offers(&self.decide(identity, &at))
    }

    /// Whether an accepted connection may be SMC-R.
    pub fn offers(&self, decision: &Decision<'_>) -> bool {
        !self.smc_r.ueids.is_empty() && decision.action == Action::Smc && decision.rule.is_some()
    }

    /// Whether a listener at `local`, whose address may be the wildcard, can get connections that may be SMC-R.
    pub fn offers_listen(&self, identity: &Identity, local: SocketAddr) -> bool {
        let covers = |r: &Rule| {
            r.listen.is_empty() && r.connect.is_empty()
                || r.listen.iter().any(|p| {
                    p.matches(&local) || local.ip().is_unspecified() && p.matches_port(local.port())
                })
        };
        !self.smc_r.ueids.is_empty()
            && self.upgrade != Upgrade::Never
            && self
                .rules
                .iter()
                .any(|r| r.action == Action::Smc && r.matches_identity(identity) && covers(r))
    }

    /// Where the policy comes from.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// The rules, in the order in which they are tried.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// What happens to connections that no rule matches.
    pub fn default_action(&self) -> Action {
        self.default_action
    }

    /// Most bytes that the RMBs of a process may take together, if the file says so (`rmb_memory` of `[defaults]`).
    pub fn rmb_memory(&self) -> Option<u64> {
        self.rmb_memory
    }

    /// Tunables of connections that no rule matches.
    pub fn defaults(&self) -> Tunables {
        self.defaults
    }

    /// The environment's word on upgrades.
    pub fn upgrade(&self) -> Upgrade {
        self.upgrade
    }
}

/// Reads a policy file of reasonable size. Never blocks on a fifo or a terminal.
///
/// # Errors
/// What opening and reading give; `InvalidInput` for what is not a file, `FileTooLarge` beyond
/// 1 MiB.
pub fn read_file(path: &OsStr) -> std::io::Result<Vec<u8>> {
    if path == "/dev/null" {
        return Ok(Vec::new());
    }
    let file: File = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(std::io::Error::new(
            std::io::ErrorKind::InvalidInput,
            "not a regular file",
        ));
    }
    let mut bytes = Vec::new();
    file.take(FILE_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > FILE_MAX {
        return Err(std::io::Error::new(
            std::io::ErrorKind::FileTooLarge,
            "larger than 1 MiB, which no policy needs",
        ));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
