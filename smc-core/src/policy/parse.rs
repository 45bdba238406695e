//! Reads the TOML text of a policy into rules.
//!
//! Works on TOML's tree with source spans rather than on derived structures, so that every problem
//! gets its exact place and a hint, and all problems of a file are found in one go.

use super::addr::AddrPattern;
use super::error::{PolicyError, position};
use super::rule::{Action, Glob, Rule, Tunables, limits};
use super::{Policy, SmcR, Source, size};
use crate::wire::Eid;
use std::ops::Range;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

const TOP_KEYS: &[&str] = &["defaults", "rule", "smc-r"];
const SMC_R_KEYS: &[&str] = &["ueid", "device", "keepalive_ms"];
const DEFAULT_KEYS: &[&str] = &[
    "action",
    "rmb_size",
    "spin_us",
    "upgrade_after_ops",
    "upgrade_after_bytes",
    "idle_ms",
    "rmb_memory",
];
const RULE_KEYS: &[&str] = &[
    "name",
    "program",
    "uid",
    "cgroup",
    "listen",
    "connect",
    "action",
    "rmb_size",
    "spin_us",
    "upgrade_after_ops",
    "upgrade_after_bytes",
    "idle_ms",
];

/// Longest name of a rule in characters.
const NAME_MAX: usize = 64;

type Value<'t> = Spanned<DeValue<'t>>;
type Table<'t> = DeTable<'t>;

/// Parses `text`; on failure gives every problem found, in the order of the file.
pub(super) fn parse(text: &str, path: &str) -> Result<Policy, Vec<PolicyError>> {
    let mut reader = Reader {
        text,
        path,
        problems: Vec::new(),
    };
    let (tree, syntax) = DeTable::parse_recoverable(text);
    for error in &syntax {
        let at = error.span().map_or(0, |span| span.start);
        let what = error.message().replace('\n', ", ");
        reader.problem(at, what, "correct the TOML syntax here");
    }
    let mut policy = Policy {
        source: Source::File(path.to_owned()),
        ..Policy::default()
    };
    // What the parser made of broken syntax would only give misleading problems on top.
    if reader.problems.is_empty() {
        reader.document(tree.get_ref(), &mut policy);
    }
    if reader.problems.is_empty() {
        return Ok(policy);
    }
    reader
        .problems
        .sort_by_key(|problem| (problem.line, problem.column));
    Err(reader.problems)
}

struct Reader<'t> {
    text: &'t str,
    path: &'t str,
    problems: Vec<PolicyError>,
}

impl Reader<'_> {
    fn problem(&mut self, at: usize, what: impl Into<String>, help: impl Into<String>) {
        let (line, column) = position(self.text, at);
        self.problems.push(PolicyError {
            path: self.path.to_owned(),
            line,
            column,
            what: what.into(),
            help: help.into(),
        });
    }

    fn wrong_type(&mut self, key: &str, value: &Value<'_>, wanted: &str, example: &str) {
        self.problem(
            value.span().start,
            format!(
                "{key} must be {wanted}, not {}",
                article(value.get_ref().type_str())
            ),
            format!("write {key} = {example}"),
        );
    }

    fn document(&mut self, tree: &Table<'_>, policy: &mut Policy) {
        self.unknown_keys(tree, TOP_KEYS, "the policy file");
        match tree.get("defaults").map(|v| (v, v.get_ref())) {
            None => {}
            Some((_, DeValue::Table(table))) => {
                self.unknown_keys(table, DEFAULT_KEYS, "[defaults]");
                if let Some(action) = self.action(table) {
                    policy.default_action = action;
                }
                policy.defaults = self.tunables(table, policy.defaults);
                policy.rmb_memory = self
                    .bytes(table, "rmb_memory", "\"1GiB\"")
                    .map(|(_, bytes)| bytes);
            }
            Some((value, _)) => self.problem(
                value.span().start,
                "defaults must be a table",
                "write [defaults] on a line of its own",
            ),
        }
        match tree.get("smc-r").map(|v| (v, v.get_ref())) {
            None => {}
            Some((_, DeValue::Table(table))) => policy.smc_r = self.smc_r(table),
            Some((value, _)) => self.problem(
                value.span().start,
                "smc-r must be a table",
                "write [smc-r] on a line of its own",
            ),
        }
        match tree.get("rule").map(|v| (v, v.get_ref())) {
            None => {}
            Some((_, DeValue::Array(rules))) => {
                for (index, value) in rules.iter().enumerate() {
                    if let Some(rule) = self.rule(index + 1, value, policy.defaults) {
                        policy.rules.push(rule);
                    }
                }
            }
            Some((value, _)) => self.problem(
                value.span().start,
                "rule must be an array of tables",
                "write [[rule]] with double brackets, once for each rule",
            ),
        }
    }

    fn smc_r(&mut self, table: &Table<'_>) -> SmcR {
        self.unknown_keys(table, SMC_R_KEYS, "[smc-r]");
        let mut out = SmcR::default();
        for value in self.list(table, "ueid") {
            let Some(text) = value.get_ref().as_str() else {
                self.wrong_type(
                    "ueid",
                    value,
                    "a string or a list of strings",
                    "\"MY-CLUSTER\"",
                );
                continue;
            };
            let at = value.span().start;
            match Eid::new(text) {
                Some(_) if out.ueids.len() == SmcR::UEIDS => self.problem(
                    at,
                    format!("more than {} UEIDs", SmcR::UEIDS),
                    "remove some: a host has at most four",
                ),
                Some(eid) => out.ueids.push(eid),
                None => self.problem(
                    at,
                    format!("{text:?} is not a UEID"),
                    "write 1 to 32 of A-Z 0-9 . - and begin with a letter or digit",
                ),
            }
        }
        if let Some(value) = table.get("device") {
            match value.get_ref().as_str() {
                Some(name) if !name.is_empty() => out.device = Some(name.to_owned()),
                _ => self.wrong_type(
                    "device",
                    value,
                    "the name of an RDMA device",
                    "\"mlx5_0\" (smctl device lists them)",
                ),
            }
        }
        let max = SmcR::KEEPALIVE_MS_MAX;
        if let Some(ms) = self.number(table, "keepalive_ms", 0, max, "30000") {
            out.keepalive_ms = ms as u32;
        }
        out
    }

    fn rule(&mut self, number: usize, value: &Value<'_>, defaults: Tunables) -> Option<Rule> {
        let at = value.span().start;
        let DeValue::Table(table) = value.get_ref() else {
            self.problem(
                at,
                "a rule must be a table",
                "write [[rule]] and its keys below it",
            );
            return None;
        };
        self.unknown_keys(table, RULE_KEYS, "[[rule]]");
        if !table.contains_key("action") {
            self.problem(
                at,
                format!("rule {number} has no action"),
                "add action = \"smc\" or action = \"tcp\"",
            );
        }
        let action = self.action(table);
        let tunables = self.tunables(table, defaults);
        let rule = Rule {
            name: self.name(table),
            number,
            line: position(self.text, at).0,
            program: self.globs(table, "program", "\"redis-*\""),
            uid: self.uids(table),
            cgroup: self.globs(table, "cgroup", "\"/system.slice/**\""),
            listen: self.addrs(table, "listen", "[\":6379\"]"),
            connect: self.addrs(table, "connect", "[\"10.0.0.0/8:80\"]"),
            // A rule without an action is a problem noted above; the file is refused then.
            action: action.unwrap_or(Action::Tcp),
            tunables,
        };
        Some(rule)
    }

    fn unknown_keys(&mut self, table: &Table<'_>, known: &[&str], place: &str) {
        for key in table.keys() {
            let name: &str = key.get_ref();
            if known.contains(&name) {
                continue;
            }
            let help = match closest(name, known) {
                Some(meant) => format!("did you mean {meant}?"),
                None => format!("known keys there: {}", known.join(", ")),
            };
            self.problem(
                key.span().start,
                format!("unknown key {name:?} in {place}"),
                help,
            );
        }
    }

    fn name(&mut self, table: &Table<'_>) -> Option<String> {
        let value = table.get("name")?;
        let Some(name) = value.get_ref().as_str() else {
            self.wrong_type("name", value, "a string", "\"cache\"");
            return None;
        };
        if name.is_empty() || name.chars().count() > NAME_MAX || name.contains(char::is_control) {
            self.problem(
                value.span().start,
                format!("name must be 1 to {NAME_MAX} printable characters"),
                "choose a short name",
            );
        }
        Some(name.to_owned())
    }

    fn action(&mut self, table: &Table<'_>) -> Option<Action> {
        let value = table.get("action")?;
        match value.get_ref().as_str() {
            Some("smc") => Some(Action::Smc),
            Some("tcp") => Some(Action::Tcp),
            Some(other) => {
                self.problem(
                    value.span().start,
                    format!("unknown action {other:?}"),
                    "write \"smc\" (may be upgraded) or \"tcp\" (stays on TCP)",
                );
                None
            }
            None => {
                self.wrong_type("action", value, "a string", "\"smc\" or \"tcp\"");
                None
            }
        }
    }

    /// The elements of a list, or the single value that stands for a list of one. An empty list is
    /// a problem: it could be read as "always" or as "never".
    fn list<'a, 't>(&mut self, table: &'a Table<'t>, key: &str) -> Vec<&'a Value<'t>> {
        match table.get(key).map(|v| (v, v.get_ref())) {
            None => Vec::new(),
            Some((value, DeValue::Array(list))) => {
                if list.is_empty() {
                    self.problem(
                        value.span().start,
                        format!("the list {key} is empty"),
                        format!("name something, or remove {key} to match everything"),
                    );
                }
                list.iter().collect()
            }
            Some((value, _)) => vec![value],
        }
    }

    fn globs(&mut self, table: &Table<'_>, key: &str, example: &str) -> Vec<Glob> {
        let mut globs = Vec::new();
        for value in self.list(table, key) {
            let Some(text) = value.get_ref().as_str() else {
                self.wrong_type(key, value, "a string or a list of strings", example);
                continue;
            };
            if text.is_empty() || text.len() > Glob::LEN_MAX {
                self.problem(
                    value.span().start,
                    format!("{key} must be 1 to {} bytes long", Glob::LEN_MAX),
                    format!("write {key} = {example}"),
                );
                continue;
            }
            match Glob::new(text) {
                Ok(glob) => globs.push(glob),
                Err(e) => {
                    let offset = text
                        .char_indices()
                        .nth(e.pos)
                        .map_or(text.len(), |(i, _)| i);
                    let what = format!("{text:?} is not a pattern: {}", e.msg);
                    let at = self.inside(value, offset);
                    self.problem(at, what, format!("write something like {key} = {example}"));
                }
            }
        }
        globs
    }

    fn addrs(&mut self, table: &Table<'_>, key: &str, example: &str) -> Vec<AddrPattern> {
        let mut addrs = Vec::new();
        for value in self.list(table, key) {
            let Some(text) = value.get_ref().as_str() else {
                self.wrong_type(key, value, "a string or a list of strings", example);
                continue;
            };
            match AddrPattern::parse(text) {
                Ok(addr) => addrs.push(addr),
                Err(e) => {
                    let at = self.inside(value, e.offset);
                    self.problem(at, format!("{} in {key}", e.what), e.help);
                }
            }
        }
        addrs
    }

    fn uids(&mut self, table: &Table<'_>) -> Vec<u32> {
        let mut uids = Vec::new();
        for value in self.list(table, "uid") {
            match integer(value) {
                // u32::MAX is "no user" to the kernel.
                Some(uid) if (0..i64::from(u32::MAX)).contains(&uid) => uids.push(uid as u32),
                Some(uid) => self.problem(
                    value.span().start,
                    format!("{uid} is not a user id"),
                    "write a number from 0 to 4294967294",
                ),
                None => {
                    self.wrong_type("uid", value, "a number or a list of numbers", "[1000]");
                }
            }
        }
        uids
    }

    fn tunables(&mut self, table: &Table<'_>, defaults: Tunables) -> Tunables {
        let mut tunables = defaults;
        if let Some((at, bytes)) = self.bytes(table, "rmb_size", "\"256KiB\"") {
            if bytes.is_power_of_two() && (limits::RMB_MIN..=limits::RMB_MAX).contains(&bytes) {
                tunables.rmb_size = bytes as u32;
            } else {
                let clamped = bytes.clamp(limits::RMB_MIN, limits::RMB_MAX);
                self.problem(
                    at,
                    format!("rmb_size can't be {}", size::format(bytes)),
                    format!(
                        "write a power of two from 16KiB to 4MiB, such as \"{}\"",
                        size::format(clamped.next_power_of_two())
                    ),
                );
            }
        }
        if let Some(us) = self.number(table, "spin_us", 0, limits::SPIN_US_MAX, "50") {
            tunables.spin_us = us as u32;
        }
        if let Some(ops) = self.number(table, "upgrade_after_ops", 1, u32::MAX.into(), "16") {
            tunables.upgrade_after_ops = ops as u32;
        }
        if let Some((at, bytes)) = self.bytes(table, "upgrade_after_bytes", "\"32KiB\"") {
            if bytes == 0 {
                self.problem(
                    at,
                    "upgrade_after_bytes can't be 0",
                    "write 1 for the earliest",
                );
            } else {
                tunables.upgrade_after_bytes = bytes;
            }
        }
        if let Some(ms) = self.number(table, "idle_ms", 0, limits::IDLE_MS_MAX, "60000") {
            tunables.idle_ms = ms as u32;
        }
        tunables
    }

    fn number(
        &mut self,
        table: &Table<'_>,
        key: &str,
        min: u64,
        max: u64,
        example: &str,
    ) -> Option<u64> {
        let value = table.get(key)?;
        if !value.get_ref().is_integer() {
            self.wrong_type(key, value, "a number", example);
            return None;
        }
        let number = integer(value).and_then(|n| u64::try_from(n).ok());
        let good = number.filter(|n| (min..=max).contains(n));
        if good.is_none() {
            self.problem(
                value.span().start,
                format!("{key} is out of range"),
                format!("write a number from {min} to {max}"),
            );
        }
        good
    }

    /// A size and where it stands.
    fn bytes(&mut self, table: &Table<'_>, key: &str, example: &str) -> Option<(usize, u64)> {
        let value = table.get(key)?;
        let at = value.span().start;
        match value.get_ref() {
            DeValue::Integer(_) => match integer(value).and_then(|n| u64::try_from(n).ok()) {
                Some(bytes) => Some((at, bytes)),
                None => {
                    self.problem(
                        at,
                        format!("{key} is out of range"),
                        "write a positive number",
                    );
                    None
                }
            },
            DeValue::String(text) => match size::parse(text) {
                Ok(bytes) => Some((at, bytes)),
                Err((what, help)) => {
                    self.problem(at, format!("{what} in {key}"), help);
                    None
                }
            },
            _ => {
                self.wrong_type(key, value, "a number of bytes or a string", example);
                None
            }
        }
    }

    /// Place in the file of byte `offset` of a string value: exact for a string on one line without
    /// escapes, else the start of the string.
    fn inside(&self, value: &Value<'_>, offset: usize) -> usize {
        let Range { start, end } = value.span();
        let inner = self.text.get(start + 1..end.saturating_sub(1));
        if inner.is_some() && inner == value.get_ref().as_str() {
            start + 1 + offset
        } else {
            start
        }
    }
}

/// The value of an integer; `None` for other types and beyond i64.
fn integer(value: &Value<'_>) -> Option<i64> {
    let integer = value.get_ref().as_integer()?;
    i64::from_str_radix(integer.as_str(), integer.radix()).ok()
}

fn article(type_name: &str) -> String {
    let an = type_name.starts_with(['a', 'e', 'i', 'o', 'u']);
    format!("{} {type_name}", if an { "an" } else { "a" })
}

/// The known key that a misspelt one most likely stands for.
fn closest<'k>(name: &str, known: &[&'k str]) -> Option<&'k str> {
    let (distance, key) = known
        .iter()
        .map(|key| (distance(name, key), *key))
        .min_by_key(|(d, _)| *d)?;
    (distance <= 2 && distance < key.len()).then_some(key)
}

/// Edit distance: insertions, deletions and replacements. Long names are far from everything.
fn distance(a: &str, b: &str) -> usize {
    if a.len() > 64 {
        return usize::MAX;
    }
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut left = i + 1;
        let mut diagonal = i;
        for (slot, cb) in row.iter_mut().skip(1).zip(&b) {
            let above = *slot;
            let here = (diagonal + usize::from(ca != *cb))
                .min(above + 1)
                .min(left + 1);
            diagonal = above;
            left = here;
            *slot = here;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or(usize::MAX)
}
