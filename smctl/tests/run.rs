//! The smctl executable as a whole: `run`, exit codes, pipes.
//!
//! The library is a stand-in: an empty file, about which the loader complains and goes on. What is
//! tested is what smctl hands to the program.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// A directory with smctl and, if wanted, a library next to it.
struct Installed {
    dir: tempfile::TempDir,
}

impl Installed {
    fn new(with_library: bool) -> Installed {
        let dir = tempfile::tempdir().unwrap();
        // By another process: a copy of our own could still be open for writing in a child that
        // another test is just starting, and then it can't be executed (ETXTBSY).
        let copied = Command::new("cp")
            .arg(env!("CARGO_BIN_EXE_smctl"))
            .arg(dir.path().join("smctl"))
            .status();
        assert!(copied.unwrap().success());
        if with_library {
            std::fs::write(dir.path().join("libxsmc.so"), "").unwrap();
        }
        Installed { dir }
    }

    fn library(&self) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join("libxsmc.so")
    }

    fn smctl(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.dir.path().join("smctl"));
        command
            .args(args)
            .env_remove("LD_PRELOAD")
            .stdin(Stdio::null());
        for name in [
            "XSMC_CONFIG",
            "XSMC_RUNTIME_DIR",
            "XSMC_LOG",
            "XSMC_UPGRADE",
        ] {
            command.env_remove(name);
        }
        command
    }
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn the_program_gets_library_and_settings() {
    let installed = Installed::new(true);
    let script = "echo $LD_PRELOAD; echo $XSMC_UPGRADE $XSMC_LOG; echo $0 $1; exit 7";
    let output = installed
        .smctl(&[
            "run",
            "--upgrade",
            "eager",
            "--log",
            "info",
            "sh",
            "-c",
            script,
            "me",
            "--json",
        ])
        .output()
        .unwrap();
    let (out, _) = texts(&output);
    let expected = format!("{}\neager info\nme --json\n", installed.library().display());
    assert_eq!(out, expected);
    assert_eq!(output.status.code(), Some(7));
}

#[test]
fn an_existing_preload_is_kept() {
    let installed = Installed::new(true);
    let output = installed
        .smctl(&["run", "--", "sh", "-c", "echo $LD_PRELOAD"])
        .env("LD_PRELOAD", "/nonexistent/other.so")
        .output()
        .unwrap();
    let (out, _) = texts(&output);
    assert_eq!(
        out,
        format!("{}:/nonexistent/other.so\n", installed.library().display())
    );
}

#[test]
fn failures_have_exit_codes() {
    let installed = Installed::new(true);
    for (program, code, expected) in [
        ("no-such-program-here", 127, "not found in PATH"),
        ("/etc/passwd", 126, "is not an executable file"),
    ] {
        let output = installed.smctl(&["run", program]).output().unwrap();
        let (out, err) = texts(&output);
        assert_eq!((output.status.code(), &*out), (Some(code), ""), "{err}");
        assert!(err.contains(expected), "{err}");
    }
    let output = installed.smctl(&["run"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn without_the_library_nothing_starts() {
    let installed = Installed::new(false);
    let output = installed
        .smctl(&["run", "echo", "started"])
        .output()
        .unwrap();
    let (out, err) = texts(&output);
    // A library that is installed on this machine is found, and that is right.
    if output.status.success() {
        return;
    }
    assert_eq!((output.status.code(), &*out), (Some(125), ""));
    assert!(
        err.contains(&*installed.library().to_string_lossy()),
        "{err}"
    );
    assert!(err.contains("/usr/local/lib/xsmc/libxsmc.so"), "{err}");
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let (read, write) = std::io::pipe().unwrap();
    drop(read);
    let installed = Installed::new(false);
    let output = installed
        .smctl(&["reasons"])
        .stdout(write)
        .output()
        .unwrap();
    let (_, err) = texts(&output);
    assert_eq!((output.status.code(), &*err), (Some(0), ""));
}

#[test]
fn a_broken_policy_file_is_exit_code_1() {
    let installed = Installed::new(false);
    let file = installed.dir.path().join("p.toml");
    std::fs::write(&file, "[[rule]]\naction = \"sm\"\n").unwrap();
    let output = installed
        .smctl(&["config", "check"])
        .env("XSMC_CONFIG", &file)
        .output()
        .unwrap();
    let (out, err) = texts(&output);
    assert_eq!((output.status.code(), &*out), (Some(1), ""));
    assert!(err.contains("p.toml:2:10: unknown action \"sm\""), "{err}");
}
