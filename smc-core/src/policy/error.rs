//! What is wrong in a policy file, and where exactly.

use std::fmt;

/// One problem in a policy file. Displays as `path:line:column: what; help`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PolicyError {
    /// The file, as it was named.
    pub path: String,
    /// Line from 1; 0 when the file as a whole is meant.
    pub line: usize,
    /// Column from 1, in characters; 0 when the file as a whole is meant.
    pub column: usize,
    /// What is wrong.
    pub what: String,
    /// What to do about it.
    pub help: String,
}

impl PolicyError {
    /// A problem of the whole file, such as one that can't be read.
    pub fn of_file(path: &str, what: impl Into<String>, help: impl Into<String>) -> PolicyError {
        PolicyError {
            path: path.to_owned(),
            line: 0,
            column: 0,
            what: what.into(),
            help: help.into(),
        }
    }
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path)?;
        if self.line != 0 {
            write!(f, ":{}:{}", self.line, self.column)?;
        }
        write!(f, ": {}", self.what)?;
        if !self.help.is_empty() {
            write!(f, "; {}", self.help)?;
        }
        Ok(())
    }
}

impl std::error::Error for PolicyError {}

/// Line and column (both from 1, columns in characters) of a byte offset. Offsets past the end or
/// inside a character are moved back to the nearest character.
pub(super) fn position(text: &str, offset: usize) -> (usize, usize) {
    let mut end = offset.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let before = text.get(..end).unwrap_or_default();
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    let line = before.bytes().filter(|&b| b == b'\n').count() + 1;
    let column = before.get(line_start..).unwrap_or_default().chars().count() + 1;
    (line, column)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions() {
        let text = "ab\nçd\n";
        assert_eq!(position(text, 0), (1, 1));
        assert_eq!(position(text, 2), (1, 3));
        assert_eq!(position(text, 3), (2, 1));
        assert_eq!(position(text, 4), (2, 1)); // inside ç
        assert_eq!(position(text, 5), (2, 2));
        assert_eq!(position(text, 7), (3, 1));
        assert_eq!(position(text, 700), (3, 1));
        assert_eq!(position("", 0), (1, 1));
    }

    #[test]
    fn display() {
        let mut error = PolicyError::of_file("/etc/x", "cannot read", "");
        assert_eq!(error.to_string(), "/etc/x: cannot read");
        error.line = 3;
        error.column = 9;
        error.help = "try again".into();
        assert_eq!(error.to_string(), "/etc/x:3:9: cannot read; try again");
    }
}
