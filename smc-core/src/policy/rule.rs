//! Rules: conditions on the program and on the connection, and what they lead to.

use super::addr::AddrPattern;
use super::{Endpoint, Identity, Role, size};
use serde::{Serialize, Serializer};
use std::fmt;

/// Bounds of the tunables, both included.
pub(super) mod limits {
    pub(crate) const RMB_MIN: u64 = 16 << 10;
    pub(crate) const RMB_MAX: u64 = 4 << 20;
    pub(crate) const SPIN_US_MAX: u64 = 1000;
    /// A day.
    pub(crate) const IDLE_MS_MAX: u64 = 86_400_000;
}

/// What a rule decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// The connection may be upgraded.
    Smc,
    /// The connection stays on TCP.
    Tcp,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Action::Smc => "smc",
            Action::Tcp => "tcp",
        })
    }
}

/// What can be tuned per rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Tunables {
    /// Size of each RMB in bytes: an SMC size class, 16 KiB << n up to 4 MiB (one chunk).
    pub rmb_size: u32,
    /// Longest spin before a wait sleeps, in microseconds, 0 to 1000.
    pub spin_us: u32,
    /// Calls that moved data before an upgrade is tried, 1 or more.
    pub upgrade_after_ops: u32,
    /// Bytes moved before an upgrade is tried, 1 or more. Whichever threshold comes first counts.
    pub upgrade_after_bytes: u64,
    /// Milliseconds without traffic after which a connection gives its RMBs back, up to a day; 0: never.
    pub idle_ms: u32,
}

impl Default for Tunables {
    fn default() -> Self {
        Tunables {
            rmb_size: 256 << 10,
            spin_us: 50,
            upgrade_after_ops: 16,
            upgrade_after_bytes: 32 << 10,
            idle_ms: 60_000,
        }
    }
}

impl Tunables {
    /// n of the SMC size class 16 KiB << n that `rmb_size` is.
    pub fn rmb_class(&self) -> u32 {
        (self.rmb_size / limits::RMB_MIN as u32)
            .checked_ilog2()
            .unwrap_or(0)
    }
}

impl fmt::Display for Tunables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rmb {}, spin {} us, upgrade after {} calls or {}, idle after {} ms",
            size::format(self.rmb_size.into()),
            self.spin_us,
            self.upgrade_after_ops,
            size::format(self.upgrade_after_bytes),
            self.idle_ms
        )
    }
}

/// A shell pattern. `*`, `?` and `[...]` stay within one path component, `**` as a whole component
/// stands for any number of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Glob {
    pattern: glob::Pattern,
    has_slash: bool,
}

impl Glob {
    /// Longest pattern in bytes: bounds the work and the depth of a match.
    pub(super) const LEN_MAX: usize = 1024;

    pub(super) fn new(text: &str) -> Result<Glob, glob::PatternError> {
        Ok(Glob {
            pattern: glob::Pattern::new(text)?,
            has_slash: text.contains('/'),
        })
    }

    /// The pattern as it was written.
    pub fn as_str(&self) -> &str {
        self.pattern.as_str()
    }

    fn matches(&self, text: &str) -> bool {
        let options = glob::MatchOptions {
            case_sensitive: true,
            require_literal_separator: true,
            require_literal_leading_dot: false,
        };
        self.pattern.matches_with(text, options)
    }

    /// With a slash in the pattern the full path must match, else the base name or `comm`.
    fn matches_program(&self, identity: &Identity) -> bool {
        if self.has_slash {
            return self.matches(&identity.exe);
        }
        self.matches(identity.executable()) || self.matches(&identity.comm)
    }
}

impl Serialize for Glob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// One rule of the policy. It matches when each condition that it has holds; an empty list is no
/// condition.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Rule {
    /// Name given in the file.
    pub name: Option<String>,
    /// Place among the rules of the file, from 1.
    pub number: usize,
    /// Line of the file where the rule starts, from 1.
    pub line: usize,
    /// Programs, by base name (or `comm`), or by full path where the pattern has a slash.
    pub program: Vec<Glob>,
    /// Effective user ids.
    pub uid: Vec<u32>,
    /// Control groups (v2), as in `/proc/self/cgroup`.
    pub cgroup: Vec<Glob>,
    /// Local addresses of accepted connections. A rule with both `listen` and `connect` covers
    /// both sorts of connection, one with only one of them covers only that sort.
    pub listen: Vec<AddrPattern>,
    /// Peer addresses of connections that the program opens.
    pub connect: Vec<AddrPattern>,
    /// What to do.
    pub action: Action,
    /// Tunables, with the file's defaults filled in.
    pub tunables: Tunables,
}

impl Rule {
    /// Whether the rule covers this program.
    pub fn matches_identity(&self, identity: &Identity) -> bool {
        (self.program.is_empty() || self.program.iter().any(|g| g.matches_program(identity)))
            && (self.uid.is_empty() || self.uid.contains(&identity.uid))
            && (self.cgroup.is_empty() || self.cgroup.iter().any(|g| g.matches(&identity.cgroup)))
    }

    /// Whether the rule covers this connection.
    pub fn matches_endpoint(&self, endpoint: &Endpoint) -> bool {
        if self.listen.is_empty() && self.connect.is_empty() {
            return true;
        }
        let listen = || self.listen.iter().any(|p| p.matches(&endpoint.local));
        let connect = || self.connect.iter().any(|p| p.matches(&endpoint.peer));
        match endpoint.role {
            Role::Listen => listen(),
            Role::Connect => connect(),
            Role::Unknown => listen() || connect(),
        }
    }
}

impl fmt::Display for Rule {
    /// `rule 2 "name" (line 12)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rule {}", self.number)?;
        if let Some(name) = &self.name {
            write!(f, " {name:?}")?;
        }
        write!(f, " (line {})", self.line)
    }
}
