//! Finds the library next to smctl or where it is installed, and programs in `PATH`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// File name of the library.
pub(crate) const LIBRARY: &str = "libxsmc.so";

/// The places where the library is looked for, best first. `smctl` is smctl's own executable.
pub(crate) fn library_places(smctl: Option<&Path>) -> Vec<PathBuf> {
    let mut places = Vec::new();
    if let Some(dir) = smctl.and_then(Path::parent) {
        places.push(dir.join(LIBRARY));
        if let Some(prefix) = dir.parent() {
            places.push(prefix.join("lib/xsmc").join(LIBRARY));
        }
    }
    for dir in [
        "/usr/lib/xsmc",
        "/usr/local/lib/xsmc",
        "/usr/lib",
        "/usr/local/lib",
    ] {
        let place = Path::new(dir).join(LIBRARY);
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places
}

/// The first of `places` that holds a file.
pub(crate) fn library(places: &[PathBuf]) -> Option<&Path> {
    places
        .iter()
        .map(PathBuf::as_path)
        .find(|place| place.is_file())
}

/// What looking for a program found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Program {
    /// An executable file.
    Found(PathBuf),
    /// A file of that name that may not be executed.
    NotExecutable(PathBuf),
    /// Nothing.
    Missing,
}

/// Looks for a program as a shell does: a name with a slash is a path, any other is searched for
/// in the directories of `path`.
pub(crate) fn program(name: &OsStr, path: &OsStr) -> Program {
    if name.is_empty() {
        return Program::Missing;
    }
    if name.as_bytes().contains(&b'/') {
        return match probe(Path::new(name)) {
            Some(true) => Program::Found(name.into()),
            Some(false) => Program::NotExecutable(name.into()),
            None => Program::Missing,
        };
    }
    let mut refused = None;
    for dir in std::env::split_paths(path) {
        // An empty entry means the current directory.
        let candidate = if dir.as_os_str().is_empty() {
            Path::new(".").join(name)
        } else {
            dir.join(name)
        };
        match probe(&candidate) {
            Some(true) => return Program::Found(candidate),
            Some(false) => refused = refused.or(Some(candidate)),
            None => {}
        }
    }
    refused.map_or(Program::Missing, Program::NotExecutable)
}

/// `None`: not there; else whether it is a file that somebody may execute. Whether we may is for
/// the kernel to say.
fn probe(path: &Path) -> Option<bool> {
    let metadata = path.metadata().ok()?;
    Some(metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn library_is_looked_for_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let bin = dir.path().join("bin");
        let lib = dir.path().join("lib/xsmc");
        fs::create_dir_all(&bin).unwrap();
        fs::create_dir_all(&lib).unwrap();
        let places = library_places(Some(&bin.join("smctl")));
        assert_eq!(
            places,
            [
                bin.join(LIBRARY),
                lib.join(LIBRARY),
                "/usr/lib/xsmc/libxsmc.so".into(),
                "/usr/local/lib/xsmc/libxsmc.so".into(),
                "/usr/lib/libxsmc.so".into(),
                "/usr/local/lib/libxsmc.so".into(),
            ]
        );
        let places = &places[..2];
        assert_eq!(library(places), None);
        fs::write(lib.join(LIBRARY), "").unwrap();
        assert_eq!(library(places), Some(&*lib.join(LIBRARY)));
        fs::write(bin.join(LIBRARY), "").unwrap();
        assert_eq!(library(places), Some(&*bin.join(LIBRARY)));
        // Installed as /usr/bin/smctl, no place is named twice.
        assert_eq!(library_places(Some(Path::new("/usr/bin/smctl"))).len(), 5);
    }

    #[test]
    fn programs() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        for d in [&a, &b] {
            fs::create_dir(d).unwrap();
            fs::write(d.join("tool"), "").unwrap();
        }
        fs::create_dir(a.join("sub")).unwrap();
        let path = std::env::join_paths([&a, &b]).unwrap();
        let find = |name: &str| program(OsStr::new(name), &path);
        assert_eq!(find("tool"), Program::NotExecutable(a.join("tool")));
        fs::set_permissions(b.join("tool"), fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(find("tool"), Program::Found(b.join("tool")));
        assert_eq!(find("sub"), Program::NotExecutable(a.join("sub")));
        assert_eq!(find("absent"), Program::Missing);
        assert_eq!(find(""), Program::Missing);
        let full = b.join("tool");
        assert_eq!(
            program(full.as_os_str(), OsStr::new("")),
            Program::Found(full.clone())
        );
        assert_eq!(find("./absent"), Program::Missing);
    }
}
