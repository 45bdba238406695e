//! Sizes in bytes as people write them: `262144`, `"256KiB"`, `"1 MiB"`.

/// Why a text is not a size: what is wrong, and what to do.
pub(super) type SizeError = (String, String);

const UNITS: [(&str, u64); 4] = [
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
];

/// Parses a whole number with an optional unit B, KiB, MiB or GiB.
pub(super) fn parse(text: &str) -> Result<u64, SizeError> {
    let text = text.trim();
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim_start();
    let bad = |help: &str| (format!("{text:?} is not a size"), help.to_owned());
    if number.is_empty() || unit.starts_with(['.', ',', '_']) {
        return Err(bad(
            "write a whole number of bytes, KiB, MiB or GiB, such as \"256KiB\"",
        ));
    }
    let factor = match UNITS.iter().find(|(name, _)| *name == unit) {
        Some((_, factor)) => *factor,
        None if unit.is_empty() => 1,
        None => {
            let meant = unit.chars().next().map(|c| c.to_ascii_uppercase());
            let guess = UNITS.iter().find(|(name, _)| name.chars().next() == meant);
            let (unit_meant, _) = guess.unwrap_or(&UNITS[1]);
            return Err((
                format!("unknown unit {unit:?} in the size {text:?}"),
                format!("write \"{number}{unit_meant}\"; units are B, KiB, MiB and GiB"),
            ));
        }
    };
    number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(factor))
        .ok_or_else(|| bad("it is too large"))
}

/// Writes a size with the largest unit that divides it.
pub fn format(bytes: u64) -> String {
    let (name, factor) = UNITS
        .iter()
        .rev()
        .find(|(_, f)| bytes >= *f && bytes.is_multiple_of(*f))
        .unwrap_or(&UNITS[0]);
    format!("{}{name}", bytes / factor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn good() {
        for (text, bytes) in [
            ("0", 0),
            ("1", 1),
            ("16B", 16),
            ("256KiB", 256 << 10),
            ("256 KiB", 256 << 10),
            (" 1MiB ", 1 << 20),
            ("1GiB", 1 << 30),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn bad() {
        for text in [
            "",
            "KiB",
            "-1",
            "1.5MiB",
            "1_000",
            "12 34",
            "99999999999GiB",
            "1e3",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
        let (what, help) = parse("256k").unwrap_err();
        assert_eq!(what, r#"unknown unit "k" in the size "256k""#);
        assert_eq!(help, r#"write "256KiB"; units are B, KiB, MiB and GiB"#);
        assert!(parse("1mb").unwrap_err().1.starts_with(r#"write "1MiB""#));
    }

    proptest! {
        #[test]
        fn format_round_trips(bytes in any::<u64>(), shift in 0u32..40) {
            let bytes = bytes >> shift << (shift / 2);
            prop_assert_eq!(parse(&format(bytes)), Ok(bytes));
        }

        #[test]
        fn never_panics(text in "\\PC{0,12}") {
            let _ = parse(&text);
        }
    }
}
