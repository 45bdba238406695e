//! `smctl run`: starts a program with libxsmc.so preloaded.

use crate::elf::{self, Kind};
use crate::find::{self, Program};
use clap::ValueEnum;
use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Options of `smctl run`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Policy file of the program (XSMC_CONFIG; default /etc/xsmc.toml)
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Runtime directory (XSMC_RUNTIME_DIR; default /run/xsmc or /dev/shm/xsmc-UID)
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
    /// When connections are upgraded (XSMC_UPGRADE)
    #[arg(long, value_name = "MODE")]
    upgrade: Option<Mode>,
    /// Log to the program's standard error (XSMC_LOG)
    #[arg(long, value_name = "LEVEL")]
    log: Option<Level>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) app: Vec<OsString>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Mode {
    /// As the policy says
    Default,
    /// At the first moment that is safe
    Eager,
    /// Not at all
    Never,
}

#[derive(Clone, Copy, ValueEnum)]
enum Level {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

const CANT_PREPARE: u8 = 125;
const CANT_EXECUTE: u8 = 126;
const NOT_FOUND: u8 = 127;

#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error("{} is in none of these places: {}; build it, or install it in one of them",
            find::LIBRARY, list(.0))]
    NoLibrary(Vec<PathBuf>),
    #[error(
        "the path {0:?} of the library can't be preloaded, because it contains a space, a \
             colon or a dollar sign; move it to another directory"
    )]
    LibraryPath(PathBuf),
    #[error("can't find the current directory, which {0:?} is relative to: {1}")]
    Relative(PathBuf, std::io::Error),
    #[error("program {0:?} not found{hint}", hint = if .0.as_bytes().contains(&b'/') {
        "; check the path" } else { " in PATH; check the name, or give its full path" })]
    NoProgram(OsString),
    #[error("{0:?} is not an executable file; check its type and mode")]
    NotExecutable(PathBuf),
    #[error("can't execute {0:?}: {1}")]
    Exec(PathBuf, std::io::Error),
}

impl RunError {
    fn code(&self) -> u8 {
        match self {
            RunError::NoProgram(_) => NOT_FOUND,
            RunError::NotExecutable(_) => CANT_EXECUTE,
            RunError::Exec(_, e) if e.kind() == std::io::ErrorKind::NotFound => NOT_FOUND,
            RunError::Exec(..) => CANT_EXECUTE,
            _ => CANT_PREPARE,
        }
    }
}

fn list(places: &[PathBuf]) -> String {
    places
        .iter()
        .map(|p| p.display().to_string())
        .collect::<Vec<_>>()
        .join(", ")
}

/// Becomes the program; returns only if that fails.
pub(crate) fn run(args: &Args) -> ExitCode {
    let smctl = std::env::current_exe()
        .and_then(|path| path.canonicalize())
        .ok();
    let places = find::library_places(smctl.as_deref());
    let error = match prepare(args, places) {
        Ok((mut command, path)) => {
            for warning in warnings(&path) {
                eprintln!("smctl: warning: {warning}");
            }
            RunError::Exec(path, command.exec())
        }
        Err(error) => error,
    };
    eprintln!("smctl: {error}");
    ExitCode::from(error.code())
}

/// The command to execute, and the file that it is.
fn prepare(args: &Args, places: Vec<PathBuf>) -> Result<(Command, PathBuf), RunError> {
    let Some(library) = find::library(&places) else {
        return Err(RunError::NoLibrary(places));
    };
    let preload = preload(library, std::env::var_os("LD_PRELOAD"))?;
    let (name, rest) = args
        .app
        .split_first()
        .ok_or(RunError::NoProgram(OsString::new()))?;
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let path = match find::program(name, &path) {
        Program::Found(path) => path,
        Program::NotExecutable(path) => return Err(RunError::NotExecutable(path)),
        Program::Missing => return Err(RunError::NoProgram(name.clone())),
    };
    let mut command = Command::new(&path);
    command.arg0(name).args(rest).env("LD_PRELOAD", preload);
    for (variable, value) in [
        ("XSMC_CONFIG", &args.config),
        ("XSMC_RUNTIME_DIR", &args.runtime_dir),
    ] {
        if let Some(value) = value {
            // The program may change its directory before the library looks.
            let value =
                std::path::absolute(value).map_err(|e| RunError::Relative(value.clone(), e))?;
            command.env(variable, value);
        }
    }
    if let Some(value) = args.upgrade.as_ref().and_then(ValueEnum::to_possible_value) {
        command.env("XSMC_UPGRADE", value.get_name());
    }
    if let Some(value) = args.log.as_ref().and_then(ValueEnum::to_possible_value) {
        command.env("XSMC_LOG", value.get_name());
    }
    Ok((command, path))
}

/// The new `LD_PRELOAD`: the library first, then what was there. Nothing is named twice.
fn preload(library: &Path, existing: Option<OsString>) -> Result<OsString, RunError> {
    let separator = |b: &u8| *b == b':' || b.is_ascii_whitespace();
    let ours = library.as_os_str().as_bytes();
    if ours.iter().any(|b| separator(b) || *b == b'$') {
        return Err(RunError::LibraryPath(library.to_owned()));
    }
    let mut preload = OsString::from(library);
    let existing = existing.unwrap_or_default();
    for other in existing.as_bytes().split(separator) {
        if !other.is_empty() && other != ours {
            preload.push(":");
            preload.push(OsStr::from_bytes(other));
        }
    }
    Ok(preload)
}

/// What will keep the program from running under xsmc although it starts.
fn warnings(program: &Path) -> Vec<String> {
    let mut warnings = Vec::new();
    let shown = program.display();
    if let Some(why) = secure_execution(program) {
        warnings.push(format!(
            "{shown} {why}: the loader ignores LD_PRELOAD for it, so it runs on plain TCP; run it \
             as the user it switches to"
        ));
    }
    match elf::inspect(program) {
        Kind::Static => warnings.push(format!(
            "{shown} is statically linked, so nothing can be preloaded and it runs on plain TCP; \
             use a dynamically linked build"
        )),
        Kind::Foreign => warnings.push(format!(
            "{shown} is made for another machine type or word size than the library, so it runs \
             on plain TCP; use a build for this machine type"
        )),
        Kind::Musl => warnings.push(format!(
            "{shown} uses musl, whose loader can't load a library made for glibc, so it may not \
             start; use a build for glibc"
        )),
        Kind::Other | Kind::Dynamic => {}
    }
    warnings
}

/// Whether executing the file changes privileges, which makes the loader drop `LD_PRELOAD`.
fn secure_execution(program: &Path) -> Option<&'static str> {
    let metadata = program.metadata().ok()?;
    let mode = metadata.permissions().mode();
    // SAFETY: these calls have no arguments and no failure.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    if mode & libc::S_ISUID != 0 && metadata.uid() != uid {
        return Some("is setuid");
    }
    // Set-group-id without group execution means something else (mandatory locking).
    let setgid = libc::S_ISGID | libc::S_IXGRP;
    if mode & setgid == setgid && metadata.gid() != gid {
        return Some("is setgid");
    }
    let path = CString::new(program.as_os_str().as_bytes()).ok()?;
    let name = c"security.capability";
    // SAFETY: both strings end in NUL; a size of 0 asks for the length and writes nothing.
    let len = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0) };
    (len > 0 && uid != 0).then_some("has file capabilities")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn args(app: &[&str]) -> Args {
        Args {
            config: None,
            runtime_dir: None,
            upgrade: None,
            log: None,
            app: app.iter().map(OsString::from).collect(),
        }
    }

    #[test]
    fn preload_is_prepended_once() {
        let lib = Path::new("/x/libxsmc.so");
        let with = |old: &str| preload(lib, Some(old.into())).unwrap();
        assert_eq!(preload(lib, None).unwrap(), "/x/libxsmc.so");
        assert_eq!(with(""), "/x/libxsmc.so");
        assert_eq!(with("/a.so /b.so"), "/x/libxsmc.so:/a.so:/b.so");
        assert_eq!(with("/a.so:/x/libxsmc.so:"), "/x/libxsmc.so:/a.so");
        let error = preload(Path::new("/x y/libxsmc.so"), None).unwrap_err();
        assert!(error.to_string().contains("move it to another directory"));
    }

    #[test]
    fn a_missing_library_says_where_it_was_looked_for() {
        let error = prepare(
            &args(&["true"]),
            vec!["/a/libxsmc.so".into(), "/b/libxsmc.so".into()],
        )
        .unwrap_err();
        assert_eq!(error.code(), CANT_PREPARE);
        assert_eq!(
            error.to_string(),
            "libxsmc.so is in none of these places: /a/libxsmc.so, /b/libxsmc.so; build it, or \
             install it in one of them"
        );
    }

    #[test]
    fn the_environment_is_set() {
        let dir = tempfile::tempdir().unwrap();
        let library = dir.path().join(find::LIBRARY);
        fs::write(&library, "").unwrap();
        let mut args = args(&["sh", "-c", "true"]);
        args.config = Some("p.toml".into());
        args.runtime_dir = Some("/run/other".into());
        args.upgrade = Some(Mode::Eager);
        args.log = Some(Level::Debug);
        let (command, path) = prepare(&args, vec![library.clone()]).unwrap();
        assert!(path.ends_with("sh") && path.is_absolute());
        let env = |name: &str| {
            let (_, value) = command.get_envs().find(|(key, _)| *key == name)?;
            value.map(|value| value.to_string_lossy().into_owned())
        };
        let here = std::env::current_dir().unwrap();
        assert_eq!(
            env("XSMC_CONFIG").unwrap(),
            here.join("p.toml").to_string_lossy()
        );
        assert_eq!(env("XSMC_RUNTIME_DIR").unwrap(), "/run/other");
        assert_eq!(env("XSMC_UPGRADE").unwrap(), "eager");
        assert_eq!(env("XSMC_LOG").unwrap(), "debug");
        assert!(
            env("LD_PRELOAD")
                .unwrap()
                .starts_with(&*library.to_string_lossy())
        );
    }

    #[test]
    fn programs_that_are_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let library = dir.path().join(find::LIBRARY);
        fs::write(&library, "").unwrap();
        let fail = |name: &str| prepare(&args(&[name]), vec![library.clone()]).unwrap_err();
        let error = fail("no-such-program-here");
        assert_eq!(error.code(), NOT_FOUND);
        assert_eq!(
            error.to_string(),
            "program \"no-such-program-here\" not found in PATH; check the name, or give its full \
             path"
        );
        let error = fail("/no/such/program");
        assert_eq!(
            error.to_string(),
            "program \"/no/such/program\" not found; check the path"
        );
        let error = fail(&library.to_string_lossy());
        assert_eq!(error.code(), CANT_EXECUTE);
        assert!(error.to_string().contains("is not an executable file"));
    }

    #[test]
    fn setuid_programs_are_warned_about() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tool");
        fs::write(&file, "#!/bin/sh\n").unwrap();
        assert!(warnings(&file).is_empty());
        // SAFETY: no arguments, no failure.
        if unsafe { libc::geteuid() } != 0 {
            return; // only root can make a file of somebody else
        }
        std::os::unix::fs::chown(&file, Some(12345), Some(12345)).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o4755)).unwrap();
        let warning = &warnings(&file)[0];
        assert!(
            warning.contains("is setuid: the loader ignores LD_PRELOAD"),
            "{warning}"
        );
        fs::set_permissions(&file, fs::Permissions::from_mode(0o2755)).unwrap();
        assert!(warnings(&file)[0].contains("is setgid"));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(warnings(&file).is_empty());
    }
}
