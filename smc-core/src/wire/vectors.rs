//! The captured messages of `tests/vectors/smc-r.hex`, for tests.

/// All of them: name and bytes.
pub(crate) fn all() -> impl Iterator<Item = (&'static str, Vec<u8>)> {
    include_str!("../../tests/vectors/smc-r.hex")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let (name, hex) = line.split_once(' ').unwrap();
            (name, from_hex(hex))
        })
}

/// The message with this name.
pub(crate) fn get(name: &str) -> Vec<u8> {
    let found = all().find(|(other, _)| *other == name);
    found.unwrap_or_else(|| panic!("no vector {name}")).1
}

/// Bytes from hex digits; spaces between them are ignored.
pub(crate) fn from_hex(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex
        .chars()
        .filter(|c| *c != ' ')
        .map(|c| c.to_digit(16).unwrap() as u8)
        .collect();
    digits
        .chunks(2)
        .map(|pair| pair[0] << 4 | pair[1])
        .collect()
}
