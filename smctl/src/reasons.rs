//! `smctl reasons`: the list of fallback reasons.

use crate::output;
use crate::table::{Align, Table};
use serde::Serialize;
use smc_core::observe::Reason;
use std::io::{self, Write};
use std::process::ExitCode;

/// Options of `smctl reasons`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Entry {
    code: u8,
    name: &'static str,
    sentence: &'static str,
}

pub(crate) fn run(args: &Args) -> io::Result<ExitCode> {
    write(&mut io::stdout().lock(), args.json)?;
    Ok(ExitCode::SUCCESS)
}

fn write(out: &mut dyn Write, json: bool) -> io::Result<()> {
    let entries = Reason::ALL.iter().map(|reason| Entry {
        code: reason.code(),
        name: reason.name(),
        sentence: reason.sentence(),
    });
    if json {
        return output::json(out, &entries.collect::<Vec<_>>());
    }
    let mut table = Table::new(&[
        ("CODE", Align::Right),
        ("NAME", Align::Left),
        ("MEANING", Align::Left),
    ]);
    for entry in entries {
        table.row([
            entry.code.to_string(),
            entry.name.into(),
            entry.sentence.into(),
        ]);
    }
    table.write(out, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(json: bool) -> String {
        let mut out = Vec::new();
        write(&mut out, json).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn lists_every_reason() {
        let lines = text(false);
        assert_eq!(lines.lines().count(), Reason::ALL.len() + 1);
        assert!(lines.starts_with("CODE  NAME"));
        let json: serde_json::Value = serde_json::from_str(&text(true)).unwrap();
        assert_eq!(json.as_array().unwrap().len(), Reason::ALL.len());
        assert_eq!(json[0]["name"], "no-peer");
        assert_eq!(json[0]["code"], 1);
    }
}
