//! How values look in the output of every command.

use serde::Serialize;
use std::io::{self, Write};

/// Writes a value as indented JSON with a newline.
pub(crate) fn json(out: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    out.write_all(b"\n")
}

/// A byte count in at most five characters: `999`, `1.5K`, `256K`, `12M`; K is 1024.
pub(crate) fn bytes(count: u64) -> String {
    if count < 1024 {
        return count.to_string();
    }
    let mut value = count as f64;
    let mut unit = ' ';
    for next in ['K', 'M', 'G', 'T', 'P', 'E'] {
        value /= 1024.0;
        unit = next;
        // 1023.5 would print as 1024: that is 1.0 of the next unit.
        if value < 1023.5 {
            break;
        }
    }
    if value < 9.95 && value.fract() != 0.0 {
        format!("{value:.1}{unit}")
    } else {
        format!("{value:.0}{unit}")
    }
}

/// A duration in its two largest units: `42s`, `3m12s`, `5h03m`, `2d04h`.
pub(crate) fn duration(seconds: u64) -> String {
    let (m, h, d) = (seconds / 60, seconds / 3600, seconds / 86400);
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{m}m{:02}s", seconds % 60),
        3600..86400 => format!("{h}h{:02}m", m % 60),
        _ => format!("{d}d{:02}h", h % 24),
    }
}

/// Text from another process, made safe for a terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_counts() {
        for (count, text) in [
            (0, "0"),
            (1023, "1023"),
            (1024, "1K"),
            (1536, "1.5K"),
            (10 << 10, "10K"),
            (262_144, "256K"),
            (1_048_575, "1.0M"),
            (1 << 20, "1M"),
            (3_435_973_836, "3.2G"),
            (u64::MAX, "16E"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }

    #[test]
    fn durations() {
        for (seconds, text) in [
            (0, "0s"),
            (59, "59s"),
            (192, "3m12s"),
            (18_180, "5h03m"),
            (187_200, "2d04h"),
        ] {
            assert_eq!(duration(seconds), text);
        }
    }

    #[test]
    fn escapes_do_not_reach_the_terminal() {
        assert_eq!(printable("a\u{1b}[31m\nb"), "a?[31m?b");
    }
}
