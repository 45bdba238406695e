//! Tests of parsing, error positions and decisions.

use super::*;
use proptest::prelude::*;

fn policy(text: &str) -> Policy {
    Policy::parse(text, "p.toml").unwrap_or_else(|e| panic!("{e}"))
}

fn problems(text: &str) -> Vec<String> {
    match Policy::check(text, "p.toml") {
        Ok(policy) => panic!("no problem in {text:?}: {policy:?}"),
        Err(problems) => problems.iter().map(ToString::to_string).collect(),
    }
}

/// The only problem of a file.
#[track_caller]
fn problem(text: &str) -> String {
    let mut problems = problems(text);
    assert_eq!(problems.len(), 1, "{problems:?}");
    problems.remove(0)
}

fn redis() -> Identity {
    Identity {
        exe: "/usr/bin/redis-server".into(),
        comm: "redis-server".into(),
        uid: 999,
        cgroup: "/system.slice/redis.service".into(),
    }
}

fn accepted(local: &str) -> Endpoint {
    Endpoint {
        local: local.parse().unwrap(),
        peer: "127.0.0.1:50000".parse().unwrap(),
        role: Role::Listen,
    }
}

fn connected(peer: &str) -> Endpoint {
    Endpoint {
        local: "127.0.0.1:50000".parse().unwrap(),
        peer: peer.parse().unwrap(),
        role: Role::Connect,
    }
}

const FULL: &str = r#"
# Everything at once.
[defaults]
action = "tcp"
spin_us = 0
upgrade_after_ops = 4
rmb_memory = "64MiB"

[[rule]]
name = "cache"
program = ["redis-*", "/opt/*/bin/keydb"]
uid = [0, 999]
cgroup = "/system.slice/**"
listen = [":6379-6389", "[fd00::/8]:80"]
connect = "10.0.0.0/8"
action = "smc"
rmb_size = "1MiB"
upgrade_after_bytes = 65_536
idle_ms = 2000

[[rule]]
uid = 33
action = "smc"
rmb_size = 0x10000
"#;

#[test]
fn full_file() {
    let policy = policy(FULL);
    assert_eq!(policy.source(), &Source::File("p.toml".into()));
    assert_eq!(policy.default_action(), Action::Tcp);
    assert_eq!(policy.rules().len(), 2);
    let rule = &policy.rules()[0];
    assert_eq!(rule.to_string(), "rule 1 \"cache\" (line 9)");
    let programs: Vec<_> = rule.program.iter().map(Glob::as_str).collect();
    assert_eq!(programs, ["redis-*", "/opt/*/bin/keydb"]);
    assert_eq!(
        rule.tunables,
        Tunables {
            rmb_size: 1 << 20,
            spin_us: 0,
            upgrade_after_ops: 4,
            upgrade_after_bytes: 65536,
            idle_ms: 2000
        }
    );
    assert_eq!(rule.tunables.rmb_class(), 6);
    assert_eq!(policy.rules()[1].to_string(), "rule 2 (line 21)");
    assert_eq!(policy.rules()[1].tunables.rmb_size, 65536);

    assert_eq!(policy.rmb_memory(), Some(64 << 20));

    let decision = policy.decide(&redis(), &accepted("127.0.0.1:6380"));
    assert_eq!(decision.action, Action::Smc);
    assert_eq!(decision.rule.unwrap().name.as_deref(), Some("cache"));
    assert_eq!(decision.reason, None);
    let decision = policy.decide(&redis(), &accepted("127.0.0.1:6378"));
    assert_eq!((decision.action, decision.rule), (Action::Tcp, None));
    assert_eq!(decision.reason, Some(Reason::PolicyTcp));
}

#[test]
fn empty_and_default() {
    let decision_of = |p: &Policy| {
        let d = p.decide(&redis(), &accepted("127.0.0.1:1"));
        (d.action, d.tunables, d.reason)
    };
    let expected = (Action::Smc, Tunables::default(), None);
    assert_eq!(decision_of(&policy("")), expected);
    assert_eq!(decision_of(&policy("rule = []")), expected);
    assert_eq!(decision_of(&Policy::default()), expected);
    let t = Tunables::default();
    assert_eq!((t.rmb_size, t.spin_us), (262144, 50));
    assert_eq!((t.upgrade_after_ops, t.upgrade_after_bytes), (16, 32768));
    assert_eq!(t.idle_ms, 60_000);
    assert_eq!(t.rmb_class(), 4);
}

#[test]
fn defaults_may_stand_after_the_rules() {
    let policy = policy("[[rule]]\naction = \"smc\"\n[defaults]\nspin_us = 7\n");
    assert_eq!(policy.rules()[0].tunables.spin_us, 7);
}

#[test]
fn first_match_wins() {
    let policy = policy(
        "[[rule]]\nlisten = \":80\"\naction = \"tcp\"\n[[rule]]\naction = \"smc\"\nspin_us = 1\n",
    );
    let number = |e: &Endpoint| policy.decide(&redis(), e).rule.unwrap().number;
    assert_eq!(number(&accepted("127.0.0.1:80")), 1);
    assert_eq!(number(&accepted("127.0.0.1:81")), 2);
    assert_eq!(number(&connected("127.0.0.1:80")), 2);
}

#[test]
fn roles() {
    let only_listen = policy("[[rule]]\nlisten = \":80\"\naction = \"tcp\"\n");
    let both = policy("[[rule]]\nlisten = \":80\"\nconnect = \":90\"\naction = \"tcp\"\n");
    let hit = |p: &Policy, e: Endpoint| p.decide(&redis(), &e).rule.is_some();
    let unknown = |e: Endpoint| Endpoint {
        role: Role::Unknown,
        ..e
    };

    assert!(hit(&only_listen, accepted("[::ffff:1.2.3.4]:80")));
    assert!(!hit(&only_listen, connected("1.2.3.4:80")));
    assert!(hit(&only_listen, unknown(accepted("1.2.3.4:80"))));
    assert!(!hit(&only_listen, unknown(connected("1.2.3.4:80"))));
    assert!(hit(&both, accepted("1.2.3.4:80")));
    assert!(!hit(&both, accepted("1.2.3.4:90")));
    assert!(hit(&both, connected("1.2.3.4:90")));
    assert!(!hit(&both, connected("1.2.3.4:80")));
    assert!(hit(&both, unknown(connected("1.2.3.4:90"))));
}

#[test]
fn program_uid_and_cgroup_conditions() {
    let hit = |condition: &str, identity: &Identity| {
        let policy = policy(&format!("[[rule]]\n{condition}\naction = \"tcp\"\n"));
        policy
            .decide(identity, &accepted("127.0.0.1:1"))
            .rule
            .is_some()
    };
    for (condition, expected) in [
        ("program = \"redis-*\"", true),
        ("program = \"redis\"", false),
        ("program = \"/usr/bin/redis-server\"", true),
        ("program = \"/usr/*/redis-*\"", true),
        ("program = \"/usr/*\"", false),
        ("program = \"/usr/**\"", true),
        ("program = \"/opt/**\"", false),
        ("program = [\"nginx\", \"redis-?erver\"]", true),
        ("uid = 999", true),
        ("uid = [1, 2]", false),
        ("cgroup = \"/system.slice/*.service\"", true),
        ("cgroup = \"/*\"", false),
        ("cgroup = \"/**\"", true),
        ("program = \"redis-*\"\nuid = 1", false),
    ] {
        assert_eq!(hit(condition, &redis()), expected, "{condition}");
    }
    let script = Identity {
        exe: "/usr/bin/python3.11".into(),
        comm: "backup.py".into(),
        ..Identity::default()
    };
    assert!(hit("program = \"backup.py\"", &script));
    assert!(hit("program = \"python3*\"", &script));
    let nothing_known = Identity::default();
    assert!(!hit("program = \"redis-*\"", &nothing_known));
    assert!(!hit("cgroup = \"/**\"", &nothing_known));
}

#[test]
fn upgrade_environment() {
    let base = policy("[[rule]]\nlisten = \":80\"\naction = \"tcp\"\n");
    let eager = base.clone().with_upgrade(Upgrade::Eager);
    let d = eager.decide(&redis(), &accepted("127.0.0.1:81"));
    assert_eq!(
        (d.tunables.upgrade_after_ops, d.tunables.upgrade_after_bytes),
        (1, 1)
    );
    assert_eq!(d.action, Action::Smc);
    let d = eager.decide(&redis(), &accepted("127.0.0.1:80"));
    assert_eq!((d.action, d.reason), (Action::Tcp, Some(Reason::PolicyTcp)));

    let never = base.with_upgrade(Upgrade::Never);
    let d = never.decide(&redis(), &accepted("127.0.0.1:81"));
    assert_eq!(
        (d.action, d.reason),
        (Action::Tcp, Some(Reason::UpgradeNever))
    );

    assert_eq!(Upgrade::parse("eager"), Some(Upgrade::Eager));
    assert_eq!(Upgrade::parse("Eager"), None);
}

#[test]
fn name_to_show() {
    for (exe, comm, name) in [
        ("/usr/bin/redis-check-rdb", "redis-server", "redis-server"),
        ("/usr/bin/python3.11", "gunicorn", "gunicorn"),
        ("/usr/bin/node", "node", "node"),
        (
            "/usr/bin/systemd-journal-upload",
            "systemd-journal",
            "systemd-journal-upload",
        ),
        ("/opt/app", "", "app"),
        ("", "app", "app"),
        ("", "", ""),
    ] {
        let identity = Identity {
            exe: exe.into(),
            comm: comm.into(),
            ..Identity::default()
        };
        assert_eq!(identity.program(), name, "{exe} {comm}");
    }
}

#[test]
fn idle_environment() {
    let base = policy("[[rule]]\naction = \"smc\"\nidle_ms = 7\n");
    let idle_ms = |p: &Policy| {
        p.decide(&redis(), &accepted("127.0.0.1:1"))
            .tunables
            .idle_ms
    };
    assert_eq!(idle_ms(&base), 7);
    assert_eq!(idle_ms(&base.clone().with_idle_ms(None)), 7);
    assert_eq!(idle_ms(&base.with_idle_ms(Some(0))), 0);
    const MAX: u64 = rule::limits::IDLE_MS_MAX;
    assert_eq!(parse_ms("250", MAX), Some(250));
    assert_eq!(parse_ms("86400000", MAX), Some(86_400_000));
    for word in ["86400001", "-1", "1s", ""] {
        assert_eq!(parse_ms(word, MAX), None, "{word}");
    }
}

#[test]
fn broken_means_tcp() {
    let policy = Policy::broken(PolicyError::of_file("f", "w", "")).with_upgrade(Upgrade::Eager);
    let d = policy.decide(&redis(), &accepted("127.0.0.1:1"));
    assert_eq!(
        (d.action, d.reason),
        (Action::Tcp, Some(Reason::PolicyBroken))
    );
}

#[test]
fn precise_errors() {
    for (text, expected) in [
        (
            "[[rule]]\naction = \"smc\"\nprorgam = \"x\"\n",
            "p.toml:3:1: unknown key \"prorgam\" in [[rule]]; did you mean program?",
        ),
        (
            "[defaults]\n  colour = 1\n",
            "p.toml:2:3: unknown key \"colour\" in [defaults]; known keys there: action, rmb_size, \
             spin_us, upgrade_after_ops, upgrade_after_bytes, idle_ms, rmb_memory",
        ),
        (
            "[[rules]]\naction = \"smc\"\n",
            "p.toml:1:3: unknown key \"rules\" in the policy file; did you mean rule?",
        ),
        (
            "\n[[rule]]\nname = \"a\"\n",
            "p.toml:2:1: rule 1 has no action; add action = \"smc\" or action = \"tcp\"",
        ),
        (
            "[rule]\naction = \"smc\"\n",
            "p.toml:1:1: rule must be an array of tables; write [[rule]] with double brackets, \
             once for each rule",
        ),
        (
            "[[rule]]\naction = \"rdma\"\n",
            "p.toml:2:10: unknown action \"rdma\"; write \"smc\" (may be upgraded) or \"tcp\" \
             (stays on TCP)",
        ),
        (
            "[[rule]]\naction = 1\n",
            "p.toml:2:10: action must be a string, not an integer; write action = \"smc\" or \
             \"tcp\"",
        ),
        (
            "[[rule]]\naction = \"smc\"\nlisten = [\":80\", \"10.0.0.0/8:80-x\"]\n",
            "p.toml:3:33: \"x\" is not a port in listen; write 1 to 65535, or a range 80-90",
        ),
        (
            "[[rule]]\naction = \"smc\"\nconnect = \"10.0.0.1/8\"\n",
            "p.toml:3:12: \"10.0.0.1/8\" has host bits set in connect; write \"10.0.0.0/8\" for \
             the network or \"10.0.0.1\" for the host",
        ),
        (
            "[[rule]]\naction = \"smc\"\nprogram = \"é[a\"\n",
            "p.toml:3:13: \"é[a\" is not a pattern: invalid range pattern; write something like \
             program = \"redis-*\"",
        ),
        (
            "[[rule]]\naction = \"smc\"\nuid = [0, -1]\n",
            "p.toml:3:11: -1 is not a user id; write a number from 0 to 4294967294",
        ),
        (
            "[[rule]]\naction = \"smc\"\nuid = \"root\"\n",
            "p.toml:3:7: uid must be a number or a list of numbers, not a string; write uid = \
             [1000]",
        ),
        (
            "[[rule]]\naction = \"smc\"\nlisten = []\n",
            "p.toml:3:10: the list listen is empty; name something, or remove listen to match \
             everything",
        ),
        (
            "[defaults]\nrmb_size = \"300KiB\"\n",
            "p.toml:2:12: rmb_size can't be 300KiB; write a power of two from 16KiB to 4MiB, such \
             as \"512KiB\"",
        ),
        (
            "[defaults]\nrmb_size = 2147483648\n",
            "p.toml:2:12: rmb_size can't be 2GiB; write a power of two from 16KiB to 4MiB, such as \
             \"4MiB\"",
        ),
        (
            "[defaults]\nrmb_size = \"256kb\"\n",
            "p.toml:2:12: unknown unit \"kb\" in the size \"256kb\" in rmb_size; write \
             \"256KiB\"; units are B, KiB, MiB and GiB",
        ),
        (
            "[defaults]\nspin_us = 1001\n",
            "p.toml:2:11: spin_us is out of range; write a number from 0 to 1000",
        ),
        (
            "[defaults]\nupgrade_after_ops = 0\n",
            "p.toml:2:21: upgrade_after_ops is out of range; write a number from 1 to 4294967295",
        ),
        (
            "[defaults]\nidle_ms = 86400001\n",
            "p.toml:2:11: idle_ms is out of range; write a number from 0 to 86400000",
        ),
        (
            "[defaults]\nupgrade_after_bytes = -5\n",
            "p.toml:2:23: upgrade_after_bytes is out of range; write a positive number",
        ),
        (
            "[defaults]\nspin_us = 1.5\n",
            "p.toml:2:11: spin_us must be a number, not a float; write spin_us = 50",
        ),
        (
            "defaults = 3\n",
            "p.toml:1:12: defaults must be a table; write [defaults] on a line of its own",
        ),
        (
            "rule = [3]\n",
            "p.toml:1:9: a rule must be a table; write [[rule]] and its keys below it",
        ),
    ] {
        assert_eq!(problem(text), expected);
    }
}

#[test]
fn syntax_errors_have_positions() {
    assert!(problem("[[rule]]\naction = smc\n").starts_with("p.toml:2:10: "));
    let twice = problem("[[rule]]\naction = \"smc\"\naction = \"tcp\"\n");
    assert!(twice.starts_with("p.toml:3:1: duplicate key"), "{twice}");
    assert!(
        problems("[[rule\n")[0].starts_with("p.toml:1:"),
        "{:?}",
        problems("[[rule\n")
    );
}

#[test]
fn all_problems_in_order() {
    let text = "[[rule]]\nspin_us = -1\n[[rule]]\naction = 2\n[defaults]\nnews = 1\n";
    let places: Vec<_> = Policy::check(text, "p")
        .unwrap_err()
        .iter()
        .map(|e| (e.line, e.column))
        .collect();
    assert_eq!(places, [(1, 1), (2, 11), (4, 10), (6, 1)]);
    assert_eq!(Policy::parse(text, "p").unwrap_err().line, 1);
}

#[test]
fn not_utf8() {
    let error = Policy::check_bytes(b"# \xc3\xa9\n# \xff", "p").unwrap_err();
    assert_eq!(
        error[0].to_string(),
        "p:2:3: the file is not UTF-8 here; save it as UTF-8"
    );
}

#[test]
fn escaped_strings_point_to_their_start() {
    let text = "[[rule]]\naction = \"smc\"\nlisten = \"\\u003aport\"\n";
    assert!(problem(text).starts_with("p.toml:3:10: \"port\" is not a port"));
}

#[test]
fn deep_nesting_is_an_error() {
    for unit in ["[", "{a=", "[[", "a."] {
        let text = format!("x = {}", unit.repeat(200_000));
        assert!(Policy::check(&text, "p").is_err());
        let text = format!("{}b = 1", unit.repeat(200_000));
        assert!(Policy::check(&text, "p").is_err());
    }
}

#[test]
fn reading_files() {
    let dir = std::env::temp_dir().join(format!("xsmc-policy-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let file = dir.join("p.toml");
    std::fs::write(&file, "[[rule]]\naction = \"tcp\"\n").unwrap();
    assert_eq!(
        Policy::read(Some(file.as_os_str())).unwrap().rules().len(),
        1
    );

    std::fs::write(&file, "x = 1").unwrap();
    let error = Policy::read(Some(file.as_os_str())).unwrap_err();
    assert!(
        error.to_string().contains("p.toml:1:1: unknown key"),
        "{error}"
    );

    std::fs::write(&file, " ".repeat(FILE_MAX as usize + 1)).unwrap();
    let error = Policy::read(Some(file.as_os_str())).unwrap_err();
    assert!(error.to_string().contains("larger than 1 MiB"), "{error}");

    for (path, expected) in [
        (dir.join("absent"), "No such file"),
        (dir.clone(), "not a regular"),
    ] {
        let error = Policy::read(Some(path.as_os_str()))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(expected) && error.contains("XSMC_CONFIG"),
            "{error}"
        );
    }
    assert!(
        Policy::read(Some(OsStr::new("/dev/null")))
            .unwrap()
            .rules()
            .is_empty()
    );
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn current_identity() {
    let identity = Identity::current();
    assert!(identity.exe.starts_with('/') && !identity.program().is_empty());
    assert!(!identity.comm.is_empty() && !identity.comm.ends_with('\n'));
    assert_eq!(
        unified_cgroup("1:name=systemd:/a\n0::/user.slice\n"),
        "/user.slice"
    );
    assert_eq!(unified_cgroup("5:cpu:/a\n"), "");
}

/// A file of random valid rules.
fn any_file() -> impl Strategy<Value = String> {
    let condition = prop_oneof![
        Just(String::new()),
        prop::sample::select(vec!["redis-*", "nginx", "/usr/**", "?*"])
            .prop_map(|glob| format!("program = {glob:?}\n")),
        prop::sample::select(vec![0u32, 999, 1000]).prop_map(|uid| format!("uid = [{uid}]\n")),
    ];
    let place = prop_oneof![
        Just(String::new()),
        (1u16..100, 1u16..100)
            .prop_map(|(a, b)| { format!("listen = [\":{}-{}\"]\n", a.min(b), a.max(b)) }),
        (1u16..100).prop_map(|port| format!("connect = \"127.0.0.0/8:{port}\"\n")),
    ];
    let tail = (any::<bool>(), 0u32..1000, 0u32..9).prop_map(|(smc, spin, class)| {
        let action = if smc { "smc" } else { "tcp" };
        format!(
            "action = \"{action}\"\nspin_us = {spin}\nrmb_size = {}\n",
            16384u64 << class
        )
    });
    let rule = (condition, place, tail).prop_map(|(c, p, t)| format!("[[rule]]\n{c}{p}{t}"));
    prop::collection::vec(rule, 0..6).prop_map(|rules| rules.concat())
}

proptest! {
    #[test]
    fn narrow_changes_no_decision(text in any_file(), port in 1u16..100, connect: bool) {
        let full = policy(&text);
        let narrow = full.clone().narrow(&redis());
        let addr = format!("127.0.0.1:{port}");
        let endpoint = if connect { connected(&addr) } else { accepted(&addr) };
        let (a, b) = (full.decide(&redis(), &endpoint), narrow.decide(&redis(), &endpoint));
        prop_assert_eq!(a.action, b.action);
        prop_assert_eq!(a.tunables, b.tunables);
        prop_assert_eq!(a.rule.map(|r| r.number), b.rule.map(|r| r.number));
        // And the winner is the first that matches.
        let first = full
            .rules()
            .iter()
            .find(|r| r.matches_identity(&redis()) && r.matches_endpoint(&endpoint));
        prop_assert_eq!(a.rule, first);
    }

    #[test]
    fn arbitrary_text_never_panics(text in "\\PC{0,80}") {
        let _ = Policy::check(&text, "p");
    }

    /// Valid files with a piece cut out or repeated: problems have places inside the file.
    #[test]
    fn damaged_files_give_places(text in any_file(), cut in any::<(u16, u8, bool)>()) {
        let at = if text.is_empty() { 0 } else { cut.0 as usize % text.len() };
        let end = (at + cut.1 as usize).min(text.len());
        let piece = if cut.2 { text[at..end].repeat(2) } else { String::new() };
        let text = format!("{}{piece}{}", &text[..at], &text[end..]);
        if let Err(problems) = Policy::check(&text, "p") {
            prop_assert!(!problems.is_empty());
            for problem in problems {
                prop_assert!((1..=text.lines().count() + 1).contains(&problem.line));
                prop_assert!((1..=text.len() + 1).contains(&problem.column));
                prop_assert!(!problem.what.is_empty());
            }
        }
    }
}

#[test]
fn keepalive() {
    let of = |text: &str| policy(text).smc_r().keepalive();
    assert_eq!(of(""), Some(Duration::from_secs(30)));
    assert_eq!(
        of("[smc-r]\nkeepalive_ms = 250\n"),
        Some(Duration::from_millis(250))
    );
    assert_eq!(of("[smc-r]\nkeepalive_ms = 0\n"), None);
    assert_eq!(
        problems("[smc-r]\nkeepalive_ms = 86400001\n").len(),
        1,
        "more than a day"
    );
}
